//! Machines without a session, over a real socket, on a fake host.

use harvest_session::machines::{Commands, Sandboxes};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

use crate::{host::Host, problem};

async fn sandbox(host: &Host) -> String {
    let made = host.post("/v1/sandboxes", &[], json!({"image": "tiny"})).await;
    assert_eq!((made.status, made.json()["status"].as_str()), (201, Some("running")), "{made:?}");
    made.json()["sandbox_id"].as_str().unwrap().to_owned()
}

async fn listed(host: &Host) -> Vec<Value> {
    host.ask("GET", "/v1/sandboxes", &[], "").await.json()["items"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_sandbox_is_made_looked_at_stopped_started_and_deleted() {
    let host = Host::start().await;
    let id = sandbox(&host).await;
    let path = format!("/v1/sandboxes/{id}");
    let shown = host.ask("GET", &path, &[], "").await.json();
    assert_eq!(
        (&shown["id"], &shown["image"], &shown["owner"]),
        (&json!(id), &json!("tiny"), &json!("you"))
    );
    assert_eq!(listed(&host).await, [shown]);
    let stopped = host.ask("POST", &format!("{path}/stop"), &[], "").await.json();
    assert_eq!(stopped["state"], "dead");
    problem(
        &host.post(&format!("{path}/exec"), &[], json!({"argv": ["true"]})).await,
        409,
        "not_running",
    );
    let started = host.ask("POST", &format!("{path}/start"), &[], "").await.json();
    assert_eq!(started["state"], "running");
    assert_eq!(host.ask("DELETE", &path, &[], "").await.status, 204);
    problem(&host.ask("GET", &path, &[], "").await, 404, "not_found");
    problem(&host.ask("DELETE", &path, &[], "").await, 404, "not_found");
}

#[tokio::test]
async fn a_key_starts_one_sandbox() {
    let host = Host::start().await;
    let ask = || host.post("/v1/sandboxes", &[("idempotency-key", "k")], json!({}));
    let (first, again) = (ask().await.json(), ask().await.json());
    assert_eq!(first["sandbox_id"], again["sandbox_id"]);
    assert_eq!(listed(&host).await.len(), 1);
}

#[tokio::test]
async fn a_command_says_what_it_says_and_how_it_ended() {
    let host = Host::start().await;
    let path = format!("/v1/sandboxes/{}/exec", sandbox(&host).await);
    let lines = host.post(&path, &[], json!({"argv": ["echo", "hi"]})).await.lines();
    assert_eq!(lines[0], json!({"type": "stdout", "data": "aGkK"}));
    assert_eq!((&lines[1]["type"], &lines[1]["exit"]["value"]), (&json!("exited"), &json!(0)));
    let missing = host.post(&path, &[], json!({"argv": ["nosuch"]})).await.lines();
    assert_eq!((missing.len(), &missing[0]["code"]), (1, &json!("not_found")));
    let given = host.post(&path, &[], json!({"argv": ["cat"], "stdin": "aGkK"})).await.lines();
    assert_eq!(given[0], json!({"type": "stdout", "data": "aGkK"}));
    for body in [
        json!({}),
        json!({"argv": ["a\0"]}),
        json!({"code": "x"}),
        json!({"argv": ["a"], "stdin": "%"}),
    ] {
        let refused = host.post(&path, &[], body.clone()).await;
        assert_eq!(refused.status, 422, "{body}: {refused:?}");
    }
}

#[tokio::test]
async fn what_a_command_reads_follows_its_line() {
    let host = Host::start().await;
    let path = format!("/v1/sandboxes/{}/exec", sandbox(&host).await);
    let kind = [("content-type", "application/vnd.harvest.exec")];
    let lines = host.ask("POST", &path, &kind, "{\"argv\":[\"cat\"]}\nhi\n").await.lines();
    assert_eq!(lines[0], json!({"type": "stdout", "data": "aGkK"}));
    assert_eq!(lines[1]["exit"]["value"], 0);
}

#[tokio::test]
async fn a_fresh_sandbox_is_gone_with_its_command() {
    let host = Host::start().await;
    let lines =
        host.post("/v1/exec", &[], json!({"image": "tiny", "argv": ["echo", "hi"]})).await.lines();
    let kinds: Vec<_> = lines.iter().map(|line| line["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["started", "stdout", "exited"]);
    assert!(lines[0]["sandbox"].as_str().unwrap().starts_with("sbx_"));
    assert_eq!(listed(&host).await, [] as [Value; 0]);
    host.fake.forget_image("nosuch");
    let missing = host.post("/v1/exec", &[], json!({"image": "nosuch", "argv": ["true"]})).await;
    problem(&missing, 404, "image_missing");
}

/// Waits until the fake host has no sandbox.
async fn empty(host: &Host) {
    while !host.fake.sandbox_list().await.unwrap().items.is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_client_that_goes_away_takes_its_fresh_sandbox_along() {
    let host = Host::start().await;
    for kind in ["application/json", "application/vnd.harvest.exec"] {
        let mut stream = host.begin("/v1/exec", kind).await;
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
        assert_eq!(host.fake.sandbox_list().await.unwrap().items.len(), 1);
        drop(stream);
        empty(&host).await;
    }
}

#[tokio::test]
async fn forks_and_restores_go_their_ways() {
    let host = Host::start().await;
    let id = sandbox(&host).await;
    let path = format!("/v1/sandboxes/{id}");
    let kept = host.ask("POST", &format!("{path}/snapshot"), &[], "").await;
    assert_eq!(kept.status, 201, "{kept:?}");
    let snapshot = kept.json()["id"].clone();
    let forked = host.post(&format!("{path}/fork"), &[], json!({"count": 3})).await;
    assert_eq!((forked.status, forked.json()["forks"].as_array().unwrap().len()), (201, 3));
    assert_eq!(listed(&host).await.len(), 4);
    problem(
        &host.post(&format!("{path}/fork"), &[], json!({"count": 0})).await,
        422,
        "invalid_body",
    );
    let restored =
        host.post(&format!("{path}/restore"), &[], json!({"snapshot": snapshot})).await.json();
    assert_eq!((&restored["id"], &restored["snapshot"]), (&json!(id), &snapshot));
    let snapshots = host.ask("GET", "/v1/snapshots", &[], "").await.json();
    let ids: Vec<&Value> =
        snapshots["items"].as_array().unwrap().iter().map(|one| &one["id"]).collect();
    assert!(ids.contains(&&snapshot) && ids.contains(&&restored["kept"]), "{snapshots}");
    let gone = format!("/v1/snapshots/{}", snapshot.as_str().unwrap());
    assert_eq!(host.ask("DELETE", &gone, &[], "").await.status, 204);
    problem(&host.ask("DELETE", &gone, &[], "").await, 404, "snapshot_missing");
}

#[tokio::test]
async fn images_and_volumes_come_and_go() {
    let host = Host::start().await;
    let built = host.post("/v1/images", &[], json!({"from": {"recipe": "base"}})).await.lines();
    assert_eq!(built.last().unwrap()["image"]["name"], "base");
    let missing = host.post("/v1/images", &[], json!({"from": {"recipe": "missing"}})).await;
    problem(&missing, 404, "recipe_missing");
    let sent = host.ask("PUT", "/v1/images/mine", &[], "not really a tar").await.lines();
    assert_eq!(sent[0], json!({"type": "bytes", "done": 16, "total": null}));
    let names = host.ask("GET", "/v1/images", &[], "").await.json();
    assert_eq!([&names["items"][0]["name"], &names["items"][1]["name"]], ["base", "mine"]);
    assert_eq!(host.ask("GET", "/v1/images/mine", &[], "").await.json()["name"], "mine");
    assert!(host.ask("GET", "/v1/images/mine/usage", &[], "").await.json()["used_by"].is_object());
    assert_eq!(host.ask("DELETE", "/v1/images/mine", &[], "").await.status, 204);
    problem(&host.ask("GET", "/v1/images/mine", &[], "").await, 404, "image_missing");
    let volume = host.post("/v1/volumes", &[], json!({"name": "data", "size_bytes": 4096})).await;
    assert_eq!((volume.status, &volume.json()["name"]), (201, &json!("data")));
    problem(&host.post("/v1/volumes", &[], json!({"name": "data"})).await, 409, "exists");
    assert_eq!(host.ask("GET", "/v1/df", &[], "").await.json()["volumes_bytes"], 4096);
    assert_eq!(host.ask("DELETE", "/v1/volumes/data", &[], "").await.status, 204);
    assert_eq!(
        host.post("/v1/gc", &[], json!({"dry_run": true})).await.json()["layers"],
        json!([])
    );
    assert_eq!(host.ask("GET", "/v1/doctor", &[], "").await.json()["items"][0]["level"], "ok");
}

#[tokio::test]
async fn the_same_routes_answer_without_a_server() {
    use futures_util::StreamExt;
    use harvest_server::here::{Here, Sent};
    let fake = harvest_providers::Fake::new();
    let here = Here::new(Commands::new(std::sync::Arc::new(fake.clone())));
    let body = Sent::Json(br#"{"image":"tiny","argv":["sleep","1"]}"#.to_vec());
    let mut answer = here.ask("POST".parse().unwrap(), "/v1/exec", body).await.unwrap();
    assert_eq!(answer.status, 200);
    let first = answer.body.next().await.unwrap().unwrap();
    assert!(String::from_utf8(first).unwrap().contains("started"));
    assert_eq!(fake.sandbox_list().await.unwrap().items.len(), 1);
    drop(answer);
    here.settle().await;
    assert_eq!(
        fake.sandbox_list().await.unwrap().items.len(),
        0,
        "who stops listening takes it along"
    );
    let refused =
        here.ask("GET".parse().unwrap(), "/v1/sandboxes/sbx_000000000000", Sent::Nothing).await;
    assert_eq!(refused.unwrap().status, 404);
    let sessions = here.ask("GET".parse().unwrap(), "/v1/sessions", Sent::Nothing).await.unwrap();
    assert_eq!(sessions.status, 404, "sessions need a server");
}
