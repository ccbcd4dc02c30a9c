//! Tokens and roles as clients meet them.

use serde_json::{Value, json};

use crate::{
    host::{Answer, Host},
    problem,
};

/// A token of somebody else: its value.
async fn member(host: &Host, name: &str) -> String {
    let user = json!({"name": name, "email": format!("{name}@example.org")});
    let made = host.post("/v1/tokens", &[], json!({"name": name, "user": user})).await;
    assert_eq!((made.status, made.json()["role"].as_str()), (201, Some("member")), "{made:?}");
    made.json()["value"].as_str().unwrap().to_owned()
}

async fn send(host: &Host, token: &str, method: &str, path: &str, body: Value) -> Answer {
    let json = [("content-type", "application/json")];
    host.ask_as(Some(token), method, path, &json, &body.to_string()).await
}

#[tokio::test]
async fn a_member_sees_every_session_and_changes_only_their_own() {
    let host = Host::start().await;
    host.repository().await;
    let bob = member(&host, "bob").await;
    let theirs = host.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let theirs = theirs["id"].as_str().unwrap();
    let own = send(&host, &bob, "POST", "/v1/sessions", json!({"repository": "calc"})).await.json();
    assert_eq!(own["author"]["email"], "bob@example.org");
    let own = own["id"].as_str().unwrap();

    let seen = send(&host, &bob, "GET", "/v1/sessions", json!({})).await.json();
    assert_eq!(seen["items"].as_array().unwrap().len(), 2);
    assert_eq!(
        send(&host, &bob, "GET", &format!("/v1/sessions/{theirs}"), json!({})).await.status,
        200
    );
    let prompt = json!({"text": "x"});
    let path = |id: &str, rest: &str| format!("/v1/sessions/{id}{rest}");
    problem(
        &send(&host, &bob, "POST", &path(theirs, "/prompts"), prompt.clone()).await,
        403,
        "forbidden",
    );
    problem(&send(&host, &bob, "POST", &path(theirs, "/stop"), json!({})).await, 403, "forbidden");
    problem(&send(&host, &bob, "DELETE", &path(theirs, ""), json!({})).await, 403, "forbidden");
    // What runs in a fork reads every file, and every variable the session was given.
    problem(&send(&host, &bob, "POST", &path(theirs, "/fork"), json!({})).await, 403, "forbidden");
    let from = json!({"repository": "calc", "from": "snp_000000000000"});
    problem(&send(&host, &bob, "POST", "/v1/sessions", from.clone()).await, 403, "forbidden");
    problem(&host.post("/v1/sessions", &[], from).await, 404, "not_found");
    // The same id, written so that only the router reads it.
    let disguised = theirs.replacen("ses", "%73es", 1);
    problem(&send(&host, &bob, "DELETE", &path(&disguised, ""), json!({})).await, 404, "not_found");
    problem(
        &send(&host, &bob, "DELETE", "/v1/sessions/ses_000000000000", json!({})).await,
        404,
        "not_found",
    );
    assert_eq!(send(&host, &bob, "POST", &path(own, "/prompts"), prompt).await.status, 202);
    assert_eq!(send(&host, &bob, "DELETE", &path(own, ""), json!({})).await.status, 204);
    assert_eq!(host.ask("DELETE", &path(theirs, ""), &[], "").await.status, 204);
}

#[tokio::test]
async fn what_is_everybodys_is_the_admins() {
    let host = Host::start().await;
    host.repository().await;
    let bob = member(&host, "bob").await;
    for (method, path) in [
        ("GET", "/v1/secrets"),
        ("PUT", "/v1/secrets/KEY"),
        ("DELETE", "/v1/secrets/KEY"),
        ("DELETE", "/v1/repositories/calc"),
        ("POST", "/v1/repositories/calc/build"),
    ] {
        problem(&send(&host, &bob, method, path, json!({"value": "x"})).await, 403, "forbidden");
    }
    let add = |body| send(&host, &bob, "POST", "/v1/repositories", body);
    // Else the vault's secret would be sent wherever a member says.
    let greedy = json!({"url": "http://127.0.0.1:1/a.git", "secret": "KEY"});
    problem(&add(greedy).await, 403, "forbidden");
    assert_eq!(add(json!({"url": "https://git.example.org/a.git"})).await.status, 201);
    // Nor may the gateway be sent to what only this machine reaches.
    problem(&add(json!({"url": "http://169.254.169.254/b.git"})).await, 403, "forbidden");
    let run = json!({"repositories": [{"url": "http://localhost:1/c.git"}]});
    problem(&send(&host, &bob, "POST", "/v1/sessions", run).await, 403, "forbidden");
}

#[tokio::test]
async fn only_an_admin_speaks_in_anothers_name() {
    let host = Host::start().await;
    host.repository().await;
    let bob = member(&host, "bob").await;
    let eve = json!({"name": "Eve", "email": "eve@example.org"});
    let create = json!({"repository": "calc", "author": eve});
    problem(
        &send(&host, &bob, "POST", "/v1/sessions", create.clone()).await,
        403,
        "author_not_allowed",
    );
    let own = send(&host, &bob, "POST", "/v1/sessions", json!({"repository": "calc"})).await.json();
    let prompts = format!("/v1/sessions/{}/prompts", own["id"].as_str().unwrap());
    let prompt = json!({"text": "x", "author": eve});
    problem(&send(&host, &bob, "POST", &prompts, prompt.clone()).await, 403, "author_not_allowed");
    assert_eq!(host.post("/v1/sessions", &[], create).await.json()["author"], eve);
    assert_eq!(host.post(&prompts, &[], prompt).await.status, 202);
}

#[tokio::test]
async fn a_token_shows_its_value_once_and_opens_nothing_once_it_is_revoked() {
    let host = Host::start().await;
    host.repository().await;
    let (bob, eve) = (member(&host, "bob").await, member(&host, "eve").await);
    let me = send(&host, &bob, "GET", "/v1/me", json!({})).await.json();
    let expected = json!({"user": {"name": "bob", "email": "bob@example.org"}, "role": "member", "token": "bob"});
    assert_eq!(me, expected);
    let all = host.ask("GET", "/v1/tokens", &[], "").await;
    assert!(!format!("{all:?}").contains("hvt_"), "{all:?}");
    assert_eq!(all.json()["items"].as_array().unwrap().len(), 3);
    let own = send(&host, &bob, "GET", "/v1/tokens", json!({})).await.json();
    assert_eq!(
        (own["items"].as_array().unwrap().len(), own["items"][0]["name"].as_str()),
        (1, Some("bob"))
    );

    problem(
        &send(&host, &bob, "POST", "/v1/tokens", json!({"name": "x", "role": "admin"})).await,
        403,
        "forbidden",
    );
    problem(&send(&host, &bob, "DELETE", "/v1/tokens/eve", json!({})).await, 403, "forbidden");
    problem(&host.post("/v1/tokens", &[], json!({"name": "bob"})).await, 409, "exists");
    problem(&host.post("/v1/tokens", &[], json!({"name": "a/b"})).await, 422, "invalid_name");
    problem(&host.ask("DELETE", "/v1/tokens/first", &[], "").await, 409, "last_admin");

    // Who follows a session with a token is cut off with it.
    let session =
        send(&host, &eve, "POST", "/v1/sessions", json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let mut follower = host.follow_as(&eve, &path).await;
    follower.frame().await.unwrap();
    assert_eq!(host.ask("DELETE", "/v1/tokens/eve", &[], "").await.status, 204);
    while follower.frame().await.is_some() {}
    problem(&send(&host, &eve, "GET", "/v1/me", json!({})).await, 401, "unauthorized");
    problem(&host.ask("DELETE", "/v1/tokens/eve", &[], "").await, 404, "not_found");
    assert_eq!(send(&host, &bob, "DELETE", "/v1/tokens/bob", json!({})).await.status, 204);
    problem(&send(&host, &bob, "GET", "/v1/me", json!({})).await, 401, "unauthorized");
}
