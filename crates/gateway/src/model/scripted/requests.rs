//! Parses the requests of each protocol as a conversation. Lenient: unknown content is ignored.

use harvest_proto::json;
use serde::Deserialize;
use serde_json::Value;

use super::conversation::{Conversation, HistoryItem, Tool, ToolKind, user_text};
use crate::model::route::Endpoint;

/// Parses the body of a request.
pub(super) fn parse(endpoint: Endpoint, body: &[u8]) -> serde_json::Result<Conversation> {
    Ok(match endpoint {
        Endpoint::Responses => json::from_slice::<ResponsesRequest>(body)?.into(),
        Endpoint::Chat => json::from_slice::<ChatRequest>(body)?.into(),
        Endpoint::Gemini => json::from_slice::<GeminiRequest>(body)?.into(),
        _ => json::from_slice::<MessagesRequest>(body)?.into(),
    })
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MessagesRequest {
    model: String,
    stream: bool,
    messages: Vec<Message>,
    tools: Vec<Value>,
    output_config: Option<Value>,
    output_format: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ChatRequest {
    model: String,
    stream: Option<bool>,
    stream_options: Option<Value>,
    messages: Vec<Message>,
    tools: Option<Vec<Value>>,
    response_format: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ResponsesRequest {
    model: String,
    stream: Option<bool>,
    input: Value,
    tools: Option<Vec<Value>>,
    text: Option<Value>,
}

/// The path has the model, and whether the response is streamed.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GeminiRequest {
    contents: Vec<GeminiContent>,
    tools: Vec<Value>,
    generation_config: Value,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct GeminiContent {
    role: String,
    parts: Vec<Value>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: Value,
}

impl From<MessagesRequest> for Conversation {
    fn from(request: MessagesRequest) -> Self {
        let formats = [&request.output_config, &request.output_format].into_iter().flatten();
        let schema = |given: &Value| given.get("format").unwrap_or(given).get("schema").cloned();
        Self {
            schema: formats.filter_map(schema).next(),
            model: request.model,
            stream: request.stream,
            include_usage: true,
            history: request.messages.iter().flat_map(message_items).collect(),
            tools: request.tools.iter().map(|tool| function(tool, "input_schema")).collect(),
        }
    }
}

impl From<ChatRequest> for Conversation {
    fn from(request: ChatRequest) -> Self {
        let format = request.response_format.unwrap_or_default();
        let options = request.stream_options.unwrap_or_default();
        let tools = request.tools.unwrap_or_default();
        Self {
            schema: format["json_schema"].get("schema").cloned(),
            model: request.model,
            stream: request.stream.unwrap_or(false),
            include_usage: options["include_usage"] == true,
            history: request.messages.iter().flat_map(message_items).collect(),
            tools: tools
                .iter()
                .filter_map(|tool| tool.get("function"))
                .map(|tool| function(tool, "parameters"))
                .collect(),
        }
    }
}

impl From<ResponsesRequest> for Conversation {
    fn from(request: ResponsesRequest) -> Self {
        let items = match request.input {
            Value::Array(items) => items,
            Value::String(text) => {
                vec![serde_json::json!({"role": "user", "content": text})]
            }
            _ => Vec::new(),
        };
        // Agents may add tools in the middle of a conversation.
        let added = items.iter().filter_map(|item| item["tools"].as_array()).flatten();
        let tools = request.tools.unwrap_or_default();
        Self {
            tools: tools.iter().chain(added).flat_map(responses_tools).collect(),
            schema: request.text.unwrap_or_default()["format"].get("schema").cloned(),
            model: request.model,
            stream: request.stream.unwrap_or(false),
            include_usage: true,
            history: items.iter().flat_map(responses_items).collect(),
        }
    }
}

impl From<GeminiRequest> for Conversation {
    fn from(request: GeminiRequest) -> Self {
        let config = &request.generation_config;
        let schema = config.get("responseJsonSchema").or_else(|| config.get("responseSchema"));
        let tools = request.tools.iter().filter_map(|tool| tool["functionDeclarations"].as_array());
        let named = |tool: &Value| match tool.get("parametersJsonSchema") {
            Some(_) => function(tool, "parametersJsonSchema"),
            None => function(tool, "parameters"),
        };
        Self {
            schema: schema.cloned(),
            include_usage: true,
            history: request.contents.iter().flat_map(gemini_items).collect(),
            tools: tools.flatten().map(named).collect(),
            ..Self::default()
        }
    }
}

fn gemini_items(content: &GeminiContent) -> Vec<HistoryItem> {
    if content.role == "model" {
        let texts = content.parts.iter().filter_map(|part| part["text"].as_str());
        return vec![HistoryItem::Assistant(texts.collect())];
    }
    let item = |part: &Value| match part.get("functionResponse") {
        Some(_) => Some(HistoryItem::ToolResult),
        None => user_text(part["text"].as_str()?),
    };
    content.parts.iter().filter_map(item).collect()
}

fn message_items(message: &Message) -> Vec<HistoryItem> {
    match message.role.as_str() {
        "assistant" => vec![HistoryItem::Assistant(content_text(&message.content))],
        "tool" => vec![HistoryItem::ToolResult],
        "user" => content_items(&message.content),
        _ => Vec::new(),
    }
}

fn content_items(content: &Value) -> Vec<HistoryItem> {
    match content {
        Value::String(text) => user_text(text).into_iter().collect(),
        Value::Array(blocks) => blocks.iter().filter_map(block_item).collect(),
        _ => Vec::new(),
    }
}

/// The texts of a response.
fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).collect(),
        _ => String::new(),
    }
}

fn block_item(block: &Value) -> Option<HistoryItem> {
    match block.get("type")?.as_str()? {
        "tool_result" => Some(HistoryItem::ToolResult),
        "text" | "input_text" => user_text(block.get("text")?.as_str()?),
        _ => None,
    }
}

fn responses_items(item: &Value) -> Vec<HistoryItem> {
    match item["type"].as_str().unwrap_or("message") {
        "message" => match item["role"].as_str() {
            Some("user") => content_items(&item["content"]),
            Some("assistant") => vec![HistoryItem::Assistant(content_text(&item["content"]))],
            _ => Vec::new(),
        },
        "reasoning" => vec![HistoryItem::Assistant(String::new())],
        kind if kind.ends_with("_output") => vec![HistoryItem::ToolResult],
        kind if kind.ends_with("_call") => vec![HistoryItem::Assistant(String::new())],
        _ => Vec::new(),
    }
}

fn responses_tools(tool: &Value) -> Vec<Tool> {
    match tool["type"].as_str() {
        Some("namespace") => {
            let namespace = tool["name"].as_str().map(str::to_owned);
            let inner = tool["tools"].as_array().into_iter().flatten();
            inner
                .flat_map(responses_tools)
                .map(|tool| Tool { namespace: namespace.clone(), ..tool })
                .collect()
        }
        Some("custom") => vec![Tool { kind: ToolKind::Custom, ..function(tool, "format") }],
        // Tools of the service itself have no name.
        _ if tool["name"].is_string() => vec![function(tool, "parameters")],
        _ => Vec::new(),
    }
}

fn function(tool: &Value, schema: &str) -> Tool {
    let name = tool["name"].as_str().unwrap_or_default().to_owned();
    Tool { name, schema: tool[schema].clone(), ..Tool::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SCRIPT: &str = "script: [{\"text\":\"a\"}]";

    fn step(endpoint: Endpoint, request: Value) -> (String, usize, usize) {
        let next = parse(endpoint, request.to_string().as_bytes()).unwrap().next_step();
        (next.prompt, next.step, next.earlier)
    }

    #[test]
    fn json_in_private_keys_is_not_parsed() {
        let hidden = r#"{"$serde_json::private::RawValue":"[]"}"#;
        let body =
            format!(r#"{{"messages":[{{"role":"user","content":{hidden}}}],"input":{hidden}}}"#);
        for endpoint in [Endpoint::Messages, Endpoint::Responses, Endpoint::Chat] {
            assert!(parse(endpoint, body.as_bytes()).is_err(), "{endpoint:?}");
        }
    }

    #[test]
    fn responses_items_give_prompt_and_step() {
        let user = |text: &str| json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]});
        let call = [
            json!({"type": "reasoning", "summary": []}),
            json!({"type": "function_call", "call_id": "c", "name": "exec_command", "arguments": "{}"}),
            json!({"type": "function_call_output", "call_id": "c", "output": "ok"}),
        ];
        let answer = json!({"type": "message", "role": "assistant", "content": []});
        let context = user("<environment_context>…</environment_context>");
        let mut input =
            vec![json!({"role": "developer", "content": "rules"}), context, user("old")];
        input.extend(call.clone());
        input.extend([answer, user(SCRIPT)]);
        input.extend(call.clone());
        input.extend(call);
        let request =
            json!({"model": "m", "input": input, "tools": [{"type": "function", "name": "f"}]});
        assert_eq!(step(Endpoint::Responses, request), (SCRIPT.to_owned(), 2, 1));
        let text = json!({"input": SCRIPT});
        assert_eq!(step(Endpoint::Responses, text), (SCRIPT.to_owned(), 0, 0));
    }

    #[test]
    fn chat_messages_give_prompt_and_step() {
        let request = json!({"model": "m", "stream": true, "messages": [
            {"role": "system", "content": "rules"}, {"role": "user", "content": SCRIPT},
            {"role": "assistant", "content": null, "tool_calls": []}, {"role": "tool", "content": "ok"},
        ]});
        assert_eq!(step(Endpoint::Chat, request), (SCRIPT.to_owned(), 1, 0));
    }

    #[test]
    fn gemini_contents_give_prompt_and_step() {
        let call = json!({"role": "model", "parts": [{"functionCall": {"name": "f"}}]});
        let result = json!({"role": "user", "parts": [{"functionResponse": {"name": "f"}}]});
        let user = json!({"role": "user", "parts": [{"text": "rules"}, {"text": SCRIPT}]});
        let context = json!({"role": "user", "parts": [{"text": "<session_context>"}]});
        let request = json!({"contents": [context, user, call, result]});
        assert_eq!(step(Endpoint::Gemini, request), (SCRIPT.to_owned(), 1, 0));
        let request = json!({"tools": [{"functionDeclarations": [{"name": "write_file"}]}]});
        let parsed = parse(Endpoint::Gemini, request.to_string().as_bytes()).unwrap();
        assert_eq!(parsed.tools[0].name, "write_file");
    }

    #[test]
    fn tools_of_every_shape_are_found() {
        let names = |endpoint, tools: Value| -> Vec<_> {
            let body = json!({"tools": tools, "input": [{"type": "additional_tools", "tools": [{"type": "function", "name": "later"}]}]});
            let tools = parse(endpoint, body.to_string().as_bytes()).unwrap().tools;
            tools.into_iter().map(|tool| (tool.name, tool.namespace, tool.kind)).collect()
        };
        let function = |name: &str| (name.to_owned(), None, ToolKind::Function);
        let inner = json!({"type": "function", "name": "read_graph"});
        let responses = json!([
            {"type": "function", "name": "f"}, {"type": "custom", "name": "apply_patch"}, {"type": "local_shell"},
            {"type": "namespace", "name": "mcp__memory", "tools": [inner]},
        ]);
        assert_eq!(
            names(Endpoint::Responses, responses),
            [
                function("f"),
                ("apply_patch".to_owned(), None, ToolKind::Custom),
                ("read_graph".to_owned(), Some("mcp__memory".to_owned()), ToolKind::Function),
                function("later"),
            ]
        );
        let chat = json!([{"type": "function", "function": {"name": "bash"}}]);
        assert_eq!(names(Endpoint::Chat, chat), [function("bash")]);
    }

    #[test]
    fn schemas_of_every_protocol_are_found() {
        let schema = json!({"enum": ["yes"]});
        for (endpoint, request) in [
            (Endpoint::Messages, json!({"output_config": {"format": {"schema": schema}}})),
            (
                Endpoint::Chat,
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
            ),
            (
                Endpoint::Responses,
                json!({"text": {"format": {"type": "json_schema", "schema": schema}}}),
            ),
            (Endpoint::Gemini, json!({"generationConfig": {"responseJsonSchema": schema}})),
        ] {
            let parsed = parse(endpoint, request.to_string().as_bytes()).unwrap();
            assert_eq!(parsed.auxiliary().as_deref(), Some("\"yes\""), "{request}");
        }
    }
}
