//! From a prompt to a pull request with evidence, through the CLI and the API.

use harvest_e2e::Host;
use harvest_proto::{
    EventBody,
    api::{CheckOutcome, SessionState},
};
use serde_json::{Value, json};

use crate::{SAMPLE, completed};

fn fix() -> Value {
    json!([
        [{ "text": "Let me look at the failing test." }, { "read": "/workspace/calc/calc.py" }],
        { "bash": "cd /workspace/calc && python3 -B -m unittest -q" },
        { "edit": { "path": "/workspace/calc/calc.py", "old": "a - b", "new": "a + b" } },
        { "bash": "cd /workspace/calc && python3 -B -m unittest -q && git commit -qam 'Add instead of subtracting' && git push -q" },
        { "text": "The test passes and the branch is pushed." },
    ])
}

#[tokio::test]
async fn prompt_becomes_pull_request_with_platform_evidence() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = host.session("calc", "Make the failing test pass.", &fix()).await;
    // Queued during the first turn; runs after it in the same conversation.
    let second =
        host.prompt(&session.id, "What did I ask first?", &json!([{ "text": "second" }])).await;
    let session = session.id;
    let mut follower = host.follow(session.clone());
    let evidence =
        follower.until("the evidence", |body| matches!(body, EventBody::Evidence(_))).await;
    let EventBody::Evidence(evidence) = evidence.body else { unreachable!("it was asked for") };
    assert_eq!(evidence.outcome, CheckOutcome::Passed, "{evidence:?}");
    follower
        .until("the second turn", |body| {
            completed(body)
                && matches!(body, EventBody::TurnEnded { prompt, .. } if *prompt == second.id)
        })
        .await;

    let pull = host.harvest(["pr", "show", &session.to_string(), "--json"]);
    let pull: Value = serde_json::from_str(&pull.stdout).unwrap();
    assert_eq!(pull["evidence"]["outcome"], "passed");
    assert_eq!(pull["commit"], evidence.commit.as_str());
    let diff = host.harvest(["diff", &session.to_string()]);
    assert!(diff.stdout.contains("+    return a + b"), "{diff:?}");
    let (_, author) =
        host.exec(&session, "harvest", "git -C /workspace/calc log -1 --format='%an <%ae>'").await;
    assert!(author.contains("(Harvest)"), "{author}");
    let (_, branch) =
        host.exec(&session, "harvest", "git -C /workspace/calc branch --show-current").await;
    assert!(branch.starts_with("harvest/make-the-failing-test-pass-"), "{branch}");
}

#[tokio::test]
async fn resume_and_fork_restore_files_and_conversation() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let first = json!([{ "bash": "echo one > /workspace/calc/notes; mkdir -p /home/harvest/.cache/x" }, { "text": "first" }]);
    let session = host.session("calc", "Turn one.", &first).await.id;
    let mut follower = host.follow(session.clone());
    follower.until("turn 1", completed).await;
    let prompt = host.prompt(&session, "Turn two.", &json!([{ "bash": "echo two >> /workspace/calc/notes; rm /workspace/calc/calc.py" }, { "text": "second" }])).await;
    follower
        .until("turn 2", |body| {
            completed(body)
                && matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id)
        })
        .await;

    let paused = host.harvest(["pause", &session.to_string()]);
    assert_eq!(paused.code, 0, "{paused:?}");
    host.wait_for(&session, SessionState::Paused).await;
    let resumed = host.harvest(["resume", &session.to_string()]);
    assert_eq!(resumed.code, 0, "{resumed:?}");
    host.wait_for(&session, SessionState::Idle).await;
    let (_, notes) = host
        .exec(&session, "harvest", "cat /workspace/calc/notes; ls /workspace/calc/calc.py 2>&1")
        .await;
    assert!(notes.starts_with("one\ntwo\n") && notes.contains("No such file"), "{notes}");

    let fork = host.harvest(["fork", &format!("{session}@1"), "--json"]);
    let fork: Value = serde_json::from_str(&fork.stdout).unwrap_or_else(|_| panic!("{fork:?}"));
    let fork = fork["id"].as_str().unwrap().parse().unwrap();
    // The scripted model's answer depends on the conversation, which must have been restored.
    host.prompt(
        &fork,
        "Look.",
        &json!([{ "bash": "cat /workspace/calc/notes; ls /workspace/calc" }, { "text": "seen" }]),
    )
    .await;
    let mut follower = host.follow(fork.clone());
    follower.until("the fork's turn", completed).await;
    let (_, notes) =
        host.exec(&fork, "harvest", "cat /workspace/calc/notes; ls /workspace/calc/calc.py").await;
    assert_eq!(notes, "one\n/workspace/calc/calc.py\n");
    let (_, asked) =
        host.exec(&fork, "harvest", "cat /home/harvest/.claude/projects/*/*.jsonl").await;
    assert!(
        asked.contains("Turn one.") && !asked.contains("Turn two."),
        "the conversation is that of turn 1"
    );
}

#[tokio::test]
async fn question_waits_for_answer_then_turn_continues() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let script = json!([{ "ask": { "question": "Which colour?", "options": ["red", "blue"] } }, { "text": "thanks" }]);
    let session = host.session("calc", "Ask me.", &script).await.id;
    let mut follower = host.follow(session.clone());
    follower.until("the question", |body| matches!(body, EventBody::RequestOpened { .. })).await;
    host.wait_for(&session, SessionState::NeedsInput).await;
    let sent = host.harvest(["send", &session.to_string(), "blue"]);
    assert_eq!(sent.code, 0, "{sent:?}");
    follower.until("the turn to end", completed).await;
    let answered = |body: &EventBody| matches!(body, EventBody::RequestClosed { answer: Some(answer), .. } if answer == "blue");
    assert!(follower.seen.iter().any(|event| answered(&event.body)));
}

#[tokio::test]
async fn the_cli_shows_what_the_api_knows() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = host.session("calc", "Say hello.", &json!([{ "text": "hello there" }])).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    let id = session.to_string();
    let listed: Value = serde_json::from_str(&host.harvest(["ls", "--json"]).stdout).unwrap();
    assert!(listed.to_string().contains(&id));
    for (arguments, wanted) in [
        (vec!["show", &id], "Say hello."),
        (vec!["show", "-"], id.as_str()),
        (vec!["logs", &id], "hello there"),
        (vec!["exec", &id, "--", "sh", "-c", "echo out; echo err >&2"], "out"),
        (vec!["repo", "ls"], "calc"),
    ] {
        let ran = host.harvest(&arguments);
        assert!(ran.code == 0 && ran.stdout.contains(wanted), "{arguments:?}: {ran:?}");
    }
    assert_eq!(host.harvest(["exec", &id, "--", "sh", "-c", "exit 7"]).code, 7);
    assert_eq!(host.harvest(["exec", &id, "--", "/no/such/program"]).code, 127);
    let metrics = host.get("/metrics").send().await.unwrap().text().await.unwrap();
    let sample = |name: &str| {
        metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    let (used, missed) =
        (sample("harvest_standby_used_total"), sample("harvest_standby_missed_total"));
    assert!(
        used.unwrap() + missed.unwrap() >= 1 && sample("harvest_standby_ready").is_some(),
        "{metrics}"
    );
    let unknown = host.harvest(["show", "ses_000000000000"]);
    assert!(unknown.code == 1 && unknown.stderr.contains("hint:"), "{unknown:?}");
}
