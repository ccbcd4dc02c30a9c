//! The API over a real socket: every error is a problem, tokens and hosts are checked, streams resume
//! where they were left, and the OpenAPI page tells the truth.
#![expect(clippy::unwrap_used, reason = "what a test cannot do without may fail loudly")]

#[path = "api/guards.rs"]
mod guards;
#[path = "api/health.rs"]
mod health;
mod host;
mod machines;
#[path = "api/people.rs"]
mod people;

use std::collections::BTreeSet;

use host::{Answer, Host};
use serde_json::{Value, json};

fn problem(answer: &Answer, status: u16, code: &str) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    let problem = answer.json();
    assert_eq!(problem["code"], code, "{answer:?}");
    assert_eq!(problem["status"], status);
    assert_eq!(problem["request_id"].as_str(), answer.header("x-request-id"));
    for field in ["type", "title", "detail"] {
        assert!(
            problem[field].as_str().is_some_and(|text| !text.is_empty()),
            "{field} in {answer:?}"
        );
    }
}

#[tokio::test]
async fn every_error_is_a_problem() {
    let host = Host::start().await;
    let json = [("content-type", "application/json")];
    let ask = |method, path, headers: &'static [(&str, &str)], body: &'static str| {
        host.ask(method, path, headers, body)
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
    problem(&host.ask("POST", "/v1/sessions", &json, "{").await, 400, "invalid_json");
    problem(&host.ask("POST", "/v1/sessions", &json, r#"{"env":1}"#).await, 422, "invalid_body");
    problem(
        &host.ask("POST", "/v1/sessions", &json, r#"{"repository":"calc","x":1}"#).await,
        422,
        "invalid_body",
    );
    problem(
        &host.ask("POST", "/v1/sessions", &json, &"x".repeat(1024 * 1024 + 1)).await,
        413,
        "too_large",
    );
    problem(
        &host.ask("POST", "/v1/sessions", &json, r#"{"repository":"nobody"}"#).await,
        404,
        "not_found",
    );
}

#[tokio::test]
async fn a_body_that_could_harm_what_is_behind_it_is_refused() {
    let host = Host::start().await;
    host.repository().await;
    let session = host.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}", session["id"].as_str().unwrap());
    for body in [
        json!({"argv": []}),
        json!({"argv": ["a\0b"]}),
        json!({"argv": ["a"], "env": {"A=B": "c"}}),
    ] {
        problem(&host.post(&format!("{path}/exec"), &[], body).await, 422, "invalid_body");
    }
    let author = json!({"name": "a\n\u{1b}[31m", "email": "a@b"});
    let prompt = json!({"text": "x", "author": author});
    problem(&host.post(&format!("{path}/prompts"), &[], prompt).await, 422, "invalid_body");
    let create = json!({"repository": "calc", "author": author});
    problem(&host.post("/v1/sessions", &[], create).await, 422, "invalid_body");
    let json = [("content-type", "application/json")];
    problem(
        &host.ask("PUT", "/v1/secrets/KEY", &json, r#"{"value":""}"#).await,
        422,
        "invalid_body",
    );
    problem(&host.post("/v1/sessions", &[], json!(["calc"])).await, 422, "invalid_body");
    for limit in ["0", "201"] {
        let path = format!("/v1/sessions?limit={limit}");
        problem(&host.ask("GET", &path, &[], "").await, 400, "invalid_query");
    }
}

#[tokio::test]
async fn a_socket_is_opened_by_an_upgrade_and_not_for_another_sites_page() {
    let host = Host::start().await;
    let path = "/v1/sessions/ses_000000000000/pty";
    problem(&host.ask("GET", path, &[], "").await, 426, "upgrade_required");
    problem(&host.ask("GET", &format!("{path}?rows=none"), &[], "").await, 426, "upgrade_required");
    for origin in ["https://evil.example", "null", "http://127.0.0.1:8080"] {
        let headers = [("origin", origin), ("connection", "upgrade"), ("upgrade", "websocket")];
        problem(&host.ask("GET", path, &headers, "").await, 403, "origin_not_allowed");
    }
    problem(&host.ask_as(None, "GET", path, &[], "").await, 401, "unauthorized");
}

#[tokio::test]
async fn a_request_without_a_known_token_is_refused() {
    let host = Host::start().await;
    for token in [None, Some("hv_wrong"), Some("")] {
        let answer = host.ask_as(token, "GET", "/v1/sessions", &[], "").await;
        problem(&answer, 401, "unauthorized");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    for open in ["/healthz", "/readyz", "/metrics", "/v1/openapi.json"] {
        assert_eq!(host.ask_as(None, "GET", open, &[], "").await.status, 200, "{open}");
    }
}

#[tokio::test]
async fn a_name_that_is_not_this_servers_is_refused_before_anything_else() {
    let host = Host::start().await;
    let answer = host.ask("GET", "/healthz", &[("host", "rebound.example:7070")], "").await;
    problem(&answer, 421, "host_not_allowed");
    assert_eq!(
        host.ask("GET", "/healthz", &[("host", "agents.example.org")], "").await.status,
        200
    );
}

#[tokio::test]
async fn the_openapi_page_has_every_route_and_each_of_them_answers() {
    let host = Host::start().await;
    let page = host.ask("GET", "/v1/openapi.json", &[], "").await.json();
    assert!(page["openapi"].as_str().unwrap().starts_with("3.1"), "{}", page["openapi"]);
    for (path, item) in page["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let responses = operation["responses"].as_object().unwrap();
            // A socket's success is 101.
            let succeeds = |status: &String| status.starts_with('2') || status == "101";
            assert!(responses.keys().any(succeeds), "{method} {path} never succeeds");
            assert!(responses.contains_key("429"), "{method} {path} does not say how it fails");
            assert!(
                !responses.contains_key("default"),
                "{method} {path} says that it may answer anything"
            );
            assert!(
                responses.values().all(|response| response["description"].is_string()),
                "{method} {path}"
            );
            // Without a token nothing is carried out, but an unknown route would say so.
            let path = path
                .replace("{session}", "ses_000000000000")
                .replace("{prompt}", "prm_000000000000");
            let path = path.replace("{turn}", "1");
            let path = path
                .replace("{sandbox}", "sbx_000000000000")
                .replace("{snapshot}", "snp_000000000000");
            let answer = host
                .ask_as(None, &method.to_uppercase(), &path.replace("{name}", "x"), &[], "")
                .await;
            assert!([200, 401].contains(&answer.status), "{method} {path}: {answer:?}");
        }
    }
    let described: BTreeSet<String> = page["paths"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(described, routes(), "the router and the page name the same paths");
    dangling(&page, &page);
}

/// The paths of the router, as they are written down in it.
fn routes() -> BTreeSet<String> {
    let mut routes = BTreeSet::new();
    for source in ["mod.rs", "machines/mod.rs"] {
        let source = format!("{}/src/routes/{source}", env!("CARGO_MANIFEST_DIR"));
        let text: String = std::fs::read_to_string(source).unwrap().split_whitespace().collect();
        let paths =
            text.split(".route(\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned());
        routes.extend(paths);
    }
    routes
}

/// Every `$ref` leads somewhere.
fn dangling(page: &Value, part: &Value) {
    match part {
        Value::Object(fields) => {
            if let Some(Value::String(target)) = fields.get("$ref") {
                assert!(
                    page.pointer(target.trim_start_matches('#')).is_some(),
                    "{target} is not there"
                );
            }
            fields.values().for_each(|field| dangling(page, field));
        }
        Value::Array(items) => items.iter().for_each(|item| dangling(page, item)),
        _ => {}
    }
}

#[tokio::test]
async fn a_key_creates_once_and_is_good_for_one_request() {
    let host = Host::start().await;
    host.repository().await;
    let ask = |body: Value| host.post("/v1/sessions", &[("idempotency-key", "k1")], body);
    let first = ask(json!({"repository": "calc"})).await;
    assert_eq!(first.status, 201, "{first:?}");
    let again = ask(json!({"repository": "calc"})).await;
    assert_eq!((again.status, again.json()["id"].clone()), (201, first.json()["id"].clone()));
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    problem(&ask(json!({"repository": "calc", "prompt": "x"})).await, 422, "key_reused");
    assert_eq!(
        host.ask("GET", "/v1/sessions", &[], "").await.json()["items"].as_array().unwrap().len(),
        1
    );
}

#[tokio::test]
async fn a_key_of_a_failed_request_may_be_used_again() {
    let host = Host::start().await;
    let ask =
        || host.post("/v1/sessions", &[("idempotency-key", "k1")], json!({"repository": "calc"}));
    problem(&ask().await, 404, "not_found");
    host.repository().await;
    assert_eq!(ask().await.status, 201);
}

#[tokio::test]
async fn a_stream_begins_with_the_session_and_resumes_after_the_last_event_seen() {
    let host = Host::start().await;
    host.repository().await;
    let session = host
        .post("/v1/sessions", &[], json!({"repository": "calc", "prompt": "hello"}))
        .await
        .json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let frames = host.frames(&path, &[], 3).await;
    assert_eq!((frames[0].event.as_deref(), frames[0].id.as_deref()), (Some("snapshot"), None));
    assert_eq!(frames[0].data["id"], session["id"]);
    assert_eq!([frames[1].id.as_deref(), frames[2].id.as_deref()], [Some("1"), Some("2")]);
    assert_eq!(frames[1].data["seq"], 1);
    let resumed = host.frames(&path, &[("last-event-id", "1")], 2).await;
    assert_eq!(resumed[0].event.as_deref(), Some("snapshot"));
    assert_eq!(resumed[1].data, frames[2].data);
    let queried = host.frames(&format!("{path}?after=1"), &[], 2).await;
    assert_eq!(queried[1].data, frames[2].data);
}

#[tokio::test]
async fn a_page_of_events_says_where_it_goes_on() {
    let host = Host::start().await;
    host.repository().await;
    let session = host
        .post("/v1/sessions", &[], json!({"repository": "calc", "prompt": "hello"}))
        .await
        .json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let page = host.ask("GET", &format!("{path}?limit=1"), &[], "").await.json();
    assert_eq!(
        (page["items"][0]["seq"].as_u64(), page["next_cursor"].as_str()),
        (Some(1), Some("1"))
    );
    problem(&host.ask("GET", &format!("{path}?after=999999"), &[], "").await, 410, "cursor_gone");
    problem(
        &host.ask("GET", &path, &[("last-event-id", "yesterday")], "").await,
        400,
        "invalid_cursor",
    );
}

#[tokio::test]
async fn a_follower_does_not_hold_up_the_servers_end() {
    let host = Host::start().await;
    host.repository().await;
    let session = host.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let mut follower = host.follow(&path, &[]).await;
    follower.frame().await.unwrap();
    host.end().await;
    while follower.frame().await.is_some() {}
}

#[tokio::test]
async fn a_secret_goes_in_and_never_comes_out() {
    let host = Host::start().await;
    let path = "/v1/secrets/ANTHROPIC_API_KEY";
    let json = [("content-type", "application/json")];
    let stored = host.ask("PUT", path, &json, r#"{"value":"sk-ant-very-secret"}"#).await;
    assert_eq!(stored.status, 204, "{stored:?}");
    let listed = host.ask("GET", "/v1/secrets", &[], "").await;
    assert_eq!(listed.json()["items"], json!(["ANTHROPIC_API_KEY"]));
    problem(&host.ask("GET", path, &[], "").await, 405, "method_not_allowed");
    assert_eq!(host.ask("DELETE", path, &[], "").await.status, 204);
    assert_eq!(host.ask("GET", "/v1/secrets", &[], "").await.json()["items"], json!([]));
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_refused_whole() {
    let host = Host::start().await;
    host.repository().await;
    let text = "x".repeat(64_001);
    let refused =
        host.post("/v1/sessions", &[], json!({"repository": "calc", "prompt": text})).await;
    assert!((400..500).contains(&refused.status), "{}", refused.status);
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    assert_eq!(host.ask("GET", "/v1/sessions", &[], "").await.json()["items"], json!([]));
}

#[tokio::test]
async fn sessions_are_found_by_state_repository_title_and_key() {
    let host = Host::start().await;
    host.repository().await;
    let create = |body: Value| host.post("/v1/sessions", &[], body);
    let mine =
        create(json!({"repository": "calc", "prompt": "Fix 100% of it", "key": "issue 12"})).await;
    assert_eq!(mine.status, 201, "{mine:?}");
    let mine = mine.json();
    create(json!({"prompt": "another thing", "env": {"MODE": "fast"}})).await;
    let found = async |query: &str| {
        let page = host.ask("GET", &format!("/v1/sessions?{query}"), &[], "").await.json();
        page["items"].as_array().unwrap().iter().map(|item| item["id"].clone()).collect::<Vec<_>>()
    };
    for query in
        ["repository=calc", "q=100%25%20OF", "key=issue%2012", "repository=calc&q=fix&limit=1"]
    {
        assert_eq!(found(query).await, [mine["id"].clone()], "{query}");
    }
    for query in
        ["state=archived", "repository=nope", "q=100_", "key=issue", "q=thing&repository=calc"]
    {
        assert_eq!(found(query).await, Vec::<Value>::new(), "{query}");
    }
    assert_eq!(found("q=").await.len(), 2);
    for query in ["state=sleeping", "q=%00", "nope=1"] {
        problem(
            &host.ask("GET", &format!("/v1/sessions?{query}"), &[], "").await,
            400,
            "invalid_query",
        );
    }
    let taken = create(json!({"repository": "calc", "key": "issue 12"})).await;
    problem(&taken, 409, "key_taken");
    assert!(taken.json()["detail"].as_str().unwrap().contains(mine["id"].as_str().unwrap()));
}

#[tokio::test]
async fn a_session_reads_back_as_what_it_was_made_from() {
    let host = Host::start().await;
    host.repository().await;
    let body = json!({"repositories": [{"name": "calc", "base": "next"}], "env": {"MODE": "fast"}, "key": "k"});
    let session = host.post("/v1/sessions", &[], body).await.json();
    let shown = json!([{"name": "calc", "url": "http://127.0.0.1:1/calc.git", "base": "next",
                        "branch": session["branch"], "pull": null}]);
    assert_eq!(session["repositories"], shown);
    assert_eq!((&session["env"], &session["key"]), (&json!(["MODE"]), &json!("k")));
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
        problem(&host.post("/v1/sessions", &[], body).await, 422, code);
    }
    problem(
        &host.post("/v1/sessions", &[], json!({"from": "snp_000000000000"})).await,
        404,
        "not_found",
    );
    let image = json!({"url": "http://127.0.0.1:1/other.git", "image": "nope"});
    let refused = host.post("/v1/repositories", &[], image).await;
    assert_eq!(
        (
            refused.json()["code"].clone(),
            host.ask("GET", "/v1/repositories/other", &[], "").await.status
        ),
        (json!("not_found"), 404)
    );
    assert!((400..500).contains(&refused.status), "{refused:?}");
}
