//! Lines of Codex 0.166.0, without the fields that are not used.

use harvest_proto::{
    bridge::{Author, TurnRequest},
    event::{PlanStep, StepStatus},
};
use proptest::prelude::*;

use super::*;
use crate::agents::Agent;

const INITIALIZED: &str = r#"{"id":1,"result":{"userAgent":"harvest/0.166.0 (Debian 12.0.0; x86_64) unknown (harvest; 0)","codexHome":"/home/harvest/.codex"}}"#;
const OPENED: &str =
    r#"{"id":2,"result":{"thread":{"id":"01a1","status":{"type":"idle"}},"model":"fake-model"}}"#;
const TURN: &str = r#"{"id":4,"result":{"turn":{"id":"t1","items":[],"status":"inProgress"}}}"#;

fn lines(codex: &mut Codex, lines: &[String]) -> Vec<Signal> {
    lines.iter().flat_map(|line| codex.parse_line(line.as_bytes())).collect()
}

fn notification(method: &str, mut params: Value) -> String {
    params["threadId"] = "01a1".into();
    json!({"method": method, "params": params, "emittedAtMs": 1}).to_string()
}

/// An agent that has got its first prompt.
fn prompted() -> Codex {
    let mut codex = Codex::default();
    codex.init_line();
    lines(&mut codex, &[INITIALIZED.into(), OPENED.into()]);
    codex.prompt(&request(), &[]);
    codex
}

fn request() -> TurnRequest {
    TurnRequest {
        prompt: "prm_000000000001".parse().unwrap(),
        turn: "trn_000000000001".parse().unwrap(),
        number: 1,
        text: "go".into(),
        images: Vec::new(),
        author: Author { name: "A".into(), email: "a@localhost".into() },
        agent: None,
        history: None,
        save_work: Vec::new(),
    }
}

fn in_turn() -> Codex {
    let mut codex = prompted();
    lines(&mut codex, &[TURN.into()]);
    codex
}

fn sent(signals: &[Signal]) -> Vec<Value> {
    let sent = signals.iter().filter_map(|signal| match signal {
        Signal::Send(line) => Some(serde_json::from_str(line).unwrap()),
        _ => None,
    });
    sent.collect()
}

fn completed(status: &str, error: Value) -> String {
    let turn = json!({"id": "t1", "items": [], "status": status, "error": error});
    notification("turn/completed", json!({"turn": turn}))
}

#[test]
fn new_conversation_is_kept_and_reported() {
    let mut codex = Codex::default();
    codex.init_line();
    let sent = sent(&lines(&mut codex, &[INITIALIZED.into()]));
    assert_eq!(
        sent.iter().map(|line| &line["method"]).collect::<Vec<_>>(),
        ["initialized", "model/list", "thread/start"]
    );
    assert_eq!(sent[2]["params"]["sandbox"], "danger-full-access");
    let ready = EventBody::AgentReady {
        version: Some("0.166.0".into()),
        model: Some("fake-model".into()),
        mcp: vec![],
    };
    assert_eq!(
        lines(&mut codex, &[OPENED.into()]),
        [Signal::Conversation("01a1".into()), Signal::Event(ready), Signal::Ready { is_new: true }]
    );
}

#[test]
fn missing_conversation_begins_anew() {
    let mut codex = Codex { saved: Some("01a0".into()), ..Codex::default() };
    codex.init_line();
    let resumed = sent(&lines(&mut codex, &[INITIALIZED.into()])).remove(2);
    assert_eq!(resumed["method"], "thread/resume");
    assert_eq!(resumed["params"]["threadId"], "01a0");
    let failed =
        r#"{"error":{"code":-32600,"message":"no rollout found for thread id 01a0"},"id":2}"#;
    assert_eq!(sent(&lines(&mut codex, &[failed.into()]))[0]["method"], "thread/start");
}

#[test]
fn text_thoughts_and_plan_are_reported() {
    let signals = lines(
        &mut in_turn(),
        &[
            notification("item/started", json!({"item": {"type": "reasoning", "id": "r"}})),
            notification("item/reasoning/summaryTextDelta", json!({"delta": "hmm"})),
            notification("item/agentMessage/delta", json!({"delta": "Wo"})),
            notification(
                "turn/plan/updated",
                json!({"plan": [{"step": "one", "status": "inProgress"}]}),
            ),
            notification("thread/name/updated", json!({"threadName": "Fix it"})),
            notification("item/completed", json!({"item": {"type": "contextCompaction"}})),
        ],
    );
    let steps = vec![PlanStep { text: "one".into(), status: StepStatus::InProgress }];
    assert_eq!(
        signals,
        [
            EventBody::ThoughtDelta { text: "hmm".into() },
            EventBody::TextDelta { text: "Wo".into() },
            EventBody::Plan { steps },
            EventBody::Title { title: "Fix it".into() },
            EventBody::Compacted {},
        ]
        .map(Signal::Event)
    );
}

fn command(status: &str, action: &str, output: Value, code: Value) -> Value {
    json!({"item": {
        "type": "commandExecution", "id": "call_2", "command": "/bin/bash -lc 'exit 3'",
        "cwd": "/w", "status": status, "commandActions": [{"type": action, "command": "exit 3"}],
        "aggregatedOutput": output, "exitCode": code,
    }})
}

#[test]
fn command_is_reported_from_start_to_end() {
    let delta = json!({"itemId": "call_2", "delta": "x\n"});
    let signals = lines(
        &mut in_turn(),
        &[
            notification(
                "item/started",
                command("inProgress", "unknown", Value::Null, Value::Null),
            ),
            notification("item/commandExecution/outputDelta", delta),
            notification("item/completed", command("failed", "unknown", json!("x\n"), json!(3))),
        ],
    );
    let call = || "call_2".to_owned();
    assert_eq!(
        signals,
        [
            EventBody::ToolStarted {
                call: call(),
                name: "shell".into(),
                kind: ToolKind::Execute,
                input: json!({"command": "exit 3", "cwd": "/w"}),
                parent: None,
                blob: None,
            },
            EventBody::ToolOutput { call: call(), text: "x\n".into() },
            EventBody::ToolEnded {
                call: call(),
                ok: false,
                output: "x\n(exit code 3)".into(),
                blob: None,
            },
        ]
        .map(Signal::Event)
    );
}

#[test]
fn kind_follows_from_the_item() {
    let kind = |item: &Value| tool(item).map(|(_, kind, _)| kind);
    let of_action = |action| kind(&command("inProgress", action, Value::Null, Value::Null)["item"]);
    assert_eq!(of_action("read"), Some(ToolKind::Read));
    assert_eq!(of_action("search"), Some(ToolKind::Search));
    assert_eq!(kind(&json!({"type": "fileChange", "changes": []})), Some(ToolKind::Edit));
    assert_eq!(kind(&json!({"type": "webSearch", "query": "x"})), Some(ToolKind::Fetch));
    assert_eq!(kind(&json!({"type": "agentMessage", "text": "x"})), None);
}

#[test]
fn running_command_ends_with_the_turn() {
    for (status, note) in [("completed", "still running"), ("interrupted", "ended with")] {
        let mut codex = in_turn();
        let item = command("inProgress", "unknown", Value::Null, Value::Null);
        lines(&mut codex, &[notification("item/started", item)]);
        let signals = lines(&mut codex, &[completed(status, Value::Null)]);
        let [Signal::Event(EventBody::ToolEnded { ok, output, .. }), Signal::Done(result)] =
            &signals[..]
        else {
            panic!("{signals:?}")
        };
        assert_eq!((*ok, result.is_ok()), (status == "completed", status == "completed"));
        assert!(output.contains(note), "{output}");
    }
}

#[test]
fn end_of_the_turn_has_its_error() {
    let said = notification("item/agentMessage/delta", json!({"delta": "x"}));
    let end = |lines_before: &[String], last: String| {
        let mut codex = in_turn();
        lines(&mut codex, lines_before);
        lines(&mut codex, &[last]).pop()
    };
    let done = |result: Result<(), &str>| Some(Signal::Done(result.map_err(str::to_owned)));
    let said = std::slice::from_ref(&said);
    assert_eq!(end(said, completed("completed", Value::Null)), done(Ok(())));
    let error = json!({"message": "unexpected status 400"});
    assert_eq!(end(said, completed("failed", error)), done(Err("unexpected status 400")));
    let other = completed("completed", Value::Null).replace("\"t1\"", "\"t0\"");
    assert_eq!(end(said, other), None, "the end of an earlier turn");
}

#[test]
fn outliving_command_belongs_to_no_later_turn() {
    let of_turn = |method: &str, mut params: Value| {
        params["turnId"] = "t1".into();
        notification(method, params)
    };
    let item = |status| command(status, "unknown", json!("x"), json!(0));
    let mut codex = in_turn();
    lines(&mut codex, &[of_turn("item/started", item("inProgress"))]);
    let ended = lines(&mut codex, &[completed("completed", Value::Null)]);
    assert!(matches!(ended[0], Signal::Event(EventBody::ToolEnded { .. })), "{ended:?}");
    let late = [
        of_turn("item/commandExecution/outputDelta", json!({"itemId": "call_2", "delta": "late"})),
        of_turn("item/completed", item("completed")),
    ];
    let ignored = [Signal::EarlierTurn, Signal::EarlierTurn];
    assert_eq!(lines(&mut codex, &late), ignored, "between turns");
    codex.prompt(&request(), &[]);
    assert_eq!(lines(&mut codex, &late), ignored, "before the next turn has an id");
    lines(&mut codex, &[TURN.replace("\"id\":3", "\"id\":4").replace("t1", "t2")]);
    assert_eq!(lines(&mut codex, &late), ignored, "in the next turn");
}

#[test]
fn ended_turns_stay_ended() {
    let mut codex = in_turn();
    for number in 1..=3 {
        let turn = json!({"id": format!("t{number}"), "status": "completed"});
        let signals = lines(&mut codex, &[notification("turn/completed", json!({"turn": turn}))]);
        assert_eq!(signals, [Signal::Done(Ok(()))]);
        codex.prompt(&request(), &[]);
    }
    let late = notification("item/agentMessage/delta", json!({"turnId": "t1", "delta": "x"}));
    assert_eq!(lines(&mut codex, &[late]), [Signal::EarlierTurn]);
    lines(&mut codex, &[notification("turn/started", json!({"turn": {"id": "t2"}}))]);
    assert_eq!(codex.turn, TurnState::Starting);
}

#[test]
fn end_before_the_reply_ends_the_turn() {
    let started = notification("turn/started", json!({"turn": {"id": "t1"}}));
    for before in [&[started][..], &[]] {
        let mut codex = prompted();
        lines(&mut codex, before);
        let signals = lines(&mut codex, &[completed("completed", Value::Null), TURN.into()]);
        assert_eq!(signals, [Signal::Done(Ok(()))]);
        assert_eq!(codex.cancel(), None, "the late reply begins nothing");
    }
}

#[test]
fn turn_is_cancelled_once_it_has_an_id() {
    let mut codex = prompted();
    assert_eq!(codex.cancel(), None);
    let interrupt = sent(&lines(&mut codex, &[TURN.into()])).remove(0);
    assert_eq!(interrupt["method"], "turn/interrupt");
    assert_eq!(interrupt["params"], json!({"threadId": "01a1", "turnId": "t1"}));
    assert!(in_turn().cancel().unwrap().contains("turn/interrupt"));
}

#[test]
fn retries_are_reported_and_401_is_final() {
    let retry = |status: Value| {
        let info = json!({"responseStreamDisconnected": {"httpStatusCode": status}});
        let error = json!({"message": "Reconnecting... 2/5", "codexErrorInfo": info});
        let line = notification("error", json!({"error": error, "willRetry": true}));
        lines(&mut in_turn(), &[line]).remove(0)
    };
    let event = |status| Signal::Event(EventBody::Retry { attempt: 2, after_millis: 0, status });
    assert_eq!(retry(json!(529)), event(Some(529)));
    assert_eq!(retry(Value::Null), event(None));
    assert!(
        matches!(retry(json!(401)), Signal::Unrecoverable(why) if why.contains("OPENAI_API_KEY"))
    );
    let last = json!({"error": {"message": "x"}, "willRetry": false});
    assert_eq!(lines(&mut in_turn(), &[notification("error", last)]), []);
}

#[test]
fn every_request_is_answered() {
    let asked = |method: &str| {
        let line = json!({"id": 9, "method": method, "params": {}}).to_string();
        sent(&lines(&mut Codex::default(), &[line])).remove(0)
    };
    let approved = asked("item/commandExecution/requestApproval");
    assert_eq!(approved["result"]["decision"], "accept");
    assert_eq!(asked("execCommandApproval")["result"]["decision"], "approved");
    for method in ["item/tool/call", "attestation/generate", "item/permissions/requestApproval"] {
        assert_eq!(asked(method)["error"]["code"], -32601, "{method}");
    }
}

#[test]
fn state_of_mcp_servers_is_reported() {
    let changed = |status: &str| {
        notification("mcpServer/startupStatus/updated", json!({"name": "memory", "status": status}))
    };
    let signals = lines(&mut in_turn(), &[changed("starting"), changed("ready")]);
    let [Signal::Event(EventBody::AgentReady { mcp, .. })] = &signals[..] else {
        panic!("{signals:?}")
    };
    assert_eq!(mcp[..], [McpServer { name: "memory".into(), state: McpState::Connected }]);
}

#[test]
fn other_threads_and_known_noise_are_dropped() {
    let foreign =
        notification("item/agentMessage/delta", json!({"delta": "x"})).replace("01a1", "0b");
    let noise = [
        foreign,
        notification("thread/tokenUsage/updated", json!({})),
        notification("warning", json!({"message": "Model metadata not found"})),
        notification("account/rateLimits/updated", json!({})),
    ];
    assert_eq!(lines(&mut in_turn(), &noise), []);
    let signals = lines(&mut in_turn(), &[notification("new/thing", json!({}))]);
    assert!(matches!(signals[..], [Signal::Event(EventBody::AgentRaw { .. })]), "{signals:?}");
}

#[test]
fn dropped_end_of_another_turn_is_ignored() {
    for params in
        [r#""threadId":"01b2","turn":{"#, r#""threadId":"01a1","turn":{"id":"t0","items":["#]
    {
        let head = format!(r#"{{"method":"turn/completed","params":{{{params}"#);
        assert_eq!(in_turn().line_dropped(head.as_bytes()), [], "{params}");
    }
    let ours =
        br#"{"method":"turn/completed","params":{"threadId":"01a1","turn":{"id":"t1","items":["#;
    assert_eq!(in_turn().line_dropped(ours), [Signal::Done(Err(TOO_LONG.into()))]);
}

#[test]
fn dropped_end_ends_the_turn() {
    let mut codex = in_turn();
    assert_eq!(codex.line_dropped(br#"{"method":"item/completed","params":{"item":{"ty"#), []);
    let signals = codex.line_dropped(br#"{"method":"turn/completed","params":{"turn":{"#);
    assert_eq!(signals, [Signal::Done(Err(TOO_LONG.into()))]);
}

proptest! {
    #[test]
    fn arbitrary_items_never_panic(kind in "[a-zA-Z]{0,16}", field in "[a-zA-Z]{0,8}", value in ".{0,20}") {
        for method in ["item/started", "item/completed", "turn/completed", "error"] {
            let item = json!({"type": kind, "id": value, field.clone(): [value]});
            in_turn().parse_line(notification(method, json!({"item": item})).as_bytes());
        }
    }
}
