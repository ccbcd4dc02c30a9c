//! What keeps a server from harm: strangers, other people's pages, too much at once, broken requests.

use harvest_proto::bridge::Author;
use harvest_server::Limits;
use serde_json::{Value, json};

use crate::{
    host::{Answer, Host},
    problem,
};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

#[tokio::test]
async fn a_page_of_another_site_is_refused() {
    let host = Host::start().await;
    for origin in ["http://evil.example", "null", "http://127.0.0.1:3000"] {
        let headers = [("host", "127.0.0.1:7070"), ("origin", origin)];
        problem(&host.ask("GET", "/v1/me", &headers, "").await, 403, "origin_not_allowed");
        problem(&host.ask("GET", "/healthz", &headers, "").await, 403, "origin_not_allowed");
    }
    for origin in ["http://127.0.0.1:7070", "https://agents.example.org"] {
        let headers = [("host", "127.0.0.1:7070"), ("origin", origin)];
        assert_eq!(host.ask("GET", "/v1/me", &headers, "").await.status, 200, "{origin}");
    }
}

#[tokio::test]
async fn who_asks_too_often_is_told_when_to_come_back_and_others_are_not_held_up() {
    let host = Host::start_with(Limits { requests_per_second: 1, ..Limits::default() }).await;
    let other = host.post("/v1/tokens", &[], json!({"name": "other"})).await.json();
    let refused = refused(async || host.ask("GET", "/v1/me", &[], "").await, 200).await;
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(host.ask_as(other["value"].as_str(), "GET", "/v1/me", &[], "").await.status, 200);
    let guess = async || host.ask_as(Some("hvt_guess"), "GET", "/v1/me", &[], "").await;
    crate::guards::refused(guess, 401).await;
    // The same bucket, which may have got a drop meanwhile.
    crate::guards::refused(async || host.ask_as(None, "GET", "/healthz", &[], "").await, 200).await;
}

/// Asks until that is too often. A machine may stand still for seconds, and then more is let in; none is so
/// slow that it asks but once a second, for a thousand times.
async fn refused(ask: impl AsyncFn() -> Answer, until_then: u16) -> Answer {
    for _ in 0..1000 {
        let answer = ask().await;
        if answer.status != until_then {
            problem(&answer, 429, "rate_limited");
            return answer;
        }
    }
    panic!("nobody is told to come back")
}

#[tokio::test]
async fn a_broken_request_is_told_what_is_wrong_with_it() {
    let host = Host::start().await;
    host.repository().await;
    let host = &host;
    let create = |body: String| async move { host.ask("POST", "/v1/sessions", &JSON, &body).await };
    problem(&create(r#"{"repository": "calc""#.into()).await, 400, "invalid_json");
    problem(&create("\u{feff}{}".into()).await, 400, "invalid_json");
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let deep = format!(r#"{{"repository": {deep}}}"#);
    problem(&create(deep).await, 422, "invalid_body");
    let deep = format!("{}1{}", r#"{"author":"#.repeat(10_000), "}".repeat(10_000));
    problem(&create(deep).await, 422, "invalid_body");
    problem(&create(json!({"repository": "ca\0lc"}).to_string()).await, 422, "invalid_body");
    problem(
        &create(json!({"repository": "calc", "prompt": "a\0b"}).to_string()).await,
        422,
        "invalid_body",
    );
    problem(&create(json!({"repository": 7}).to_string()).await, 422, "invalid_body");
    problem(&create("x".repeat(1024 * 1024 + 1)).await, 413, "too_large");
    problem(&host.ask("POST", "/v1/sessions", &[], "{}").await, 415, "unsupported_media_type");
    problem(
        &host.ask_bytes("POST", "/v1/sessions", &JSON, b"{\"repository\": \"\xff\"}").await,
        400,
        "invalid_json",
    );
    problem(&host.ask("GET", "/v1/sessions/%ff", &[], "").await, 404, "not_found");
    problem(&host.ask("GET", "/v1/sessions?limit=%ff", &[], "").await, 400, "invalid_query");
    assert_eq!(host.ask("HEAD", "/v1/sessions", &[], "").await.status, 200);
    assert_eq!(host.ask("HEAD", "/v1/sessions/ses_000000000000", &[], "").await.status, 404);
}

#[tokio::test]
async fn a_list_is_asked_for_in_sensible_parts() {
    let host = Host::start().await;
    host.repository().await;
    let session = host.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let events = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    for limit in ["-1", "0", "201", "4294967296", "99999999999999999999999", "1e3", ""] {
        let path = format!("/v1/sessions?limit={limit}");
        problem(&host.ask("GET", &path, &[], "").await, 400, "invalid_query");
    }
    problem(&host.ask("GET", &format!("{events}?limit=1001"), &[], "").await, 400, "invalid_query");
    problem(&host.ask("GET", &format!("{events}?after=-1"), &[], "").await, 400, "invalid_query");
    problem(&host.ask("GET", "/v1/sessions?no_such=1", &[], "").await, 400, "invalid_query");
    problem(&host.ask("GET", "/v1/sessions?cursor=%00", &[], "").await, 400, "invalid_query");
    // The cursor of another list.
    problem(&host.ask("GET", "/v1/sessions?cursor=17", &[], "").await, 422, "invalid_cursor");
    problem(
        &host.ask("GET", &format!("{events}?after=18446744073709551615"), &[], "").await,
        410,
        "cursor_gone",
    );
}

#[tokio::test]
async fn a_key_is_short_and_belongs_to_one_request() {
    let host = Host::start().await;
    host.repository().await;
    let host = &host;
    let ask = |key: String, body: Value| async move {
        host.post("/v1/sessions", &[("idempotency-key", &key)], body).await
    };
    problem(&ask("k".repeat(256), json!({"repository": "calc"})).await, 400, "invalid_key");
    problem(&ask(String::new(), json!({"repository": "calc"})).await, 400, "invalid_key");
    problem(&ask("\u{e4}".into(), json!({"repository": "calc"})).await, 400, "invalid_key");
    assert_eq!(ask("k".into(), json!({"repository": "calc"})).await.status, 201);
    problem(
        &ask("k".into(), json!({"repository": "calc", "prompt": "y"})).await,
        422,
        "key_reused",
    );
    // Keys of different people do not meet.
    let user = json!({"name": "Bob", "email": "bob@example.org"});
    let bob = host.post("/v1/tokens", &[], json!({"name": "bob", "user": user})).await.json();
    let headers = [("idempotency-key", "k"), ("content-type", "application/json")];
    let body = json!({"repository": "calc", "prompt": "z"}).to_string();
    let answer = host.ask_as(bob["value"].as_str(), "POST", "/v1/sessions", &headers, &body).await;
    assert_eq!((answer.status, answer.header("idempotency-replayed")), (201, None), "{answer:?}");
}

#[tokio::test]
async fn a_key_whose_request_is_being_carried_out_has_to_wait() {
    let host = Host::start().await;
    host.repository().await;
    let body = json!({"repository": "calc"}).to_string();
    host.claim(&format!("ada@example.org {}", "k"), &format!("POST /v1/sessions\n{body}")).await;
    let headers = [("idempotency-key", "k"), ("content-type", "application/json")];
    problem(&host.ask("POST", "/v1/sessions", &headers, &body).await, 409, "in_progress");
}

#[tokio::test]
async fn what_a_server_made_that_died_before_its_answer_is_shown_and_not_made_again() {
    let host = Host::start().await;
    host.repository().await;
    let ada = || Author { name: "Ada".into(), email: "ada@example.org".into() };
    let die = async |key: &str, path: &str, body: &Value| {
        host.claim(&format!("ada@example.org {key}"), &format!("POST {path}\n{body}")).await;
        host.sessions.under(Some(&format!("ada@example.org {key}")))
    };
    let again = async |key: &str, path: &str, body: &Value, status: u16| {
        let answer = host.post(path, &[("idempotency-key", key)], body.clone()).await;
        assert_eq!(
            (answer.status, answer.header("idempotency-replayed")),
            (status, Some("true")),
            "{answer:?}"
        );
        answer.json()
    };
    let create = json!({"repository": "calc"});
    let sessions = die("k", "/v1/sessions", &create).await;
    let order = serde_json::from_value(create.clone()).unwrap();
    let made = sessions.create(order, ada()).await.unwrap();
    assert_eq!(again("k", "/v1/sessions", &create, 201).await["id"], made.id.to_string());

    let (path, text) = (format!("/v1/sessions/{}/prompts", made.id), json!({"text": "Go on."}));
    let sessions = die("l", &path, &text).await;
    let order = serde_json::from_value(text.clone()).unwrap();
    let prompt = sessions.prompt(&made.id, order, ada()).await.unwrap();
    assert_eq!(again("l", &path, &text, 202).await["id"], prompt.id.to_string());
    problem(
        &host.post(&path, &[("idempotency-key", "l")], json!({"text": "Other."})).await,
        422,
        "key_reused",
    );
    assert_eq!(host.sessions.prompts(&made.id).await.unwrap().len(), 1);
    assert_eq!(host.sessions.list(None, 10).await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn what_does_not_fit_a_sessions_state_is_a_conflict_or_not_there() {
    let host = Host::start().await;
    host.repository().await;
    let session = host.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}", session["id"].as_str().unwrap());
    problem(&host.ask("GET", &format!("{path}/pull"), &[], "").await, 404, "no_pull");
    problem(
        &host.ask("DELETE", &format!("{path}/prompts/prm_000000000000"), &[], "").await,
        404,
        "not_found",
    );
    problem(&host.post(&format!("{path}/fork"), &[], json!({})).await, 409, "no_snapshot");
    problem(&host.post(&format!("{path}/fork"), &[], json!({"turn": 99})).await, 404, "not_found");
    problem(
        &host.post(&format!("{path}/prompts"), &[], json!({"text": " "})).await,
        422,
        "invalid_prompt",
    );
}
