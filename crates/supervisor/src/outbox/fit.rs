//! Makes events fit into a frame. Long text is split into several events; long tool inputs and
//! outputs are truncated, with the full text as a blob. An event larger than a frame would break
//! the connection on every retry, so none is ever queued.

use harvest_proto::{BlobId, EventBody, bridge::MAX_CONTROL_BYTES, event::Blob};
use serde_json::Value;

use super::MAX_DELTA_BYTES;
use crate::truncate;

// Limit of ids and names from the agent (of calls and tools). Above `truncate::MAX_NAME_BYTES`, so
// that ids already truncated by an agent's parser stay unchanged.
const MAX_NAME_BYTES: usize = 2 * truncate::MAX_NAME_BYTES;

// More options than a person would read.
const MAX_OPTIONS: usize = 64;
const MAX_OPTION_BYTES: usize = 1024;

// Overhead of a frame around an event's body: number, time, turn.
const FRAME_BYTES: usize = 4 * 1024;

/// An event that fits, and the full text of its blob.
pub(super) type FittedEvent = (EventBody, Option<String>);

/// Splits or truncates an event.
pub(super) fn fit(mut body: EventBody) -> Vec<FittedEvent> {
    shorten(&mut body);
    let full = match &mut body {
        EventBody::TextDelta { text } if text.len() > MAX_DELTA_BYTES => {
            return split(text).map(|text| (EventBody::TextDelta { text }, None)).collect();
        }
        EventBody::ThoughtDelta { text } if text.len() > MAX_DELTA_BYTES => {
            return split(text).map(|text| (EventBody::ThoughtDelta { text }, None)).collect();
        }
        EventBody::ToolOutput { call, text } if text.len() > MAX_DELTA_BYTES => {
            let output = |text| EventBody::ToolOutput { call: call.clone(), text };
            return split(text).map(|text| (output(text), None)).collect();
        }
        EventBody::ToolEnded { output, blob, .. } if output.len() > truncate::MAX_TEXT_BYTES => {
            let short = truncate::text(output, truncate::MAX_TEXT_BYTES);
            *blob = Some(new_blob(output));
            Some(std::mem::replace(output, short))
        }
        EventBody::ToolStarted { input, blob, .. } => long_json(input).inspect(|json| {
            *input = truncate::value(input.take());
            *blob = Some(new_blob(json));
        }),
        _ => None,
    };
    vec![(body, full)]
}

/// The event and its length as JSON, or a warning if it is still too long for a frame.
pub(super) fn or_warning(body: EventBody) -> (EventBody, usize) {
    let bytes = truncate::json_len(&body);
    if bytes + FRAME_BYTES <= MAX_CONTROL_BYTES {
        return (body, bytes);
    }
    let message = format!("dropped an event of {bytes} bytes: too long");
    (EventBody::Warning { message }, 0)
}

// Truncates the fields that `fit` does not handle: an agent's line, and so any field of it, may be
// longer than a frame.
fn shorten(body: &mut EventBody) {
    let name = |name: &mut String| *name = truncate::text(name, MAX_NAME_BYTES);
    let text = |text: &mut String| *text = truncate::text(text, truncate::MAX_TEXT_BYTES);
    match body {
        EventBody::ToolStarted { call, name: tool, parent, .. } => {
            [Some(call), Some(tool), parent.as_mut()].into_iter().flatten().for_each(name);
        }
        EventBody::ToolEnded { call, .. } | EventBody::ToolOutput { call, .. } => name(call),
        EventBody::AgentReady { version, model, mcp } => {
            mcp.truncate(MAX_OPTIONS);
            let servers = mcp.iter_mut().map(|server| &mut server.name);
            version.iter_mut().chain(model).chain(servers).for_each(name);
        }
        EventBody::Plan { steps } => {
            steps.truncate(MAX_OPTIONS);
            let texts = steps.iter_mut().map(|step| &mut step.text);
            texts.for_each(|text| *text = truncate::text(text, MAX_OPTION_BYTES));
        }
        EventBody::Title { title } => name(title),
        EventBody::RequestOpened { request, question, options } => {
            name(request);
            text(question);
            options.truncate(MAX_OPTIONS);
            options
                .iter_mut()
                .for_each(|option| *option = truncate::text(option, MAX_OPTION_BYTES));
        }
        EventBody::RequestClosed { request, answer } => {
            name(request);
            answer.iter_mut().for_each(text);
        }
        EventBody::TurnEnded { error, .. } => error.iter_mut().for_each(text),
        EventBody::BootPhase { tail, failure, .. } => {
            let message = failure.as_mut().map(|failure| &mut failure.message);
            tail.iter_mut().chain(message).for_each(text);
        }
        EventBody::AgentExited { tail, .. } | EventBody::InstallStep { tail, .. } => text(tail),
        EventBody::Warning { message } => text(message),
        EventBody::AgentRaw { line } => text(line),
        _ => {}
    }
}

fn new_blob(full: &str) -> Blob {
    Blob { id: BlobId::random(), bytes: full.len() as u64 }
}

fn long_json(value: &Value) -> Option<String> {
    let json = value.to_string();
    truncate::is_long(value, &json).then_some(json)
}

fn split(text: &str) -> impl Iterator<Item = String> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (delta, after) = rest.split_at(rest.floor_char_boundary(MAX_DELTA_BYTES));
        rest = after;
        (!delta.is_empty()).then(|| delta.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::event::{McpServer, McpState, PlanStep, StepStatus, ToolKind};
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn long_output_is_truncated_with_a_blob() {
        let output = format!("begin{}end", "x".repeat(200_000));
        let ended =
            EventBody::ToolEnded { call: "c".into(), ok: true, output: output.clone(), blob: None };
        let [(EventBody::ToolEnded { output: short, blob: Some(blob), .. }, Some(full))] =
            &fit(ended)[..]
        else {
            panic!("expected one event with a blob")
        };
        assert!(short.starts_with("begin") && short.ends_with("end") && short.len() < 70_000);
        assert_eq!((full, blob.bytes), (&output, output.len() as u64));
    }

    #[test]
    fn long_input_is_truncated_with_a_json_blob() {
        let input = json!({ "file_path": "/a", "content": "x".repeat(200_000) });
        let started = EventBody::ToolStarted {
            call: "c".into(),
            name: "Write".into(),
            input: input.clone(),
            kind: ToolKind::Other,
            parent: None,
            blob: None,
        };
        let [(EventBody::ToolStarted { input: short, blob: Some(_), .. }, Some(full))] =
            &fit(started)[..]
        else {
            panic!("expected one event with a blob")
        };
        assert_eq!(short["file_path"], "/a");
        assert_eq!(serde_json::from_str::<Value>(full).unwrap(), input);
    }

    #[test]
    fn deep_input_can_be_read_back() {
        let input = (0..126).fold(json!("core"), |inner, _| json!([inner]));
        let started = EventBody::ToolStarted {
            call: "c".into(),
            name: "n".into(),
            input: input.clone(),
            kind: ToolKind::Other,
            parent: None,
            blob: None,
        };
        let (body, full) = fit(started).remove(0);
        assert_eq!(full, Some(input.to_string()));
        let page = json!({ "items": [[body]] }).to_string();
        serde_json::from_str::<Value>(&page).unwrap();
    }

    // The longest line of an agent, of a character that takes the most space as JSON.
    fn long() -> String {
        "\u{1}".repeat(8 * 1024 * 1024)
    }

    #[test]
    fn no_field_of_an_agent_exceeds_a_frame() {
        use harvest_proto::{PromptId, bridge::Exit, event::TurnOutcome};
        let started = |call, name, parent| EventBody::ToolStarted {
            call,
            name,
            kind: ToolKind::Other,
            input: Value::Null,
            parent,
            blob: None,
        };
        let (short, prompt, word) = (|| "c".to_owned(), PromptId::random(), "\u{1}".repeat(4096));
        for body in [
            started(long(), short(), None),
            started(short(), long(), None),
            started(short(), short(), Some(long())),
            EventBody::ToolEnded { call: long(), ok: true, output: long(), blob: None },
            EventBody::RequestOpened {
                request: long(),
                question: long(),
                options: vec![word.clone(); 100],
            },
            EventBody::RequestOpened {
                request: short(),
                question: short(),
                options: vec![short(); 1 << 20],
            },
            EventBody::RequestClosed { request: long(), answer: Some(long()) },
            EventBody::ToolOutput { call: long(), text: long() },
            EventBody::Title { title: long() },
            EventBody::Plan {
                steps: vec![PlanStep { text: word.clone(), status: StepStatus::Pending }; 1000],
            },
            EventBody::AgentReady {
                version: Some(long()),
                model: Some(long()),
                mcp: vec![McpServer { name: word.clone(), state: McpState::Failed }; 1000],
            },
            EventBody::TurnEnded {
                prompt,
                outcome: TurnOutcome::Failed,
                reason: None,
                error: Some(long()),
                millis: 1,
            },
            EventBody::AgentExited { exit: Exit::Code(1), tail: long(), restarts: true },
            EventBody::Warning { message: long() },
            EventBody::AgentRaw { line: long() },
        ] {
            let kind = std::mem::discriminant(&body);
            for (fitting, _) in fit(body) {
                assert!(
                    truncate::json_len(&fitting) + FRAME_BYTES <= MAX_CONTROL_BYTES,
                    "{kind:?}"
                );
                assert_eq!(
                    std::mem::discriminant(&or_warning(fitting).0),
                    kind,
                    "the event keeps its type"
                );
            }
        }
    }

    #[test]
    fn long_call_ids_still_match() {
        let started = EventBody::ToolStarted {
            call: long(),
            name: "Bash".into(),
            input: Value::Null,
            kind: ToolKind::Other,
            parent: None,
            blob: None,
        };
        let ended =
            EventBody::ToolEnded { call: long(), ok: true, output: String::new(), blob: None };
        let (started, ended) = (fit(started).remove(0).0, fit(ended).remove(0).0);
        let (EventBody::ToolStarted { call, .. }, EventBody::ToolEnded { call: same, .. }) =
            (started, ended)
        else {
            panic!("the events keep their types")
        };
        assert_eq!(call, same);
    }

    proptest! {
        #[test]
        fn long_text_is_split_without_loss(text in "[aé☃]{0,20000}") {
            let fitted = fit(EventBody::TextDelta { text: text.clone() });
            let mut joined = String::new();
            for (body, full) in fitted {
                let EventBody::TextDelta { text } = body else { panic!("expected text") };
                prop_assert!(text.len() <= MAX_DELTA_BYTES && full.is_none());
                joined.push_str(&text);
            }
            prop_assert_eq!(joined, text);
        }
    }
}
