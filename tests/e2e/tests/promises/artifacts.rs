//! Artifacts: files that an agent hands over with a tool.

use harvest_e2e::Host;
use harvest_proto::{EventBody, api::Artifact};
use serde_json::{Value, json};

use crate::{completed, prompt_options::create};

fn artifacts(host: &Host, id: &str) -> Vec<Artifact> {
    let listed = host.harvest(["artifacts", id, "--json"]);
    serde_json::from_str(&listed.stdout).unwrap_or_else(|_| panic!("{listed:?}"))
}

fn upload(arguments: Value) -> Value {
    json!({ "tool": { "name": "mcp__harvest__upload_artifact", "input": arguments } })
}

// The command line program runs while the server answers.
#[tokio::test(flavor = "multi_thread")]
async fn artifact_lives_and_dies_with_its_session() {
    let host = Host::start().await;
    let make = "printf 'one two' > /workspace/report.txt && ln -s /etc/passwd /workspace/link && mkfifo /workspace/pipe";
    let script = json!([
        { "bash": make },
        upload(json!({ "path": "/workspace/report.txt", "media_type": "text/plain" })),
        upload(json!({ "path": "/workspace/report.txt", "name": "second.txt" })),
        upload(json!({ "path": "/workspace/report.txt" })),
        upload(json!({ "path": "/workspace/link" })),
        upload(json!({ "path": "/workspace/pipe" })),
        { "text": "done" },
    ]);
    let body = json!({ "agent": "claude", "model": "scripted", "network": "none",
                       "prompt": format!("Report.\nscript: {script}") });
    let session = create(&host, body).await;
    let id = session.to_string();
    host.follow(session.clone()).until("the turn", completed).await;
    let events = host.events(&session).await;
    let outputs: Vec<&str> = events
        .iter()
        .filter_map(|event| match event {
            EventBody::ToolEnded { output, .. } => Some(&**output),
            _ => None,
        })
        .collect();
    let refusals = ["already an artifact `report.txt`", "is a link", "is not a regular file"];
    for refusal in refusals {
        assert!(outputs.iter().any(|output| output.contains(refusal)), "{refusal}: {outputs:?}");
    }
    let named: Vec<String> = artifacts(&host, &id).into_iter().map(|one| one.name).collect();
    assert_eq!(named, ["report.txt", "second.txt"]);

    let target = host.home().join("downloaded");
    let saved = host.harvest(["artifacts", &id, "report.txt", "-o", target.to_str().unwrap()]);
    assert_eq!(
        (saved.code, std::fs::read(&target).unwrap()),
        (0, b"one two".to_vec()),
        "{saved:?}"
    );
    let path = format!("/v1/sessions/{id}/artifacts/report.txt");
    let part = host.get(&path).header("range", "bytes=4-").send().await.unwrap();
    let headers = part.headers().clone();
    assert_eq!(headers["content-disposition"], "attachment; filename*=UTF-8''report.txt");
    assert_eq!(
        (&headers["content-type"], &headers["x-content-type-options"]),
        (&"text/plain".parse().unwrap(), &"nosniff".parse().unwrap())
    );
    assert_eq!((part.status().as_u16(), part.text().await.unwrap()), (206, "two".to_owned()));

    // Both have the same content: one file.
    let folder = host.home().join("artifacts");
    let files = || std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(files(), 1);
    assert_eq!(host.harvest(["rm", "-y", &id]).code, 0);
    assert_eq!(files(), 0);
}
