//! An agent's request as a conversation, the same for all protocols: the user's last prompt, the
//! number of responses since, and the offered tools.

use harvest_proto::script::Script;
use serde_json::{Map, Value, json};

const REMINDER: (&str, &str) = ("<system-reminder>", "</system-reminder>");
const AUXILIARY_TEXT: &str = "Scripted title";
// Deeper than any agent's schema; bounds the recursion.
const MAX_SCHEMA_DEPTH: usize = 8;

/// A request, as far as scripts need it.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    pub(super) model: String,
    pub(super) stream: bool,
    /// Whether the agent has asked for token counts of a streamed response; only Chat Completions
    /// has the choice.
    pub(super) include_usage: bool,
    pub(super) history: Vec<HistoryItem>,
    pub(super) tools: Vec<Tool>,
    /// The JSON schema that the response must match.
    pub(super) schema: Option<Value>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Tool {
    pub(super) name: String,
    /// The Responses API groups tools, for example by MCP server.
    pub(super) namespace: Option<String>,
    pub(super) kind: ToolKind,
    pub(super) schema: Value,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ToolKind {
    #[default]
    Function,
    /// Takes a text instead of arguments; only in the Responses API.
    Custom,
}

impl Tool {
    /// The first of these arguments that the tool has.
    pub(super) fn argument<'a>(&self, candidates: &[&'a str]) -> Option<&'a str> {
        let properties = self.schema.get("properties")?;
        candidates.iter().copied().find(|name| properties.get(name).is_some())
    }
}

/// The scripted step that a request asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NextStep {
    /// The user's last prompt.
    pub(super) prompt: String,
    /// Number of responses since.
    pub(super) step: usize,
    /// Number of history items before; distinguishes equal prompts.
    pub(super) position: usize,
    /// Number of earlier prompts that got a response.
    pub(super) earlier: usize,
    /// The first of them and its response, of each the first line.
    pub(super) first: Option<[String; 2]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HistoryItem {
    User(String),
    ToolResult,
    /// A response, or a part of one, with its text.
    Assistant(String),
}

impl HistoryItem {
    const fn is_response(&self) -> bool {
        matches!(self, Self::Assistant(_))
    }
}

impl Conversation {
    pub(super) fn next_step(&self) -> NextStep {
        let history = &self.history;
        let Some(position) = last_prompt(history) else {
            return NextStep::default();
        };
        let HistoryItem::User(prompt) = &history[position] else {
            unreachable!("last_prompt finds user texts")
        };
        let later = &history[position..];
        // Agents may store one response as several messages, one per block.
        let starts_response =
            |pair: &&[HistoryItem]| pair[1].is_response() && !pair[0].is_response();
        let answered = |pair: &&[HistoryItem]| is_answered(pair);
        NextStep {
            prompt: prompt.clone(),
            step: later.windows(2).filter(starts_response).count(),
            position,
            earlier: history[..position].windows(2).filter(answered).count(),
            first: first_exchange(&history[..position]),
        }
    }

    /// The response to a request without tools: a title, a summary or a routing question.
    pub(super) fn auxiliary(&self) -> Option<String> {
        if !self.tools.is_empty() {
            return None;
        }
        Some(
            self.schema
                .as_ref()
                .map_or_else(|| AUXILIARY_TEXT.to_owned(), |schema| sample(schema, 0).to_string()),
        )
    }
}

fn is_answered(pair: &[HistoryItem]) -> bool {
    matches!(pair[0], HistoryItem::User(_)) && pair[1].is_response()
}

/// The first prompt with a response, and that response: the first line of each.
fn first_exchange(history: &[HistoryItem]) -> Option<[String; 2]> {
    let first_line = |text: &str| text.trim().lines().next().unwrap_or_default().to_owned();
    let at = history.windows(2).position(is_answered)?;
    let HistoryItem::User(prompt) = &history[at] else { return None };
    let texts = history[at + 1..].iter().map_while(|item| match item {
        HistoryItem::Assistant(text) => Some(text.as_str()),
        _ => None,
    });
    Some([first_line(prompt), first_line(&texts.collect::<String>())])
}

/// A text of the user, without what agents add to it; `None` when nothing is left.
pub(super) fn user_text(text: &str) -> Option<HistoryItem> {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some((before, reminder)) = rest.split_once(REMINDER.0) {
        kept.push_str(before);
        rest = reminder.split_once(REMINDER.1).map_or("", |(_, after)| after);
    }
    kept.push_str(rest);
    (!kept.trim().is_empty()).then_some(HistoryItem::User(kept))
}

// Agents append context of their own to a prompt. So among the texts since the last response, one
// with a script is the prompt; without one it is the last text.
fn last_prompt(history: &[HistoryItem]) -> Option<usize> {
    let last = history.iter().rposition(|item| matches!(item, HistoryItem::User(_)))?;
    let since = history[..last]
        .iter()
        .rposition(HistoryItem::is_response)
        .map_or(0, |response| response + 1);
    let has_script = |index: &usize| {
        let HistoryItem::User(text) = &history[*index] else { return false };
        Script::find(text) != Ok(None)
    };
    Some((since..=last).rev().find(has_script).unwrap_or(last))
}

// A small value that matches a JSON schema.
fn sample(schema: &Value, depth: usize) -> Value {
    if depth > MAX_SCHEMA_DEPTH {
        return Value::Null;
    }
    if let Some(value) = schema.get("const") {
        return value.clone();
    }
    let first = |key: &str| schema.get(key).and_then(|list| list.get(0));
    if let Some(value) = first("enum") {
        return value.clone();
    }
    if let Some(choice) = ["anyOf", "oneOf", "allOf"].into_iter().find_map(first) {
        return sample(choice, depth + 1);
    }
    let kind = schema.get("type").map(|kind| kind.get(0).unwrap_or(kind)).and_then(Value::as_str);
    // Gemini's own schemas have the types in capitals.
    match kind.unwrap_or("object").to_ascii_lowercase().as_str() {
        "object" => Value::Object(sample_fields(schema, depth)),
        "array" => json!([]),
        "integer" | "number" => schema.get("minimum").cloned().unwrap_or(json!(1)),
        "boolean" => json!(false),
        "null" => Value::Null,
        _ => json!(AUXILIARY_TEXT),
    }
}

fn sample_fields(schema: &Value, depth: usize) -> Map<String, Value> {
    let Some(Value::Object(properties)) = schema.get("properties") else { return Map::new() };
    let required = schema.get("required").and_then(Value::as_array);
    let is_wanted =
        |name: &str| required.is_none_or(|names| names.iter().any(|wanted| wanted == name));
    let wanted = properties.iter().filter(|(name, _)| is_wanted(name));
    wanted.map(|(name, schema)| (name.clone(), sample(schema, depth + 1))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{route::Endpoint, scripted::requests};

    fn parse(request: &Value) -> Conversation {
        requests::parse(Endpoint::Messages, request.to_string().as_bytes()).unwrap()
    }

    fn conversation(messages: Value) -> Conversation {
        parse(&json!({"model": "m", "messages": messages, "tools": [{"name": "Bash"}]}))
    }

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": [{"type": "text", "text": text}]})
    }

    fn answered() -> [Value; 2] {
        [
            json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]}),
            json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"},
                {"type": "text", "text": "<system-reminder>be kind</system-reminder>"}]}),
        ]
    }

    #[test]
    fn step_is_number_of_responses_since_last_prompt() {
        let [call, result] = answered();
        let next = conversation(json!([
            user("old"),
            call,
            result,
            call,
            user("new"),
            call,
            result,
            call,
            call,
            result
        ]))
        .next_step();
        assert_eq!((next.prompt.as_str(), next.step, next.earlier), ("new", 2, 1));
    }

    #[test]
    fn system_reminders_are_not_user_text() {
        let next = conversation(json!([
            user("<system-reminder>context</system-reminder>\nscript: [{\"text\":\"a\"}]"),
            user("<system-reminder>more"),
            {"role": "user", "content": "<system-reminder>x</system-reminder> "},
            {"role": "system", "content": "whatever"},
        ]))
        .next_step();
        assert_eq!((next.prompt.trim(), next.step), ("script: [{\"text\":\"a\"}]", 0));
    }

    #[test]
    fn script_wins_over_context_but_not_later_prompt() {
        let [call, _] = answered();
        let script = "script: [{\"text\":\"a\"}]";
        assert_eq!(
            conversation(json!([user(script), user("the date is today")])).next_step().prompt,
            script
        );
        assert_eq!(
            conversation(json!([user(script), call, user("thanks")])).next_step().prompt,
            "thanks"
        );
    }

    #[test]
    fn request_without_tools_gets_matching_value() {
        let schema = json!({"type": "object", "required": ["title", "kind"], "properties": {
            "title": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "more": {"type": "string"}}});
        let plain = parse(&json!({"messages": []}));
        assert_eq!(plain.auxiliary().unwrap(), AUXILIARY_TEXT);
        let format = json!({"format": {"type": "json_schema", "schema": schema}});
        let structured = parse(&json!({"output_config": format}));
        assert_eq!(structured.auxiliary().unwrap(), r#"{"kind":"a","title":"Scripted title"}"#);
    }

    proptest! {
        #[test]
        fn step_never_exceeds_responses(roles in prop::collection::vec(0usize..4, 0..30)) {
            let [call, result] = answered();
            let all = [user("p"), call, result, user("<system-reminder>r</system-reminder>")];
            let messages: Vec<_> = roles.iter().map(|role| all[*role].clone()).collect();
            let answers = roles.iter().filter(|role| **role == 1).count();
            prop_assert!(conversation(json!(messages)).next_step().step <= answers);
        }
    }
}
