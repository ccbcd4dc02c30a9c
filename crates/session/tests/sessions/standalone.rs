//! Standalone sandboxes next to sessions.

use harvest_session::{
    Claim, Limits, Sandboxes,
    sandboxes::{Requester, SandboxError},
};

use super::{idle_and_slots::until_reason, *};

pub(super) async fn limited(sandboxes: usize, sandboxes_per_user: Option<usize>) -> Harness {
    let mut harness = Harness::new().await;
    harness.config.limits =
        Limits { sandboxes, sandboxes_per_user, checks: 1, ..Limits::default() };
    harness
}

fn by(user: &str) -> Requester {
    Requester { user: Some(user.to_owned()), ..Requester::default() }
}

/// Without a slot, a request is refused at once.
pub(super) async fn serve(harness: &Harness) -> (Sessions, Sandboxes) {
    let parts = harness.serve_parts(harness.lease().await).await;
    (parts.sessions, parts.sandboxes.with_slot_timeout(Duration::ZERO))
}

pub(super) async fn create(sandboxes: &Sandboxes, user: &str) -> Result<SandboxId, SandboxError> {
    Ok(sandboxes.create(&by(user), CreateSandbox::default()).await?.created.sandbox_id)
}

pub(super) fn code<T>(answer: Result<T, SandboxError>) -> &'static str {
    answer.err().map_or("no error", |error| error.code())
}

#[tokio::test]
async fn standalone_sandbox_holds_slot_until_it_exits() {
    let harness = limited(1, None).await;
    let (sessions, sandboxes) = serve(&harness).await;
    for end in ["stop", "delete", "crash"] {
        let sandbox = create(&sandboxes, "ada@example.org").await.unwrap();
        assert_eq!(code(create(&sandboxes, "bob@example.org").await), "limit_sandboxes");
        assert_eq!(code(sandboxes.fork(&by("a"), &sandbox, 1).await), "limit_sandboxes");
        let once = ExecRequest { argv: vec!["true".into()], ..ExecRequest::default() };
        assert_eq!(code(sandboxes.exec_once(&by("a"), once, None).await), "limit_sandboxes");
        let waiting = harness.session(&sessions, Some("hello")).await.id;
        until_reason(&sessions, &waiting, StateReason::LimitSandboxes).await;
        match end {
            "stop" => drop(sandboxes.stop(&sandbox).await.unwrap()),
            "delete" => sandboxes.delete(&sandbox, false).await.unwrap(),
            _ => harness.fake.crash(&sandbox, "by itself"),
        }
        until(&sessions, &waiting, ended).await;
        if end == "stop" {
            assert_eq!(
                code(sandboxes.start(&Requester::default(), &sandbox).await),
                "limit_sandboxes",
                "its slot is taken"
            );
        }
        sessions.delete(&waiting).await.unwrap();
    }
}

#[tokio::test]
async fn ephemeral_sandbox_holds_slot_during_command() {
    let harness = limited(1, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    for _ in 0..3 {
        let once = ExecRequest { argv: vec!["echo".into(), "hi".into()], ..ExecRequest::default() };
        let lines: Vec<_> =
            sandboxes.exec_once(&by("a"), once, None).await.unwrap().collect().await;
        assert!(matches!(lines.last(), Some(ExecLine::Exited { .. })), "{lines:?}");
    }
    let sleep = ExecRequest { argv: vec!["sleep".into(), "1000".into()], ..ExecRequest::default() };
    let running = sandboxes.exec_once(&by("a"), sleep, None).await.unwrap();
    assert_eq!(code(create(&sandboxes, "a").await), "limit_sandboxes");
    drop(running);
    sandboxes.settle().await;
    assert!(create(&sandboxes, "a").await.is_ok());
}

#[tokio::test]
async fn waiting_commands_all_get_a_slot() {
    let harness = limited(2, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let sandboxes = sandboxes.with_slot_timeout(Duration::from_secs(3600));
    let permanent = create(&sandboxes, "a").await.unwrap();
    let all: Vec<_> = (0..8)
        .map(|_| {
            let sandboxes = sandboxes.clone();
            tokio::spawn(async move {
                let once = ExecRequest {
                    argv: vec!["echo".into(), "hi".into()],
                    ..ExecRequest::default()
                };
                sandboxes.exec_once(&by("a"), once, None).await.unwrap().collect::<Vec<_>>().await
            })
        })
        .collect();
    for one in all {
        let lines = one.await.unwrap();
        assert!(matches!(lines.last(), Some(ExecLine::Exited { .. })), "{lines:?}");
    }
    sandboxes.delete(&permanent, false).await.unwrap();
}

#[tokio::test]
async fn create_waits_until_idle_session_frees_slot() {
    let harness = limited(1, None).await;
    let (sessions, sandboxes) = serve(&harness).await;
    let idle = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &idle, SessionState::Idle).await;
    let sandboxes = sandboxes.with_slot_timeout(Duration::from_secs(3600));
    let created = create(&sandboxes, "a").await.unwrap();
    until_reason(&sessions, &idle, StateReason::SlotNeeded).await;
    let never = sandboxes.fork(&by("a"), &created, 2).await;
    assert_eq!(code(never), "limit_sandboxes", "two never fit into one slot");
    let second = tokio::spawn({
        let sandboxes = sandboxes.clone();
        async move { create(&sandboxes, "a").await }
    });
    tokio::task::yield_now().await;
    sandboxes.delete(&created, false).await.unwrap();
    assert!(second.await.unwrap().is_ok(), "it waits for any slot");
}

#[tokio::test]
async fn running_standalone_sandboxes_count_after_restart() {
    let harness = limited(9, Some(1)).await;
    let (sessions, sandboxes) = serve(&harness).await;
    let sandbox = create(&sandboxes, "ada@example.org").await.unwrap();
    sessions.close().await;
    let (sessions, sandboxes) = serve(&harness).await;
    assert_eq!(code(create(&sandboxes, "ada@example.org").await), "limit_user");
    let waiting = harness.session(&sessions, Some("hello")).await.id;
    // Sessions of the same user wait too.
    until_reason(&sessions, &waiting, StateReason::LimitUser).await;
    assert!(create(&sandboxes, "bob@example.org").await.is_ok());
    harness.fake.crash(&sandbox, "by itself");
    until(&sessions, &waiting, ended).await;
}

#[tokio::test]
async fn restored_sandbox_keeps_its_slot() {
    let harness = limited(1, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let sandbox = create(&sandboxes, "a").await.unwrap();
    let snapshot = sandboxes.snapshot(&Requester::default(), &sandbox).await.unwrap().id;
    sandboxes.restore(&sandbox, &snapshot).await.unwrap();
    assert_eq!(code(create(&sandboxes, "a").await), "limit_sandboxes");
    harness.fake.crash(&sandbox, "by itself");
    while sandboxes.provider().wait(&sandbox).await.is_err()
        || create(&sandboxes, "a").await.is_err()
    {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn without_server_there_is_no_limit() {
    let harness = limited(1, None).await;
    let sandboxes = Sandboxes::without_server(Arc::new(harness.fake.clone()));
    for _ in 0..3 {
        sandboxes.create(&Requester::default(), CreateSandbox::default()).await.unwrap();
    }
    assert_eq!(harness.fake.sandboxes().len(), 3);
}

/// A request with a claimed key.
async fn claimed(sessions: &Sessions, key: &str) -> Requester {
    let planned = match sessions.idempotency_claim(key, b"the same").await.unwrap() {
        Claim::New => Vec::new(),
        Claim::CreatedIds { ids } => ids,
        other => panic!("{other:?}"),
    };
    Requester { key: Some(key.to_owned()), planned, ..Requester::default() }
}

#[tokio::test]
async fn retry_after_crash_finds_or_creates_planned_sandbox() {
    let harness = limited(9, None).await;
    let (mut sessions, mut sandboxes) = serve(&harness).await;
    let order = CreateSandbox::default;
    let first = claimed(&sessions, "k").await;
    let created = sandboxes.create(&first, order()).await.unwrap();
    let planned = created.created.sandbox_id.clone();
    for created_before in [true, false] {
        // The server dies without an answer.
        sessions.close().await;
        (sessions, sandboxes) = serve(&harness).await;
        let again = claimed(&sessions, "k").await;
        assert_eq!(again.planned, [planned.to_string()]);
        let found = sandboxes.create(&again, order()).await.unwrap();
        assert_eq!((found.created.sandbox_id, found.replayed), (planned.clone(), created_before));
        assert_eq!(harness.fake.sandboxes().len(), 1, "one sandbox, not two");
        sandboxes.delete(&planned, false).await.unwrap();
    }
}

#[tokio::test]
async fn retry_after_crash_completes_missing_forks() {
    let harness = limited(9, None).await;
    let (mut sessions, mut sandboxes) = serve(&harness).await;
    let source = create(&sandboxes, "a").await.unwrap();
    let first = claimed(&sessions, "k").await;
    let forks = sandboxes.fork(&first, &source, 3).await.unwrap().created.forks;
    sandboxes.delete(&forks[1], false).await.unwrap();
    for created_before in [false, true] {
        sessions.close().await;
        (sessions, sandboxes) = serve(&harness).await;
        let again = claimed(&sessions, "k").await;
        let found = sandboxes.fork(&again, &source, 3).await.unwrap();
        assert_eq!((&found.created.forks, found.replayed), (&forks, created_before));
        assert_eq!(harness.fake.sandboxes().len(), 4);
    }
    assert_eq!(harness.fake.snapshots_taken(), [], "the forks' snapshot is removed");
}

#[tokio::test]
async fn running_forks_keep_slots_when_others_fail() {
    let harness = limited(4, None).await;
    let (mut sessions, mut sandboxes) = serve(&harness).await;
    let source = create(&sandboxes, "a").await.unwrap();
    let first = claimed(&sessions, "k").await;
    let forks = sandboxes.fork(&first, &source, 3).await.unwrap().created.forks;
    sandboxes.delete(&forks[2], false).await.unwrap();
    sessions.close().await;
    (sessions, sandboxes) = serve(&harness).await;
    let again = claimed(&sessions, "k").await;
    sandboxes.delete(&source, true).await.unwrap();
    assert!(sandboxes.fork(&again, &source, 3).await.is_err());
    // Two of four run.
    assert!(create(&sandboxes, "a").await.is_ok() && create(&sandboxes, "a").await.is_ok());
    assert_eq!(code(create(&sandboxes, "a").await), "limit_sandboxes");
}

#[tokio::test]
async fn shutdown_refuses_waiting_commands() {
    let harness = limited(1, None).await;
    let (sessions, sandboxes) = serve(&harness).await;
    let sandboxes = sandboxes.with_slot_timeout(Duration::from_secs(3600));
    create(&sandboxes, "a").await.unwrap();
    let waiting = sandboxes.clone();
    let waiting = tokio::spawn(async move {
        let once = ExecRequest { argv: vec!["true".into()], ..ExecRequest::default() };
        code(waiting.exec_once(&by("a"), once, None).await)
    });
    tokio::task::yield_now().await;
    sessions.close().await;
    assert_eq!(waiting.await.unwrap(), "server_busy");
}

#[tokio::test]
async fn failed_create_frees_idempotency_key() {
    let harness = limited(9, None).await;
    let (sessions, sandboxes) = serve(&harness).await;
    let requester = claimed(&sessions, "k").await;
    harness.fake.set_failing(FakeOp::Create, true);
    assert!(sandboxes.create(&requester, CreateSandbox::default()).await.is_err());
    sessions.idempotency_release("k").await.unwrap();
    assert_eq!(sessions.idempotency_claim("k", b"another").await.unwrap(), Claim::New);
}

#[tokio::test]
async fn removed_sandbox_ends_its_commands() {
    let harness = limited(9, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let sandbox = create(&sandboxes, "a").await.unwrap();
    let sleep = ExecRequest { argv: vec!["sleep".into(), "1000".into()], ..ExecRequest::default() };
    let handle = sandboxes.standalone_handle(&sandbox).await.unwrap();
    let running = handle.exec_lines(sleep, None).await.unwrap();
    sandboxes.delete(&sandbox, false).await.unwrap();
    let lines: Vec<_> = running.collect().await;
    let ended =
        |line: &ExecLine| matches!(line, ExecLine::Failed { code, .. } if code == "sandbox_ended");
    assert!(lines.last().is_some_and(ended), "{lines:?}");
}

#[tokio::test]
async fn refused_commands_leave_no_one_shot_sandbox() {
    let harness = limited(1, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let unknown = ExecRequest { argv: vec!["nope".into()], ..ExecRequest::default() };
    for _ in 0..3 {
        let lines = sandboxes.exec_once(&by("a"), unknown.clone(), None).await.unwrap();
        let lines: Vec<_> = lines.collect().await;
        assert!(matches!(lines.last(), Some(ExecLine::Failed { .. })), "{lines:?}");
        assert!(harness.fake.sandboxes().is_empty(), "removed before the stream ends");
    }
    let detached = ExecRequest { detach: true, ..unknown.clone() };
    let garbled = ExecRequest { stdin: Some("?".into()), ..unknown };
    for invalid in [detached, garbled] {
        assert!(sandboxes.exec_once(&by("a"), invalid, None).await.is_err());
    }
    assert_eq!(harness.fake.created().len(), 3, "an invalid command starts no sandbox");
}
