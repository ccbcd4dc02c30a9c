//! Tokens and roles over the API.

use harvest_server::Limits;
use serde_json::{Value, json};

use crate::{
    problem,
    test_server::{ApiResponse, TestServer},
};

/// Creates a member and returns their token.
pub(crate) async fn member(server: &TestServer, name: &str) -> String {
    let user = json!({"name": name, "email": format!("{name}@example.org")});
    let made = server.post("/v1/tokens", &[], json!({"name": name, "user": user})).await;
    assert_eq!((made.status, made.json()["role"].as_str()), (201, Some("member")), "{made:?}");
    made.json()["value"].as_str().unwrap().to_owned()
}

async fn send(
    server: &TestServer,
    token: &str,
    method: &str,
    path: &str,
    body: Value,
) -> ApiResponse {
    let json = [("content-type", "application/json")];
    server.request_as(Some(token), method, path, &json, &body.to_string()).await
}

#[tokio::test]
async fn members_change_only_their_own_sessions() {
    let server = TestServer::start().await;
    server.repository().await;
    let bob = member(&server, "bob").await;
    let theirs = server.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let theirs = theirs["id"].as_str().unwrap();
    let own =
        send(&server, &bob, "POST", "/v1/sessions", json!({"repository": "calc"})).await.json();
    assert_eq!(own["author"]["email"], "bob@example.org");
    let own = own["id"].as_str().unwrap();

    let seen = send(&server, &bob, "GET", "/v1/sessions", json!({})).await.json();
    assert_eq!(seen["items"].as_array().unwrap().len(), 2);
    assert_eq!(
        send(&server, &bob, "GET", &format!("/v1/sessions/{theirs}"), json!({})).await.status,
        200
    );
    let prompt = json!({"text": "x"});
    let path = |id: &str, rest: &str| format!("/v1/sessions/{id}{rest}");
    problem(
        &send(&server, &bob, "POST", &path(theirs, "/prompts"), prompt.clone()).await,
        403,
        "forbidden",
    );
    problem(
        &send(&server, &bob, "POST", &path(theirs, "/stop"), json!({})).await,
        403,
        "forbidden",
    );
    problem(&send(&server, &bob, "DELETE", &path(theirs, ""), json!({})).await, 403, "forbidden");
    // What an agent handed over may come from a private file.
    problem(
        &send(&server, &bob, "GET", &path(theirs, "/artifacts/a.png"), json!({})).await,
        403,
        "forbidden",
    );
    // A bundle may start a sandbox on its owner's account.
    problem(
        &send(&server, &bob, "GET", &path(theirs, "/bundle"), json!({})).await,
        403,
        "forbidden",
    );
    // A fork could read every file and environment variable of the session.
    problem(
        &send(&server, &bob, "POST", &path(theirs, "/fork"), json!({})).await,
        403,
        "forbidden",
    );
    let from = json!({"repository": "calc", "from": "snp_000000000000"});
    problem(&send(&server, &bob, "POST", "/v1/sessions", from.clone()).await, 403, "forbidden");
    problem(&server.post("/v1/sessions", &[], from).await, 404, "not_found");
    // The same id with a percent escape, which only the router decodes.
    let disguised = theirs.replacen("ses", "%73es", 1);
    problem(
        &send(&server, &bob, "DELETE", &path(&disguised, ""), json!({})).await,
        404,
        "not_found",
    );
    problem(
        &send(&server, &bob, "DELETE", "/v1/sessions/ses_000000000000", json!({})).await,
        404,
        "not_found",
    );
    assert_eq!(send(&server, &bob, "POST", &path(own, "/prompts"), prompt).await.status, 202);
    assert_eq!(send(&server, &bob, "DELETE", &path(own, ""), json!({})).await.status, 204);
    assert_eq!(server.request("DELETE", &path(theirs, ""), &[], "").await.status, 204);
}

#[tokio::test]
async fn shared_resources_are_for_admins() {
    let server = TestServer::start().await;
    server.repository().await;
    let bob = member(&server, "bob").await;
    for (method, path) in [
        ("PUT", "/v1/secrets/KEY"),
        ("DELETE", "/v1/secrets/KEY"),
        ("PUT", "/v1/repositories/local/calc/secrets/KEY"),
        ("DELETE", "/v1/repositories/local/calc"),
        ("PATCH", "/v1/repositories/local/calc"),
    ] {
        problem(&send(&server, &bob, method, path, json!({"value": "x"})).await, 403, "forbidden");
    }
    let add = |body| send(&server, &bob, "POST", "/v1/repositories", body);
    // Otherwise a member could have a secret sent to any server.
    let greedy = json!({"url": "http://127.0.0.1:1/a.git", "secret": "KEY"});
    problem(&add(greedy).await, 403, "forbidden");
    assert_eq!(add(json!({"url": "https://git.example.org/a.git"})).await.status, 201);
}

#[tokio::test]
async fn members_set_network_rules_of_their_sessions_only() {
    let server = TestServer::start().await;
    server.repository().await;
    let bob = member(&server, "bob").await;
    let create = json!({"repository": "calc"});
    let theirs = server.post("/v1/sessions", &[], create.clone()).await.json();
    let own = send(&server, &bob, "POST", "/v1/sessions", create).await.json();
    let of = |session: &serde_json::Value| {
        format!("/v1/sessions/{}/network/rules/a.org", session["id"].as_str().unwrap())
    };
    for (path, method, status) in [
        (of(&own), "PUT", 200),
        (of(&own), "DELETE", 204),
        (of(&theirs), "PUT", 403),
        (of(&theirs), "DELETE", 403),
        ("/v1/network/rules/a.org".to_owned(), "PUT", 403),
        ("/v1/repositories/local/calc/network/rules/a.org".to_owned(), "PUT", 403),
    ] {
        let answer = send(&server, &bob, method, &path, json!({"verdict": "allow"})).await;
        assert_eq!(answer.status, status, "{method} {path}");
    }
}

#[tokio::test]
async fn repository_at_private_address_is_refused() {
    let server = TestServer::start().await;
    // An admin too: the setting decides.
    for token in [member(&server, "bob").await, server.token.clone()] {
        for url in ["http://169.254.169.254/b.git", "http://loc%61lhost:1/c.git"] {
            for (path, body) in [
                ("/v1/repositories", json!({"url": url})),
                ("/v1/sessions", json!({"repositories": [{"url": url}]})),
                ("/v1/sessions", json!({"repository": url})),
            ] {
                let refused = send(&server, &token, "POST", path, body).await;
                problem(&refused, 422, "private_address");
                let detail = refused.json()["detail"].to_string();
                assert!(detail.contains("private_hosts"), "{detail}");
            }
        }
    }
    let listed = server.request("GET", "/v1/repositories", &[], "").await;
    assert_eq!(listed.json()["items"], json!([]));
}

#[tokio::test]
async fn only_admins_may_set_another_author() {
    let server = TestServer::start().await;
    server.repository().await;
    let bob = member(&server, "bob").await;
    let eve = json!({"name": "Eve", "email": "eve@example.org"});
    let create = json!({"repository": "calc", "author": eve});
    problem(
        &send(&server, &bob, "POST", "/v1/sessions", create.clone()).await,
        403,
        "author_not_allowed",
    );
    let own =
        send(&server, &bob, "POST", "/v1/sessions", json!({"repository": "calc"})).await.json();
    let prompts = format!("/v1/sessions/{}/prompts", own["id"].as_str().unwrap());
    let prompt = json!({"text": "x", "author": eve});
    problem(
        &send(&server, &bob, "POST", &prompts, prompt.clone()).await,
        403,
        "author_not_allowed",
    );
    assert_eq!(server.post("/v1/sessions", &[], create).await.json()["author"], eve);
    assert_eq!(server.post(&prompts, &[], prompt).await.status, 202);
}

#[tokio::test]
async fn revoked_token_closes_streams_and_is_rejected() {
    let server = TestServer::start().await;
    server.repository().await;
    let (bob, eve) = (member(&server, "bob").await, member(&server, "eve").await);
    let me = send(&server, &bob, "GET", "/v1/me", json!({})).await.json();
    let user = json!({"name": "bob", "email": "bob@example.org"});
    assert_eq!((&me["user"], &me["role"], &me["token"]), (&user, &json!("member"), &json!("bob")));
    assert_eq!(me["limits"]["sandboxes"], 2);
    let all = server.request("GET", "/v1/tokens", &[], "").await;
    assert!(!format!("{all:?}").contains("hvt_"), "{all:?}");
    assert_eq!(all.json()["items"].as_array().unwrap().len(), 3);
    let own = send(&server, &bob, "GET", "/v1/tokens", json!({})).await.json();
    assert_eq!(
        (own["items"].as_array().unwrap().len(), own["items"][0]["name"].as_str()),
        (1, Some("bob"))
    );

    problem(
        &send(&server, &bob, "POST", "/v1/tokens", json!({"name": "x", "role": "admin"})).await,
        403,
        "forbidden",
    );
    problem(&send(&server, &bob, "DELETE", "/v1/tokens/eve", json!({})).await, 403, "forbidden");
    problem(&server.post("/v1/tokens", &[], json!({"name": "bob"})).await, 409, "exists");
    problem(&server.post("/v1/tokens", &[], json!({"name": "a/b"})).await, 422, "invalid_name");
    problem(&server.request("DELETE", "/v1/tokens/first", &[], "").await, 409, "last_admin");

    // Revoking a token closes the streams opened with it.
    let session =
        send(&server, &eve, "POST", "/v1/sessions", json!({"repository": "calc"})).await.json();
    let path = format!("/v1/sessions/{}/events", session["id"].as_str().unwrap());
    let mut follower = server.follow_as(&eve, &path).await;
    follower.frame().await.unwrap();
    assert_eq!(server.request("DELETE", "/v1/tokens/eve", &[], "").await.status, 204);
    while follower.frame().await.is_some() {}
    problem(&send(&server, &eve, "GET", "/v1/me", json!({})).await, 401, "unauthorized");
    problem(&server.request("DELETE", "/v1/tokens/eve", &[], "").await, 404, "not_found");
    assert_eq!(send(&server, &bob, "DELETE", "/v1/tokens/bob", json!({})).await.status, 204);
    problem(&send(&server, &bob, "GET", "/v1/me", json!({})).await, 401, "unauthorized");
}

#[tokio::test]
async fn members_manage_own_secrets_and_those_of_sessions() {
    let server = TestServer::start().await;
    server.repository().await;
    let bob = member(&server, "bob").await;
    let create = json!({"repository": "calc", "secrets": {"GITHUB_TOKEN": "of-session"}});
    let theirs = server.post("/v1/sessions", &[], create.clone()).await.json();
    let own = send(&server, &bob, "POST", "/v1/sessions", create).await.json();
    let id = |session: &serde_json::Value| session["id"].as_str().unwrap().to_owned();
    let of = |session| format!("/v1/sessions/{}/secrets/KEY", id(session));
    let bound = json!({"value": "x", "hosts": ["API.example.com"]});
    for (path, status) in [
        (of(&own), 204),
        ("/v1/me/secrets/KEY".to_owned(), 204),
        (of(&theirs), 403),
        ("/v1/secrets/KEY".to_owned(), 403),
        ("/v1/repositories/local/calc/secrets/KEY".to_owned(), 403),
    ] {
        assert_eq!(send(&server, &bob, "PUT", &path, bound.clone()).await.status, status, "{path}");
    }
    let json = [("content-type", "application/json")];
    let global = server.request("PUT", "/v1/secrets/KEY", &json, &bound.to_string()).await;
    assert_eq!(global.status, 204, "{global:?}");
    let listed = send(&server, &bob, "GET", "/v1/secrets", json!({})).await.json();
    let seen: Vec<_> =
        listed["items"].as_array().unwrap().iter().map(|one| &one["scope"]).collect();
    assert_eq!(seen, ["session", "session", "user"]);
    let all = server.request("GET", "/v1/secrets", &[], "").await.json();
    assert_eq!(all["items"].as_array().unwrap().len(), 5);
    assert_eq!(all["items"][2]["hosts"], json!(["api.example.com"]));
    // What a secret is for may be reached where it is used.
    let rules = server.request("GET", &format!("/v1/sessions/{}/network", id(&own)), &[], "").await;
    assert!(rules.json()["rules"].to_string().contains("api.example.com"), "{rules:?}");
    for (body, status, code) in [
        (json!({"value": "x", "hosts": ["*.example.com"]}), 422, "invalid_host"),
        (json!({"value": "x", "hosts": ["a.org"], "header": "Host: {}"}), 422, "invalid_header"),
        (json!({"value": "x", "header": "X-Key: {}"}), 400, "invalid_header"),
    ] {
        problem(&send(&server, &bob, "PUT", "/v1/me/secrets/KEY", body).await, status, code);
    }
    assert_eq!(send(&server, &bob, "DELETE", "/v1/me/secrets/KEY", json!({})).await.status, 204);
    let gone = send(&server, &bob, "DELETE", "/v1/me/secrets/KEY", json!({})).await;
    problem(&gone, 404, "not_found");
}

#[tokio::test]
async fn sandbox_verbs_are_for_their_owner_and_admins() {
    let server = TestServer::start().await;
    let (bob, eve) = (member(&server, "bob").await, member(&server, "eve").await);
    let create = json!({"image": "tiny"});
    let verbs = [
        ("GET", "", json!(null)),
        ("POST", "/exec", json!({"argv": ["true"]})),
        ("GET", "/exec", json!(null)),
        ("GET", "/pty", json!(null)),
        ("PUT", "/files?path=/note", json!("hi")),
        ("GET", "/files?path=/note", json!(null)),
        ("HEAD", "/files?path=/note", json!(null)),
        ("DELETE", "/files?path=/note", json!(null)),
        ("POST", "/stop", json!(null)),
        ("POST", "/start", json!(null)),
        ("DELETE", "", json!(null)),
        ("DELETE", "?force=true", json!(null)),
    ];
    for (method, rest, body) in verbs {
        let made = send(&server, &bob, "POST", "/v1/sandboxes", create.clone()).await;
        assert_eq!(made.status, 201, "{made:?}");
        let id = made.json()["sandbox_id"].as_str().unwrap().to_owned();
        let path = format!("/v1/sandboxes/{id}{rest}");
        if rest.starts_with("/files") && method != "PUT" {
            let put = format!("/v1/sandboxes/{id}/files?path=/note");
            assert_eq!(send(&server, &bob, "PUT", &put, json!("hi")).await.status, 200);
        }
        let other = send(&server, &eve, method, &path, body.clone()).await;
        assert_eq!(other.status, 403, "another member: {method} {rest}");
        let own = send(&server, &bob, method, &path, body.clone()).await;
        // The fake deletes no files, and a socket needs an upgrade: 422 and 426 were allowed.
        let allowed = |status: u16| [200, 201, 204, 422, 426].contains(&status);
        assert!(allowed(own.status), "the owner: {method} {rest}: {own:?}");
        if method != "DELETE" {
            let admin = send(&server, &server.token, method, &path, body.clone()).await;
            assert!(allowed(admin.status), "an admin: {method} {rest}: {admin:?}");
        }
        for one in
            send(&server, &server.token, "GET", "/v1/sandboxes", json!(null)).await.json()["items"]
                .as_array()
                .unwrap()
        {
            let path = format!("/v1/sandboxes/{}", one["id"].as_str().unwrap());
            assert_eq!(server.request("DELETE", &path, &[], "").await.status, 204);
        }
    }
}

#[tokio::test]
async fn members_see_only_their_own_sandboxes() {
    let server = TestServer::start().await;
    let (bob, eve) = (member(&server, "bob").await, member(&server, "eve").await);
    let create = json!({"image": "tiny"});
    let own = send(&server, &bob, "POST", "/v1/sandboxes", create.clone()).await.json();
    assert_eq!(server.post("/v1/sandboxes", &[], create).await.status, 201);
    server.repository().await;
    let session = send(&server, &bob, "POST", "/v1/sessions", json!({"repository": "calc"})).await;
    assert_eq!(session.status, 201);
    let seen = async |token: &str| -> Vec<Value> {
        let page = send(&server, token, "GET", "/v1/sandboxes", json!(null)).await.json();
        page["items"].as_array().unwrap().iter().map(|one| one["id"].clone()).collect()
    };
    assert_eq!(seen(&bob).await, [own["sandbox_id"].clone()]);
    assert_eq!(seen(&eve).await, [] as [Value; 0]);
    assert!(seen(&server.token).await.len() >= 2);
    let unknown = send(&server, &eve, "GET", "/v1/sandboxes/sbx_000000000000", json!(null)).await;
    problem(&unknown, 404, "not_found");
}

#[tokio::test]
async fn shared_disks_stay_with_admins() {
    let server = TestServer::start().await;
    let bob = member(&server, "bob").await;
    let made = send(&server, &bob, "POST", "/v1/sandboxes", json!({"image": "tiny"})).await.json();
    let id = made["sandbox_id"].as_str().unwrap();
    for (method, path) in [
        ("POST", format!("/v1/sandboxes/{id}/snapshot")),
        ("POST", format!("/v1/sandboxes/{id}/fork")),
        ("POST", format!("/v1/sandboxes/{id}/restore")),
        ("GET", "/v1/volumes".to_owned()),
        ("POST", "/v1/volumes".to_owned()),
        ("GET", "/v1/snapshots".to_owned()),
        ("DELETE", "/v1/images/tiny".to_owned()),
        ("POST", "/v1/gc".to_owned()),
        ("GET", "/v1/users".to_owned()),
        ("PATCH", "/v1/users/bob@example.org/limits".to_owned()),
    ] {
        let refused = send(&server, &bob, method, &path, json!({})).await;
        problem(&refused, 403, "forbidden");
    }
    for (order, code) in [
        (json!({"network": "host"}), "forbidden"),
        (json!({"state": true}), "forbidden"),
        (json!({"from": "snp_000000000000"}), "forbidden"),
        (json!({"volumes": [{"name": "data", "inside": "/data"}]}), "forbidden"),
        (json!({"limits": {"memory_bytes": 1_u64 << 40}}), "over_limit"),
    ] {
        let refused = send(&server, &bob, "POST", "/v1/sandboxes", order.clone()).await;
        problem(&refused, 403, code);
        let once = json!({"argv": ["true"], "sandbox": order});
        problem(&send(&server, &bob, "POST", "/v1/exec", once).await, 403, code);
    }
    let allowed = json!({"argv": ["echo", "hi"], "sandbox": {"image": "tiny"}});
    let lines = send(&server, &bob, "POST", "/v1/exec", allowed).await.lines();
    assert_eq!(lines.last().unwrap()["type"], "exited");
}

#[tokio::test]
async fn admins_shared_sandbox_refuses_own_member_token() {
    let server = TestServer::start().await;
    let made = server.post("/v1/tokens", &[], json!({"name": "agent", "role": "member"})).await;
    assert_eq!(made.json()["user"]["email"], "ada@example.org", "{made:?}");
    let agent = made.json()["value"].as_str().unwrap().to_owned();
    let volume = json!({"name": "data", "inside": "/data"});
    assert_eq!(server.post("/v1/volumes", &[], json!({"name": "data"})).await.status, 201);
    for shared in [
        json!({"image": "tiny", "state": false, "network": "host"}),
        json!({"image": "tiny", "state": false, "volumes": [volume]}),
        json!({"image": "tiny", "state": true}),
    ] {
        let made = server.post("/v1/sandboxes", &[], shared.clone()).await;
        assert_eq!(made.status, 201, "{made:?}");
        let path = format!("/v1/sandboxes/{}", made.json()["sandbox_id"].as_str().unwrap());
        let command = json!({"argv": ["true"]});
        for (method, rest) in [("POST", "/exec"), ("POST", "/start"), ("GET", ""), ("DELETE", "")] {
            let path = format!("{path}{rest}");
            let refused = send(&server, &agent, method, &path, command.clone()).await;
            problem(&refused, 403, "forbidden");
        }
        let seen = send(&server, &agent, "GET", "/v1/sandboxes", json!(null)).await.json();
        assert_eq!(seen["items"], json!([]), "{shared}");
    }
    let plain = json!({"image": "tiny", "state": false});
    let plain = server.post("/v1/sandboxes", &[], plain).await.json();
    let path = format!("/v1/sandboxes/{}", plain["sandbox_id"].as_str().unwrap());
    assert_eq!(send(&server, &agent, "GET", &path, json!(null)).await.status, 200);
}

#[tokio::test]
async fn admin_changes_limits_of_member() {
    let server = TestServer::start().await;
    let bob = member(&server, "bob").await;
    let change = async |body: Value| {
        let path = "/v1/users/bob@example.org/limits";
        send(&server, &server.token, "PATCH", path, body).await
    };
    assert_eq!(change(json!({"sandboxes": 0})).await.json()["sandboxes"], 0);
    let refused = send(&server, &bob, "POST", "/v1/sandboxes", json!({"image": "tiny"})).await;
    problem(&refused, 403, "sandboxes_not_allowed");
    let users = server.request("GET", "/v1/users", &[], "").await.json();
    let seen: Vec<_> = users["items"].as_array().unwrap().iter().map(|one| &one["role"]).collect();
    assert_eq!(seen, ["admin", "member"], "{users}");
    assert_eq!(change(json!({"sandboxes": null})).await.json()["sandboxes"], 2);
    problem(&change(json!({"memory_bytes": 1})).await, 422, "invalid_limits");
    let invalid = send(&server, &server.token, "PATCH", "/v1/users/bob/limits", json!({})).await;
    problem(&invalid, 422, "invalid_user");
}

#[tokio::test]
async fn session_key_is_an_id_for_its_creator() {
    let server = TestServer::start().await;
    server.repository().await;
    let (bob, eve) = (member(&server, "bob").await, member(&server, "eve").await);
    let create = json!({"repository": "calc", "key": "issue #12/a"});
    let own = send(&server, &bob, "POST", "/v1/sessions", create.clone()).await.json();
    let path = "/v1/sessions/issue%20%2312%2Fa";
    let shown = send(&server, &bob, "GET", path, json!(null)).await.json();
    assert_eq!(shown["id"], own["id"]);
    let prompt = json!({"text": "x"});
    let sent = send(&server, &bob, "POST", &format!("{path}/prompts?"), prompt.clone()).await;
    assert_eq!(sent.status, 202, "{sent:?}");
    for token in [&eve, &server.token] {
        problem(&send(&server, token, "GET", path, json!(null)).await, 404, "not_found");
    }
    assert_eq!(server.request_as(None, "GET", path, &[], "").await.status, 401);
    let others = send(&server, &eve, "POST", "/v1/sessions", create).await.json();
    assert_ne!(others["id"], own["id"], "another user's key");
    assert_eq!(send(&server, &eve, "DELETE", path, json!(null)).await.status, 204);
    assert_eq!(send(&server, &bob, "GET", path, json!(null)).await.status, 200);
    for key in ["counts", "ses_000000000000"] {
        let reserved = json!({"repository": "calc", "key": key});
        problem(&send(&server, &bob, "POST", "/v1/sessions", reserved).await, 422, "invalid_key");
    }
}

#[tokio::test]
async fn request_with_key_counts_once() {
    let limits = Limits { requests_per_second: 1, ..Limits::default() };
    let server = TestServer::start_with(limits).await;
    let path = "/v1/sessions/unknown";
    // The burst is four requests.
    for _ in 0..4 {
        problem(&server.request("GET", path, &[], "").await, 404, "not_found");
    }
    while server.request("GET", path, &[], "").await.status != 429 {}
}

#[tokio::test]
async fn failed_lookup_of_key_fails_its_request() {
    let server = TestServer::start().await;
    server.break_sessions().await;
    let failed = server.request("GET", "/v1/sessions/task-42", &[], "").await;
    assert_eq!(failed.status, 500, "{failed:?}");
    let other = [("host", "evil.example.net")];
    let refused = server.request("GET", "/v1/sessions/task-42", &other, "").await;
    problem(&refused, 421, "host_not_allowed");
}

#[tokio::test]
async fn session_snapshots_are_for_its_author() {
    let server = TestServer::start().await;
    server.repository().await;
    let (bob, eve) = (member(&server, "bob").await, member(&server, "eve").await);
    let create = json!({"repository": "calc", "key": "k"});
    let own = send(&server, &bob, "POST", "/v1/sessions", create).await.json();
    let path = format!("/v1/sessions/{}", own["id"].as_str().unwrap());
    let unknown = json!({"snapshot_id": "snp_000000000000"});
    for (rest, body) in [("/snapshots", json!({"name": "x"})), ("/restore", unknown.clone())] {
        let others = send(&server, &eve, "POST", &format!("{path}{rest}"), body).await;
        problem(&others, 403, "forbidden");
    }
    let of_key = |rest: &str| format!("/v1/sessions/k{rest}");
    problem(&send(&server, &bob, "POST", &of_key("/restore"), unknown).await, 409, "no_snapshot");
    for body in [json!({}), json!({"turn": 1, "snapshot_id": "snp_000000000000"})] {
        let refused = send(&server, &bob, "POST", &of_key("/restore"), body).await;
        problem(&refused, 400, "invalid_restore");
    }
    let bad = json!({"name": "two\nlines"});
    let refused = send(&server, &bob, "POST", &of_key("/snapshots"), bad).await;
    problem(&refused, 422, "invalid_name");
}
