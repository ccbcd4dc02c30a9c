//! What a model request asks the model service to reach by itself: URL sources, MCP servers and
//! server-side tools. The service would be a way out past the network policy, so each is judged by
//! it. Pure. The table is for Anthropic Messages; `openai` and `gemini` have those of the other
//! three protocols.
//!
//! | in the request | `none` | `trusted` |
//! |---|---|---|
//! | `source` of the type `url`, `mcp_servers` | refused | the host must be allowed |
//! | tools that fetch any URL (`web_fetch`) | refused | refused |
//! | other server-side tools (`web_search`, `code_execution`) | refused | allowed: they reach no host of the session's choice |
//! | tools that run in the sandbox | allowed | allowed |

mod gemini;
mod node;
mod openai;

use std::fmt;

use harvest_proto::json;
use reqwest::Url;
use serde::{
    Deserialize, Deserializer,
    de::{
        MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};

use super::route::Endpoint;
use harvest_proto::NetworkPolicy;

use crate::{ledger::ResolvedPolicy, policy};

// A value takes up to a hundred times the memory of its JSON. A long conversation has some ten
// thousand.
const MAX_NODES: usize = 500_000;

/// Types of tools that the agent runs itself, or that reach nothing; followed by a version.
const HARMLESS_TOOLS: [&str; 6] =
    ["custom", "bash_", "text_editor_", "computer_", "memory_", "tool_search_tool_"];
/// Types of sources that contain the data, or that name an uploaded file.
const HARMLESS_SOURCES: [&str; 4] = ["base64", "text", "content", "file"];

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OutsideError {
    /// It cannot be judged.
    Malformed(String),
    /// The host or the tool that the policy does not allow.
    NotAllowed(String),
}

/// Checks a request, before anything else parses it.
pub(super) fn check(
    endpoint: Endpoint,
    body: &[u8],
    policy: &ResolvedPolicy,
) -> Result<(), OutsideError> {
    if json::count_nodes(body) > MAX_NODES {
        let message = format!("the request has more than {MAX_NODES} values");
        return Err(OutsideError::Malformed(message));
    }
    match endpoint {
        Endpoint::Messages | Endpoint::CountTokens => check_messages(body, policy),
        Endpoint::Responses | Endpoint::Chat => openai::check(body, policy),
        Endpoint::Gemini | Endpoint::GeminiCount => gemini::check(body, policy),
        Endpoint::Models | Endpoint::GeminiModels => Ok(()),
    }
}

fn check_messages(body: &[u8], policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let request: OutsideRequest = serde_json::from_slice(body)
        .map_err(|error| OutsideError::Malformed(format!("the request is malformed: {error}")))?;
    for message in &request.messages {
        check_content(&message.content, policy)?;
    }
    check_content(&request.system, policy)?;
    for server in request.mcp_servers.iter().flatten() {
        check_url(&server.url, policy)?;
    }
    let tools = request.tools.iter().flatten().filter_map(|tool| tool.kind.as_ref());
    match tools.into_iter().find(|kind| !allows_tool(kind, policy)) {
        Some(kind) => Err(OutsideError::NotAllowed(kind.clone())),
        None => Ok(()),
    }
}

// A field that is given twice is refused: the service might read the other one.
#[derive(Deserialize)]
struct OutsideRequest {
    #[serde(default)]
    messages: Vec<OutsideMessage>,
    #[serde(default)]
    system: Option<OutsideContent>,
    tools: Option<Vec<OutsideTool>>,
    mcp_servers: Option<Vec<McpServer>>,
}

#[derive(Deserialize)]
struct OutsideMessage {
    #[serde(default)]
    content: Option<OutsideContent>,
}

#[derive(Deserialize)]
struct OutsideTool {
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Deserialize)]
struct McpServer {
    url: String,
}

enum OutsideContent {
    Text,
    Many(Vec<OutsideContent>),
    Block(Box<OutsideBlock>),
}

/// The input of a tool call is not looked at: it is the agent's data.
#[derive(Deserialize)]
struct OutsideBlock {
    source: Option<OutsideSource>,
    content: Option<OutsideContent>,
}

enum OutsideSource {
    /// The title or address of a search result, which is not fetched.
    Text,
    Object(OutsideSourceObject),
}

#[derive(Deserialize)]
struct OutsideSourceObject {
    #[serde(rename = "type")]
    kind: String,
    url: Option<String>,
    content: Option<OutsideContent>,
}

// Both are read in one pass: an untagged enum tries each variant at each level, which takes
// exponential time in the depth of a hostile request.
impl<'de> Deserialize<'de> for OutsideContent {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ContentVisitor)
    }
}

impl<'de> Deserialize<'de> for OutsideSource {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(SourceVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = OutsideContent;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("text, a block or a list of blocks")
    }

    fn visit_str<E>(self, _: &str) -> Result<OutsideContent, E> {
        Ok(OutsideContent::Text)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<OutsideContent, A::Error> {
        Deserialize::deserialize(SeqAccessDeserializer::new(list)).map(OutsideContent::Many)
    }

    fn visit_map<A: MapAccess<'de>>(self, block: A) -> Result<OutsideContent, A::Error> {
        Deserialize::deserialize(MapAccessDeserializer::new(block)).map(OutsideContent::Block)
    }
}

struct SourceVisitor;

impl<'de> Visitor<'de> for SourceVisitor {
    type Value = OutsideSource;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("text or an object")
    }

    fn visit_str<E>(self, _: &str) -> Result<OutsideSource, E> {
        Ok(OutsideSource::Text)
    }

    fn visit_map<A: MapAccess<'de>>(self, source: A) -> Result<OutsideSource, A::Error> {
        Deserialize::deserialize(MapAccessDeserializer::new(source)).map(OutsideSource::Object)
    }
}

fn check_content(
    content: &Option<OutsideContent>,
    policy: &ResolvedPolicy,
) -> Result<(), OutsideError> {
    content.iter().try_for_each(|part| check_part(part, policy))
}

fn check_part(part: &OutsideContent, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    match part {
        OutsideContent::Text => Ok(()),
        OutsideContent::Many(parts) => parts.iter().try_for_each(|part| check_part(part, policy)),
        OutsideContent::Block(block) => {
            if let Some(OutsideSource::Object(source)) = &block.source {
                let OutsideSourceObject { kind, url, content } = source;
                match url {
                    Some(url) => check_url(url, policy)?,
                    None if HARMLESS_SOURCES.contains(&kind.as_str()) => {}
                    None => return Err(OutsideError::NotAllowed(format!("source `{kind}`"))),
                }
                check_content(content, policy)?;
            }
            check_content(&block.content, policy)
        }
    }
}

fn check_url(text: &str, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let parsed = Url::parse(text).ok();
    let target =
        parsed.as_ref().and_then(|url| Some((url.host_str()?, url.port_or_known_default()?)));
    match target {
        Some((host, port)) if policy::allows(policy, host, port) => Ok(()),
        Some((host, _)) => Err(OutsideError::NotAllowed(host.to_owned())),
        None => Err(OutsideError::Malformed("the request has a malformed URL".to_owned())),
    }
}

fn allows_tool(kind: &str, policy: &ResolvedPolicy) -> bool {
    let harmless = HARMLESS_TOOLS.iter().any(|known| kind.starts_with(known));
    let fetches = kind.starts_with("web_fetch");
    harmless || (policy.base != NetworkPolicy::None && !fetches)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refused(request: &Value, policy: &ResolvedPolicy) -> Option<String> {
        match check_messages(request.to_string().as_bytes(), policy) {
            Ok(()) => None,
            Err(OutsideError::NotAllowed(name) | OutsideError::Malformed(name)) => Some(name),
        }
    }

    fn trusted() -> ResolvedPolicy {
        ResolvedPolicy::of(NetworkPolicy::Trusted, &["files.example.org"])
    }

    fn message(block: Value) -> Value {
        json!({"model": "m", "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, block]},
        ]})
    }

    #[test]
    fn request_of_too_many_values_is_malformed() {
        use Endpoint::{Chat, CountTokens, Gemini, GeminiCount, Messages, Responses};
        for endpoint in [Messages, CountTokens, Responses, Chat, Gemini, GeminiCount] {
            // Each object counts as three, and what is around them as four.
            for (count, allowed) in [(MAX_NODES / 3 - 1, true), (MAX_NODES / 3, false)] {
                let body = format!(r#"{{"x":[{}0]}}"#, r#"{"":0},"#.repeat(count));
                let checked = check(endpoint, body.as_bytes(), &trusted());
                assert_eq!(checked.is_ok(), allowed, "{endpoint:?}: {count}, {checked:?}");
            }
        }
    }

    #[test]
    fn url_sources_are_refused_at_any_depth() {
        let image = |url: &str| json!({"type": "image", "source": {"type": "url", "url": url}});
        let evil = image("https://evil.example/?data");
        let nested = json!({"type": "document", "source": {"type": "content", "content": [evil]}});
        for block in [
            evil.clone(),
            json!({"type": "tool_result", "tool_use_id": "t", "content": [evil]}),
            json!({"type": "tool_result", "tool_use_id": "t", "content": evil}),
            json!({"type": "tool_result", "content": [nested]}),
            nested.clone(),
        ] {
            for policy in [ResolvedPolicy::of(NetworkPolicy::None, &[]), trusted()] {
                let name = refused(&message(block.clone()), &policy);
                assert_eq!(name.as_deref(), Some("evil.example"), "{block}");
            }
        }
        let allowed = message(image("https://files.example.org/a.png"));
        assert_eq!(refused(&allowed, &trusted()), None);
        assert!(refused(&allowed, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_some());
        let port = message(image("https://files.example.org:8443/a.png"));
        assert!(refused(&port, &trusted()).is_some());
        let system = json!({"system": [evil], "messages": []});
        assert!(refused(&system, &trusted()).is_some());
    }

    #[test]
    fn plain_requests_pass_with_every_policy() {
        let data = json!({"type": "base64", "media_type": "image/png", "data": "aGk="});
        let url = json!({"source": {"type": "url", "url": "https://evil.example"}});
        for block in [
            json!({"type": "image", "source": data}),
            json!({"type": "document", "source": {"type": "text", "data": "x"}}),
            json!({"type": "tool_use", "id": "t", "name": "Bash", "input": url}),
            json!({"type": "search_result", "source": "https://example.org", "content": []}),
        ] {
            assert_eq!(
                refused(&message(block.clone()), &ResolvedPolicy::of(NetworkPolicy::None, &[])),
                None,
                "{block}"
            );
        }
        let tools = json!({"system": "s", "messages": [], "tools": [
            {"name": "Bash", "input_schema": {"type": "object"}},
            {"type": "custom", "name": "x"}, {"type": "bash_20250124", "name": "bash"},
            {"type": "tool_search_tool_regex_20251119", "name": "find"},
        ]});
        assert_eq!(refused(&tools, &ResolvedPolicy::of(NetworkPolicy::None, &[])), None);
    }

    #[test]
    fn mcp_servers_need_an_allowed_host() {
        let servers =
            |url: &str| json!({"mcp_servers": [{"type": "url", "url": url, "name": "m"}]});
        let (evil, good) =
            (servers("https://evil.example/sse"), servers("https://files.example.org/"));
        assert!(refused(&evil, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_some());
        assert!(refused(&good, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_some());
        assert!(refused(&evil, &trusted()).is_some());
        assert_eq!(refused(&good, &trusted()), None);
    }

    #[test]
    fn server_side_tools_are_refused_by_policy() {
        for (kind, none, some) in [
            ("web_search_20250305", false, true),
            ("web_fetch_20250910", false, false),
            ("code_execution_20250825", false, true),
            ("novel_tool_20270101", false, true),
            ("text_editor_20250728", true, true),
        ] {
            let request = json!({"messages": [], "tools": [{"type": kind, "name": "x"}]});
            assert_eq!(
                refused(&request, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_none(),
                none,
                "{kind}"
            );
            assert_eq!(refused(&request, &trusted()).is_none(), some, "{kind}");
        }
    }

    // With one attempt per variant and level, 100 levels would never end.
    #[test]
    fn deeply_nested_content_is_read_in_one_pass() {
        let list = (0..100).fold("0".to_owned(), |inner, _| format!(r#"["",{inner}]"#));
        let block = (0..50).fold("0".to_owned(), |inner, _| format!(r#"[{{"content":{inner}}}]"#));
        for content in [list, block] {
            let body = format!(r#"{{"messages":[{{"content":{content}}}]}}"#);
            let refused = check_messages(body.as_bytes(), &trusted());
            assert!(matches!(refused, Err(OutsideError::Malformed(_))), "{refused:?}");
        }
    }

    #[test]
    fn ambiguous_request_is_refused() {
        let hidden = r#"{"type":"url","url":"https://evil.example"}"#;
        for body in [
            "not json".to_owned(),
            "\u{feff}{}".to_owned(),
            r#"{"tools":[],"tools":[{"type":"web_fetch_1"}]}"#.to_owned(),
            format!(
                r#"{{"messages":[{{"content":[{{"source":{{"type":"base64"}},"source":{hidden}}}]}}]}}"#
            ),
            format!(r#"{{"messages":[{{"content":[{{"source":{hidden},"source":"x"}}]}}]}}"#),
            r#"{"messages":[{"content":[{"source":{"type":"base64","type":"url"}}]}]}"#.to_owned(),
            r#"{"messages":[{"content":[{"source":{"type":"remote"}}]}]}"#.to_owned(),
        ] {
            assert!(check_messages(body.as_bytes(), &trusted()).is_err(), "{body}");
        }
    }
}
