//! Faults around a server: killed during a snapshot or a fork, and a full disk.

use std::{fs, io::Write, path::PathBuf, process::Command};

use harvest_e2e::{Host, eventually, until};
use harvest_proto::{
    EventBody, SessionId,
    api::{Prompt, PromptStatus, SessionState},
    event::SnapshotKind,
};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{SAMPLE, completed, turn_ended};

fn kept(body: &EventBody) -> bool {
    matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Turn, .. })
}

async fn prompts(host: &Host, session: &SessionId) -> Vec<Prompt> {
    let page: Value = host
        .get(&format!("/v1/sessions/{session}/prompts"))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    serde_json::from_value(page["items"].clone()).unwrap()
}

#[tokio::test]
async fn killed_server_takes_turn_snapshot_exactly_once() {
    let mut host = Host::start().await;
    // Enough files for the kill to arrive while they are copied.
    let files = "mkdir /home/harvest/many; cd /home/harvest/many; seq 1 6000 | split -l 2 -a 4 -; ls | wc -l";
    let session =
        host.bare("Write a lot.", &json!([{ "bash": files }, { "text": "done" }])).await.id;
    let ended = host.follow(session.clone()).until("the turn to end", turn_ended).await;
    let next = host
        .prompt(&session, "Go on.", &json!([{ "bash": "echo on > ~/next" }, { "text": "on" }]))
        .await;
    for _ in 0..3 {
        host.kill();
        host.up().await;
    }
    let mut follower = host.follow(session.clone());
    let of_next = |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt, .. } if *prompt == next.id);
    let second = follower.until("the next turn", of_next).await;
    assert!(completed(&second.body), "{:?}", second.body);
    let last = follower.after(second.seq, "its snapshot", kept).await.seq;
    let taken = follower.seen.iter().filter(|event| kept(&event.body)).map(|event| event.seq);
    let taken: Vec<u64> = taken.collect();
    assert_eq!(taken.len(), 2, "one for each turn: {taken:?}");
    assert!(
        ended.seq < taken[0] && taken[0] < second.seq && taken[1] == last,
        "before the next prompt was sent"
    );
    // The first snapshot is complete.
    let fork = host.post(&format!("/v1/sessions/{session}/fork"), json!({ "turn": 1 })).await;
    let fork: SessionId = fork["items"][0]["id"].as_str().unwrap().parse().unwrap();
    host.wait_for(&fork, SessionState::Idle).await;
    let (_, count) = host.exec(&fork, "harvest", "ls ~/many | wc -l; ls ~/next 2>&1").await;
    assert!(count.starts_with("3000\n") && count.contains("No such file"), "{count}");
}

#[tokio::test]
async fn turn_saved_across_server_kill_has_diff() {
    let mut host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    // Enough files for the kill to arrive while git reads them.
    let files =
        "mkdir /workspace/calc/many; cd /workspace/calc/many; seq 1 600 | split -l 2 -a 4 -";
    let first = json!([{ "bash": files }, { "text": "done" }]);
    let prompt = format!("Write a lot.\nscript: {first}");
    let body =
        json!({ "repository": "calc", "agent": "scripted", "network": "none", "prompt": prompt });
    let session: SessionId =
        host.post("/v1/sessions", body).await["id"].as_str().unwrap().parse().unwrap();
    let ended = host.follow(session.clone()).until("the turn to end", turn_ended).await;
    let then = json!([{ "bash": "echo on > /workspace/calc/next" }, { "text": "on" }]);
    let next = host.prompt(&session, "Go on.", &then).await;
    for _ in 0..2 {
        host.kill();
        host.up().await;
    }
    let mut follower = host.follow(session.clone());
    let first_kept = follower.after(ended.seq, "the first turn to be kept", kept).await.seq;
    let of_next = |body: &EventBody| matches!(body, EventBody::TurnStarted { prompt, .. } if *prompt == next.id);
    let began = follower.after(ended.seq, "the next turn", of_next).await.seq;
    assert!(first_kept < began, "the first is kept before the next is begun");
    follower.after(began, "the next to be kept", kept).await;
    let page: Value = host
        .get(&format!("/v1/sessions/{session}/turns"))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let changed = |turn: usize| page["items"][turn]["diff"]["files"].as_u64();
    assert_eq!((changed(0), changed(1)), (Some(300), Some(1)), "{page}");
    let told = host.get(&format!("/v1/sessions/{session}/diff?from=1&to=2")).send().await.unwrap();
    let told = told.text().await.unwrap();
    assert!(told.contains("+on") && !told.contains("many/"), "{told}");
}

#[tokio::test]
async fn killed_fork_creates_all_sessions_or_none() {
    let mut host = Host::start().await;
    let session =
        host.bare("Begin.", &json!([{ "bash": "echo one > ~/file" }, { "text": "done" }])).await.id;
    host.follow(session.clone()).until("its snapshot", kept).await;
    let path = format!("/v1/sessions/{session}/fork");
    let mut made = Vec::new();
    for (number, millis) in [0, 1, 2, 4, 8, 16].into_iter().enumerate() {
        let key = format!("fork-{number}");
        let ask = || {
            host.request(Method::POST, &path)
                .header("idempotency-key", &key)
                .json(&json!({ "count": 3 }))
        };
        // The kill arrives at any stage of the request.
        let sent =
            tokio::time::timeout(std::time::Duration::from_millis(millis), ask().send()).await;
        drop(sent);
        host.kill();
        host.up().await;
        let again = eventually("the forks to be made", || async {
            let answer = host.request(Method::POST, &path).header("idempotency-key", &key);
            let answer = answer.json(&json!({ "count": 3 })).send().await.ok()?;
            answer.status().is_success().then_some(answer)
        })
        .await;
        let page: Value = again.json().await.unwrap();
        made.extend(
            page["items"]
                .as_array()
                .unwrap()
                .iter()
                .map(|one| one["id"].as_str().unwrap().to_owned()),
        );
    }
    let page: Value =
        host.get("/v1/sessions?limit=200").send().await.unwrap().json().await.unwrap();
    assert_eq!(
        page["items"].as_array().unwrap().len(),
        1 + made.len(),
        "every fork is in the response"
    );
    assert_eq!(made.len(), 18);
    for id in [&made[0], &made[17]] {
        let fork: SessionId = id.parse().unwrap();
        // A finished session releases its slot to a waiting one.
        eventually("a fork to be ready", || async {
            let now = host.show(&fork).await.state;
            matches!(now, SessionState::Idle | SessionState::Paused).then_some(())
        })
        .await;
        assert_eq!(host.exec(&fork, "harvest", "cat ~/file").await.1, "one\n");
    }
}

/// A mounted file system of limited size, unmounted on drop.
pub(crate) struct SmallDisk {
    pub(crate) place: PathBuf,
    _folder: tempfile::TempDir,
}

impl SmallDisk {
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("hv").tempdir().unwrap();
        let (image, place) = (folder.path().join("image"), folder.path().join("d"));
        fs::create_dir(&place).unwrap();
        // Sparse. With less than 512 MiB free no sandbox would start.
        fs::File::create(&image).unwrap().set_len(2 << 30).unwrap();
        let run =
            |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&place));
        Self { place, _folder: folder }
    }

    /// Fills the disk; removing the returned file frees it.
    pub(crate) fn fill(&self) -> PathBuf {
        let ballast = self.place.join("ballast");
        let mut file = fs::File::create(&ballast).unwrap();
        // Reserves blocks without writing them, in smaller and smaller pieces.
        for bytes in [256 << 20, 16 << 20, 1 << 20, 64 << 10, 4096] {
            let mut end = file.metadata().unwrap().len();
            while rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), end, bytes)
                .is_ok()
            {
                end += bytes;
            }
        }
        while file.write(&[0; 4096]).is_ok_and(|written| written > 0) {}
        ballast
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = |how: Option<&str>| {
            let done = Command::new("umount").args(how).arg(&self.place).output();
            done.is_ok_and(|done| done.status.success())
        };
        if std::thread::panicking() {
            unmounted(Some("-l"));
            return;
        }
        // A dying process may still have a file open.
        until("the disk to be unused", || unmounted(None));
    }
}

/// Queues prompts until a short one is refused; returns the accepted ones and the refusal.
async fn until_full(host: &Host, session: &SessionId) -> (Vec<String>, StatusCode, Value) {
    let (mut taken, mut long) = (Vec::new(), 30_000);
    loop {
        assert!(taken.len() < 3_000, "the disk never fills");
        let script =
            json!([{ "bash": format!("echo {} >> ~/ran", taken.len()) }, { "text": "ok" }]);
        let text = format!("{}\n{}\nscript: {script}", taken.len(), "x".repeat(long));
        let path = format!("/v1/sessions/{session}/prompts");
        let answer =
            host.request(Method::POST, &path).json(&json!({ "text": text })).send().await.unwrap();
        let (status, body) = (answer.status(), answer.json::<Value>().await.unwrap());
        match (status.is_success(), long) {
            (true, _) => taken.push(body["id"].as_str().unwrap().to_owned()),
            (false, 0) => return (taken, status, body),
            (false, _) => long /= 2,
        }
    }
}

#[tokio::test]
async fn full_disk_loses_no_accepted_prompt() {
    let disk = SmallDisk::new();
    let mut host = Host::start_below(&disk.place, &[]).await;
    // The turn produces events while nothing can be written.
    let slow =
        json!([{ "text": "a b c d e f g h i j k l m n o p", "chunks": 16, "delay_ms": 200 }]);
    let session = host.bare("Talk.", &slow).await.id;
    let talks = |body: &EventBody| matches!(body, EventBody::TextDelta { .. });
    host.follow(session.clone()).until("it to talk", talks).await;
    let ballast = disk.fill();
    let (taken, status, problem) = until_full(&host, &session).await;
    assert_eq!(status, StatusCode::INSUFFICIENT_STORAGE, "{problem}");
    assert_eq!(problem["code"], "no_room", "{problem}");
    assert!(problem["hint"].as_str().unwrap().contains("harvest gc"), "{problem}");
    // Reads still work.
    assert_eq!(host.show(&session).await.id, session);
    assert_eq!(
        prompts(&host, &session).await.len(),
        taken.len() + 1,
        "what was refused is not there"
    );
    fs::remove_file(&ballast).unwrap();
    everything_runs(&host, &session, &taken).await;

    // Once more with a killed server: the next one starts, and continues when there is room.
    let ballast = disk.fill();
    let (more, ..) = until_full(&host, &session).await;
    host.kill();
    host.up().await;
    fs::remove_file(&ballast).unwrap();
    everything_runs(&host, &session, &[taken, more].concat()).await;
}

/// Every accepted prompt ran once, in order, and the events have no gap.
async fn everything_runs(host: &Host, session: &SessionId, taken: &[String]) {
    let all = eventually("every prompt to be over", || async {
        let all = prompts(host, session).await;
        let waits =
            |one: &Prompt| matches!(one.status, PromptStatus::Queued | PromptStatus::Dispatched);
        (!all.iter().any(waits)).then_some(all)
    })
    .await;
    let ids: Vec<String> = all.iter().skip(1).map(|one| one.id.to_string()).collect();
    assert_eq!(ids, taken);
    assert!(all.iter().all(|one| one.status == PromptStatus::Completed), "{all:?}");
    let ends = host.events(session).await.iter().filter(|body| turn_ended(body)).count();
    assert_eq!(ends, all.len());
}
