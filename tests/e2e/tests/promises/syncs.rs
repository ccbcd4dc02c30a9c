//! `harvest sync`: work is committed and carried to the newest base, or stays as it is; and work
//! that an agent left behind reaches its pull request.

use std::{fs, path::PathBuf, process::Command};

use harvest_e2e::{Host, Ran, eventually};
use harvest_proto::{
    EventBody, SessionId, StateReason,
    api::SessionState,
    event::{CheckoutSync, SyncOutcome},
};
use serde_json::{Value, json};

use crate::{SAMPLE, completed};

const SHOP: &str = "/workspace/calc";

/// A host with an idle session that has uncommitted work in `calc.py`.
async fn working() -> (Host, SessionId) {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let script = json!([{ "bash": format!("cd {SHOP} && echo '# ours' >> calc.py && touch new") }]);
    let session = host.scripted("calc", "Begin.", &script).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;
    (host, session)
}

/// Pushes a commit to the base, as a person would.
fn move_base(host: &Host, file: &str, line: &str) {
    let source = host.home().join("sources/calc");
    let path = source.join(file);
    let text = fs::read_to_string(&path).unwrap_or_default() + line + "\n";
    fs::write(path, text).unwrap();
    let bare: PathBuf = host.home().join("forge/calc/repository.git");
    for arguments in [
        vec!["add", "-A"],
        vec!["-c", "user.name=T", "-c", "user.email=t@e", "commit", "-qm", line],
        vec!["push", "-q", bare.to_str().unwrap(), "HEAD:main"],
    ] {
        let done = Command::new("git").current_dir(&source).args(&arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {done:?}");
    }
}

fn sync(host: &Host, session: &SessionId) -> Ran {
    host.harvest(["sync", &session.to_string()])
}

async fn shell(host: &Host, session: &SessionId, command: &str) -> String {
    let (exit, output) = host.exec(session, "harvest", &format!("cd {SHOP} && {command}")).await;
    assert_eq!(exit, harvest_proto::bridge::Exit::Code(0), "{command}: {output}");
    output
}

/// Makes merges wait while the file `hold` is there.
async fn hold_merges(host: &Host, session: &SessionId) {
    let driver = "touch ~/merging; while [ -e ~/hold ]; do sleep 0.02; done; exit 1";
    let attributes = "echo '*.py merge=slow' > .git/info/attributes";
    let config = format!("git config merge.slow.driver '{driver}'");
    shell(host, session, &format!("touch ~/hold && {attributes} && {config}")).await;
}

/// Starts a sync and waits until its rebase merges.
async fn begin_sync(host: &Host, session: &SessionId) -> std::process::Child {
    let sync = host.command().args(["sync", &session.to_string()]).spawn().unwrap();
    eventually("the rebase to merge", || async {
        let (_, merging) = host.exec(session, "harvest", "ls ~/merging 2>/dev/null").await;
        (!merging.is_empty()).then_some(())
    })
    .await;
    sync
}

fn ends(events: &[EventBody]) -> Vec<&CheckoutSync> {
    let mut all = Vec::new();
    for body in events {
        if let EventBody::SyncEnded { checkouts, .. } = body {
            all.extend(checkouts);
        }
    }
    all
}

const STATE: &str = "git status --porcelain; git symbolic-ref --short HEAD; git log -1 --format=%s; \
                     cat calc.py; ls -d new .git/rebase-merge 2>/dev/null; true";

#[tokio::test]
async fn sync_rebases_work_and_names_conflicts() {
    let (host, session) = working().await;
    move_base(&host, "theirs", "theirs");
    let ran = host.harvest(["sync", &session.to_string(), "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let done: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&done["synced"], &done["session"]["state"]), (&json!(true), &json!("idle")));
    assert_eq!(done["checkouts"][0]["outcome"], "rebased");
    assert_eq!(done["checkouts"][0]["files"], 2);
    let log = shell(&host, &session, "git log -2 --format='%an <%ae>: %s' && ls theirs new").await;
    assert_eq!(
        log,
        "Test (Harvest) <test@example.org>: wip: snapshot\nT <t@e>: theirs\nnew\ntheirs\n"
    );
    let diff = host.harvest(["diff", &session.to_string()]);
    assert!(diff.stdout.contains("# ours") && !diff.stdout.contains("theirs"), "{diff:?}");

    move_base(&host, "calc.py", "# theirs");
    let before = shell(&host, &session, STATE).await;
    let ran = sync(&host, &session);
    assert_eq!(ran.code, 3, "{ran:?}");
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines[0], "Conflict: local/calc with origin/main; the branch is as before");
    assert_eq!(lines[1], "  files:      calc.py");
    assert!(lines[2].starts_with("  commit:     ") && lines[2].ends_with("wip: snapshot"));
    assert!(lines[3].starts_with("  checkpoint: checkpoint-harvest-begin-"), "{ran:?}");
    assert!(lines[4].contains("git rebase origin/main"), "{ran:?}");
    assert!(ran.stderr.contains("harvest send"), "{ran:?}");
    assert_eq!(shell(&host, &session, STATE).await, before);
    let now = host.show(&session).await;
    assert_eq!((now.state, now.reason), (SessionState::NeedsInput, StateReason::Conflict));

    for _ in 0..2 {
        assert_eq!(sync(&host, &session).code, 3);
    }
    let shown = host.harvest(["show", &session.to_string()]);
    for part in
        ["Blocked: local/calc follows origin/main", "because: local/calc: conflict", "kept as:"]
    {
        assert!(shown.stdout.contains(part), "{shown:?}");
    }
    let resolve = "cd /workspace/calc && ! git rebase -q origin/main && git checkout -q --theirs \
                   calc.py && git add calc.py && GIT_EDITOR=true git rebase --continue";
    host.prompt(&session, "Resolve it.", &json!([{ "bash": resolve }])).await;
    eventually("the second turn", || async {
        let turns = host.show(&session).await;
        (turns.turns == 2 && turns.state == SessionState::Idle).then_some(())
    })
    .await;
    assert_eq!(sync(&host, &session).code, 0);
}

#[tokio::test]
async fn sync_ends_although_server_is_killed() {
    let (mut host, session) = working().await;
    move_base(&host, "calc.py", "# theirs");
    hold_merges(&host, &session).await;
    let before = shell(&host, &session, "cat calc.py").await;
    let mut caller = begin_sync(&host, &session).await;
    host.kill();
    caller.wait().unwrap();
    host.up().await;
    shell(&host, &session, "rm ~/hold").await;
    let ended = |body: &EventBody| matches!(body, EventBody::SyncEnded { .. });
    host.follow(session.clone()).until("the sync", ended).await;
    let now = host.wait_for(&session, SessionState::NeedsInput).await;
    assert_eq!(now.reason, StateReason::Conflict);
    assert_eq!(shell(&host, &session, "cat calc.py").await, before);
    assert_eq!(sync(&host, &session).code, 3, "the verb can be repeated");
    let events = host.events(&session).await;
    let outcomes: Vec<_> = ends(&events).iter().map(|one| one.outcome).collect();
    assert_eq!(outcomes, [SyncOutcome::Conflict; 2]);
}

#[tokio::test]
async fn sync_of_a_dying_sandbox_loses_no_work() {
    let (host, session) = working().await;
    move_base(&host, "calc.py", "# theirs");
    hold_merges(&host, &session).await;
    let mut caller = begin_sync(&host, &session).await;
    let killed = host.harvest(["terminate", &session.to_string()]);
    assert_eq!(killed.code, 0, "{killed:?}");
    assert_eq!(caller.wait().unwrap().code(), Some(1));
    assert_eq!(host.harvest(["resume", &session.to_string()]).code, 0);
    let undone = |body: &EventBody| matches!(body, EventBody::Warning { message } if message.contains("was interrupted"));
    host.follow(session.clone()).until("the sync to be undone", undone).await;
    let state = shell(&host, &session, STATE).await;
    assert!(state.starts_with("harvest/begin-") && state.ends_with("# ours\nnew\n"), "{state}");
    assert!(state.contains("wip: snapshot"), "{state}");
}

#[tokio::test]
async fn forgotten_work_becomes_pull_request() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let fix = "sed -i 's/a - b/a + b/' /workspace/calc/calc.py";
    let body = json!({
        "repository": "calc", "agent": "scripted", "network": "none", "pr_mode": "draft",
        "author": { "name": "Ada", "email": "ada@example.org" },
        "prompt": format!("Fix it.\nscript: {}", json!([{ "bash": fix }])),
    });
    let session: SessionId =
        host.post("/v1/sessions", body).await["id"].as_str().unwrap().parse().unwrap();
    let mut follower = host.follow(session.clone());
    follower.until("the pull request", |body| matches!(body, EventBody::PrOpened { .. })).await;
    host.wait_for(&session, SessionState::Idle).await;
    let events = host.events(&session).await;
    let at = |wanted: fn(&EventBody) -> bool| events.iter().position(wanted).unwrap();
    let saved = at(|body| matches!(body, EventBody::WorkSaved(_)));
    assert!(saved < at(|body| matches!(body, EventBody::TurnEnded { .. })));
    assert!(saved < at(|body| matches!(body, EventBody::SnapshotTaken { .. })));
    let EventBody::WorkSaved(work) = &events[saved] else { unreachable!() };
    assert_eq!((work.work.files, &work.error), (1, &None));
    let log = host.harvest(["logs", &session.to_string()]);
    assert!(log.stdout.contains("Saved 1 uncommitted file as "), "{log:?}");
    let bare = host.home().join("forge/calc/repository.git");
    let branch = host.show(&session).await.branch;
    let log = Command::new("git")
        .arg("-C")
        .arg(bare)
        .args(["log", "-1", "--format=%an <%ae>: %s", &branch])
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&log.stdout).into_owned();
    assert_eq!(log, "Ada (Harvest) <ada@example.org>: wip: uncommitted work of turn 1\n");
}
