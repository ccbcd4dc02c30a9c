//! Reads an agent's request as a conversation: what the user last asked, how many answers the agent
//! has had since, and which tools it offers. Lenient: what it does not know it passes over.

use harvest_proto::script::Script;
use serde::Deserialize;
use serde_json::{Map, Value, json};

const REMINDER: (&str, &str) = ("<system-reminder>", "</system-reminder>");
const AUXILIARY_TEXT: &str = "Scripted title";
// Deeper schemas than this are not asked for by any agent; a bound keeps recursion finite.
const MAX_SCHEMA_DEPTH: usize = 8;

/// A request to the Messages API, as far as scripts need it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Conversation {
    pub(super) model: String,
    pub(super) stream: bool,
    messages: Vec<Message>,
    pub(super) tools: Vec<Tool>,
    output_config: Option<Value>,
    output_format: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<Value>),
}

/// A tool the agent offers.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Tool {
    pub(super) name: String,
    input_schema: Value,
}

impl Tool {
    /// The first of these arguments that the tool takes.
    pub(super) fn argument<'a>(&self, candidates: &[&'a str]) -> Option<&'a str> {
        let properties = self.input_schema.get("properties")?;
        candidates.iter().copied().find(|name| properties.get(name).is_some())
    }
}

/// Where the conversation stands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// What the user last asked.
    pub(super) prompt: String,
    /// How many answers the agent has had since.
    pub(super) step: usize,
    /// How many texts and answers came before; tells equal prompts apart.
    pub(super) position: usize,
    /// How many prompts the agent was given an answer to before this one.
    pub(super) earlier: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Said {
    User(String),
    ToolResult,
    Assistant,
}

impl Conversation {
    /// Where the conversation stands.
    pub(super) fn due(&self) -> Due {
        let said = self.said();
        let Some(position) = last_prompt(&said) else {
            return Due { prompt: String::new(), step: 0, position: 0, earlier: 0 };
        };
        let Said::User(prompt) = &said[position] else {
            unreachable!("last_prompt finds user texts")
        };
        let later = &said[position..];
        // Agents may keep one answer as several messages, a block each.
        let begins_answer =
            |pair: &&[Said]| pair[1] == Said::Assistant && pair[0] != Said::Assistant;
        let answered =
            |pair: &&[Said]| matches!(pair[0], Said::User(_)) && pair[1] == Said::Assistant;
        Due {
            prompt: prompt.clone(),
            step: later.windows(2).filter(begins_answer).count(),
            position,
            earlier: said[..position].windows(2).filter(answered).count(),
        }
    }

    /// The whole answer to a request that offers no tools: a title, a summary, a routing question.
    pub(super) fn auxiliary(&self) -> Option<String> {
        if !self.tools.is_empty() {
            return None;
        }
        let formats = [&self.output_config, &self.output_format].into_iter().flatten();
        let schema =
            formats.filter_map(|given| given.get("format").unwrap_or(given).get("schema")).next();
        Some(
            schema
                .map_or_else(|| AUXILIARY_TEXT.to_owned(), |schema| sample(schema, 0).to_string()),
        )
    }

    fn said(&self) -> Vec<Said> {
        self.messages.iter().flat_map(Message::said).collect()
    }
}

impl Message {
    fn said(&self) -> Vec<Said> {
        match self.role.as_str() {
            "assistant" => vec![Said::Assistant],
            "user" => match &self.content {
                Content::Text(text) => user_text(text).into_iter().collect(),
                Content::Blocks(blocks) => blocks.iter().filter_map(block_said).collect(),
            },
            _ => Vec::new(),
        }
    }
}

fn block_said(block: &Value) -> Option<Said> {
    match block.get("type")?.as_str()? {
        "tool_result" => Some(Said::ToolResult),
        "text" => user_text(block.get("text")?.as_str()?),
        _ => None,
    }
}

fn user_text(text: &str) -> Option<Said> {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some((before, reminder)) = rest.split_once(REMINDER.0) {
        kept.push_str(before);
        rest = reminder.split_once(REMINDER.1).map_or("", |(_, after)| after);
    }
    kept.push_str(rest);
    (!kept.trim().is_empty()).then_some(Said::User(kept))
}

// Agents put context of their own behind a prompt. So among the texts since the last answer, one that
// carries a script is the prompt; without one it is the last.
fn last_prompt(said: &[Said]) -> Option<usize> {
    let last = said.iter().rposition(|said| matches!(said, Said::User(_)))?;
    let since = said[..last]
        .iter()
        .rposition(|said| *said == Said::Assistant)
        .map_or(0, |answer| answer + 1);
    let carries_script =
        |index: &usize| matches!(&said[*index], Said::User(text) if Script::find(text) != Ok(None));
    Some((since..=last).rev().find(carries_script).unwrap_or(last))
}

// A small value that fits a JSON schema.
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
    match kind.unwrap_or("object") {
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

    fn conversation(messages: Value) -> Conversation {
        serde_json::from_value(
            json!({"model": "m", "messages": messages, "tools": [{"name": "Bash"}]}),
        )
        .unwrap()
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
    fn the_step_is_the_number_of_answers_since_the_users_last_text() {
        let [call, result] = answered();
        let due = conversation(json!([
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
        .due();
        assert_eq!((due.prompt.as_str(), due.step, due.earlier), ("new", 2, 1));
    }

    #[test]
    fn reminders_are_not_the_users_text_alone_or_within_it() {
        let due = conversation(json!([
            user("<system-reminder>context</system-reminder>\nscript: [{\"text\":\"a\"}]"),
            user("<system-reminder>more"),
            {"role": "user", "content": "<system-reminder>x</system-reminder> "},
            {"role": "system", "content": "whatever"},
        ]))
        .due();
        assert_eq!((due.prompt.trim(), due.step), ("script: [{\"text\":\"a\"}]", 0));
    }

    #[test]
    fn a_text_with_a_script_wins_over_context_that_follows_it_but_not_over_a_later_prompt() {
        let [call, _] = answered();
        let script = "script: [{\"text\":\"a\"}]";
        assert_eq!(
            conversation(json!([user(script), user("the date is today")])).due().prompt,
            script
        );
        assert_eq!(
            conversation(json!([user(script), call, user("thanks")])).due().prompt,
            "thanks"
        );
    }

    #[test]
    fn a_request_without_tools_gets_a_title_or_what_its_schema_asks_for() {
        let schema = json!({"type": "object", "required": ["title", "kind"], "properties": {
            "title": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "more": {"type": "string"}}});
        let plain: Conversation = serde_json::from_value(json!({"messages": []})).unwrap();
        assert_eq!(plain.auxiliary().unwrap(), AUXILIARY_TEXT);
        let structured: Conversation = serde_json::from_value(
            json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        )
        .unwrap();
        assert_eq!(structured.auxiliary().unwrap(), r#"{"kind":"a","title":"Scripted title"}"#);
    }

    proptest! {
        #[test]
        fn any_order_of_messages_gives_a_step_within_the_answers(roles in prop::collection::vec(0usize..4, 0..30)) {
            let [call, result] = answered();
            let all = [user("p"), call, result, user("<system-reminder>r</system-reminder>")];
            let messages: Vec<_> = roles.iter().map(|role| all[*role].clone()).collect();
            let answers = roles.iter().filter(|role| **role == 1).count();
            prop_assert!(conversation(json!(messages)).due().step <= answers);
        }
    }
}
