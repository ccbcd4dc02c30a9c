//! Hostile repositories and agents: they harm at most their own session, which reports the reason.

use std::{
    ffi::OsStr, fs, os::unix::ffi::OsStrExt, os::unix::fs::symlink, path::Path, process::Command,
};

use harvest_e2e::{Host, most_memory};
use harvest_proto::{
    EventBody, SessionId, StateReason,
    api::{Session, SessionState},
    event::{BootPhase, PhaseStatus, TurnOutcome},
};
use serde_json::{Value, json};

use super::{begin, lives, outcome, prompts, supervisor, told_once};
use crate::{SAMPLE, completed};

/// A repository with this start hook.
async fn with_hook(host: &Host, name: &str, start: &str) -> SessionId {
    host.repository(name, &[("file", "x\n"), (".harvest/start.sh", start)]).await;
    host.scripted(name, "Begin.", &json!([{ "text": "on" }])).await.id
}

/// Why the hook failed the boot, and its last lines.
async fn last_words(host: &Host, session: &SessionId) -> String {
    let failed = |body: &EventBody| {
        matches!(
            body,
            EventBody::BootPhase { phase: BootPhase::Start, status: PhaseStatus::Failed, .. }
        )
    };
    let failed = host.follow(session.clone()).until("the hook to fail", failed).await;
    let EventBody::BootPhase { tail, failure: Some(failure), .. } = failed.body else {
        panic!("{failed:?}")
    };
    format!("{}\n{}", failure.message, tail.unwrap_or_default())
}

#[tokio::test]
async fn hostile_hook_fails_only_its_own_session() {
    let host = Host::start().await;
    let before = most_memory(server(&host)).unwrap();
    let flood = with_hook(
        &host,
        "flood",
        "head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last word; exit 3\n",
    )
    .await;
    let failed = host.wait_for(&flood, SessionState::Failed).await;
    assert_eq!(failed.reason, StateReason::BootFailed);
    let words = last_words(&host, &flood).await;
    assert!(
        words.contains("last word") && words.contains("(exit 3)") && words.len() < 65_536,
        "{}",
        words.len()
    );
    let after = most_memory(server(&host)).unwrap();
    assert!(
        after < before + (48 << 20),
        "the server took {before} bytes before and {after} at most"
    );

    // Kills its parent and every process of its user.
    let murder =
        with_hook(&host, "murder", "kill -9 $PPID 1; kill -STOP 1; kill -9 -1; exit 4\n").await;
    let failed = host.wait_for(&murder, SessionState::Failed).await;
    assert_eq!(failed.reason, StateReason::BootFailed, "{}", last_words(&host, &murder).await);
}

#[tokio::test]
async fn endless_hook_times_out_and_can_be_stopped() {
    let host =
        Host::start_with(&[("HARVEST_CLOCKS_BOOT", "5s"), ("HARVEST_CLOCKS_BREAKER", "10s")]).await;
    let endless =
        with_hook(&host, "endless", "trap '' TERM INT HUP; while :; do sleep 98761.25; done\n")
            .await;
    lives("98761.25").await;
    let failed = host.wait_for(&endless, SessionState::Failed).await;
    assert_eq!((failed.reason, failed.sandbox), (StateReason::BootTimeout, None));
    // A stop takes effect while the hook hangs.
    host.post(&format!("/v1/sessions/{endless}/resume"), json!({})).await;
    lives("98761.25").await;
    host.post(&format!("/v1/sessions/{endless}/stop"), json!({})).await;
    let stopped = host.wait_for(&endless, SessionState::Paused).await;
    assert_eq!((stopped.reason, stopped.sandbox), (StateReason::Stopped, None));
}

fn server(host: &Host) -> u32 {
    let text = fs::read_to_string(host.home().join("server.json")).unwrap();
    u32::try_from(serde_json::from_str::<Value>(&text).unwrap()["pid"].as_u64().unwrap()).unwrap()
}

fn git(folder: &Path, arguments: &[&str]) {
    let who = [
        "-c",
        "user.name=Test",
        "-c",
        "user.email=test@example.org",
        "-c",
        "protocol.file.allow=always",
    ];
    let done =
        Command::new("git").arg("-C").arg(folder).args(who).args(arguments).output().unwrap();
    assert!(done.status.success(), "git {arguments:?}: {done:?}");
}

/// File names, links, sizes and git pointers that break careless code.
fn write_oddities(folder: &Path) {
    fs::create_dir_all(folder.join("-rf")).unwrap();
    let names: [&[u8]; 6] = [
        b"-rf/--help",
        b"a b\n\tc",
        b"$(touch pwned)",
        b"\xff\xfe",
        b"';touch pwned;'",
        "ü".as_bytes(),
    ];
    for name in names {
        fs::write(folder.join(OsStr::from_bytes(name)), "odd\n").unwrap();
    }
    for (name, target) in [
        ("passwd", "/etc/passwd"),
        ("up", "../../../../../../etc"),
        ("loop", "loop"),
        ("dev", "/dev/zero"),
    ] {
        symlink(target, folder.join(name)).unwrap();
    }
    fs::write(folder.join("large"), vec![b'l'; 20_000_000]).unwrap();
    fs::write(folder.join(".gitattributes"), "*.bin filter=lfs diff=lfs merge=lfs -text\n")
        .unwrap();
    let pointer = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n",
        "0".repeat(64)
    );
    fs::write(folder.join("model.bin"), pointer).unwrap();
    let deep = folder.join(["d"; 200].join("/"));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("file"), "deep\n").unwrap();
    // A hook that links out of the tree.
    fs::create_dir_all(folder.join(".harvest")).unwrap();
    symlink("/dev/zero", folder.join(".harvest/start.sh")).unwrap();
}

#[tokio::test]
async fn hostile_repository_is_handled_verbatim() {
    let host = Host::start().await;
    let folder = host.home().join("traps");
    let inner = host.home().join("inner");
    for (path, content) in SAMPLE {
        let path = inner.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    git(&inner.parent().unwrap().join("inner"), &["init", "-q", "-b", "main"]);
    git(&inner, &["add", "-A"]);
    git(&inner, &["commit", "-qm", "Inner"]);
    fs::create_dir_all(&folder).unwrap();
    git(&folder, &["init", "-q", "-b", "main"]);
    write_oddities(&folder);
    git(&folder, &["submodule", "--quiet", "add", inner.to_str().unwrap(), "sub"]);
    git(&folder, &["add", "-A"]);
    git(&folder, &["commit", "-qm", "Traps"]);
    let script = json!([{ "bash": "for f in *; do echo more >> \"./$f\"; done 2>/dev/null; echo new > \"$(printf 'n\\nw')\"" }]);
    let prompt = format!("Work.\nscript: {script}");
    let run = [
        "run",
        &prompt,
        "-r",
        folder.to_str().unwrap(),
        "-a",
        "scripted",
        "--net",
        "none",
        "-d",
        "--json",
    ];
    let ran = host.harvest(run);
    assert_eq!(ran.code, 0, "{ran:?}");
    let session = serde_json::from_str::<Session>(&ran.stdout).unwrap().id;
    host.follow(session.clone()).until("the turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;

    let (_, listed) = host.exec(&session, "harvest", "ls -A . sub; head -1 model.bin").await;
    assert!(listed.contains("version https://git-lfs") && !listed.contains("\npwned"), "{listed}");
    for diff in [
        &["diff", "-"][..],
        &["diff", "-", "--turn", "1"],
        &["diff", "-", "--turn", "1", "--stat"],
        &["diff", "-", "--sandbox"],
    ] {
        let shown = host.harvest(diff);
        let said: String = shown.stdout.chars().take(2000).collect();
        assert!(
            shown.code == 0 && said.contains("touch pwned"),
            "{diff:?}: {} {said}",
            shown.stderr
        );
    }
    // Copying out: links stay links, and nothing is written through them.
    let out = host.home().join("out");
    let copied = host.harvest([
        "cp",
        "-r",
        &format!("{session}:/workspace/traps/-rf"),
        out.to_str().unwrap(),
    ]);
    assert_eq!(copied.code, 0, "{copied:?}");
    assert_eq!(fs::read_to_string(out.join("--help")).unwrap(), "odd\n");
    let passwd =
        host.get(&format!("/v1/sessions/{session}/files?path=up/hostname")).send().await.unwrap();
    let theirs = passwd.text().await.unwrap();
    assert_ne!(
        theirs,
        fs::read_to_string("/etc/hostname").unwrap_or_default(),
        "a link leads nowhere but inside"
    );
    let again = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    assert_eq!(outcome(&mut host.follow(session.clone()), &again).await, TurnOutcome::Completed);
    told_once(&host, &session).await;
}

#[tokio::test]
async fn agent_git_traps_do_not_block_diff() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let traps = "cd /workspace/calc; echo mine > mine; \
        for key in core.fsmonitor core.pager diff.external core.editor core.sshCommand credential.helper; do \
        git config $key 'sh -c \"touch /tmp/ran; sleep 98762.25\"'; done; \
        git config core.hooksPath /workspace/calc/hooks; mkdir hooks; \
        for hook in post-index-change post-checkout pre-commit reference-transaction; do \
        printf '#!/bin/sh\\nsleep 98762.25\\n' > hooks/$hook; chmod +x hooks/$hook; done";
    let session = host.scripted("calc", "Trap.", &json!([{ "bash": traps }])).await.id;
    let mut follower = host.follow(session.clone());
    follower.until("the turn", completed).await;
    let kept = follower
        .until("its snapshot", |body| matches!(body, EventBody::SnapshotTaken { .. }))
        .await;
    assert!(kept.seq > 0);
    for diff in [&["diff", "-"][..], &["diff", "-", "--turn", "1"]] {
        let shown = host.harvest(diff);
        assert!(shown.code == 0 && shown.stdout.contains("+mine"), "{diff:?}: {shown:?}");
    }
    let first = prompts(&host, &session).await.remove(0);
    assert_eq!(outcome(&mut follower, &first).await, TurnOutcome::Completed);
}

#[tokio::test]
async fn supervisor_survives_attacks_by_the_agent() {
    let host = Host::start().await;
    let before = most_memory(server(&host)).unwrap();
    let attack = "for f in /proc/1/fd/* /proc/1/mem /proc/1/root/etc/x /proc/sysrq-trigger; do echo x > $f; done 2>/dev/null; \
        kill -9 1; kill -STOP 1; kill -SEGV 1; echo tried";
    let script = json!([
        { "bash": attack },
        { "garbage": 10_000_000 },
        { "raw": "{\"say\":\"done\"" },
        { "flood": { "events": 200, "bytes": 30_000 } },
        { "bash": "head -c 5000000 /dev/zero | tr '\\0' y" },
        { "text": "survived" },
    ]);
    let session = begin(&host, &script).await;
    let mut follower = host.follow(session.clone());
    let first = prompts(&host, &session).await.remove(0);
    assert_eq!(outcome(&mut follower, &first).await, TurnOutcome::Completed);
    assert!(follower.text().contains("survived"));
    let pid = supervisor(&host, &session).await;
    let second = host.prompt(&session, "Go on.", &json!([{ "history": true }])).await;
    assert_eq!(outcome(&mut follower, &second).await, TurnOutcome::Completed);
    assert_eq!(supervisor(&host, &session).await, pid, "it is the same sandbox");
    let after = most_memory(server(&host)).unwrap();
    assert!(
        after < before + (96 << 20),
        "the server took {before} bytes before and {after} at most"
    );
    told_once(&host, &session).await;
}

#[tokio::test]
async fn next_turn_runs_after_resource_exhaustion() {
    let host = Host::start().await;
    let hog = "python3 -c 'x = []\nwhile True: x.append(bytearray(64 << 20))'; echo ended $?";
    let session = begin(&host, &json!([{ "bash": hog }, { "text": "on" }])).await;
    let mut follower = host.follow(session.clone());
    let first = prompts(&host, &session).await.remove(0);
    // The memory limit kills the hog, or the agent, which is restarted.
    let ended = outcome(&mut follower, &first).await;
    assert!(matches!(ended, TurnOutcome::Completed | TurnOutcome::Failed), "{ended:?}");
    let pid = supervisor(&host, &session).await;
    // The shell itself forks once, before the bomb can use up the process limit.
    let bomb = "f() { f | f & }; (f) & exec sleep 98763.25";
    let second = host.prompt(&session, "Go off.", &json!([{ "bash": bomb }])).await;
    lives("98763.25").await;
    host.post(&format!("/v1/sessions/{session}/stop"), json!({})).await;
    assert_eq!(outcome(&mut follower, &second).await, TurnOutcome::Stopped);
    let third =
        host.prompt(&session, "Go on.", &json!([{ "bash": "echo alive" }, { "text": "on" }])).await;
    assert_eq!(outcome(&mut follower, &third).await, TurnOutcome::Completed);
    assert_eq!(supervisor(&host, &session).await, pid, "it is the same sandbox");
    told_once(&host, &session).await;
}
