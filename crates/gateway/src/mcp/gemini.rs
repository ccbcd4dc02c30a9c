//! The tools of the MCP server `gemini`: a second opinion on a plan, and research on the web, by
//! one call of the Gemini API each. The gateway adds the key and counts the tokens.

use std::{fmt::Write as _, sync::Arc, time::Duration};

use async_trait::async_trait;
use harvest_proto::{CallId, NetworkPolicy, Secret, event::Usage};
use hyper::{Method, StatusCode, header::HeaderValue};
use serde_json::{Value, json};

use super::McpServer;
use crate::{
    door::Door,
    http::{self, Reach},
    ledger::{PlannedCall, ToolResult, Tools, Used},
    model::{Endpoint, bounded, most_tokens},
    vault::redact,
};

// A search with a long answer takes a minute or two.
const CALL_TIMEOUT: Duration = Duration::from_secs(5 * 60);

const MAX_RESPONSE_BYTES: usize = 4 * 1024 * 1024;

const REVIEW: &str = "gemini_review";
const RESEARCH: &str = "gemini_research";

const REVIEWER: &str = "You review the plan of a software engineer before it is carried out. Name \
    wrong assumptions, missing steps, risks and simpler ways, the most important first. Be specific \
    and brief.";
const RESEARCHER: &str = "You answer a software engineer's question from current sources on the \
    web. State what is certain, what is not, and versions and dates where they matter.";

pub(super) struct GeminiTools {
    pub(super) door: Arc<Door>,
    pub(super) server: McpServer,
}

#[async_trait]
impl Tools for GeminiTools {
    fn list(&self) -> Vec<Value> {
        let tool = |name: &str, description: &str, argument: &str, meaning: &str| {
            json!({
                "name": name,
                "description": description,
                "inputSchema": {
                    "type": "object",
                    "properties": { argument: { "type": "string", "description": meaning } },
                    "required": [argument],
                },
                "annotations": { "readOnlyHint": true, "openWorldHint": true },
            })
        };
        let review = "Let Gemini review a plan before you carry it out";
        let research = "Let Gemini research a question on the web; the answer names its sources";
        let mut tools =
            vec![tool(REVIEW, review, "plan", "The plan, with everything it depends on")];
        if self.may_search() {
            tools.push(tool(RESEARCH, research, "question", "The question"));
        }
        tools
    }

    async fn call(&self, name: &str, arguments: Value) -> Option<ToolResult> {
        let (argument, research) = match name {
            REVIEW => ("plan", false),
            RESEARCH if self.may_search() => ("question", true),
            _ => return None,
        };
        let Some(text) = arguments[argument].as_str().filter(|text| !text.trim().is_empty()) else {
            return Some(failure(&format!("invalid arguments: `{argument}` is missing")));
        };
        let (door, server) = (Arc::clone(&self.door), self.server.clone());
        let body = request_body(text, research);
        // Held by the call and not by the connection, which the agent may close.
        let slot = Arc::clone(&door.gemini_calls).acquire_owned().await.ok()?;
        // A task of its own: an agent that disconnects must not avoid the count of its tokens.
        let asked = tokio::spawn(async move {
            let _slot = slot;
            ask(&door, &server, &body).await
        });
        let asked = asked.await;
        let asked = asked.unwrap_or_else(|_| Err("the tool panicked; see the log".to_owned()));
        Some(asked.map_or_else(|why| failure(&why), success))
    }
}

impl GeminiTools {
    /// A search reads pages that the network policy `none` does not allow.
    fn may_search(&self) -> bool {
        self.door.network().base != NetworkPolicy::None
    }
}

fn success(text: String) -> ToolResult {
    ToolResult { text, structured: None, failed: false }
}

fn failure(why: &str) -> ToolResult {
    ToolResult { text: why.to_owned(), structured: None, failed: true }
}

fn request_body(text: &str, research: bool) -> Value {
    let told = if research { RESEARCHER } else { REVIEWER };
    let mut body = json!({
        "systemInstruction": { "parts": [{ "text": told }] },
        "contents": [{ "role": "user", "parts": [{ "text": text }] }],
    });
    if research {
        body["tools"] = json!([{ "google_search": {} }]);
    }
    body
}

async fn ask(door: &Door, server: &McpServer, body: &Value) -> Result<String, String> {
    let (ledger, session) = (&door.shared.ledger, &door.policy.session);
    let call = PlannedCall {
        id: CallId::random(),
        upstream: "gemini".parse().expect("a built-in name is valid"),
        keyed: server.secret.is_some(),
        model: server.url.rsplit('/').next().unwrap_or_default().to_owned(),
        fallbacks: Vec::new(),
        most: most_tokens(Endpoint::Gemini, body.to_string().as_bytes())?,
    };
    ledger.reserve(session, &call).await.map_err(|refusal| refusal.to_string())?;
    // Whatever happens, the call is settled.
    let exchanged = tokio::time::timeout(CALL_TIMEOUT, exchange(door, server, body)).await;
    let late = |_| Err(Failure::sent("the Gemini API did not answer in time"));
    let exchanged = exchanged.unwrap_or_else(late);
    ledger.settle(session, &call, bounded(used(&exchanged))).await;
    let (status, answer) = exchanged.map_err(|failure| failure.why)?;
    if !status.is_success() {
        let why = answer["error"]["message"].as_str().unwrap_or("it gave no reason");
        return Err(format!("the Gemini API refused the call ({status}): {why}"));
    }
    answer_text(&answer).ok_or_else(|| "the Gemini API gave no answer".to_owned())
}

/// Why there is no response.
struct Failure {
    why: String,
    /// The service may have computed one.
    sent: bool,
}

impl Failure {
    fn sent(why: &str) -> Self {
        Self { why: why.to_owned(), sent: true }
    }
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self { why, sent: false }
    }
}

/// A successful response has counts, if it was read to its end.
fn used(exchanged: &Result<(StatusCode, Value), Failure>) -> Used {
    match exchanged {
        Ok((status, answer)) if status.is_success() && !answer["usageMetadata"].is_object() => {
            Used::AtLeast(Usage::default())
        }
        Ok((_, answer)) => Used::Counted(usage(answer)),
        Err(failure) if failure.sent => Used::AtLeast(Usage::default()),
        Err(_) => Used::Counted(Usage::default()),
    }
}

async fn exchange(
    door: &Door,
    server: &McpServer,
    body: &Value,
) -> Result<(StatusCode, Value), Failure> {
    let shared = &door.shared;
    let key = match &server.secret {
        Some(secret) => {
            let missing = || format!("no key is stored; `harvest secret set {secret}` stores it");
            Some(shared.ledger.secret(&door.policy.secrets, secret).await.ok_or_else(missing)?)
        }
        None => None,
    };
    let secrets: Vec<&Secret<String>> = key.iter().collect();
    let request = outgoing(server, body, key.as_ref())?;
    let sent = shared.clients.execute(request, Reach::Any).await.map_err(|error| {
        let sent = !http::is_unsent(&error);
        let error = redact(&error.to_string(), &secrets);
        tracing::warn!(%error, "cannot reach the Gemini API");
        Failure { why: "cannot reach the Gemini API from this machine".to_owned(), sent }
    })?;
    let status = sent.status();
    let text = redact(&http::read_text(sent, MAX_RESPONSE_BYTES).await, &secrets);
    let answer: Value = harvest_proto::json::from_slice(text.as_bytes()).unwrap_or_default();
    Ok((status, answer))
}

fn outgoing(
    server: &McpServer,
    body: &Value,
    key: Option<&Secret<String>>,
) -> Result<reqwest::Request, String> {
    let url = format!("{}:generateContent", server.url.trim_end_matches('/'));
    let url = reqwest::Url::parse(&url).map_err(|_| "the configured URL is invalid")?;
    let mut request = reqwest::Request::new(Method::POST, url);
    let headers = request.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    if let Some(key) = key {
        let value = HeaderValue::from_str(key.expose().trim());
        let mut value = value.map_err(|_| "the key contains invalid characters; store it again")?;
        value.set_sensitive(true);
        headers.insert("x-goog-api-key", value);
    }
    *request.body_mut() = Some(body.to_string().into());
    Ok(request)
}

/// The text of the first candidate, without its thoughts, and the sources of a search.
fn answer_text(answer: &Value) -> Option<String> {
    let candidate = &answer["candidates"][0];
    let parts = candidate["content"]["parts"].as_array()?;
    let said = parts.iter().filter(|part| part["thought"] != true);
    let mut text: String = said.filter_map(|part| part["text"].as_str()).collect();
    let sources = candidate["groundingMetadata"]["groundingChunks"].as_array();
    for source in sources.into_iter().flatten().map(|chunk| &chunk["web"]) {
        if let (Some(title), Some(uri)) = (source["title"].as_str(), source["uri"].as_str()) {
            let _ = write!(text, "\n- {title}: {uri}");
        }
    }
    (!text.is_empty()).then_some(text)
}

/// Gemini counts the tokens of the cache inside the input, and thoughts beside the output.
fn usage(answer: &Value) -> Usage {
    let count = |name: &str| answer["usageMetadata"][name].as_u64().unwrap_or(0);
    let cached = count("cachedContentTokenCount");
    Usage {
        input_tokens: count("promptTokenCount")
            .saturating_add(count("toolUsePromptTokenCount"))
            .saturating_sub(cached),
        output_tokens: count("candidatesTokenCount").saturating_add(count("thoughtsTokenCount")),
        cache_read_tokens: cached,
        cache_write_tokens: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_has_sources_but_no_thoughts() {
        let answer = json!({
            "candidates": [{
                "content": { "parts": [{ "text": "hm", "thought": true }, { "text": "Yes." }] },
                "groundingMetadata": { "groundingChunks": [
                    { "web": { "title": "docs", "uri": "https://example.org" } }, {},
                ] },
            }],
            "usageMetadata": {
                "promptTokenCount": 10, "cachedContentTokenCount": 4,
                "candidatesTokenCount": 3, "thoughtsTokenCount": 2,
            },
        });
        assert_eq!(answer_text(&answer).unwrap(), "Yes.\n- docs: https://example.org");
        let Usage { input_tokens, output_tokens, cache_read_tokens, .. } = usage(&answer);
        assert_eq!((input_tokens, output_tokens, cache_read_tokens), (6, 5, 4));
        assert_eq!(answer_text(&json!({})), None);
    }

    #[test]
    fn gemini_call_without_counts_is_held() {
        let ok = |answer| Ok((StatusCode::OK, answer));
        let unknown = Used::AtLeast(Usage::default());
        assert_eq!(used(&ok(json!({"candidates": []}))), unknown);
        assert_eq!(used(&ok(Value::Null)), unknown);
        assert_eq!(used(&Err(Failure::sent("late"))), unknown);
        let none = Used::Counted(Usage::default());
        assert_eq!(used(&Err(Failure::from("no key".to_owned()))), none);
        assert_eq!(used(&Ok((StatusCode::BAD_REQUEST, json!({"error": {}})))), none);
        assert_ne!(used(&ok(json!({"usageMetadata": {"promptTokenCount": 5}}))), none);
    }

    #[test]
    fn only_research_searches_the_web() {
        assert_eq!(request_body("q", false)["tools"], Value::Null);
        assert!(request_body("q", true)["tools"][0]["google_search"].is_object());
    }
}
