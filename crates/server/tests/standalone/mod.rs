//! Standalone sandboxes over a real socket, with the fake provider.

use harvest_session::Sandboxes;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

use crate::{problem, test_server::TestServer};

async fn create_sandbox(server: &TestServer) -> String {
    let created = server.post("/v1/sandboxes", &[], json!({"image": "tiny"})).await;
    assert_eq!(
        (created.status, created.json()["status"].as_str()),
        (201, Some("running")),
        "{created:?}"
    );
    created.json()["sandbox_id"].as_str().unwrap().to_owned()
}

async fn list(server: &TestServer) -> Vec<Value> {
    server.request("GET", "/v1/sandboxes", &[], "").await.json()["items"]
        .as_array()
        .unwrap()
        .clone()
}

#[tokio::test]
async fn sandbox_lifecycle() {
    let server = TestServer::start().await;
    let id = create_sandbox(&server).await;
    let path = format!("/v1/sandboxes/{id}");
    let shown = server.request("GET", &path, &[], "").await.json();
    assert_eq!(
        (&shown["id"], &shown["image"], &shown["owner"]),
        (&json!(id), &json!("tiny"), &json!("you"))
    );
    assert_eq!(list(&server).await, [shown]);
    let stopped = server.request("POST", &format!("{path}/stop"), &[], "").await.json();
    assert_eq!(stopped["state"], "dead");
    problem(
        &server.post(&format!("{path}/exec"), &[], json!({"argv": ["true"]})).await,
        409,
        "not_running",
    );
    let started = server.request("POST", &format!("{path}/start"), &[], "").await.json();
    assert_eq!(started["state"], "running");
    assert_eq!(server.request("DELETE", &path, &[], "").await.status, 204);
    problem(&server.request("GET", &path, &[], "").await, 404, "not_found");
    problem(&server.request("DELETE", &path, &[], "").await, 404, "not_found");
}

#[tokio::test]
async fn idempotency_key_creates_one_sandbox() {
    let server = TestServer::start().await;
    let ask = || server.post("/v1/sandboxes", &[("idempotency-key", "k")], json!({}));
    let (first, again) = (ask().await.json(), ask().await.json());
    assert_eq!(first["sandbox_id"], again["sandbox_id"]);
    assert_eq!(list(&server).await.len(), 1);
}

#[tokio::test]
async fn exec_streams_output_and_exit_code() {
    let server = TestServer::start().await;
    let path = format!("/v1/sandboxes/{}/exec", create_sandbox(&server).await);
    let lines = server.post(&path, &[], json!({"argv": ["echo", "hi"]})).await.lines();
    assert_eq!(lines[0], json!({"type": "stdout", "data": "aGkK"}));
    assert_eq!((&lines[1]["type"], &lines[1]["exit"]["value"]), (&json!("exited"), &json!(0)));
    let missing = server.post(&path, &[], json!({"argv": ["nosuch"]})).await.lines();
    assert_eq!((missing.len(), &missing[0]["code"]), (1, &json!("not_found")));
    let given = server.post(&path, &[], json!({"argv": ["cat"], "stdin": "aGkK"})).await.lines();
    assert_eq!(given[0], json!({"type": "stdout", "data": "aGkK"}));
    for body in [
        json!({}),
        json!({"argv": ["a\0"]}),
        json!({"code": "x"}),
        json!({"argv": ["a"], "stdin": "%"}),
    ] {
        let refused = server.post(&path, &[], body.clone()).await;
        assert_eq!(refused.status, 422, "{body}: {refused:?}");
    }
}

#[tokio::test]
async fn stdin_follows_the_command_line() {
    let server = TestServer::start().await;
    let path = format!("/v1/sandboxes/{}/exec", create_sandbox(&server).await);
    let kind = [("content-type", "application/vnd.harvest.exec")];
    let lines = server.request("POST", &path, &kind, "{\"argv\":[\"cat\"]}\nhi\n").await.lines();
    assert_eq!(lines[0], json!({"type": "stdout", "data": "aGkK"}));
    assert_eq!(lines[1]["exit"]["value"], 0);
}

#[tokio::test]
async fn one_shot_sandbox_is_removed_after_its_command() {
    let server = TestServer::start().await;
    let lines = server
        .post("/v1/exec", &[], json!({"sandbox": {"image": "tiny"}, "argv": ["echo", "hi"]}))
        .await
        .lines();
    let kinds: Vec<_> = lines.iter().map(|line| line["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["started", "stdout", "exited"]);
    assert!(lines[0]["sandbox"].as_str().unwrap().starts_with("sbx_"));
    assert_eq!(list(&server).await, [] as [Value; 0]);
    server.fake.remove_image("nosuch");
    let missing = server
        .post("/v1/exec", &[], json!({"sandbox": {"image": "nosuch"}, "argv": ["true"]}))
        .await;
    problem(&missing, 404, "image_missing");
}

async fn wait_until_no_sandboxes(server: &TestServer) {
    while !server.fake.sandboxes().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn disconnect_removes_the_one_shot_sandbox() {
    let server = TestServer::start().await;
    for kind in ["application/json", "application/vnd.harvest.exec"] {
        let mut stream = server.begin("/v1/exec", kind).await;
        let body = "{\"argv\":[\"sleep\",\"1000\"]}\n";
        let chunk = format!("{:x}\r\n{body}\r\n", body.len());
        stream.get_mut().write_all(chunk.as_bytes()).await.unwrap();
        if kind == "application/json" {
            stream.get_mut().write_all(b"0\r\n\r\n").await.unwrap();
        }
        let mut line = String::new();
        while !line.contains("\"started\"") {
            line.clear();
            assert_ne!(stream.read_line(&mut line).await.unwrap(), 0, "{kind}");
        }
        assert_eq!(server.fake.sandboxes().len(), 1);
        drop(stream);
        wait_until_no_sandboxes(&server).await;
    }
}

#[tokio::test]
async fn snapshot_fork_and_restore() {
    let server = TestServer::start().await;
    let id = create_sandbox(&server).await;
    let path = format!("/v1/sandboxes/{id}");
    let saved = server.request("POST", &format!("{path}/snapshot"), &[], "").await;
    assert_eq!(saved.status, 201, "{saved:?}");
    let snapshot = saved.json()["id"].clone();
    let forked = server.post(&format!("{path}/fork"), &[], json!({"count": 3})).await;
    assert_eq!((forked.status, forked.json()["forks"].as_array().unwrap().len()), (201, 3));
    assert_eq!(list(&server).await.len(), 4);
    problem(
        &server.post(&format!("{path}/fork"), &[], json!({"count": 0})).await,
        422,
        "invalid_body",
    );
    let restored =
        server.post(&format!("{path}/restore"), &[], json!({"snapshot_id": snapshot})).await.json();
    assert_eq!((&restored["id"], &restored["snapshot_id"]), (&json!(id), &snapshot));
    let snapshots = server.request("GET", "/v1/snapshots", &[], "").await.json();
    let ids: Vec<&Value> =
        snapshots["items"].as_array().unwrap().iter().map(|one| &one["id"]).collect();
    assert!(ids.contains(&&snapshot) && ids.contains(&&restored["kept"]), "{snapshots}");
    let gone = format!("/v1/snapshots/{}", snapshot.as_str().unwrap());
    assert_eq!(server.request("DELETE", &gone, &[], "").await.status, 204);
    problem(&server.request("DELETE", &gone, &[], "").await, 404, "snapshot_missing");
}

#[tokio::test]
async fn created_resources_name_their_path() {
    let server = TestServer::start().await;
    let path = format!("/v1/sandboxes/{}", create_sandbox(&server).await);
    let url = "http://127.0.0.1:1/calc.git";
    for (request, body, parent, id) in [
        ("/v1/sandboxes", json!({"image": "tiny"}), "/v1/sandboxes", "/sandbox_id"),
        (&format!("{path}/snapshot"), json!(null), "/v1/snapshots", "/id"),
        (&format!("{path}/fork"), json!({"count": 2}), "/v1/sandboxes", "/forks/0"),
        ("/v1/volumes", json!({"name": "data", "size_bytes": 4096}), "/v1/volumes", "/name"),
        ("/v1/tokens", json!({"name": "laptop"}), "/v1/tokens", "/name"),
        ("/v1/repositories", json!({"url": url}), "/v1/repositories", "/name"),
    ] {
        let created = server.post(request, &[], body).await;
        let id = created.json().pointer(id).and_then(Value::as_str).map(str::to_owned);
        let location = id.map(|id| format!("{parent}/{id}"));
        assert_eq!((created.status, created.header("location")), (201, location.as_deref()));
    }
}

#[tokio::test]
async fn images_and_volumes_are_created_and_removed() {
    let server = TestServer::start().await;
    let built = server.post("/v1/images", &[], json!({"from": {"recipe": "base"}})).await.lines();
    assert_eq!(built.last().unwrap()["image"]["name"], "base");
    let missing = server.post("/v1/images", &[], json!({"from": {"recipe": "missing"}})).await;
    problem(&missing, 404, "recipe_missing");
    let sent = server.request("PUT", "/v1/images/mine", &[], "not really a tar").await.lines();
    assert_eq!(sent[0], json!({"type": "bytes", "done": 16, "total": null}));
    let names = server.request("GET", "/v1/images", &[], "").await.json();
    assert_eq!([&names["items"][0]["name"], &names["items"][1]["name"]], ["base", "mine"]);
    assert_eq!(server.request("GET", "/v1/images/mine", &[], "").await.json()["name"], "mine");
    assert!(
        server.request("GET", "/v1/images/mine/usage", &[], "").await.json()["used_by"].is_object()
    );
    assert_eq!(server.request("DELETE", "/v1/images/mine", &[], "").await.status, 204);
    problem(&server.request("GET", "/v1/images/mine", &[], "").await, 404, "image_missing");
    let volume = server.post("/v1/volumes", &[], json!({"name": "data", "size_bytes": 4096})).await;
    assert_eq!((volume.status, &volume.json()["name"]), (201, &json!("data")));
    problem(&server.post("/v1/volumes", &[], json!({"name": "data"})).await, 409, "exists");
    assert_eq!(server.request("GET", "/v1/df", &[], "").await.json()["volumes_bytes"], 4096);
    assert_eq!(server.request("DELETE", "/v1/volumes/data", &[], "").await.status, 204);
    assert_eq!(
        server.post("/v1/gc", &[], json!({"dry_run": true})).await.json()["layers"],
        json!([])
    );
    assert_eq!(
        server.request("GET", "/v1/doctor", &[], "").await.json()["items"][0]["level"],
        "ok"
    );
}

#[tokio::test]
async fn in_process_api_serves_the_same_routes() {
    use futures_util::StreamExt;
    use harvest_server::in_process::{InProcessApi, RequestBody};
    let fake = harvest_providers::Fake::new();
    let api = InProcessApi::new(Sandboxes::without_server(std::sync::Arc::new(fake.clone())));
    let body = RequestBody::Json(br#"{"sandbox":{"image":"tiny"},"argv":["sleep","1"]}"#.to_vec());
    let mut response = api.request("POST".parse().unwrap(), "/v1/exec", body).await.unwrap();
    assert_eq!(response.status, 200);
    let first = response.body.next().await.unwrap().unwrap();
    assert!(String::from_utf8(first).unwrap().contains("started"));
    assert_eq!(fake.sandboxes().len(), 1);
    drop(response);
    api.settle().await;
    assert_eq!(fake.sandboxes().len(), 0, "dropping the response removes the sandbox");
    let refused = api
        .request("GET".parse().unwrap(), "/v1/sandboxes/sbx_000000000000", RequestBody::Empty)
        .await;
    assert_eq!(refused.unwrap().status, 404);
    let sessions =
        api.request("GET".parse().unwrap(), "/v1/sessions", RequestBody::Empty).await.unwrap();
    assert_eq!(sessions.status, 404, "sessions need a server");
}
