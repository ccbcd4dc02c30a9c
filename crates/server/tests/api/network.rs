//! Network rules over the API.

use serde_json::json;

use crate::{problem, test_server::TestServer};

#[tokio::test]
async fn network_rules_follow_the_sessions_policy() {
    let server = TestServer::start().await;
    server.repository().await;
    let configured = json!([{"name": "packages.example.org", "source": "config"}]);
    let closed = json!({"repository": "calc", "network": "none"});
    let closed = server.post("/v1/sessions", &[], closed).await.json();
    let open = server.post("/v1/sessions", &[], json!({"repository": "calc"})).await.json();
    let path = |session: &serde_json::Value| {
        format!("/v1/sessions/{}/network", session["id"].as_str().unwrap())
    };
    for (path, policy, names) in [
        ("/v1/network".to_owned(), "trusted", &configured),
        ("/v1/repositories/local/calc/network".to_owned(), "trusted", &configured),
        (path(&open), "trusted", &configured),
        (path(&closed), "none", &json!([])),
    ] {
        let rules = server.request("GET", &path, &[], "").await;
        assert_eq!(rules.status, 200, "{path}: {rules:?}");
        assert_eq!(rules.json(), json!({"policy": policy, "names": names, "rules": []}), "{path}");
    }
    let unknown = server.request("GET", "/v1/repositories/a/b/network", &[], "").await;
    problem(&unknown, 404, "not_found");
}

#[tokio::test]
async fn rules_are_set_and_removed_by_name() {
    let server = TestServer::start().await;
    let session = server.post("/v1/sessions", &[], json!({"allow": ["a.org:22"]})).await.json();
    let path = format!("/v1/sessions/{}/network", session["id"].as_str().unwrap());
    let put = async |name: &str, body: serde_json::Value| {
        let json = [("content-type", "application/json")];
        server.request("PUT", &format!("{path}/rules/{name}"), &json, &body.to_string()).await
    };
    let set = put("*.B.org", json!({"verdict": "deny"})).await;
    let deny = json!({"name": "*.b.org", "verdict": "deny", "ports": [], "private": false, "scope": "session"});
    assert_eq!((set.status, set.json()), (200, deny.clone()));
    let allow = json!({"name": "a.org", "verdict": "allow", "ports": [22], "private": false, "scope": "session"});
    let listed = server.request("GET", &path, &[], "").await.json();
    assert_eq!(listed["rules"], json!([deny, allow]));
    problem(&put("10.0.0.1", json!({"verdict": "allow"})).await, 422, "invalid_name");
    problem(&put("a.org", json!({"verdict": "allow", "ports": [0]})).await, 422, "invalid_port");
    problem(&put("a.org", json!({"verdict": "maybe"})).await, 422, "invalid_verdict");
    let removed = server.request("DELETE", &format!("{path}/rules/a.org"), &[], "").await;
    assert_eq!(removed.status, 204);
    let again = server.request("DELETE", &format!("{path}/rules/a.org"), &[], "").await;
    problem(&again, 404, "not_found");
}
