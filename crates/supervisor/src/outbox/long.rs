//! Makes events fit. A long text becomes several pieces of it; what cannot be cut into pieces keeps its
//! ends, and the whole goes along as a blob.

use harvest_proto::{BlobId, EventBody, event::Blob};
use serde_json::Value;

use super::MAX_PIECE_BYTES;
use crate::cut;

/// An event that fits, and the whole of what it holds the ends of.
pub(super) type Fitting = (EventBody, Option<String>);

/// The same in events that fit.
pub(super) fn fit(body: EventBody) -> Vec<Fitting> {
    match body {
        EventBody::TextDelta { text } if text.len() > MAX_PIECE_BYTES => {
            pieces(&text).map(|text| (EventBody::TextDelta { text }, None)).collect()
        }
        EventBody::ThoughtDelta { text } if text.len() > MAX_PIECE_BYTES => {
            pieces(&text).map(|text| (EventBody::ThoughtDelta { text }, None)).collect()
        }
        EventBody::ToolEnded { call, ok, output, .. } if output.len() > cut::MAX_TEXT_BYTES => {
            let short = cut::text(&output, cut::MAX_TEXT_BYTES);
            vec![(EventBody::ToolEnded { call, ok, output: short, blob: blob(&output) }, Some(output))]
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
        let ended = EventBody::ToolEnded { call: "c".into(), ok: true, output: output.clone(), blob: None };
        let [(EventBody::ToolEnded { output: short, blob: Some(blob), .. }, Some(whole))] = &fit(ended)[..]
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
        let [(EventBody::ToolStarted { input: short, blob: Some(_), .. }, Some(whole))] = &fit(started)[..]
        else {
            panic!("it is one event with a blob")
        };
        assert_eq!(short["file_path"], "/a");
        assert_eq!(serde_json::from_str::<Value>(whole).unwrap(), input);
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
