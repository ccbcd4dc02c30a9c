//! Questions of Codex to the user. One request may hold several questions; each one is a separate
//! question outside. Pure.

use std::collections::BTreeMap;

use harvest_proto::EventBody;
use serde_json::{Map, Value, json};

use crate::{
    agents::{
        NO_ANSWER, Signal, closed_unanswered, may_ask,
        rpc::{self, text},
    },
    truncate,
};

/// A request that waits for the user's answers.
#[derive(Debug)]
struct PendingRequest {
    id: Value,
    /// The remaining questions; the first one is open.
    questions: Vec<Value>,
    answers: Map<String, Value>,
}

/// The open questions by their id outside.
#[derive(Debug, Default)]
pub(super) struct Questions(BTreeMap<String, PendingRequest>);

impl Questions {
    /// Handles `item/tool/requestUserInput`.
    pub(super) fn ask(&mut self, id: Value, params: &Value) -> Vec<Signal> {
        if !may_ask(self.0.len(), &json!([id, params])) {
            return vec![Signal::Send(rpc::failure(&id, NO_ANSWER))];
        }
        let questions = params["questions"].as_array().cloned().unwrap_or_default();
        // The event and the answer use this id, which must be short.
        let name = match text(params, "itemId") {
            "" => "question".to_owned(),
            item => truncate::text(item, truncate::MAX_NAME_BYTES),
        };
        self.next(name, PendingRequest { id, questions, answers: Map::new() })
    }

    /// Handles the user's answer to the open question.
    pub(super) fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        let Some(mut pending) = self.0.remove(request) else { return Vec::new() };
        let question = text(&pending.questions.remove(0), "id").to_owned();
        pending.answers.insert(question, json!({"answers": [answer]}));
        let (closed, answer) = (request.to_owned(), Some(answer.to_owned()));
        let mut signals = vec![Signal::Event(EventBody::RequestClosed { request: closed, answer })];
        signals.extend(self.next(format!("{request}+"), pending));
        signals
    }

    /// Closes the open questions without an answer.
    pub(super) fn close_all(&mut self) -> Vec<Signal> {
        let close = |(request, pending): (String, PendingRequest)| {
            closed_unanswered(request, rpc::failure(&pending.id, NO_ANSWER))
        };
        std::mem::take(&mut self.0).into_iter().flat_map(close).collect()
    }

    // Asks the next question, or replies to the request.
    fn next(&mut self, mut name: String, pending: PendingRequest) -> Vec<Signal> {
        let Some(question) = pending.questions.first() else {
            let reply = rpc::reply(&pending.id, &json!({"answers": pending.answers}));
            return vec![Signal::Send(reply)];
        };
        let options = question["options"].as_array().map_or(&[][..], Vec::as_slice);
        while self.0.contains_key(&name) {
            name.push('+');
        }
        let opened = EventBody::RequestOpened {
            request: name.clone(),
            question: text(question, "question").to_owned(),
            options: options.iter().map(|option| text(option, "label").to_owned()).collect(),
        };
        self.0.insert(name.clone(), pending);
        vec![Signal::Event(opened), Signal::Question { request: name }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_of_a_request_are_asked_in_turn() {
        let mut questions = Questions::default();
        let params = json!({"itemId": "i", "questions": [
            {"id": "a", "header": "", "question": "One?", "options": [{"label": "x"}]},
            {"id": "b", "header": "", "question": "Two?", "options": null},
        ]});
        let asked = questions.ask(json!(5), &params);
        assert!(
            matches!(&asked[0], Signal::Event(EventBody::RequestOpened { question, options, .. })
                if question == "One?" && options == &["x"])
        );
        let second = questions.answer("i", "x");
        assert!(second.contains(&Signal::Question { request: "i+".into() }), "{second:?}");
        assert_eq!(questions.answer("i", "again"), []);
        let answers = json!({"a": {"answers": ["x"]}, "b": {"answers": ["y"]}});
        let reply = Signal::Send(rpc::reply(&json!(5), &json!({"answers": answers})));
        assert_eq!(questions.answer("i+", "y").last(), Some(&reply));
        assert_eq!(questions.close_all(), []);
    }

    #[test]
    fn questions_of_one_item_are_kept_apart() {
        for item in ["", "i"] {
            let mut questions = Questions::default();
            let mut ask = |id: u64| {
                let params = json!({"itemId": item, "questions": [{"id": "a", "question": "?"}]});
                match questions.ask(json!(id), &params).pop() {
                    Some(Signal::Question { request }) => request,
                    other => panic!("{other:?}"),
                }
            };
            let (first, second) = (ask(1), ask(2));
            assert!(!first.is_empty() && first != second, "{first} {second}");
            for (id, request) in [(1, first), (2, second)] {
                let reply = json!({"answers": {"a": {"answers": ["x"]}}});
                let reply = Signal::Send(rpc::reply(&json!(id), &reply));
                assert_eq!(questions.answer(&request, "x").last(), Some(&reply));
            }
        }
    }

    #[test]
    fn closed_question_is_refused() {
        let mut questions = Questions::default();
        questions.ask(json!(5), &json!({"itemId": "i", "questions": [{"question": "One?"}]}));
        let signals = questions.close_all();
        let [Signal::Event(EventBody::RequestClosed { answer: None, .. }), Signal::Send(line)] =
            &signals[..]
        else {
            panic!("{signals:?}")
        };
        assert!(line.contains(r#""error":"#) && line.contains(r#""id":5"#), "{line}");
        assert_eq!(questions.close_all(), []);
    }

    #[test]
    fn too_many_questions_are_refused() {
        let mut questions = Questions::default();
        let mut ask = |item: String, text: &str| {
            let params = json!({"itemId": item, "questions": [{"question": text}]});
            let signals = questions.ask(json!(item), &params);
            matches!(&signals[..], [Signal::Event(_), Signal::Question { .. }])
        };
        let asked = (0..100).filter(|item| ask(item.to_string(), "Which?")).count();
        assert_eq!(asked, 16);
        questions.close_all();
        let mut ask = |text: &str| {
            let params = json!({"itemId": "i", "questions": [{"question": text}]});
            questions.ask(json!("i"), &params).len()
        };
        assert_eq!(ask(&"x".repeat(100_000)), 1, "too long");
    }

    #[test]
    fn request_without_questions_is_answered_at_once() {
        let reply = Signal::Send(rpc::reply(&json!("r"), &json!({"answers": {}})));
        assert_eq!(Questions::default().ask(json!("r"), &json!({})), [reply]);
    }
}
