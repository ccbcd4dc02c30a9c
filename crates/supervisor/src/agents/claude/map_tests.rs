//! Lines as Claude Code 2.1.325 printed them, shortened where a field is of no use to us.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn hear(claude: &mut Claude, lines: &[&str]) -> Vec<Signal> {
    lines.iter().flat_map(|line| claude.line(line.as_bytes())).collect()
}

const IDLE: &str =
    r#"{"type":"system","subtype":"session_state_changed","state":"idle","session_id":"1cb7"}"#;
const RESULT: &str = r#"{"duration_api_ms":106,"stop_reason":"end_turn","session_id":"1cb7","usage":{"input_tokens":300},"type":"result","subtype":"success","is_error":false,"result":"done"}"#;
const ASK: &str = r#"{"type":"control_request","request_id":"a25e","request":{"subtype":"can_use_tool","tool_name":"AskUserQuestion","display_name":"AskUserQuestion","input":{"questions":[{"question":"Which colour?","header":"Colour","options":[{"label":"red","description":"r"},{"label":"blue","description":"b"}],"multiSelect":false}]},"tool_use_id":"toolu_d8","requires_user_interaction":true}}"#;

#[test]
fn noise_is_dropped() {
    let signals = hear(
        &mut Claude::default(),
        &[
            r#"{"type":"system","subtype":"session_state_changed","state":"running"}"#,
            r#"{"type":"system","subtype":"init","cwd":"/x","tools":["Bash"]}"#,
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
fn text_comes_from_the_partials_of_the_conversation_itself() {
    let partial = |parent: &str| {
        format!(
            r#"{{"type":"stream_event","event":{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":"Working."}}}},"parent_tool_use_id":{parent}}}"#
        )
    };
    let signals = hear(
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
fn a_tool_call_starts_and_ends() {
    let signals = hear(
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
fn a_turn_ends_with_its_result_and_idleness_not_with_either() {
    let mut claude = Claude::default();
    assert_eq!(hear(&mut claude, &[IDLE]), []);
    assert_eq!(hear(&mut claude, &[RESULT]), []);
    assert_eq!(hear(&mut claude, &[IDLE]), [Signal::Done(Ok(()))]);
    assert_eq!(hear(&mut claude, &[IDLE]), []);
}

#[test]
fn an_api_failure_is_a_failure_though_it_says_success() {
    let failed = r#"{"type":"result","subtype":"success","is_error":true,"result":"API Error: 529","api_error_status":529}"#;
    let signals = hear(&mut Claude::default(), &[failed, IDLE]);
    assert_eq!(signals, [Signal::Done(Err("API Error: 529".into()))]);
}

#[test]
fn a_prompt_it_has_carried_out_before_ends_at_once() {
    let prompt: PromptId = "prm_000000000001".parse().unwrap();
    let line = |state: &str| {
        json!({"type": "command_lifecycle", "command_uuid": wire::uuid(&prompt), "state": state})
            .to_string()
    };
    let mut claude = Claude::default();
    claude.begin(&prompt);
    assert_eq!(hear(&mut claude, &[&line("completed")]), [Signal::Done(Ok(()))]);
    claude.begin(&prompt);
    assert_eq!(hear(&mut claude, &[&line("queued"), &line("started"), &line("completed")]), []);
}

#[test]
fn a_question_waits_for_its_answer() {
    let mut claude = Claude::default();
    let opened = EventBody::RequestOpened {
        request: "toolu_d8".into(),
        question: "Which colour?".into(),
        options: vec!["red".into(), "blue".into()],
    };
    let asked = Signal::Asked { request: "toolu_d8".into() };
    assert_eq!(hear(&mut claude, &[ASK]), [Signal::Event(opened), asked]);
    let signals = claude.answered("toolu_d8", "blue");
    let Signal::Say(line) = &signals[1] else { panic!("{signals:?}") };
    let reply: Value = serde_json::from_str(line).unwrap();
    assert_eq!(reply["response"]["request_id"], "a25e");
    assert_eq!(
        reply["response"]["response"]["updatedInput"]["answers"],
        json!({"Which colour?": "blue"})
    );
    assert_eq!(claude.answered("toolu_d8", "again"), []);
}

#[test]
fn two_questions_are_asked_one_after_the_other() {
    let mut claude = Claude::default();
    let mut ask: Value = serde_json::from_str(ASK).unwrap();
    let mut second = ask["request"]["input"]["questions"][0].clone();
    second["question"] = json!("Which size?");
    ask["request"]["input"]["questions"].as_array_mut().unwrap().push(second);
    hear(&mut claude, &[&ask.to_string()]);
    let next = claude.answered("toolu_d8", "red");
    assert!(next.contains(&Signal::Asked { request: "toolu_d8+".into() }), "{next:?}");
    let last = claude.answered("toolu_d8+", "small");
    let Signal::Say(line) = &last[1] else { panic!("{last:?}") };
    assert!(line.contains(r#""Which colour?":"red""#) && line.contains(r#""Which size?":"small""#));
}

#[test]
fn any_other_tool_is_allowed_at_once() {
    let line = r#"{"type":"control_request","request_id":"r9","request":{"subtype":"can_use_tool","tool_name":"Bash","input":{"command":"ls"}}}"#;
    let signals = hear(&mut Claude::default(), &[line]);
    assert_eq!(signals, [Signal::Say(wire::allow("r9", &json!({"command": "ls"})))]);
}

#[test]
fn a_refused_key_is_not_waited_for() {
    let line = r#"{"type":"system","subtype":"api_retry","attempt":1,"max_retries":10,"retry_delay_ms":532.5,"error_status":401,"error":"x"}"#;
    let signals = hear(&mut Claude::default(), &[line]);
    assert_eq!(
        signals[0],
        Signal::Event(EventBody::Retry { attempt: 1, after_millis: 532, status: Some(401) })
    );
    assert!(matches!(signals[1], Signal::Hopeless(_)));
}

#[test]
fn what_we_have_no_word_for_is_kept_short() {
    let line = format!(r#"{{"type":"novelty","x":"{}"}}"#, "y".repeat(10_000));
    let signals = hear(&mut Claude::default(), &[&line]);
    let [Signal::Event(EventBody::AgentRaw { line })] = &signals[..] else { panic!("{signals:?}") };
    assert_eq!(line.len(), 4096);
}

proptest! {
    #[test]
    fn garbled_lines_never_panic(line in r#"\{"type":"(user|assistant|result|system|control_request|x)".{0,60}"#) {
        let _any = Claude::default().line(line.as_bytes());
    }
}
