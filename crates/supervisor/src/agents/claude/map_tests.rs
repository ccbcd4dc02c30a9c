//! Lines of Claude Code 2.1.325, without the fields that are not used.

use harvest_proto::event::ToolKind;
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn interpret(claude: &mut Claude, lines: &[&str]) -> Vec<Signal> {
    lines.iter().flat_map(|line| claude.interpret(line.as_bytes())).collect()
}

const IDLE: &str =
    r#"{"type":"system","subtype":"session_state_changed","state":"idle","session_id":"1cb7"}"#;
const RESULT: &str = r#"{"duration_api_ms":106,"stop_reason":"end_turn","session_id":"1cb7","usage":{"input_tokens":300},"type":"result","subtype":"success","is_error":false,"result":"done"}"#;
const ASK: &str = r#"{"type":"control_request","request_id":"a25e","request":{"subtype":"can_use_tool","tool_name":"AskUserQuestion","display_name":"AskUserQuestion","input":{"questions":[{"question":"Which colour?","header":"Colour","options":[{"label":"red","description":"r"},{"label":"blue","description":"b"}],"multiSelect":false}]},"tool_use_id":"toolu_d8","requires_user_interaction":true}}"#;

const HOOK: &str = r#"{"type":"control_request","request_id":"970a","request":{"subtype":"hook_callback","callback_id":"tool","input":{"session_id":"2dbc","cwd":"/tmp","permission_mode":"bypassPermissions","hook_event_name":"PreToolUse","tool_name":"Bash","tool_input":{"command":"cat a.txt"},"tool_use_id":"toolu_6d"},"tool_use_id":"toolu_6d"}}"#;

#[test]
fn hook_asks_before_a_tool_runs() {
    let tool =
        ToolRequest { request: "970a".into(), call: "toolu_6d".into(), kind: ToolKind::Execute };
    let mut claude = Claude::default();
    assert_eq!(interpret(&mut claude, &[HOOK]), [Signal::AsksForTool(tool.clone())]);
    // Too long to be read: an error as the answer would let the tool run.
    let head = HOOK.split("\"tool_input\"").next().unwrap();
    let asked = claude.interpret_head(head.as_bytes());
    let [Signal::AsksForTool(ToolRequest { request, kind, .. })] = &asked[..] else {
        panic!("{asked:?}")
    };
    assert_eq!((request.as_str(), *kind), ("970a", ToolKind::Execute));
    let withdrawn = r#"{"type":"control_cancel_request","request_id":"970a"}"#;
    assert_eq!(
        interpret(&mut claude, &[withdrawn]),
        [Signal::ToolWithdrawn { request: "970a".into() }]
    );
}

#[test]
fn irrelevant_lines_are_dropped() {
    let signals = interpret(
        &mut Claude::default(),
        &[
            r#"{"type":"system","subtype":"session_state_changed","state":"running"}"#,
            r#"{"type":"system","subtype":"status","status":"requesting"}"#,
            r#"{"type":"command_lifecycle","command_uuid":"1111","state":"queued"}"#,
            r#"{"type":"stream_event","event":{"type":"message_stop"},"parent_tool_use_id":null}"#,
            r#"{"type":"stream_event","event":{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{"}},"parent_tool_use_id":null}"#,
            "",
        ],
    );
    assert_eq!(signals, []);
}

#[test]
fn text_comes_from_partials_of_the_main_conversation() {
    let partial = |parent: &str| {
        format!(
            r#"{{"type":"stream_event","event":{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":"Working."}}}},"parent_tool_use_id":{parent}}}"#
        )
    };
    let signals = interpret(
        &mut Claude::default(),
        &[
            &partial("null"),
            &partial(r#""toolu_1""#),
            r#"{"type":"assistant","message":{"content":[{"type":"text","text":"Working."}]},"parent_tool_use_id":null}"#,
        ],
    );
    assert_eq!(signals, [Signal::Event(EventBody::TextDelta { text: "Working.".into() })]);
}

#[test]
fn tool_call_starts_and_ends() {
    let signals = interpret(
        &mut Claude::default(),
        &[
            r#"{"type":"assistant","message":{"id":"msg_29","content":[{"type":"tool_use","id":"toolu_75","name":"Bash","input":{"command":"echo x > made.txt"}}]},"parent_tool_use_id":null}"#,
            r#"{"type":"user","message":{"role":"user","content":[{"tool_use_id":"toolu_75","type":"tool_result","content":"(Bash completed with no output)","is_error":false}]},"parent_tool_use_id":null,"tool_use_result":{"stdout":""}}"#,
        ],
    );
    assert_eq!(
        signals,
        [
            Signal::Event(EventBody::ToolStarted {
                call: "toolu_75".into(),
                name: "Bash".into(),
                kind: ToolKind::Execute,
                input: json!({"command": "echo x > made.txt"}),
                parent: None,
                blob: None,
            }),
            Signal::Event(EventBody::ToolEnded {
                call: "toolu_75".into(),
                ok: true,
                output: "(Bash completed with no output)".into(),
                blob: None,
            }),
        ]
    );
}

#[test]
fn agent_is_reported_ready_when_something_changed() {
    let init = |state: &str| {
        format!(
            r#"{{"type":"system","subtype":"init","cwd":"/x","tools":["Bash"],"mcp_servers":[{{"name":"memory","status":"{state}"}}],"model":"opus","claude_code_version":"2.1.325"}}"#
        )
    };
    let lines = [init("pending"), init("connected"), init("connected")];
    let signals = interpret(&mut Claude::default(), &lines.each_ref().map(String::as_str));
    let ready = |state| {
        Signal::Event(EventBody::AgentReady {
            version: Some("2.1.325".into()),
            model: Some("opus".into()),
            mcp: vec![McpServer { name: "memory".into(), state }],
        })
    };
    assert_eq!(signals, [ready(McpState::Starting), ready(McpState::Connected)]);
}

#[test]
fn todo_list_of_the_agent_is_its_plan() {
    let call = |parent: &str| {
        format!(
            r#"{{"type":"assistant","message":{{"content":[{{"type":"tool_use","id":"t","name":"TodoWrite","input":{{"todos":[{{"content":"one","status":"in_progress","activeForm":"Doing one"}}]}}}}]}},"parent_tool_use_id":{parent}}}"#
        )
    };
    let plans = |line: &str| {
        let signals = interpret(&mut Claude::default(), &[line]);
        let is_plan = |signal: &&Signal| matches!(signal, Signal::Event(EventBody::Plan { steps }) if steps[0].text == "one");
        (signals.len(), signals.iter().filter(is_plan).count())
    };
    assert_eq!(plans(&call("null")), (2, 1));
    assert_eq!(plans(&call(r#""toolu_1""#)), (1, 0), "of a sub-agent");
}

#[test]
fn turn_ends_after_result_and_idle() {
    let mut claude = Claude::default();
    let text = r#"{"type":"stream_event","event":{"delta":{"type":"text_delta","text":"x"}},"parent_tool_use_id":null}"#;
    interpret(&mut claude, &[text]);
    assert_eq!(interpret(&mut claude, &[IDLE]), []);
    assert_eq!(interpret(&mut claude, &[RESULT]), []);
    assert_eq!(interpret(&mut claude, &[IDLE]), [Signal::Done(Ok(()))]);
    assert_eq!(interpret(&mut claude, &[IDLE]), []);
}

#[test]
fn result_that_was_not_streamed_is_text() {
    let signals = interpret(&mut Claude::default(), &[RESULT]);
    assert_eq!(signals, [Signal::Event(EventBody::TextDelta { text: "done".into() })]);
}

#[test]
fn api_failure_with_success_subtype_fails() {
    let failed = r#"{"type":"result","subtype":"success","is_error":true,"result":"API Error: 529","api_error_status":529}"#;
    let signals = interpret(&mut Claude::default(), &[failed, IDLE]);
    assert_eq!(signals, [Signal::Done(Err("API Error: 529".into()))]);
}

#[test]
fn repeated_prompt_ends_at_once() {
    let prompt: PromptId = "prm_000000000001".parse().unwrap();
    let line = |state: &str| {
        json!({"type": "command_lifecycle", "command_uuid": uuid(&prompt), "state": state})
            .to_string()
    };
    let mut claude = Claude::default();
    claude.begin(&prompt);
    assert_eq!(interpret(&mut claude, &[&line("completed")]), [Signal::Repeated]);
    claude.begin(&prompt);
    assert_eq!(
        interpret(&mut claude, &[&line("queued"), &line("started"), &line("completed")]),
        []
    );
}

#[test]
fn question_waits_for_its_answer() {
    let mut claude = Claude::default();
    let opened = EventBody::RequestOpened {
        request: "toolu_d8".into(),
        question: "Which colour?".into(),
        options: vec!["red".into(), "blue".into()],
    };
    let asked = Signal::Question { request: "toolu_d8".into() };
    assert_eq!(interpret(&mut claude, &[ASK]), [Signal::Event(opened), asked]);
    let signals = claude.on_answer("toolu_d8", "blue");
    let Signal::Send(line) = &signals[1] else { panic!("{signals:?}") };
    let reply: Value = serde_json::from_str(line).unwrap();
    assert_eq!(reply["response"]["request_id"], "a25e");
    assert_eq!(
        reply["response"]["response"]["updatedInput"]["answers"],
        json!({"Which colour?": "blue"})
    );
    assert_eq!(claude.on_answer("toolu_d8", "again"), []);
}

#[test]
fn questions_are_asked_one_by_one() {
    let mut claude = Claude::default();
    let mut ask: Value = serde_json::from_str(ASK).unwrap();
    let mut second = ask["request"]["input"]["questions"][0].clone();
    second["question"] = json!("Which size?");
    ask["request"]["input"]["questions"].as_array_mut().unwrap().push(second);
    interpret(&mut claude, &[&ask.to_string()]);
    let next = claude.on_answer("toolu_d8", "red");
    assert!(next.contains(&Signal::Question { request: "toolu_d8+".into() }), "{next:?}");
    let last = claude.on_answer("toolu_d8+", "small");
    let Signal::Send(line) = &last[1] else { panic!("{last:?}") };
    assert!(line.contains(r#""Which colour?":"red""#) && line.contains(r#""Which size?":"small""#));
}

#[test]
fn questions_of_one_id_are_kept_apart() {
    let mut claude = Claude::default();
    let other = ASK.replace("a25e", "b36f");
    let signals = interpret(&mut claude, &[ASK, &other]);
    assert_eq!(signals.last(), Some(&Signal::Question { request: "toolu_d8+".into() }));
    for (request, control) in [("toolu_d8", "a25e"), ("toolu_d8+", "b36f")] {
        let signals = claude.on_answer(request, "blue");
        let Some(Signal::Send(line)) = signals.last() else { panic!("{signals:?}") };
        assert!(line.contains(control), "{line}");
    }
}

#[test]
fn other_tools_are_allowed_at_once() {
    let line = r#"{"type":"control_request","request_id":"r9","request":{"subtype":"can_use_tool","tool_name":"Bash","input":{"command":"ls"}}}"#;
    let signals = interpret(&mut Claude::default(), &[line]);
    assert_eq!(signals, [Signal::Send(allow("r9", &json!({"command": "ls"})))]);
}

#[test]
fn rejected_api_key_fails_without_a_retry() {
    let line = r#"{"type":"system","subtype":"api_retry","attempt":1,"max_retries":10,"retry_delay_ms":532.5,"error_status":401,"error":"x"}"#;
    let signals = interpret(&mut Claude::default(), &[line]);
    let [Signal::Unrecoverable(reason)] = &signals[..] else { panic!("{signals:?}") };
    assert!(reason.contains("harvest secret set ANTHROPIC_API_KEY"), "{reason}");
    let overloaded = line.replace("401", "529");
    assert_eq!(
        interpret(&mut Claude::default(), &[&overloaded]),
        [Signal::Event(EventBody::Retry { attempt: 1, after_millis: 532, status: Some(529) })]
    );
}

#[test]
fn compaction_counts_as_output() {
    let signals = interpret(
        &mut Claude::default(),
        &[
            r#"{"type":"system","subtype":"compact_boundary","compact_metadata":{"trigger":"manual"}}"#,
        ],
    );
    assert!(signals.len() == 1 && signals[0].is_output(), "{signals:?}");
}

#[test]
fn unknown_lines_are_truncated() {
    let line = format!(r#"{{"type":"novelty","x":"{}"}}"#, "y".repeat(10_000));
    let signals = interpret(&mut Claude::default(), &[&line]);
    let [Signal::Event(EventBody::AgentRaw { line })] = &signals[..] else { panic!("{signals:?}") };
    assert_eq!(line.len(), 4096);
}

#[test]
fn json_in_private_keys_is_an_unknown_line() {
    let line = RESULT.replace(r#""done""#, r#"{"$serde_json::private::RawValue":"[]"}"#);
    let signals = interpret(&mut Claude::default(), &[&line]);
    assert!(matches!(signals[..], [Signal::Event(EventBody::AgentRaw { .. })]), "{signals:?}");
}

#[test]
fn dropped_result_ends_the_turn() {
    let mut claude = Claude::default();
    assert_eq!(claude.interpret_head(br#"{"type":"result","subtype":"success","result":"x"#), []);
    assert_eq!(interpret(&mut claude, &[IDLE]), [Signal::Done(Err(TOO_LONG.into()))]);
    let asked = claude.interpret_head(br#"{"type":"control_request","request_id":"r1","requ"#);
    assert!(matches!(&asked[..], [Signal::Send(line)] if line.contains("r1")), "{asked:?}");
}

proptest! {
    #[test]
    fn malformed_lines_never_panic(line in r#"\{"type":"(user|assistant|result|system|control_request|x)".{0,60}"#) {
        let _any = Claude::default().interpret(line.as_bytes());
    }
}
