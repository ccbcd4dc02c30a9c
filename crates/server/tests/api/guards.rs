//! Protection against foreign origins, excessive request rates and malformed requests.

use harvest_proto::bridge::Author;
use harvest_server::Limits;
use serde_json::{Value, json};

use crate::{
    problem,
    test_server::{ApiResponse, TestServer},
};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

#[tokio::test]
async fn foreign_origins_are_rejected() {
    let server = TestServer::start().await;
    for origin in ["http://evil.example", "null", "http://127.0.0.1:3000"] {
        let headers = [("host", "127.0.0.1:7070"), ("origin", origin)];
        problem(&server.request("GET", "/v1/me", &headers, "").await, 403, "origin_not_allowed");
        problem(&server.request("GET", "/healthz", &headers, "").await, 403, "origin_not_allowed");
    }
    for origin in ["http://127.0.0.1:7070", "https://agents.example.org"] {
        let headers = [("host", "127.0.0.1:7070"), ("origin", origin)];
        assert_eq!(server.request("GET", "/v1/me", &headers, "").await.status, 200, "{origin}");
    }
}

#[tokio::test]
async fn rate_limit_applies_per_token_and_address() {
    let server =
        TestServer::start_with(Limits { requests_per_second: 1, ..Limits::default() }).await;
    let other = server.post("/v1/tokens", &[], json!({"name": "other"})).await.json();
    let limited = until_limited(async || server.request("GET", "/v1/me", &[], "").await, 200).await;
    assert!(limited.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(
        server.request_as(other["value"].as_str(), "GET", "/v1/me", &[], "").await.status,
        200
    );
    let guess = async || server.request_as(Some("hvt_guess"), "GET", "/v1/me", &[], "").await;
    until_limited(guess, 401).await;
    // The same bucket, which may have been refilled slightly meanwhile.
    until_limited(async || server.request_as(None, "GET", "/healthz", &[], "").await, 200).await;
}

/// Repeats a request until it is rate limited. A slow test machine may let more through, but never
/// a thousand at one per second.
async fn until_limited(send: impl AsyncFn() -> ApiResponse, before: u16) -> ApiResponse {
    for _ in 0..1000 {
        let response = send().await;
        if response.status != before {
            problem(&response, 429, "rate_limited");
            return response;
        }
    }
    panic!("the rate limit was not reached")
}

#[tokio::test]
async fn malformed_requests_are_rejected_with_a_code() {
    let server = TestServer::start().await;
    server.repository().await;
    let server = &server;
    let create =
        |body: String| async move { server.request("POST", "/v1/sessions", &JSON, &body).await };
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
    // A prompt may have images.
    problem(&create("x".repeat(1024 * 1024 + 1)).await, 400, "invalid_json");
    problem(&create("x".repeat(24 * 1024 * 1024)).await, 413, "too_large");
    let long = "x".repeat(1024 * 1024 + 1);
    let other = server.request("POST", "/v1/repositories", &JSON, &long).await;
    problem(&other, 413, "too_large");
    problem(
        &server.request("POST", "/v1/sessions", &[], "{}").await,
        415,
        "unsupported_media_type",
    );
    problem(
        &server.request_bytes("POST", "/v1/sessions", &JSON, b"{\"repository\": \"\xff\"}").await,
        400,
        "invalid_json",
    );
    problem(&server.request("GET", "/v1/sessions/%ff", &[], "").await, 404, "not_found");
    problem(&server.request("GET", "/v1/sessions?limit=%ff", &[], "").await, 400, "invalid_query");
    assert_eq!(server.request("HEAD", "/v1/sessions", &[], "").await.status, 200);
    assert_eq!(server.request("HEAD", "/v1/sessions/ses_000000000000", &[], "").await.status, 404);
}

#[tokio::test]
async fn invalid_page_parameters_are_rejected() {
    let server = TestServer::start().await;
    server.repository().await;
    let session = server.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let events = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    for limit in ["-1", "0", "201", "4294967296", "99999999999999999999999", "1e3", ""] {
        let path = format!("/v1/sessions?limit={limit}");
        problem(&server.request("GET", &path, &[], "").await, 400, "invalid_query");
    }
    problem(
        &server.request("GET", &format!("{events}?limit=1001"), &[], "").await,
        400,
        "invalid_query",
    );
    problem(
        &server.request("GET", &format!("{events}?after=-1"), &[], "").await,
        400,
        "invalid_query",
    );
    problem(&server.request("GET", "/v1/sessions?no_such=1", &[], "").await, 400, "invalid_query");
    problem(&server.request("GET", "/v1/sessions?cursor=%00", &[], "").await, 400, "invalid_query");
    // A cursor of another list.
    problem(&server.request("GET", "/v1/sessions?cursor=17", &[], "").await, 422, "invalid_cursor");
    problem(
        &server.request("GET", &format!("{events}?after=18446744073709551615"), &[], "").await,
        410,
        "cursor_gone",
    );
}

#[tokio::test]
async fn idempotency_key_is_validated_and_scoped_to_users() {
    let server = TestServer::start().await;
    server.repository().await;
    let server = &server;
    let ask = |key: String, body: Value| async move {
        server.post("/v1/sessions", &[("idempotency-key", &key)], body).await
    };
    problem(&ask("k".repeat(256), json!({"repository": "calc"})).await, 400, "invalid_key");
    problem(&ask(String::new(), json!({"repository": "calc"})).await, 400, "invalid_key");
    problem(&ask("\u{e4}".into(), json!({"repository": "calc"})).await, 400, "invalid_key");
    problem(&ask("two words".into(), json!({"repository": "calc"})).await, 400, "invalid_key");
    assert_eq!(ask("k".into(), json!({"repository": "calc"})).await.status, 201);
    problem(
        &ask("k".into(), json!({"repository": "calc", "prompt": "y"})).await,
        422,
        "key_reused",
    );
    // Keys of different users are independent.
    let user = json!({"name": "Bob", "email": "bob@example.org"});
    let bob = server.post("/v1/tokens", &[], json!({"name": "bob", "user": user})).await.json();
    let headers = [("idempotency-key", "k"), ("content-type", "application/json")];
    let body = json!({"repository": "calc", "prompt": "z"}).to_string();
    let response =
        server.request_as(bob["value"].as_str(), "POST", "/v1/sessions", &headers, &body).await;
    assert_eq!(
        (response.status, response.header("idempotency-replayed")),
        (201, None),
        "{response:?}"
    );
}

#[tokio::test]
async fn key_of_a_deleted_session_creates_another() {
    let server = TestServer::start().await;
    server.repository().await;
    let key = [("idempotency-key", "k")];
    let create = async || {
        let answer = server.post("/v1/sessions", &key, json!({"repository": "calc"})).await;
        assert_eq!(answer.status, 201, "{answer:?}");
        let replayed = answer.header("idempotency-replayed").is_some();
        (answer.json()["id"].as_str().unwrap().to_owned(), replayed)
    };
    let (first, _) = create().await;
    let prompts = format!("/v1/sessions/{first}/prompts");
    let prompt =
        async || server.post(&prompts, &[("idempotency-key", "p")], json!({"text": "x"})).await;
    assert_eq!(prompt().await.status, 202);
    let deleted = server.request("DELETE", &format!("/v1/sessions/{first}"), &[], "").await;
    assert_eq!(deleted.status, 204, "{deleted:?}");
    let (second, replayed) = create().await;
    assert!(second != first && !replayed, "{first} {second}");
    problem(&prompt().await, 404, "not_found");
}

#[tokio::test]
async fn key_of_a_request_in_progress_conflicts() {
    let server = TestServer::start().await;
    server.repository().await;
    let body = json!({"repository": "calc"}).to_string();
    server.claim(&format!("ada@example.org {}", "k"), &format!("POST /v1/sessions\n{body}")).await;
    let headers = [("idempotency-key", "k"), ("content-type", "application/json")];
    problem(&server.request("POST", "/v1/sessions", &headers, &body).await, 409, "in_progress");
}

#[tokio::test]
async fn crash_before_response_does_not_create_twice() {
    let server = TestServer::start().await;
    server.repository().await;
    let ada = || Author { name: "Ada".into(), email: "ada@example.org".into() };
    let crash = async |key: &str, path: &str, body: &Value| {
        server.claim(&format!("ada@example.org {key}"), &format!("POST {path}\n{body}")).await;
        server.sessions.with_idempotency_key(Some(&format!("ada@example.org {key}")))
    };
    let retry = async |key: &str, path: &str, body: &Value, status: u16| {
        let response = server.post(path, &[("idempotency-key", key)], body.clone()).await;
        assert_eq!(
            (response.status, response.header("idempotency-replayed")),
            (status, Some("true")),
            "{response:?}"
        );
        response.json()
    };
    let create = json!({"repository": "calc"});
    let sessions = crash("k", "/v1/sessions", &create).await;
    let request = serde_json::from_value(create.clone()).unwrap();
    let made = sessions.create(request, ada()).await.unwrap();
    assert_eq!(retry("k", "/v1/sessions", &create, 201).await["id"], made.id.to_string());

    let (path, text) = (format!("/v1/sessions/{}/prompts", made.id), json!({"text": "Go on."}));
    let sessions = crash("l", &path, &text).await;
    let request = serde_json::from_value(text.clone()).unwrap();
    let prompt = sessions.prompt(&made.id, request, ada()).await.unwrap();
    assert_eq!(retry("l", &path, &text, 202).await["id"], prompt.id.to_string());
    problem(
        &server.post(&path, &[("idempotency-key", "l")], json!({"text": "Other."})).await,
        422,
        "key_reused",
    );
    assert_eq!(server.sessions.prompts(&made.id).await.unwrap().len(), 1);
    assert_eq!(server.sessions.list(None, 10).await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn requests_against_session_state_fail_with_codes() {
    let server = TestServer::start().await;
    server.repository().await;
    let session = server.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}", session["id"].as_str().unwrap());
    problem(&server.request("GET", &format!("{path}/pr"), &[], "").await, 404, "no_pr");
    problem(
        &server.request("DELETE", &format!("{path}/prompts/prm_000000000000"), &[], "").await,
        404,
        "not_found",
    );
    problem(&server.post(&format!("{path}/fork"), &[], json!({})).await, 409, "no_snapshot");
    problem(
        &server.post(&format!("{path}/fork"), &[], json!({"turn": 99})).await,
        404,
        "not_found",
    );
    problem(
        &server.post(&format!("{path}/prompts"), &[], json!({"text": " "})).await,
        422,
        "invalid_prompt",
    );
}
