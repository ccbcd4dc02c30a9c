//! The memory of a repository: read, replaced and deleted as a whole.

use serde_json::{Value, json};

use crate::{
    problem,
    test_server::{ApiResponse, TestServer},
};

const PATH: &str = "/v1/repositories/local/calc/memory";

async fn put(server: &TestServer, body: &Value) -> ApiResponse {
    let json = [("content-type", "application/json")];
    server.request("PUT", PATH, &json, &body.to_string()).await
}

#[tokio::test]
async fn memory_is_replaced_read_and_deleted() {
    let server = TestServer::start().await;
    server.repository().await;
    let empty = json!({"entities": [], "relations": []});
    assert_eq!(server.request("GET", PATH, &[], "").await.json(), empty);
    let graph = json!({
        "entities": [{"name": "api", "entityType": "service", "observations": ["port 80"]}],
        "relations": [{"from": "api", "to": "db", "relationType": "uses"}],
    });
    assert_eq!(put(&server, &graph).await.json(), graph);
    assert_eq!(server.request("GET", PATH, &[], "").await.json(), graph);
    assert_eq!(server.request("DELETE", PATH, &[], "").await.status, 204);
    assert_eq!(server.request("GET", PATH, &[], "").await.json(), empty);
}

#[tokio::test]
async fn memory_of_unknown_repository_is_not_found() {
    let server = TestServer::start().await;
    for method in ["GET", "DELETE"] {
        problem(&server.request(method, PATH, &[], "").await, 404, "not_found");
    }
    problem(&put(&server, &json!({"entities": [], "relations": []})).await, 404, "not_found");
}

#[tokio::test]
async fn too_long_observation_is_refused() {
    let server = TestServer::start().await;
    server.repository().await;
    let entity = json!({"name": "a", "entityType": "b", "observations": ["x".repeat(9000)]});
    let refused = put(&server, &json!({"entities": [entity], "relations": []})).await;
    problem(&refused, 422, "too_large");
}
