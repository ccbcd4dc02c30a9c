//! Turns, diffs between them, forks, and that deleting a session frees its disk space.

use harvest_e2e::{Host, eventually};
use harvest_proto::{EventBody, SessionId, api::SessionState};
use serde_json::{Value, json};

use crate::{SAMPLE, completed};

fn kept(body: &EventBody) -> bool {
    matches!(body, EventBody::SnapshotTaken { .. })
}

/// A session that has run these scripts, one turn each.
async fn session(host: &Host, turns: &[&str]) -> SessionId {
    let script = |bash: &str| json!([{ "bash": bash }, { "text": "done" }]);
    let id = host.session("calc", "First.", &script(turns[0])).await.id;
    let mut follower = host.follow(id.clone());
    follower.until("turn 1", completed).await;
    let mut seen = follower.until("its snapshot", kept).await.seq;
    for bash in &turns[1..] {
        let prompt = host.prompt(&id, "Next.", &script(bash)).await;
        let ended = follower
            .after(
                seen,
                "the turn",
                |body| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id),
            )
            .await;
        seen = follower.after(ended.seq, "its snapshot", kept).await.seq;
    }
    id
}

fn printed(host: &Host, arguments: &[&str]) -> String {
    let ran = host.harvest(arguments);
    assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
    ran.stdout
}

#[tokio::test]
async fn diff_compares_turns_running_paused_and_forked() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let id = session(
        &host,
        &[
            "cd /workspace/calc; echo one > notes; echo x >> calc.py; echo tool > /usr/local/tool 2>/dev/null || echo tool > /home/harvest/tool",
            "cd /workspace/calc; echo two >> notes; git add -A; git -c user.name=a -c user.email=a@b commit -qm two; rm /home/harvest/tool",
            "cd /workspace/calc; rm notes; git reset -q --hard HEAD~1; git gc -q --prune=now; printf 'n\\033[31m' > \"$(printf 'odd\\033[31m')\"",
        ],
    )
    .await;
    let id = id.to_string();
    for asleep in [false, true] {
        if asleep {
            printed(&host, &["pause", &id]);
        }
        let diff = |turns: &str| printed(&host, &["diff", &id, "--turn", turns]);
        let first = diff("1");
        assert!(
            first.contains("+one") && first.contains("+x") && !first.contains("two"),
            "{first}"
        );
        let second = diff("2");
        assert!(second.contains("+two") && !second.contains("+one"), "{second}");
        let across = diff("1..3");
        assert!(across.contains("-one") && !across.contains("two"), "{across}");
        let back = diff("2..1");
        assert!(back.contains("-two"), "{back}");
        let stat: Value = serde_json::from_str(&printed(
            &host,
            &["diff", &id, "--turn", "1", "--stat", "--json"],
        ))
        .unwrap();
        assert_eq!(stat["total"], json!({ "files": 2, "insertions": 2, "deletions": 0 }), "{stat}");
        let files = printed(&host, &["diff", &id, "--sandbox", "--turn", "2"]);
        assert!(files.contains("- /home/harvest/tool (5 B)"), "{files}");
        assert!(files.contains("~ /workspace/calc/notes (4 B → 8 B)"), "{files}");
        // More diffs than slots: each needs two sandboxes when the session is paused, without
        // deadlock.
        let path = format!("/v1/sessions/{id}/diff?from=3&to=1");
        let many =
            (0..4).map(|_| async { host.get(&path).send().await.unwrap().text().await.unwrap() });
        for told in futures_util::future::join_all(many).await {
            assert!(told.contains("+one") && !told.contains("two"), "{told}");
        }
        let all = printed(&host, &["diff", &id, "--sandbox"]);
        assert!(all.contains("/workspace/calc/odd") && !all.contains('\u{1b}'), "{all}");
        assert_eq!(
            host.show(&id.parse().unwrap()).await.sandbox.is_none(),
            asleep,
            "a diff starts no session"
        );
    }
    let turns = printed(&host, &["turns", &id]);
    for word in ["2 files +2 −0", "completed", "snp_", "First."] {
        assert!(turns.contains(word), "{word}: {turns}");
    }
    let read =
        |arguments: &[&str]| serde_json::from_str::<Value>(&printed(&host, arguments)).unwrap();
    let pinned = read(&["snapshot", "pin", &format!("{id}@2"), "--json"]);
    assert_eq!((&pinned["pinned"], &pinned["turn"]), (&json!(true), &json!(2)));
    let held = read(&["df", "--json"])["sessions"]["items"][0].clone();
    assert_eq!((&held["session"], &held["pinned"]), (&json!(id), &json!(1)), "{held}");
    assert!(held["snapshots"].as_u64() >= Some(4) && held["bytes"].as_u64() > Some(0), "{held}");
    assert_eq!(read(&["gc", "--dry-run", "--json"])["dropped"], json!([]), "nothing is too much");
    let fork = printed(&host, &["fork", &format!("{id}@1")]).trim().to_owned();
    host.wait_for(&fork.parse().unwrap(), SessionState::Idle).await;
    let prompt = host
        .prompt(
            &fork.parse().unwrap(),
            "Go on.",
            &json!([{ "bash": "echo fork >> /workspace/calc/notes" }, { "text": "done" }]),
        )
        .await;
    let mut follower = host.follow(fork.parse().unwrap());
    follower
        .until(
            "the turn",
            |body| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id),
        )
        .await;
    follower.until("its snapshot", kept).await;
    let own = printed(&host, &["diff", &fork, "--turn", "1"]);
    assert!(own.contains("+fork") && !own.contains("+one"), "{own}");
    let unknown = host.harvest(["diff", &fork, "--turn", "9"]);
    assert!(unknown.code == 1 && unknown.stderr.contains("turn 9"), "{unknown:?}");
}

#[tokio::test]
async fn deleted_session_frees_disk_despite_server_kill() {
    let mut host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let layers = |host: &Host| names(host, "layers");
    let before = (layers(&host), names(&host, "snapshots"), names(&host, "sandboxes"));
    let id =
        session(&host, &["echo one > /workspace/calc/a", "echo two > /workspace/calc/b"]).await;
    let forks = printed(&host, &["fork", &format!("{id}@1"), "-n", "2"]);
    let forks: Vec<&str> = forks.lines().collect();
    assert_eq!(forks.len(), 2);
    for fork in &forks {
        host.wait_for(&fork.parse().unwrap(), SessionState::Idle).await;
    }
    assert_ne!(layers(&host), before.0);
    printed(&host, &["rm", "--yes", &id.to_string(), forks[0]]);
    let fork = forks[1].parse().unwrap();
    host.kill();
    host.up().await;
    host.wait_for(&fork, SessionState::Idle).await;
    let (_, file) = host.exec(&fork, "harvest", "cat /workspace/calc/a").await;
    assert_eq!(file, "one\n", "what a fork stands on stays");
    // The server is killed right after the decision, before the response arrives.
    let url = format!("/v1/sessions/{fork}");
    let deleting = tokio::spawn(host.request(reqwest::Method::DELETE, &url).send());
    let decided = async {
        while host.get(&url).send().await.unwrap().status() != reqwest::StatusCode::NOT_FOUND {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(harvest_e2e::PATIENCE, decided).await.expect("it is deleted");
    host.kill();
    deleting.abort();
    host.up().await;
    let _ = host.request(reqwest::Method::DELETE, &url).send().await.unwrap();
    eventually("everything is as it was", || async {
        let now = (layers(&host), names(&host, "snapshots"), names(&host, "sandboxes"));
        (now == before && names(&host, "trash").is_empty()).then_some(())
    })
    .await;
}

/// The sorted names in a folder of the home.
fn names(host: &Host, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(host.home().join(folder)).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
