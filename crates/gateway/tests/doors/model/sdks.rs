//! The official SDKs of the model APIs read the scripted model. `.ci/model-sdks` installs them.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::*;

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder of the SDKs. Blocks while they are installed.
pub(crate) fn sdks() -> PathBuf {
    let output =
        Command::new(repository().join(".ci/model-sdks")).stderr(Stdio::inherit()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "cannot install the SDKs");
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// Runs a program that reads its script from stdin, with a door of its own.
async fn read(mut program: Command, script: &str) -> (Value, Vec<u16>) {
    let agent = Agent::scripted().await;
    let script = repository().join("crates/gateway/tests/sdks").join(script);
    program.arg(&agent.base).stdin(std::fs::File::open(script).unwrap()).stderr(Stdio::inherit());
    let output = tokio::task::spawn_blocking(move || program.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", output.status);
    let status = |event: &EventBody| match event {
        EventBody::ModelCall { status, .. } => *status,
        other => panic!("{other:?}"),
    };
    let statuses = agent.door.ledger.events().iter().map(status).collect();
    (serde_json::from_slice(&output.stdout).unwrap(), statuses)
}

fn expected(stop: &str, input: u64) -> Value {
    let call = json!(["bash", {"command": "ls -l"}]);
    let answer =
        json!({"text": "Hello wörld", "call": call, "stop": stop, "tokens": [input, 8, 9]});
    json!({
        "answer": answer, "retried": null, "denied": "AuthenticationError", "cut": true,
        "models": ["scripted"], "model": "scripted",
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn official_sdks_read_scripted_streams() {
    let sdks = tokio::task::spawn_blocking(sdks).await.unwrap();
    let mut python = Command::new(sdks.join("venv/bin/python"));
    python.arg("-");
    let mut node = Command::new(sdks.join("node"));
    node.args(["--input-type=module", "-"]).current_dir(&sdks);
    let read = tokio::join!(read(python, "read.py"), read(node, "read.mjs"));
    // OpenAI counts the tokens of the cache inside the input.
    let all = json!({
        "chat": expected("tool_calls", 18), "responses": expected("completed", 18),
        "messages": expected("tool_use", 7),
    });
    for (answers, statuses) in [read.0, read.1] {
        assert_eq!(answers, all);
        let busy = statuses.iter().filter(|status| **status == 529).count();
        assert_eq!(busy, 6, "two retries in each protocol");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn official_gemini_sdk_reads_scripted_streams() {
    let sdks = tokio::task::spawn_blocking(sdks).await.unwrap();
    let mut python = Command::new(sdks.join("venv/bin/python"));
    python.arg("-");
    let (answers, statuses) = read(python, "read_gemini.py").await;
    // The tokens of the cache are counted inside the input.
    let answer = expected("STOP", 18)["answer"].take();
    let models = (json!(["models/scripted"]), json!("models/scripted"));
    let all = json!({
        "answer": answer, "retried": null, "denied": 401, "counted": true, "models": models.0,
        "model": models.1,
    });
    assert_eq!(answers, all);
    assert_eq!(statuses.iter().filter(|status| **status == 503).count(), 2);
}
