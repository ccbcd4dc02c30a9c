//! The binary is replaced while sandboxes run: a supervisor with another version of the bridge is
//! stopped, its work is saved and the reason reported. One with the same version is adopted, which
//! `durable.rs` tests.

use std::{fs, path::PathBuf};

use harvest_e2e::{Host, eventually};
use harvest_proto::{
    EventBody, SessionId,
    api::Session,
    bridge::VERSION,
    event::{SnapshotKind, TurnOutcome},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};

use crate::{completed, turn_ended};

/// A proxy in front of a supervisor that changes the version in its greeting.
struct VersionProxy(JoinHandle<()>);

impl VersionProxy {
    fn before(host: &Host, session: &Session, version: u32) -> Self {
        let sandbox = session.sandbox.as_ref().expect("the session has a sandbox");
        let socket: PathBuf = host.home().join("run").join(sandbox.part()).join("bridge.sock");
        let real = socket.with_extension("real");
        fs::rename(&socket, &real).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        Self(tokio::spawn(async move {
            while let Ok((server, _)) = listener.accept().await {
                let supervisor = UnixStream::connect(&real).await.unwrap();
                tokio::spawn(carry(server, supervisor, version));
            }
        }))
    }
}

impl Drop for VersionProxy {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn carry(server: UnixStream, supervisor: UnixStream, version: u32) {
    let ((mut from_server, mut to_server), (mut from_supervisor, mut to_supervisor)) =
        (server.into_split(), supervisor.into_split());
    tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_supervisor).await });
    // The first frame is small and contains the version.
    let mut first = vec![0; 64 * 1024];
    let Ok(count) = from_supervisor.read(&mut first).await else { return };
    let (real, changed) = (format!("\"version\":{VERSION}"), format!("\"version\":{version}"));
    let Some(at) = first[..count].windows(real.len()).position(|bytes| bytes == real.as_bytes())
    else {
        return;
    };
    first.truncate(count);
    first.splice(at..at + real.len(), changed.bytes());
    // A frame begins with its length.
    let length = u32::from_be_bytes(first[..4].try_into().unwrap()) as usize;
    let length = u32::try_from(length + changed.len() - real.len()).unwrap();
    first[..4].copy_from_slice(&length.to_be_bytes());
    if to_server.write_all(&first).await.is_ok() {
        let _ = tokio::io::copy(&mut from_supervisor, &mut to_server).await;
    }
}

async fn session_in_a_turn(host: &Host) -> SessionId {
    let script = json!([
        { "bash": "echo before > ~/work; until [ -e ~/go ]; do sleep 0.05; done; echo after >> ~/work" },
        { "text": "done" },
    ]);
    let session = host.bare("Work.", &script).await.id;
    let works = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    host.follow(session.clone()).until("it to work", works).await;
    eventually("the file to be there", || async {
        (host.exec(&session, "harvest", "cat ~/work 2>/dev/null").await.1 == "before\n")
            .then_some(())
    })
    .await;
    session
}

#[tokio::test]
async fn older_supervisor_version_is_stopped_with_work_saved() {
    stopped_with_work_saved(VERSION - 1).await;
}

#[tokio::test]
async fn newer_supervisor_version_is_stopped_with_work_saved() {
    stopped_with_work_saved(VERSION + 1).await;
}

async fn stopped_with_work_saved(version: u32) {
    let mut host = Host::start().await;
    let session = session_in_a_turn(&host).await;
    let before = host.show(&session).await;
    host.kill();
    let _proxy = VersionProxy::before(&host, &before, version);
    host.up().await;
    let mut follower = host.follow(session.clone());
    let end = follower.until("the turn to end", turn_ended).await;
    let EventBody::TurnEnded { outcome: TurnOutcome::Interrupted, error: Some(error), .. } =
        &end.body
    else {
        panic!("{:?}", end.body)
    };
    assert!(error.contains("version"), "{error}");
    let recovered = |body: &EventBody| {
        matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Recovered, .. })
    };
    follower.until("its work to be kept", recovered).await;
    let over = |body: &EventBody| matches!(body, EventBody::SandboxEnded { reason, .. } if reason.contains("version"));
    follower.until("the reason", over).await;
    // The session continues in a sandbox of this version.
    host.prompt(&session, "Go on.", &json!([{ "bash": "cat ~/work" }, { "text": "on" }])).await;
    follower.after(end.seq, "the next turn", completed).await;
    assert_eq!(host.exec(&session, "harvest", "cat ~/work").await.1, "before\n");
    assert!(host.show(&session).await.epoch > before.epoch);
}
