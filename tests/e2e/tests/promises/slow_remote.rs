//! Sessions from a build whose remote is slow: agents read during the fetch, and change nothing
//! before it has ended. The real programs, with the scripted model.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use harvest_e2e::{Follower, Host};
use harvest_proto::{
    Event, EventBody, SessionId,
    event::{SyncedCheckout, TurnOutcome},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::{SAMPLE, completed, turn_ended};

/// The file that the sessions read, and its text before and after.
const FILE: &str = "/workspace/shop/calc.py";

/// Half a megabyte that does not compress: a fetch that brought it again would be seen.
const LARGE: usize = 512 * 1024;

const PACK_REQUEST: &[u8] = b"/git-upload-pack HTTP/1";

/// A remote in front of the local forge, which holds answers with packs until it is told.
struct SlowRemote {
    host: Host,
    hold: watch::Sender<bool>,
    sent: Arc<AtomicU64>,
}

impl SlowRemote {
    /// A host with a build of `acme/shop`, whose base has moved since.
    async fn start(image: &str) -> Self {
        let env = [("HARVEST_IMAGE", image), ("HARVEST_PRIVATE_HOSTS", "127.0.0.1")];
        let host = Host::start_with(&env).await;
        let large: String = (0..LARGE / 16).map(|at| format!("{:016x}", scramble(at))).collect();
        let mut files = SAMPLE.to_vec();
        files.push(("large", &large));
        host.repository("shop", &files).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (hold, sent) = (watch::Sender::new(false), Arc::new(AtomicU64::new(0)));
        let forge = host.url().unwrap().trim_start_matches("http://").to_owned();
        let (holding, counted) = (hold.clone(), Arc::clone(&sent));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (holding, counted) = (holding.subscribe(), Arc::clone(&counted));
                let Ok(server) = TcpStream::connect(&forge).await else { return };
                tokio::spawn(relay(client, server, holding, counted));
            }
        });
        let url = format!("http://{address}/forge/local/shop.git");
        let add = ["repo", "add", &url, "--name", "acme/shop", "--secret", "FORGE_SHOP"];
        let added = host.harvest(add);
        assert_eq!(added.code, 0, "{added:?}");
        let built = host.harvest(["repo", "build", "acme/shop"]);
        assert_eq!(built.code, 0, "{built:?}");
        let source = host.home().join("sources/shop");
        let newer = fs::read_to_string(source.join("calc.py")).unwrap() + "# newer\n";
        fs::write(source.join("calc.py"), newer).unwrap();
        git(&source, &["commit", "-qam", "Newer"]);
        let bare = host.home().join("forge/shop/repository.git");
        git(&source, &["push", "-q", bare.to_str().unwrap(), "HEAD:main"]);
        hold.send_replace(true);
        sent.store(0, Ordering::SeqCst);
        Self { host, hold, sent }
    }

    fn release(&self) {
        self.hold.send_replace(false);
    }

    async fn run(&self, agent: &str, script: &Value) -> SessionId {
        self.host.session_of(agent, "acme/shop", "Look.", script).await.id
    }
}

fn scramble(at: usize) -> u64 {
    (at as u64 + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(31)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn git(folder: &Path, arguments: &[&str]) {
    let mut git = Command::new("git");
    git.args(["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "safe.directory=*"]);
    let done = git.arg("-C").arg(folder).args(arguments).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

/// Passes bytes in both directions. After a request for a pack the answer waits.
async fn relay(
    client: TcpStream,
    server: TcpStream,
    mut holding: watch::Receiver<bool>,
    counted: Arc<AtomicU64>,
) {
    let asked = AtomicBool::new(false);
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from_client.read(&mut buffer).await {
            if buffer[..length].windows(PACK_REQUEST.len()).any(|part| part == PACK_REQUEST) {
                asked.store(true, Ordering::SeqCst);
            }
            if to_server.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
        let _closed = to_server.shutdown().await;
    };
    let down = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
            if asked.load(Ordering::SeqCst) {
                let _sender_gone = holding.wait_for(|hold| !hold).await;
            }
            counted.fetch_add(length as u64, Ordering::SeqCst);
            if to_client.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
        let _closed = to_client.shutdown().await;
    };
    tokio::join!(up, down);
}

fn is_end(body: &EventBody) -> bool {
    matches!(body, EventBody::ToolEnded { .. })
}

fn is_sync(body: &EventBody) -> bool {
    matches!(body, EventBody::Synced { .. })
}

fn output(event: &Event) -> (bool, &str) {
    let EventBody::ToolEnded { ok, output, .. } = &event.body else { panic!("{event:?}") };
    (*ok, output)
}

/// The number of tools that have ended.
fn ended(follower: &Follower<'_>) -> usize {
    follower.seen.iter().filter(|event| is_end(&event.body)).count()
}

/// Reads, and wants to change and to run something. `tools` are its names for reading and editing.
async fn reads_early_and_changes_late(agent: &str, tools: (Value, Value)) {
    let remote = SlowRemote::start("agents").await;
    let (read, edit) = tools;
    let script = json!([[read.clone()], [edit], { "text": "done" }]);
    let session = remote.run(agent, &script).await;
    let mut follower = remote.host.follow(session.clone());
    let first = follower.until("the read", is_end).await;
    assert!(output(&first).0 && !output(&first).1.contains("newer"), "{first:?}");
    let started = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    follower.after(first.seq, "the edit to begin", started).await;
    let (_, text) = remote.host.exec(&session, "harvest", &format!("cat {FILE}")).await;
    assert!(text.contains("a - b") && !text.contains("newer"), "{text}");
    assert_eq!(ended(&follower), 1);
    remote.release();
    let synced = follower.after(first.seq, "the sync", is_sync).await;
    let EventBody::Synced { checkouts, .. } = &synced.body else { unreachable!() };
    let [SyncedCheckout { before: Some(before), after: Some(after), .. }] = &checkouts[..] else {
        panic!("{synced:?}")
    };
    assert_ne!(before, after);
    follower.after(first.seq, "the turn's end", turn_ended).await;
    // The model was told before anything was changed, so nothing of the new base is lost.
    let ends: Vec<_> = follower.seen.iter().filter(|event| is_end(&event.body)).collect();
    assert!(ends.len() == 2 && !output(ends[1]).0, "{ends:?}");
    let (_, text) = remote.host.exec(&session, "harvest", &format!("cat {FILE}")).await;
    assert!(text.contains("a - b") && text.contains("newer"), "{text}");
    // Only the difference has travelled.
    let sent = remote.sent.load(Ordering::SeqCst);
    assert!(sent < 64 * 1024, "{sent} bytes");
    // Nothing of the base counts as a change of the session.
    let diff = remote.host.harvest(["diff", &session.to_string()]);
    assert_eq!((diff.code, diff.stdout.as_str()), (0, ""), "{diff:?}");
    let logs = remote.host.harvest(["logs", &session.to_string()]).stdout;
    let line = format!("Updated acme/shop: {} → {}", &before[..7], &after[..7]);
    assert!(logs.contains(&line), "{logs}");
    // The agent knows what it was told, and its tools run at once now.
    let seen = json!([[read], { "bash": "echo more >> more" }, { "text": "ok" }]);
    let last = follower.seen.last().unwrap().seq;
    remote.host.prompt(&session, "Again.", &seen).await;
    follower.after(last, "the second turn", completed).await;
    let later = follower.seen.iter().filter(|event| event.seq > last && is_end(&event.body));
    let later: Vec<_> = later.collect();
    assert!(later.len() == 2 && output(later[0]).1.contains("newer"), "{later:?}");
}

fn claude_tools() -> (Value, Value) {
    let change = json!({ "file_path": FILE, "old_string": "a - b", "new_string": "a + b" });
    (
        json!({ "tool": { "name": "Read", "input": { "file_path": FILE } } }),
        json!({ "tool": { "name": "Edit", "input": change } }),
    )
}

// The remote answers while the test waits for a command.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claude_reads_during_the_fetch() {
    reads_early_and_changes_late("claude", claude_tools()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opencode_reads_during_the_fetch() {
    let change = json!({ "filePath": FILE, "oldString": "a - b", "newString": "a + b" });
    let tools = (
        json!({ "tool": { "name": "read", "input": { "filePath": FILE } } }),
        json!({ "tool": { "name": "edit", "input": change } }),
    );
    reads_early_and_changes_late("opencode", tools).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_of_codex_waits_for_the_fetch() {
    let remote = SlowRemote::start("agents").await;
    let script = json!([{ "bash": "tail -n 1 calc.py" }, { "text": "done" }]);
    let session = remote.run("codex", &script).await;
    let mut follower = remote.host.follow(session);
    let begun = |body: &EventBody| matches!(body, EventBody::TurnStarted { .. });
    let begun = follower.until("the turn", begun).await;
    remote.release();
    follower.after(begun.seq, "the sync", is_sync).await;
    follower.after(begun.seq, "the turn's end", completed).await;
    let ends: Vec<_> = follower.seen.iter().filter(|event| is_end(&event.body)).collect();
    assert!(ends.len() == 1 && output(ends[0]).1.contains("newer"), "{ends:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_tool_survives_kill_of_the_server() {
    let mut remote = SlowRemote::start("claude").await;
    let (_, edit) = claude_tools();
    let script = json!([[edit], { "bash": "tail -n 1 calc.py" }, { "text": "done" }]);
    let session = remote.run("claude", &script).await;
    let started = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    remote.host.follow(session.clone()).until("the edit to begin", started).await;
    remote.host.kill();
    remote.release();
    remote.host.up().await;
    let mut follower = remote.host.follow(session.clone());
    let end = follower.until("the turn's end", turn_ended).await;
    let EventBody::TurnEnded { outcome, .. } = end.body else { unreachable!() };
    assert_eq!(outcome, TurnOutcome::Completed);
}
