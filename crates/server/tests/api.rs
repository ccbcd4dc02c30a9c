//! The API over a real socket: errors are problem documents, tokens and hosts are checked, streams
//! resume, and the OpenAPI document matches the routes.
#![expect(clippy::unwrap_used, reason = "tests panic on failure")]

#[path = "api/guards.rs"]
mod guards;
#[path = "api/health.rs"]
mod health;
#[path = "api/hooks.rs"]
mod hooks;
#[path = "api/mcp.rs"]
mod mcp;
#[path = "api/memory.rs"]
mod memory;
#[path = "api/network.rs"]
mod network;
#[path = "api/permissions.rs"]
mod permissions;
mod standalone;
mod test_server;
#[path = "api/warm.rs"]
mod warm;

use serde_json::{Value, json};
use test_server::{ApiResponse, TestServer};

fn problem(response: &ApiResponse, status: u16, code: &str) {
    assert_eq!(response.status, status, "{response:?}");
    assert_eq!(response.header("content-type"), Some("application/problem+json"), "{response:?}");
    let problem = response.json();
    assert_eq!(problem["code"], code, "{response:?}");
    assert_eq!(problem["status"], status);
    assert_eq!(problem["request_id"].as_str(), response.header("x-request-id"));
    for field in ["type", "title", "detail"] {
        assert!(
            problem[field].as_str().is_some_and(|text| !text.is_empty()),
            "{field} in {response:?}"
        );
    }
}

#[tokio::test]
async fn every_error_is_a_problem_document() {
    let server = TestServer::start().await;
    let json = [("content-type", "application/json")];
    let ask = |method, path, headers: &'static [(&str, &str)], body: &'static str| {
        server.request(method, path, headers, body)
    };
    problem(&ask("GET", "/nowhere", &[], "").await, 404, "no_such_route");
    problem(&ask("GET", "/v1/nowhere", &[], "").await, 404, "no_such_route");
    problem(&ask("DELETE", "/v1/sessions", &[], "").await, 405, "method_not_allowed");
    problem(&ask("GET", "/v1/sessions/nonsense", &[], "").await, 404, "not_found");
    problem(&ask("GET", "/v1/sessions/ses_000000000000", &[], "").await, 404, "not_found");
    problem(&ask("GET", "/v1/sessions?limit=many", &[], "").await, 400, "invalid_query");
    problem(
        &ask("POST", "/v1/sessions", &[("content-type", "text/plain")], "{}").await,
        415,
        "unsupported_media_type",
    );
    problem(&server.request("POST", "/v1/sessions", &json, "{").await, 400, "invalid_json");
    problem(
        &server.request("POST", "/v1/sessions", &json, r#"{"env":1}"#).await,
        422,
        "invalid_body",
    );
    problem(
        &server.request("POST", "/v1/sessions", &json, r#"{"repository":"calc","x":1}"#).await,
        422,
        "invalid_body",
    );
    problem(
        &server.request("POST", "/v1/repositories", &json, &"x".repeat(1024 * 1024 + 1)).await,
        413,
        "too_large",
    );
    problem(
        &server.request("POST", "/v1/sessions", &json, r#"{"repository":"missing"}"#).await,
        404,
        "not_found",
    );
}

#[tokio::test]
async fn dangerous_bodies_are_rejected() {
    let server = TestServer::start().await;
    server.repository().await;
    let session = server.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}", session["id"].as_str().unwrap());
    for body in [
        json!({"argv": []}),
        json!({"argv": ["a\0b"]}),
        json!({"argv": ["a"], "env": {"A=B": "c"}}),
    ] {
        problem(&server.post(&format!("{path}/exec"), &[], body).await, 422, "invalid_body");
    }
    let author = json!({"name": "a\n\u{1b}[31m", "email": "a@b"});
    let prompt = json!({"text": "x", "author": author});
    problem(&server.post(&format!("{path}/prompts"), &[], prompt).await, 422, "invalid_body");
    let create = json!({"repository": "calc", "author": author});
    problem(&server.post("/v1/sessions", &[], create).await, 422, "invalid_body");
    let json = [("content-type", "application/json")];
    problem(
        &server.request("PUT", "/v1/secrets/KEY", &json, r#"{"value":""}"#).await,
        422,
        "invalid_body",
    );
    problem(&server.post("/v1/sessions", &[], json!(["calc"])).await, 422, "invalid_body");
    for limit in ["0", "201"] {
        let path = format!("/v1/sessions?limit={limit}");
        problem(&server.request("GET", &path, &[], "").await, 400, "invalid_query");
    }
}

#[tokio::test]
async fn websocket_needs_an_upgrade_and_the_same_origin() {
    let server = TestServer::start().await;
    let path = "/v1/sessions/ses_000000000000/pty";
    problem(&server.request("GET", path, &[], "").await, 426, "upgrade_required");
    problem(
        &server.request("GET", &format!("{path}?rows=none"), &[], "").await,
        426,
        "upgrade_required",
    );
    for origin in ["https://evil.example", "null", "http://127.0.0.1:8080"] {
        let headers = [("origin", origin), ("connection", "upgrade"), ("upgrade", "websocket")];
        problem(&server.request("GET", path, &headers, "").await, 403, "origin_not_allowed");
    }
    problem(&server.request_as(None, "GET", path, &[], "").await, 401, "unauthorized");
}

#[tokio::test]
async fn unknown_tokens_are_rejected() {
    let server = TestServer::start().await;
    for token in [None, Some("hv_wrong"), Some("")] {
        let response = server.request_as(token, "GET", "/v1/sessions", &[], "").await;
        problem(&response, 401, "unauthorized");
        assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    }
    for open in ["/healthz", "/readyz", "/metrics", "/v1/openapi.json"] {
        assert_eq!(server.request_as(None, "GET", open, &[], "").await.status, 200, "{open}");
    }
}

#[tokio::test]
async fn unknown_host_names_are_rejected_first() {
    let server = TestServer::start().await;
    let response = server.request("GET", "/healthz", &[("host", "rebound.example:7070")], "").await;
    problem(&response, 421, "host_not_allowed");
    assert_eq!(
        server.request("GET", "/healthz", &[("host", "agents.example.org")], "").await.status,
        200
    );
}

#[tokio::test]
async fn openapi_document_matches_the_routes() {
    let server = TestServer::start().await;
    let page = server.request("GET", "/v1/openapi.json", &[], "").await.json();
    assert!(page["openapi"].as_str().unwrap().starts_with("3.1"), "{}", page["openapi"]);
    for (path, item) in page["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let responses = operation["responses"].as_object().unwrap();
            // 101 is the success of a WebSocket.
            let succeeds = |status: &String| status.starts_with('2') || status == "101";
            assert!(responses.keys().any(succeeds), "{method} {path} never succeeds");
            assert!(responses.contains_key("429"), "{method} {path} declares no errors");
            assert!(!responses.contains_key("default"), "{method} {path} has a `default` response");
            assert!(
                responses
                    .values()
                    .all(|one| one["description"].is_string() || one["$ref"].is_string()),
                "{method} {path}"
            );
            // Without a token a known route answers 401, an unknown one 404.
            let path = path
                .replace("{session}", "ses_000000000000")
                .replace("{prompt}", "prm_000000000000");
            let path = path.replace("{turn}", "1");
            let path = path
                .replace("{sandbox}", "sbx_000000000000")
                .replace("{snapshot}", "snp_000000000000");
            let response = server
                .request_as(None, &method.to_uppercase(), &path.replace("{name}", "x"), &[], "")
                .await;
            assert!([200, 401].contains(&response.status), "{method} {path}: {response:?}");
        }
    }
    check_references(&page, &page);
}

/// Asserts that every `$ref` resolves.
fn check_references(page: &Value, part: &Value) {
    match part {
        Value::Object(fields) => {
            if let Some(Value::String(target)) = fields.get("$ref") {
                assert!(
                    page.pointer(target.trim_start_matches('#')).is_some(),
                    "{target} does not resolve"
                );
            }
            fields.values().for_each(|field| check_references(page, field));
        }
        Value::Array(items) => items.iter().for_each(|item| check_references(page, item)),
        _ => {}
    }
}

#[tokio::test]
async fn idempotency_key_creates_one_session() {
    let server = TestServer::start().await;
    server.repository().await;
    let ask = |body: Value| server.post("/v1/sessions", &[("idempotency-key", "k1")], body);
    let first = ask(json!({"repository": "calc"})).await;
    assert_eq!(first.status, 201, "{first:?}");
    let again = ask(json!({"repository": "calc"})).await;
    assert_eq!((again.status, again.json()["id"].clone()), (201, first.json()["id"].clone()));
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    let location = format!("/v1/sessions/{}", first.json()["id"].as_str().unwrap());
    for response in [&first, &again] {
        assert_eq!(response.header("location"), Some(location.as_str()));
    }
    problem(&ask(json!({"repository": "calc", "prompt": "x"})).await, 422, "key_reused");
    assert_eq!(
        server.request("GET", "/v1/sessions", &[], "").await.json()["items"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

#[tokio::test]
async fn wrong_queries_are_explained_in_words() {
    let server = TestServer::start().await;
    for (query, reason) in
        [("state=nosuch", "unknown value `nosuch`"), ("stat=idle", "unknown parameter `stat`")]
    {
        let refused = server.request("GET", &format!("/v1/sessions?{query}"), &[], "").await;
        problem(&refused, 400, "invalid_query");
        let detail = refused.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.starts_with("invalid query: ") && detail.contains(reason), "{detail}");
    }
}

#[tokio::test]
async fn key_of_a_failed_request_is_reusable() {
    let server = TestServer::start().await;
    let ask =
        || server.post("/v1/sessions", &[("idempotency-key", "k1")], json!({"repository": "calc"}));
    problem(&ask().await, 404, "not_found");
    server.repository().await;
    assert_eq!(ask().await.status, 201);
}

#[tokio::test]
async fn stream_resumes_after_the_last_event_seen() {
    let server = TestServer::start().await;
    server.repository().await;
    let session = server
        .post("/v1/sessions", &[], json!({"repository": "calc", "prompt": "hello"}))
        .await
        .json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let frames = server.frames(&path, &[], 3).await;
    assert_eq!((frames[0].event.as_deref(), frames[0].id.as_deref()), (Some("snapshot"), None));
    assert_eq!(frames[0].data["id"], session["id"]);
    assert_eq!([frames[1].id.as_deref(), frames[2].id.as_deref()], [Some("1"), Some("2")]);
    assert_eq!(frames[1].data["seq"], 1);
    let resumed = server.frames(&path, &[("last-event-id", "1")], 2).await;
    assert_eq!(resumed[0].event.as_deref(), Some("snapshot"));
    assert_eq!(resumed[1].data, frames[2].data);
    let queried = server.frames(&format!("{path}?after=1"), &[], 2).await;
    assert_eq!(queried[1].data, frames[2].data);
}

#[tokio::test]
async fn event_page_has_a_cursor() {
    let server = TestServer::start().await;
    server.repository().await;
    let session = server
        .post("/v1/sessions", &[], json!({"repository": "calc", "prompt": "hello"}))
        .await
        .json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let page = server.request("GET", &format!("{path}?limit=1"), &[], "").await.json();
    assert_eq!(
        (page["items"][0]["seq"].as_u64(), page["next_cursor"].as_str()),
        (Some(1), Some("1"))
    );
    problem(
        &server.request("GET", &format!("{path}?after=999999"), &[], "").await,
        410,
        "cursor_gone",
    );
    problem(
        &server.request("GET", &path, &[("last-event-id", "yesterday")], "").await,
        400,
        "invalid_cursor",
    );
}

#[tokio::test]
async fn open_stream_does_not_delay_shutdown() {
    let server = TestServer::start().await;
    server.repository().await;
    let session = server.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let mut follower = server.follow(&path, &[]).await;
    follower.frame().await.unwrap();
    server.shut_down().await;
    while follower.frame().await.is_some() {}
}

#[tokio::test]
async fn secret_values_are_never_returned() {
    let server = TestServer::start().await;
    let path = "/v1/secrets/ANTHROPIC_API_KEY";
    let json = [("content-type", "application/json")];
    let stored = server.request("PUT", path, &json, r#"{"value":"sk-ant-very-secret"}"#).await;
    assert_eq!(stored.status, 204, "{stored:?}");
    let listed = server.request("GET", "/v1/secrets", &[], "").await;
    let (names, first) = (listed.json()["items"].clone(), &listed.json()["items"][0]);
    assert_eq!(names.as_array().unwrap().len(), 1);
    assert_eq!((&first["name"], &first["scope"]), (&json!("ANTHROPIC_API_KEY"), &json!("global")));
    assert!(!listed.text().contains("very-secret"));
    problem(&server.request("GET", path, &[], "").await, 405, "method_not_allowed");
    assert_eq!(server.request("DELETE", path, &[], "").await.status, 204);
    assert_eq!(server.request("GET", "/v1/secrets", &[], "").await.json()["items"], json!([]));
}

#[tokio::test]
async fn too_long_prompt_creates_no_session() {
    let server = TestServer::start().await;
    server.repository().await;
    let text = "x".repeat(64_001);
    let refused =
        server.post("/v1/sessions", &[], json!({"repository": "calc", "prompt": text})).await;
    assert!((400..500).contains(&refused.status), "{}", refused.status);
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    assert_eq!(server.request("GET", "/v1/sessions", &[], "").await.json()["items"], json!([]));
}

#[tokio::test]
async fn sessions_can_be_filtered() {
    let server = TestServer::start().await;
    server.repository().await;
    let create = |body: Value| server.post("/v1/sessions", &[], body);
    let mine =
        create(json!({"repository": "calc", "prompt": "Fix 100% of it", "key": "issue 12"})).await;
    assert_eq!(mine.status, 201, "{mine:?}");
    let mine = mine.json();
    create(json!({"prompt": "another thing", "env": {"MODE": "fast"}})).await;
    let found = async |query: &str| {
        let page = server.request("GET", &format!("/v1/sessions?{query}"), &[], "").await.json();
        page["items"].as_array().unwrap().iter().map(|item| item["id"].clone()).collect::<Vec<_>>()
    };
    for query in [
        "repository=calc",
        "repository=local/calc",
        "q=100%25%20OF",
        "key=issue%2012",
        "repository=calc&q=fix&limit=1",
    ] {
        assert_eq!(found(query).await, [mine["id"].clone()], "{query}");
    }
    for query in ["state=archived", "q=100_", "key=issue", "q=thing&repository=calc"] {
        assert_eq!(found(query).await, Vec::<Value>::new(), "{query}");
    }
    assert_eq!(found("q=").await.len(), 2);
    let unknown = server.request("GET", "/v1/sessions?repository=acme/calc", &[], "").await;
    problem(&unknown, 404, "not_found");
    for query in ["state=sleeping", "q=%00", "nope=1", "repository=../calc"] {
        problem(
            &server.request("GET", &format!("/v1/sessions?{query}"), &[], "").await,
            400,
            "invalid_query",
        );
    }
    let taken = create(json!({"repository": "calc", "key": "issue 12"})).await;
    problem(&taken, 409, "key_taken");
    assert!(taken.json()["detail"].as_str().unwrap().contains(mine["id"].as_str().unwrap()));
}

#[tokio::test]
async fn repositories_of_one_name_live_side_by_side() {
    let server = TestServer::start().await;
    for owner in ["a", "b"] {
        let url = format!("http://127.0.0.1:1/{owner}/app.git");
        let added = server.post("/v1/repositories", &[], json!({ "url": url })).await;
        assert_eq!(added.json()["name"], format!("{owner}/app"), "{added:?}");
    }
    let get = async |path: &str| server.request("GET", path, &[], "").await;
    assert_eq!(get("/v1/repositories/b/app").await.json()["url"], "http://127.0.0.1:1/b/app.git");
    assert_eq!(get("/v1/repositories?name=b/app").await.json()["items"][0]["name"], "b/app");
    let ambiguous = [
        get("/v1/repositories?name=app").await,
        get("/v1/sessions?repository=app").await,
        server.post("/v1/sessions", &[], json!({"repository": "app"})).await,
        server.post("/v1/sessions", &[], json!({"repositories": [{"name": "app"}]})).await,
    ];
    for answer in ambiguous {
        problem(&answer, 409, "ambiguous_name");
        assert!(answer.json()["detail"].as_str().unwrap().contains("a/app, b/app"), "{answer:?}");
    }
    let removed = server.request("DELETE", "/v1/repositories/a/app", &[], "").await;
    assert_eq!(removed.status, 204);
    assert_eq!(get("/v1/repositories?name=app").await.json()["items"][0]["name"], "b/app");
    for unknown in ["/v1/repositories/a/app", "/v1/repositories/a/..app"] {
        problem(&get(unknown).await, 404, "not_found");
    }
}

#[tokio::test]
async fn session_shows_its_creation_parameters() {
    let server = TestServer::start().await;
    server.repository().await;
    let body = json!({"repositories": [{"name": "calc", "base": "next"}], "env": {"MODE": "fast"}, "key": "k"});
    let session = server.post("/v1/sessions", &[], body).await.json();
    let shown = json!([{"name": "local/calc", "folder": "/workspace/calc",
                        "url": "http://127.0.0.1:1/calc.git", "base": "next",
                        "branch": session["branch"], "pr": null}]);
    assert_eq!(session["repositories"], shown);
    assert_eq!((&session["env"], &session["key"]), (&json!(["MODE"]), &json!("k")));
    let repository = ["repository", "repo_owner", "repo_name"].map(|field| session[field].clone());
    assert_eq!(repository, ["local/calc", "local", "calc"]);
    assert!(!session.to_string().contains("fast"), "values are not shown: {session}");
    for field in ["snapshot_id", "pr_number", "pr_url", "forked_from", "forked_turn"] {
        assert_eq!(session.get(field), Some(&Value::Null), "{field}");
    }
    for (body, code) in [
        (json!({"repository": "calc", "repositories": [{"name": "calc"}]}), "invalid_repositories"),
        (json!({"env": {"A B": ""}}), "invalid_env"),
        (json!({"key": ""}), "invalid_key"),
        (
            json!({"repositories": [{"name": "calc", "url": "http://h/calc"}]}),
            "invalid_repositories",
        ),
    ] {
        problem(&server.post("/v1/sessions", &[], body).await, 422, code);
    }
    problem(
        &server.post("/v1/sessions", &[], json!({"from": "snp_000000000000"})).await,
        404,
        "not_found",
    );
    server.fake.remove_image("nope");
    let image = json!({"url": "http://127.0.0.1:1/other.git", "image": "nope"});
    let refused = server.post("/v1/repositories", &[], image).await;
    assert_eq!(
        (
            refused.json()["code"].clone(),
            server.request("GET", "/v1/repositories/local/other", &[], "").await.status
        ),
        (json!("not_found"), 404)
    );
    assert!((400..500).contains(&refused.status), "{refused:?}");
}
