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
        assert_eq!(rules.json(), json!({"policy": policy, "names": names}), "{path}");
    }
    let unknown = server.request("GET", "/v1/repositories/a/b/network", &[], "").await;
    problem(&unknown, 404, "not_found");
}
