//! Lines of OpenCode 1.18.33, without the fields that are not used.

use std::collections::BTreeMap;

use harvest_proto::{
    bridge::{Author, TurnRequest},
    event::{McpServer, McpState, PlanStep, StepStatus},
};
use proptest::prelude::*;

use super::*;
use crate::agents::{Agent, acp::Configured};

const SESSION: &str = "ses_e1b1";
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1,"agentCapabilities":{"loadSession":true,"sessionCapabilities":{"close":{},"fork":{},"list":{},"resume":{}}},"agentInfo":{"name":"OpenCode","version":"1.18.33"}}}"#;
const OPENED: &str = r#"{"jsonrpc":"2.0","id":2,"result":{"sessionId":"ses_e1b1","configOptions":[{"id":"model","currentValue":"harvest/main"},{"id":"mode","currentValue":"build"}]}}"#;

fn lines(acp: &mut Acp, lines: &[String]) -> Vec<Signal> {
    lines.iter().flat_map(|line| acp.parse_line(line.as_bytes())).collect()
}

fn update(update: Value) -> String {
    let params = json!({"sessionId": SESSION, "update": update});
    json!({"jsonrpc": "2.0", "method": "session/update", "params": params}).to_string()
}

fn chunk_of(text: &str) -> String {
    let content = json!({"type": "text", "text": text});
    update(json!({"sessionUpdate": "agent_message_chunk", "messageId": "m", "content": content}))
}

fn replied(reason: &str) -> String {
    json!({"jsonrpc": "2.0", "id": 3, "result": {"stopReason": reason}}).to_string()
}

/// An agent that has got its first prompt.
fn prompted() -> Acp {
    let mut acp = Acp::default();
    acp.init_line();
    lines(&mut acp, &[INITIALIZED.into(), OPENED.into()]);
    acp.prompt(&request(), &[]);
    acp
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

fn sent(signals: &[Signal]) -> Vec<Value> {
    let sent = signals.iter().filter_map(|signal| match signal {
        Signal::Send(line) => Some(serde_json::from_str(line).unwrap()),
        _ => None,
    });
    sent.collect()
}

#[test]
fn new_conversation_is_kept_and_reported() {
    let mut acp = Acp { cwd: "/w".into(), ..Acp::default() };
    acp.init_line();
    let signals = lines(&mut acp, &[INITIALIZED.into()]);
    assert_eq!(sent(&signals)[0]["method"], "session/new");
    assert_eq!(sent(&signals)[0]["params"], json!({"cwd": "/w", "mcpServers": []}));
    let ready = EventBody::AgentReady {
        version: Some("1.18.33".into()),
        model: Some("harvest/main".into()),
        mcp: vec![],
    };
    assert_eq!(
        lines(&mut acp, &[OPENED.into()]),
        [
            Signal::Conversation(SESSION.into()),
            Signal::Event(ready),
            Signal::Ready { is_new: true }
        ]
    );
}

#[test]
fn harvest_tools_are_offered_where_http_is_taken() {
    let mut acp = Acp::default();
    acp.init_line();
    let result = json!({"agentCapabilities": {"mcpCapabilities": {"http": true}}});
    let line = json!({"jsonrpc": "2.0", "id": 1, "result": result}).to_string();
    let url = "http://mcp.harvest.internal/mcp";
    let server = json!({"type": "http", "name": "harvest", "url": url, "headers": []});
    assert_eq!(sent(&lines(&mut acp, &[line]))[0]["params"]["mcpServers"], json!([server]));
    let ready = lines(&mut acp, &[OPENED.into()]);
    let offered = McpServer { name: "harvest".into(), state: McpState::Offered };
    assert!(
        matches!(&ready[1], Signal::Event(EventBody::AgentReady { mcp, .. }) if *mcp == [offered]),
        "{ready:?}"
    );
}

#[test]
fn saved_conversation_is_resumed_where_offered() {
    let with = |capabilities: Value| {
        let mut acp = Acp { saved: Some("ses_1".into()), ..Acp::default() };
        acp.init_line();
        let result = json!({"agentCapabilities": capabilities});
        let line = json!({"jsonrpc": "2.0", "id": 1, "result": result}).to_string();
        let sent = sent(&lines(&mut acp, &[line])).remove(0);
        (sent["method"].as_str().unwrap().to_owned(), sent["params"]["sessionId"].clone())
    };
    let all = json!({"loadSession": true, "sessionCapabilities": {"resume": {}}});
    assert_eq!(with(all), ("session/resume".into(), json!("ses_1")));
    assert_eq!(with(json!({"loadSession": true})), ("session/load".into(), json!("ses_1")));
    assert_eq!(with(json!({})).0, "session/new");
}

#[test]
fn resumed_configured_agent_gets_its_rules_once() {
    let configured = Configured { env: BTreeMap::new(), rules: None };
    let mut acp =
        Acp { saved: Some(SESSION.into()), configured: Some(configured), ..Acp::default() };
    acp.init_line();
    lines(&mut acp, &[INITIALIZED.into(), OPENED.into()]);
    let mut blocks = || {
        let line: Value = serde_json::from_str(&acp.prompt(&request(), &[])).unwrap();
        line["params"]["prompt"].as_array().unwrap().len()
    };
    assert_eq!((blocks(), blocks()), (2, 1));
}

#[test]
fn replayed_history_becomes_no_event() {
    let mut acp = Acp { saved: Some(SESSION.into()), ..Acp::default() };
    acp.init_line();
    lines(&mut acp, &[INITIALIZED.into()]);
    let replay = [
        update(json!({"sessionUpdate": "user_message_chunk", "content": {"text": "do"}})),
        chunk_of("Working."),
        update(json!({"sessionUpdate": "tool_call", "toolCallId": "t", "status": "completed"})),
    ];
    assert_eq!(lines(&mut acp, &replay), []);
    let done = r#"{"jsonrpc":"2.0","id":2,"result":{}}"#.to_owned();
    assert!(lines(&mut acp, &[done]).contains(&Signal::Ready { is_new: false }));
    assert_eq!(lines(&mut acp, &[chunk_of("new")]).len(), 1);
}

#[test]
fn missing_conversation_begins_anew() {
    let mut acp = Acp { saved: Some("ses_gone".into()), ..Acp::default() };
    acp.init_line();
    lines(&mut acp, &[INITIALIZED.into()]);
    let failed = r#"{"jsonrpc":"2.0","id":2,"error":{"code":-32603,"message":"Internal error: OpenCode service failure"}}"#;
    assert_eq!(sent(&lines(&mut acp, &[failed.into()]))[0]["method"], "session/new");
}

#[test]
fn text_and_thoughts_are_streamed() {
    let thought = json!({"sessionUpdate": "agent_thought_chunk", "content": {"text": "hm"}});
    let empty = json!({"sessionUpdate": "agent_thought_chunk", "content": {"text": ""}});
    let signals = lines(&mut prompted(), &[update(thought), update(empty), chunk_of("Working.")]);
    assert_eq!(
        signals,
        [
            Signal::Event(EventBody::ThoughtDelta { text: "hm".into() }),
            Signal::Event(EventBody::TextDelta { text: "Working.".into() }),
        ]
    );
}

fn tool(status: &str, kind: &str, input: Value, output: &str) -> String {
    let content = json!([{"type": "content", "content": {"type": "text", "text": output}}]);
    let content = if output.is_empty() { Value::Null } else { content };
    let start = if status == "pending" { "tool_call" } else { "tool_call_update" };
    update(json!({
        "sessionUpdate": start, "toolCallId": "toolu_2", "title": kind, "kind": kind,
        "status": status, "rawInput": input, "content": content,
    }))
}

#[test]
fn tool_starts_with_its_complete_input() {
    let input = json!({"command": "make", "cwd": "/w"});
    let signals = lines(
        &mut prompted(),
        &[
            tool("pending", "execute", json!({"cwd": "/w"}), ""),
            tool("in_progress", "execute", input.clone(), ""),
            tool("in_progress", "execute", input.clone(), "line 1\n"),
            tool("in_progress", "execute", input.clone(), "line 1\nline 2\n"),
            update(json!({
                "sessionUpdate": "tool_call_update", "toolCallId": "toolu_2", "status": "completed",
                "content": [{"type": "content", "content": {"type": "text", "text": "(no output)"}}],
                "rawOutput": {"output": "(no output)", "metadata": {"exit": 3}},
            })),
        ],
    );
    let call = || "toolu_2".to_owned();
    assert_eq!(
        signals,
        [
            Signal::Event(EventBody::ToolStarted {
                call: call(),
                name: "execute".into(),
                kind: ToolKind::Execute,
                input,
                parent: None,
                blob: None,
            }),
            Signal::Event(EventBody::ToolOutput { call: call(), text: "line 1\n".into() }),
            Signal::Event(EventBody::ToolOutput { call: call(), text: "line 2\n".into() }),
            Signal::Event(EventBody::ToolEnded {
                call: call(),
                ok: false,
                output: "(no output)\n(exit code 3)".into(),
                blob: None,
            }),
        ]
    );
}

#[test]
fn todo_list_of_a_tool_is_a_plan() {
    let input = json!({"todos": [{"content": "one", "status": "in_progress", "id": "1"}]});
    let signals = lines(
        &mut prompted(),
        &[tool("pending", "other", json!({}), ""), tool("completed", "other", input, "1 todos")],
    );
    let steps = vec![PlanStep { text: "one".into(), status: StepStatus::InProgress }];
    assert_eq!(signals.last(), Some(&Signal::Event(EventBody::Plan { steps })));
}

#[test]
fn turn_ends_after_reply_and_open_tools() {
    let mut acp = prompted();
    lines(&mut acp, &[tool("in_progress", "execute", json!({}), "")]);
    assert_eq!(lines(&mut acp, &[replied("end_turn")]), []);
    let signals = lines(&mut acp, &[tool("completed", "execute", json!({}), "x")]);
    assert_eq!(signals.last(), Some(&Signal::Done(Ok(()))));
}

#[test]
fn tool_never_run_does_not_hold_turn() {
    let mut acp = prompted();
    lines(&mut acp, &[tool("pending", "execute", json!({}), "")]);
    assert_eq!(lines(&mut acp, &[replied("end_turn")]), [Signal::Done(Ok(()))]);
}

#[test]
fn update_after_the_end_opens_no_call() {
    let mut acp = prompted();
    lines(&mut acp, &[tool("completed", "execute", json!({}), "x")]);
    let described =
        json!({"sessionUpdate": "tool_call_update", "toolCallId": "toolu_2", "title": "t"});
    assert_eq!(lines(&mut acp, &[update(described)]), []);
    assert!(!acp.tools.is_open("toolu_2"));
    assert_eq!(lines(&mut acp, &[replied("end_turn")]), [Signal::Done(Ok(()))]);
}

#[test]
fn cancelled_turn_ends_its_open_tools() {
    let mut acp = prompted();
    lines(&mut acp, &[tool("in_progress", "execute", json!({}), "")]);
    assert!(acp.cancel().unwrap().contains("session/cancel"));
    let signals = lines(&mut acp, &[replied("cancelled")]);
    let [Signal::Event(ended), Signal::Done(Err(_))] = &signals[..] else { panic!("{signals:?}") };
    assert!(matches!(ended, EventBody::ToolEnded { ok: false, .. }), "{ended:?}");
}

#[test]
fn refusal_of_the_model_fails_the_turn() {
    let signals = lines(&mut prompted(), &[chunk_of("x"), replied("refusal")]);
    assert!(matches!(&signals[1], Signal::Done(Err(why)) if why.contains("refused")));
}

#[test]
fn error_of_the_prompt_is_the_turns_error() {
    let failed = r#"{"jsonrpc":"2.0","id":3,"error":{"code":-32603,"message":"Internal error: bad key","data":{"errorName":"APIError"}}}"#;
    let signals = lines(&mut prompted(), &[failed.into()]);
    assert_eq!(signals, [Signal::Done(Err("bad key".into()))]);
}

#[test]
fn every_request_is_answered() {
    let request = |method: &str, params: Value| {
        json!({"jsonrpc": "2.0", "id": 9, "method": method, "params": params}).to_string()
    };
    let option = |kind: &str| json!({"optionId": kind, "kind": kind});
    let permission = json!({"options": [option("reject_once"), option("allow_once")]});
    let asked = |line| sent(&lines(&mut Acp::default(), &[line])).remove(0);
    let answer = asked(request("session/request_permission", permission));
    assert_eq!(answer["result"]["outcome"]["optionId"], "allow_once");
    let answer = asked(request("session/request_permission", json!({})));
    assert_eq!(answer["result"]["outcome"]["outcome"], "cancelled");
    for method in ["fs/read_text_file", "terminal/create", "elicitation/create", "x"] {
        assert_eq!(asked(request(method, json!({})))["error"]["code"], -32601, "{method}");
    }
}

#[test]
fn permission_is_asked_for_during_a_sync() {
    let option = |id: &str, kind: &str| json!({"optionId": id, "kind": kind});
    let options = [option("once", "allow_once"), option("reject", "reject_once")];
    let call = json!({"toolCallId": "toolu_4c", "kind": "edit", "title": "calc.py"});
    let params = json!({"sessionId": SESSION, "toolCall": call, "options": options});
    let asked = json!({"jsonrpc": "2.0", "id": 0, "method": "session/request_permission", "params": params});
    for (refusal, expected) in [(None, "once"), (Some("it changed"), "reject")] {
        let mut acp = prompted();
        acp.asks_for_tools = true;
        let tool =
            ToolRequest { request: "0".into(), call: "toolu_4c".into(), kind: ToolKind::Edit };
        assert_eq!(lines(&mut acp, &[asked.to_string()]), [Signal::AsksForTool(tool)]);
        let answer = sent(&acp.answer_tool("0", refusal)).remove(0);
        assert_eq!(answer["id"], 0);
        assert_eq!(answer["result"]["outcome"]["optionId"], expected);
        assert_eq!(acp.answer_tool("0", refusal), [], "it is answered once");
    }
}

#[test]
fn reply_to_a_note_ends_no_turn() {
    let mut acp = prompted();
    assert_eq!(acp.tell("it changed"), None, "its tools do not wait");
    acp.asks_for_tools = true;
    let note: Value = serde_json::from_str(&acp.tell("it changed").unwrap()).unwrap();
    assert_eq!(note["params"]["prompt"][0]["text"], "it changed");
    let reply = json!({"jsonrpc": "2.0", "id": note["id"], "result": {"stopReason": "end_turn"}});
    assert_eq!(lines(&mut acp, &[reply.to_string()]), []);
    assert_eq!(lines(&mut acp, &[replied("end_turn")]), [Signal::Done(Ok(()))]);
}

#[test]
fn other_conversations_and_known_noise_are_dropped() {
    let mut foreign = chunk_of("x").replace(SESSION, "ses_child");
    foreign.push(' ');
    let noise = [
        foreign,
        update(json!({"sessionUpdate": "usage_update", "used": 100})),
        update(json!({"sessionUpdate": "available_commands_update", "availableCommands": []})),
    ];
    assert_eq!(lines(&mut prompted(), &noise), []);
    let signals = lines(&mut prompted(), &[update(json!({"sessionUpdate": "from_the_future"}))]);
    assert!(matches!(signals[..], [Signal::Event(EventBody::AgentRaw { .. })]), "{signals:?}");
    let titled = update(json!({"sessionUpdate": "session_info_update", "title": "Fix it"}));
    let title = EventBody::Title { title: "Fix it".into() };
    assert_eq!(lines(&mut prompted(), &[titled]), [Signal::Event(title)]);
}

#[test]
fn dropped_line_does_not_hold_the_turn() {
    let running = tool("in_progress", "execute", json!({}), "");
    let done = |signals: &[Signal]| matches!(signals.last(), Some(Signal::Done(_)));
    let ended = tool("completed", "execute", json!({}), "");
    // The end of the last call was dropped, before and after the reply.
    let mut acp = prompted();
    lines(&mut acp, std::slice::from_ref(&running));
    assert_eq!(acp.line_dropped(&ended.as_bytes()[..60]), []);
    assert!(done(&lines(&mut acp, &[replied("end_turn")])));
    let mut acp = prompted();
    assert!(!done(&lines(&mut acp, &[running, replied("end_turn")])));
    assert!(done(&acp.line_dropped(&ended.as_bytes()[..60])));
    // The reply itself, and a request of the agent.
    assert!(done(&prompted().line_dropped(br#"{"jsonrpc":"2.0","id":3,"result":{"stopRea"#)));
    let asked = br#"{"jsonrpc":"2.0","id":"a","method":"session/request_permission","params":{"#;
    let refused = sent(&prompted().line_dropped(asked)).remove(0);
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!("a"), &json!(-32000)));
}

proptest! {
    #[test]
    fn arbitrary_updates_never_panic(kind in "[a-z_]{0,12}", field in "[a-zA-Z]{0,8}", value in ".{0,20}") {
        for update in [
            json!({"sessionUpdate": kind, field.clone(): value}),
            json!({"sessionUpdate": "tool_call_update", field.clone(): [value], "status": kind}),
            json!({"sessionUpdate": "plan", "entries": {field: value}}),
        ] {
            let params = json!({"sessionId": SESSION, "update": update});
            let line = json!({"method": "session/update", "params": params}).to_string();
            prompted().parse_line(line.as_bytes());
        }
    }
}

#[test]
fn effort_is_set_by_an_option_or_ignored() {
    let opened = |levels: &[&str]| {
        let levels: Vec<Value> = levels.iter().map(|level| json!({"value": level})).collect();
        let option = json!({"id": "think", "category": "thought_level", "options": levels});
        let result = json!({"sessionId": SESSION, "configOptions": [option]});
        json!({"jsonrpc": "2.0", "id": 2, "result": result}).to_string()
    };
    let ready = |levels: &[&str]| {
        let mut acp = Acp { effort: Some(Effort::High), ..Acp::default() };
        acp.init_line();
        lines(&mut acp, &[INITIALIZED.into()]);
        lines(&mut acp, &[opened(levels)])
    };
    let set = sent(&ready(&["low", "high"])).remove(0);
    assert_eq!(set["method"], "session/set_config_option");
    assert_eq!(
        (&set["params"]["configId"], &set["params"]["value"]),
        (&json!("think"), &json!("high"))
    );
    let ignored = ready(&["default"]);
    assert!(sent(&ignored).is_empty());
    assert!(
        ignored.contains(&super::ignored("effort", "the agent offers no such option")),
        "{ignored:?}"
    );
}

#[test]
fn resumed_conversation_gets_the_wanted_model() {
    let mut acp = Acp { model: Some("harvest/other".into()), ..Acp::default() };
    acp.init_line();
    lines(&mut acp, &[INITIALIZED.into()]);
    let set = sent(&lines(&mut acp, &[OPENED.into()])).remove(0);
    assert_eq!(
        (&set["params"]["configId"], &set["params"]["value"]),
        (&json!("model"), &json!("harvest/other"))
    );
    let ready = lines(&mut acp, &[r#"{"jsonrpc":"2.0","id":3,"result":{}}"#.into()]);
    assert_eq!(ready.last(), Some(&Signal::Ready { is_new: true }));
}
