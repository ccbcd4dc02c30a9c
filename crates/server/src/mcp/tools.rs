//! The tools: what each is called, what it takes, and which request of the API it is.

use std::time::Duration;

use axum::http::{Method, StatusCode};
use harvest_proto::{Event, SessionId, api::SessionState};
use harvest_session::mcp::{Definition, Effect, ToolResult, text};
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};

use super::{ApiTools, history};
use crate::routes::percent_encode;

/// A client gives up a call after about a minute.
const MAX_WAIT: Duration = Duration::from_secs(50);

const POLL_INTERVAL: Duration = Duration::from_millis(300);

const EVENTS: u64 = 500;

fn session() -> Value {
    text("The session: its id (ses_…) or its key")
}

fn whole(description: &str) -> Value {
    json!({ "type": "integer", "minimum": 0, "description": description })
}

const DEFINITIONS: [Definition; 9] = [
    Definition {
        name: "list_sessions",
        description: "Lists sessions, newest first: state, repository, title, pull request.",
        effect: Effect::Reads,
        arguments: &[],
        optional: &[
            ("state", || text("Only sessions in this state, such as `running` or `needs_input`")),
            ("repository", || text("Only sessions on this repository, OWNER/NAME")),
            ("limit", || whole("How many, 20 by default")),
        ],
    },
    Definition {
        name: "start_session",
        description: "Starts a session: an agent works on the prompt in a sandbox of its own and \
                      pushes to a branch of its own. Returns at once; `wait_for_session` waits.",
        effect: Effect::Adds,
        arguments: &[("prompt", || text("The task for the agent"))],
        optional: &[
            ("repository", || text("OWNER/NAME of a registered repository, or its URL")),
            ("base", || text("The branch to start from")),
            ("agent", || text("`claude` (default), `opencode`, `codex` or a configured one")),
            ("model", || text("The model, as `harvest models` lists them")),
            ("network", || text("`none`, `trusted` (default) or `full`")),
            ("key", || text("A unique name of your choice, valid wherever an id is")),
        ],
    },
    Definition {
        name: "show_session",
        description: "The state of a session, its branch, pull request, cost and queue.",
        effect: Effect::Reads,
        arguments: &[("session", session)],
        optional: &[],
    },
    Definition {
        name: "read_session",
        description: "What happened in a session, as text: prompts, the agent's words, its tools, \
                      pushes and checks. Continue with `after`.",
        effect: Effect::Reads,
        arguments: &[("session", session)],
        optional: &[("after", || whole("Only what came after this event; the last call names it"))],
    },
    Definition {
        name: "wait_for_session",
        description: "Waits until a session is idle, asks a question, or has ended, for at most 50 \
                      seconds; call it again if it is still at work.",
        effect: Effect::Reads,
        arguments: &[("session", session)],
        optional: &[("seconds", || whole("How long, 50 by default"))],
    },
    Definition {
        name: "send_prompt",
        description: "Queues a prompt for a session, or answers its question. With `now` the \
                      current turn is stopped first.",
        effect: Effect::Adds,
        arguments: &[("session", session), ("prompt", || text("The task, or the answer"))],
        optional: &[("now", || json!({ "type": "boolean", "description": "Stop the turn first" }))],
    },
    Definition {
        name: "stop_session",
        description: "Stops the current turn of a session with every process it started. Files \
                      and conversation stay.",
        effect: Effect::Adds,
        arguments: &[("session", session)],
        optional: &[],
    },
    Definition {
        name: "pause_session",
        description: "Saves a session and ends its sandbox; the next prompt continues it.",
        effect: Effect::Adds,
        arguments: &[("session", session)],
        optional: &[],
    },
    Definition {
        name: "session_diff",
        description: "All changes of a session as a diff, or those of one turn.",
        effect: Effect::Reads,
        arguments: &[("session", session)],
        optional: &[("turn", || whole("Only the changes of this turn"))],
    },
];

pub(super) fn list() -> Vec<Value> {
    DEFINITIONS.iter().map(Definition::to_json).collect()
}

/// Calls a tool; `None` when there is none of this name.
pub(super) async fn call(api: &ApiTools, name: &str, arguments: Value) -> Option<ToolResult> {
    let tool = DEFINITIONS.iter().find(|tool| tool.name == name)?;
    let Value::Object(arguments) = arguments else {
        return Some(failure("the arguments are not an object"));
    };
    Some(run(api, tool, arguments).await.unwrap_or_else(|why| failure(&why)))
}

async fn run(
    api: &ApiTools,
    tool: &Definition,
    mut given: Map<String, Value>,
) -> Result<ToolResult, String> {
    tool.check(&given)?;
    let id = match given.remove("session") {
        Some(named) => Some(find(api, named.as_str().unwrap_or_default()).await?),
        None => None,
    };
    let path = |rest: &str| {
        format!("/v1/sessions/{}{rest}", id.as_ref().map(ToString::to_string).unwrap_or_default())
    };
    match tool.name {
        "list_sessions" => {
            given.entry("limit").or_insert(json!(20));
            let page = request(api, Method::GET, &query("/v1/sessions", &given), None).await?;
            let items: Vec<Value> =
                page["items"].as_array().into_iter().flatten().map(summary).collect();
            Ok(document(json!({ "sessions": items })))
        }
        "start_session" => request(api, Method::POST, "/v1/sessions", Some(given.into()))
            .await
            .map(|made| document(summary(&made))),
        "show_session" => request(api, Method::GET, &path(""), None).await.map(document),
        "read_session" => read(api, &path("/events"), given).await,
        "wait_for_session" => wait(api, &path(""), &given).await,
        "send_prompt" => {
            let body = json!({ "text": given["prompt"], "now": given.get("now").unwrap_or(&json!(false)) });
            request(api, Method::POST, &path("/prompts"), Some(body)).await.map(document)
        }
        "stop_session" => change(api, &path("/stop")).await,
        "pause_session" => change(api, &path("/pause")).await,
        "session_diff" => {
            let turn = given.remove("turn").and_then(|turn| turn.as_u64());
            if let Some(turn) = turn {
                let before = turn.checked_sub(1).ok_or("turns are numbered from 1")?;
                given.insert("from".to_owned(), json!(before));
                given.insert("to".to_owned(), json!(turn));
            }
            let diff = request(api, Method::GET, &query(&path("/diff"), &given), None).await?;
            let text = diff.as_str().map_or_else(|| diff.to_string(), str::to_owned);
            let text = if text.is_empty() { "no changes".to_owned() } else { text };
            Ok(ToolResult { text, structured: None, failed: false })
        }
        _ => Err("the tool does nothing".to_owned()),
    }
}

async fn change(api: &ApiTools, path: &str) -> Result<ToolResult, String> {
    request(api, Method::POST, path, Some(json!({}))).await.map(document)
}

/// The session of an id or a key.
async fn find(api: &ApiTools, named: &str) -> Result<SessionId, String> {
    if let Ok(id) = named.parse() {
        return Ok(id);
    }
    let path = format!("/v1/sessions?key={}", percent_encode(named));
    let page = request(api, Method::GET, &path, None).await?;
    let id = page["items"][0]["id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| format!("there is no session `{named}`; list_sessions shows them"))
}

async fn read(
    api: &ApiTools,
    path: &str,
    mut given: Map<String, Value>,
) -> Result<ToolResult, String> {
    given.insert("limit".to_owned(), json!(EVENTS));
    let page = request(api, Method::GET, &query(path, &given), None).await?;
    let items = page["items"].as_array().cloned().unwrap_or_default();
    let last = items.last().and_then(|event| event["seq"].as_u64());
    let last = last.or_else(|| given.get("after").and_then(Value::as_u64)).unwrap_or_default();
    // Kinds that this version does not know are passed over.
    let events: Vec<Event> =
        items.into_iter().filter_map(|one| serde_json::from_value(one).ok()).collect();
    let more = if page["next_cursor"].is_null() { "" } else { "there is more: " };
    let text = format!("{}\n[{more}read on with after={last}]", history::text(&events).trim_end());
    // Clients such as Claude Code show an agent either the text or a document, never both.
    Ok(ToolResult { text, structured: None, failed: false })
}

async fn wait(
    api: &ApiTools,
    path: &str,
    given: &Map<String, Value>,
) -> Result<ToolResult, String> {
    let asked = given.get("seconds").and_then(Value::as_u64).map(Duration::from_secs);
    let deadline = Instant::now() + asked.unwrap_or(MAX_WAIT).min(MAX_WAIT);
    loop {
        let now = request(api, Method::GET, path, None).await?;
        if !is_at_work(&now) || Instant::now() >= deadline || api.shutdown.is_cancelled() {
            return Ok(document(summary(&now)));
        }
        tokio::select! {
            () = sleep(POLL_INTERVAL) => {}
            () = api.shutdown.cancelled() => {}
        }
    }
}

/// Whether a session goes on by itself. One that asks or has failed does not, whatever is queued.
fn is_at_work(session: &Value) -> bool {
    match serde_json::from_value(session["state"].clone()) {
        Ok(SessionState::Queued | SessionState::Starting | SessionState::Running) => true,
        Ok(SessionState::Idle) => session["queued"].as_u64().is_some_and(|queued| queued > 0),
        _ => false,
    }
}

/// Sends a request; a refusal becomes text with its hint.
async fn request(
    api: &ApiTools,
    method: Method,
    path: &str,
    body: Option<Value>,
) -> Result<Value, String> {
    let (status, answer) = api.send(method, path, body).await;
    if status.is_success() {
        return Ok(answer);
    }
    Err(refusal(status, &answer))
}

fn refusal(status: StatusCode, problem: &Value) -> String {
    let detail = problem["detail"].as_str().unwrap_or_else(|| status.as_str());
    match problem["hint"].as_str() {
        Some(hint) => format!("{detail}\nhint: {hint}"),
        None => detail.to_owned(),
    }
}

/// A path with these values as its query.
fn query(path: &str, values: &Map<String, Value>) -> String {
    let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let pairs = values.iter().map(|(name, one)| format!("{name}={}", percent_encode(&value(one))));
    let pairs: Vec<String> = pairs.collect();
    if pairs.is_empty() { path.to_owned() } else { format!("{path}?{}", pairs.join("&")) }
}

/// What an agent needs to know of a session.
fn summary(session: &Value) -> Value {
    let fields = [
        "id",
        "key",
        "title",
        "state",
        "reason",
        "detail",
        "repository",
        "branch",
        "agent",
        "turns",
        "pr_number",
        "pr_url",
        "created_at",
        "last_activity",
    ];
    let kept =
        fields.iter().filter_map(|name| Some(((*name).to_owned(), session.get(name)?.clone())));
    kept.filter(|(_, value)| !value.is_null()).collect::<Map<_, _>>().into()
}

fn document(value: Value) -> ToolResult {
    let text = serde_json::to_string_pretty(&value).unwrap_or_default();
    let structured = value.is_object().then_some(value);
    ToolResult { text, structured, failed: false }
}

fn failure(why: &str) -> ToolResult {
    ToolResult { text: why.to_owned(), structured: None, failed: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cannot_change_the_request() {
        let values = json!({ "state": "idle&limit=1", "limit": 3 });
        let Value::Object(values) = values else { unreachable!() };
        assert_eq!(query("/p", &values), "/p?limit=3&state=idle%26limit%3D1");
        assert_eq!(query("/p", &Map::new()), "/p");
    }

    #[test]
    fn question_is_no_work_although_prompts_wait() {
        let session = |state: &str, queued: u32| json!({ "state": state, "queued": queued });
        assert!(is_at_work(&session("running", 0)) && is_at_work(&session("idle", 1)));
        assert!(!is_at_work(&session("idle", 0)) && !is_at_work(&session("needs_input", 1)));
        assert!(!is_at_work(&session("paused", 1)) && !is_at_work(&session("unknown", 1)));
    }

    #[test]
    fn refusals_keep_their_hint() {
        let problem = json!({ "detail": "it is paused", "hint": "resume it" });
        assert_eq!(refusal(StatusCode::CONFLICT, &problem), "it is paused\nhint: resume it");
        assert_eq!(refusal(StatusCode::BAD_GATEWAY, &Value::Null), "502");
    }
}
