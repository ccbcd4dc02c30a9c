//! Promise 10: what the scripted agent remembers, and the output of its tools. `agent_contract.rs`
//! has what holds for every agent.

use harvest_e2e::{Follower, Host};
use harvest_proto::{Event, EventBody, api::CheckOutcome, event::SnapshotKind};
use serde_json::{Value, json};

use crate::{SAMPLE, completed};

/// The number in the output of a `history` step.
pub(crate) fn remembered(follower: &Follower<'_>, after: u64) -> u32 {
    let told = follower.seen.iter().rev().find_map(|event| match &event.body {
        EventBody::TextDelta { text } if event.seq > after => Some(text.clone()),
        _ => None,
    });
    let told = told.expect("it tells what it remembers");
    told.split(' ')
        .nth(2)
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("{told}"))
}

pub(crate) fn last(follower: &Follower<'_>) -> u64 {
    follower.seen.last().map_or(0, |event| event.seq)
}

#[tokio::test]
async fn scripted_agent_remembers_across_resume_and_fork() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let script = json!([
        { "edit": { "path": "calc.py", "old": "a - b", "new": "a + b" } },
        { "bash": "git commit -qam 'Add' && git push -q" },
    ]);
    let session = host.scripted("calc", "Fix it.", &script).await.id;
    let mut follower = host.follow(session.clone());
    let evidence =
        follower.until("the evidence", |body| matches!(body, EventBody::Evidence(_))).await;
    assert!(
        matches!(&evidence.body, EventBody::Evidence(evidence) if evidence.outcome == CheckOutcome::Passed),
        "{evidence:?}"
    );
    let kept = |body: &EventBody| {
        matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Turn, .. })
    };
    follower.until("the snapshot of turn 1", kept).await;

    let history = json!([{ "history": true }]);
    let before = last(&follower);
    host.prompt(&session, "Remember?", &history).await;
    follower.after(before, "turn 2", completed).await;
    assert_eq!(remembered(&follower, before), 1);
    assert_eq!(host.harvest(["pause", &session.to_string()]).code, 0);
    let before = last(&follower);
    host.prompt(&session, "Still?", &history).await;
    follower.after(before, "turn 3", completed).await;
    assert_eq!(remembered(&follower, before), 2);

    let fork = host.harvest(["fork", &format!("{session}@1"), "--json"]);
    let fork: Value = serde_json::from_str(&fork.stdout).unwrap_or_else(|_| panic!("{fork:?}"));
    let fork = fork["id"].as_str().unwrap().parse().unwrap();
    host.prompt(&fork, "And you?", &history).await;
    let mut follower = host.follow(fork);
    follower.until("the fork's turn", completed).await;
    assert_eq!(remembered(&follower, 0), 1);
}

#[tokio::test]
async fn long_tool_output_is_readable_in_full() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let script = json!([{ "bash": "seq 100000" }, { "bash": "echo short" }]);
    let session = host.scripted("calc", "Count.", &script).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    let outputs = |arguments: &[&str]| {
        let ran = host.harvest(
            [&["events", &session.to_string(), "--types", "tool_ended"], arguments].concat(),
        );
        assert_eq!(ran.code, 0, "{ran:?}");
        let outputs = ran.stdout.lines().map(|line| {
            let event: Event = serde_json::from_str(line).unwrap();
            let EventBody::ToolEnded { output, blob, .. } = event.body else { panic!("{line}") };
            (output, blob.map(|blob| blob.bytes))
        });
        outputs.collect::<Vec<_>>()
    };
    let whole: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    let cut = outputs(&[]);
    assert!(cut[0].0.len() < 70_000 && cut[0].0.contains("bytes left out"));
    assert_eq!(cut[0].1, Some(whole.len() as u64));
    assert_eq!(cut[1], ("short\n".to_owned(), None));
    assert!(outputs(&["--full"])[0].0 == whole);
    let logs = host.harvest(["logs", &session.to_string()]).stdout;
    assert!(logs.contains("→ 100000\n") && !logs.contains("| 99999\n"), "{logs}");
    let logs = host.harvest(["logs", &session.to_string(), "--full"]).stdout;
    assert!(
        ["  | 1\n  | 2\n", "  | 50000\n", "  | 100000\n", "  | short\n"]
            .iter()
            .all(|line| logs.contains(line))
    );
    let wrong = host.harvest(["events", "-", "--types", "tool_edned"]);
    assert!(wrong.code == 1 && wrong.stderr.contains("`tool_ended`"), "{wrong:?}");
    let unknown = host.harvest(["run", "-r", "calc", "-a", "gpt", "x"]);
    assert!(unknown.code == 1 && unknown.stderr.contains("scripted"), "{unknown:?}");
}
