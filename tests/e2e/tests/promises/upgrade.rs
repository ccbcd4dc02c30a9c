//! The binary is replaced while sandboxes live: supervisors of this and the last version of the bridge are
//! adopted, any other is ended with its work kept and the reason told.

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

/// Stands before a session's supervisor and has it say another version.
struct Disguise(JoinHandle<()>);

impl Disguise {
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

impl Drop for Disguise {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn carry(server: UnixStream, supervisor: UnixStream, version: u32) {
    let ((mut from_server, mut to_server), (mut from_supervisor, mut to_supervisor)) =
        (server.into_split(), supervisor.into_split());
    tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_supervisor).await });
    // Its first words are a small frame that has the version in it.
    let mut first = vec![0; 64 * 1024];
    let Ok(count) = from_supervisor.read(&mut first).await else { return };
    let (said, says) = (format!("\"version\":{VERSION}"), format!("\"version\":{version}"));
    let Some(at) = first[..count].windows(said.len()).position(|word| word == said.as_bytes())
    else {
        return;
    };
    first[at..at + says.len()].copy_from_slice(says.as_bytes());
    if to_server.write_all(&first[..count]).await.is_ok() {
        let _ = tokio::io::copy(&mut from_supervisor, &mut to_server).await;
    }
}

async fn begun(host: &Host) -> SessionId {
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
async fn a_supervisor_of_the_last_version_is_adopted_in_the_middle_of_its_turn() {
    let mut host = Host::start().await;
    let session = begun(&host).await;
    let before = host.show(&session).await;
    host.kill();
    let _old = Disguise::before(&host, &before, VERSION - 1);
    host.up().await;
    host.exec(&session, "harvest", "touch ~/go").await;
    let end = host.follow(session.clone()).until("the turn to end", turn_ended).await;
    assert!(completed(&end.body), "{:?}", end.body);
    let after = host.show(&session).await;
    assert_eq!(
        (after.sandbox, after.epoch),
        (before.sandbox, before.epoch),
        "it is the same sandbox"
    );
    assert_eq!(host.exec(&session, "harvest", "cat ~/work").await.1, "before\nafter\n");
}

#[tokio::test]
async fn a_supervisor_nobody_understands_is_ended_with_its_work_kept_and_the_reason_told() {
    let mut host = Host::start().await;
    let session = begun(&host).await;
    let before = host.show(&session).await;
    host.kill();
    let _strange = Disguise::before(&host, &before, VERSION + 8);
    host.up().await;
    let mut follower = host.follow(session.clone());
    let end = follower.until("the turn to end", turn_ended).await;
    let EventBody::TurnEnded { outcome: TurnOutcome::Interrupted, error: Some(told), .. } =
        &end.body
    else {
        panic!("{:?}", end.body)
    };
    assert!(told.contains("version"), "{told}");
    let recovered = |body: &EventBody| {
        matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Recovered, .. })
    };
    follower.until("its work to be kept", recovered).await;
    let over = |body: &EventBody| matches!(body, EventBody::SandboxEnded { reason, .. } if reason.contains("version"));
    follower.until("the reason", over).await;
    // It goes on in a sandbox of today.
    host.prompt(&session, "Go on.", &json!([{ "bash": "cat ~/work" }, { "text": "on" }])).await;
    follower.after(end.seq, "the next turn", completed).await;
    assert_eq!(host.exec(&session, "harvest", "cat ~/work").await.1, "before\n");
    assert!(host.show(&session).await.epoch > before.epoch);
}
