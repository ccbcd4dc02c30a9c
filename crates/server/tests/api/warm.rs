//! Sandboxes that are started before their session.

use serde_json::json;

use crate::{problem, test_server::TestServer};

#[tokio::test]
async fn repository_without_build_is_not_warmed() {
    let server = TestServer::start().await;
    server.repository().await;
    let body = json!({ "repository": "calc", "agent": "scripted" });
    problem(&server.post("/v1/warm", &[], body).await, 409, "no_build");
    let listed = server.request("GET", "/v1/warm", &[], "").await.json();
    assert_eq!(listed["items"], json!([]), "{listed}");
}

#[tokio::test]
async fn unknown_repository_and_field_are_refused() {
    let server = TestServer::start().await;
    let unknown = json!({ "repository": "none" });
    problem(&server.post("/v1/warm", &[], unknown).await, 404, "not_found");
    let field = json!({ "repository": "calc", "image": "x" });
    assert_eq!(server.post("/v1/warm", &[], field).await.status, 422);
    assert_eq!(server.request_as(None, "GET", "/v1/warm", &[], "").await.status, 401);
}
