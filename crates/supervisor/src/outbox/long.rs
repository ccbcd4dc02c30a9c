//! Makes events fit. A long text becomes several pieces of it; what cannot be cut into pieces keeps its
//! ends, and the whole goes along as a blob where somebody may want it. An event that is no frame would cut
//! the connection each time it is sent, and it is sent until it is stored: so none is made.

use harvest_proto::{BlobId, EventBody, bridge::MAX_CONTROL_BYTES, event::Blob};
use serde_json::Value;

use super::MAX_PIECE_BYTES;
use crate::cut;

// A name an agent gives: of a call, of a tool. Longer than `cut::MAX_NAME_BYTES`, so that what an agent's side
// has cut to be found again by it stays as it is.
const MAX_NAME_BYTES: usize = 2 * cut::MAX_NAME_BYTES;

// More answers, and longer ones, than anybody reads through.
const MAX_OPTIONS: usize = 64;
const MAX_OPTION_BYTES: usize = 1024;

// What a frame takes around an event's body: number, time, turn.
const FRAME_BYTES: usize = 4 * 1024;

/// An event that fits, and the whole of what it holds the ends of.
pub(super) type Fitting = (EventBody, Option<String>);

/// The same in events that fit.
pub(super) fn fit(mut body: EventBody) -> Vec<Fitting> {
    shorten(&mut body);
    match body {
        EventBody::TextDelta { text } if text.len() > MAX_PIECE_BYTES => {
            pieces(&text).map(|text| (EventBody::TextDelta { text }, None)).collect()
        }
        EventBody::ThoughtDelta { text } if text.len() > MAX_PIECE_BYTES => {
            pieces(&text).map(|text| (EventBody::ThoughtDelta { text }, None)).collect()
        }
        EventBody::ToolEnded { call, ok, output, .. } if output.len() > cut::MAX_TEXT_BYTES => {
            let short = cut::text(&output, cut::MAX_TEXT_BYTES);
            vec![(
                EventBody::ToolEnded { call, ok, output: short, blob: blob(&output) },
                Some(output),
            )]
        }
        EventBody::ToolStarted { call, name, input, parent, .. } => match long_json(&input) {
            Some(json) => {
                let blob = blob(&json);
                vec![(
                    EventBody::ToolStarted { call, name, input: cut::value(input), parent, blob },
                    Some(json),
                )]
            }
            None => vec![(EventBody::ToolStarted { call, name, input, parent, blob: None }, None)],
        },
        other => vec![(other, None)],
    }
}

/// The event, or where it would be no frame whatever was cut, a word about it.
pub(super) fn framed(body: EventBody) -> EventBody {
    let bytes = cut::encoded(&body);
    if bytes + FRAME_BYTES <= MAX_CONTROL_BYTES {
        return body;
    }
    EventBody::Warning {
        message: format!("an event of {bytes} bytes is too long to be kept; it is left out"),
    }
}

// What the match above does not put elsewhere: an agent's line may be longer than a frame, and any word of it
// as long as the line.
fn shorten(body: &mut EventBody) {
    let name = |name: &mut String| *name = cut::text(name, MAX_NAME_BYTES);
    let text = |text: &mut String| *text = cut::text(text, cut::MAX_TEXT_BYTES);
    match body {
        EventBody::ToolStarted { call, name: tool, parent, .. } => {
            [Some(call), Some(tool), parent.as_mut()].into_iter().flatten().for_each(name);
        }
        EventBody::ToolEnded { call, .. } => name(call),
        EventBody::RequestOpened { request, question, options } => {
            name(request);
            text(question);
            options.truncate(MAX_OPTIONS);
            options.iter_mut().for_each(|option| *option = cut::text(option, MAX_OPTION_BYTES));
        }
        EventBody::RequestClosed { request, answer } => {
            name(request);
            answer.iter_mut().for_each(text);
        }
        EventBody::TurnEnded { error, .. } => error.iter_mut().for_each(text),
        EventBody::BootPhase { tail, .. } => tail.iter_mut().for_each(text),
        EventBody::AgentExited { tail, .. } => text(tail),
        EventBody::Warning { message } => text(message),
        EventBody::AgentRaw { line } => text(line),
        _ => {}
    }
}

fn blob(whole: &str) -> Option<Blob> {
    Some(Blob { id: BlobId::random(), bytes: whole.len() as u64 })
}

fn long_json(value: &Value) -> Option<String> {
    let json = value.to_string();
    (json.len() > cut::MAX_TEXT_BYTES).then_some(json)
}

fn pieces(text: &str) -> impl Iterator<Item = String> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(MAX_PIECE_BYTES));
        rest = after;
        (!piece.is_empty()).then(|| piece.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn a_long_output_keeps_its_ends_and_goes_along_whole() {
        let output = format!("begin{}end", "x".repeat(200_000));
        let ended =
            EventBody::ToolEnded { call: "c".into(), ok: true, output: output.clone(), blob: None };
        let [(EventBody::ToolEnded { output: short, blob: Some(blob), .. }, Some(whole))] =
            &fit(ended)[..]
        else {
            panic!("it is one event with a blob")
        };
        assert!(short.starts_with("begin") && short.ends_with("end") && short.len() < 70_000);
        assert_eq!((whole, blob.bytes), (&output, output.len() as u64));
    }

    #[test]
    fn a_long_input_goes_along_as_json() {
        let input = json!({ "file_path": "/a", "content": "x".repeat(200_000) });
        let started = EventBody::ToolStarted {
            call: "c".into(),
            name: "Write".into(),
            input: input.clone(),
            parent: None,
            blob: None,
        };
        let [(EventBody::ToolStarted { input: short, blob: Some(_), .. }, Some(whole))] =
            &fit(started)[..]
        else {
            panic!("it is one event with a blob")
        };
        assert_eq!(short["file_path"], "/a");
        assert_eq!(serde_json::from_str::<Value>(whole).unwrap(), input);
    }

    // The longest line of an agent, of what takes the most room in a frame.
    fn long() -> String {
        "\u{1}".repeat(8 * 1024 * 1024)
    }

    #[test]
    fn no_word_of_an_agent_is_too_long_for_a_frame() {
        use harvest_proto::{PromptId, bridge::Exit, event::TurnOutcome};
        let started = |call, name, parent| EventBody::ToolStarted {
            call,
            name,
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
                options: vec![word; 100],
            },
            EventBody::RequestOpened {
                request: short(),
                question: short(),
                options: vec![short(); 1 << 20],
            },
            EventBody::RequestClosed { request: long(), answer: Some(long()) },
            EventBody::TurnEnded {
                prompt,
                outcome: TurnOutcome::Failed,
                error: Some(long()),
                millis: 1,
            },
            EventBody::AgentExited { exit: Exit::Code(1), tail: long(), restarts: true },
            EventBody::Warning { message: long() },
            EventBody::AgentRaw { line: long() },
        ] {
            let kind = std::mem::discriminant(&body);
            for (fitting, _) in fit(body) {
                assert!(cut::encoded(&fitting) + FRAME_BYTES <= MAX_CONTROL_BYTES, "{kind:?}");
                assert_eq!(
                    std::mem::discriminant(&framed(fitting)),
                    kind,
                    "it is told as what it is"
                );
            }
        }
    }

    #[test]
    fn a_call_with_a_long_name_is_still_seen_to_end() {
        let started = EventBody::ToolStarted {
            call: long(),
            name: "Bash".into(),
            input: Value::Null,
            parent: None,
            blob: None,
        };
        let ended =
            EventBody::ToolEnded { call: long(), ok: true, output: String::new(), blob: None };
        let (started, ended) = (fit(started).remove(0).0, fit(ended).remove(0).0);
        let (EventBody::ToolStarted { call, .. }, EventBody::ToolEnded { call: same, .. }) =
            (started, ended)
        else {
            panic!("they stay what they are")
        };
        assert_eq!(call, same);
    }

    proptest! {
        #[test]
        fn a_long_text_becomes_pieces_that_make_it_up(text in "[aé☃]{0,20000}") {
            let fitted = fit(EventBody::TextDelta { text: text.clone() });
            let mut heard = String::new();
            for (body, whole) in fitted {
                let EventBody::TextDelta { text } = body else { panic!("it stays text") };
                prop_assert!(text.len() <= MAX_PIECE_BYTES && whole.is_none());
                heard.push_str(&text);
            }
            prop_assert_eq!(heard, text);
        }
    }
}
