//! Sessions with a real store and fake sandboxes that speak the real bridge protocol.
#![expect(clippy::unwrap_used, reason = "tests panic on failure")]

#[path = "sessions/blobs.rs"]
mod blobs;
#[path = "sessions/budgets.rs"]
mod budgets;
#[path = "sessions/builds.rs"]
mod builds;
#[path = "sessions/compute.rs"]
mod compute;
#[path = "sessions/configured_agents.rs"]
mod configured_agents;
#[path = "sessions/create.rs"]
mod create;
#[path = "sessions/failures.rs"]
mod failures;
#[path = "sessions/forks_and_diffs.rs"]
mod forks_and_diffs;
#[path = "sessions/fuse.rs"]
mod fuse;
#[path = "sessions/harness.rs"]
mod harness;
#[path = "sessions/idle_and_slots.rs"]
mod idle_and_slots;
#[path = "sessions/member_sandboxes.rs"]
mod member_sandboxes;
#[path = "sessions/network_rules.rs"]
mod network_rules;
#[path = "sessions/other_agents.rs"]
mod other_agents;
#[path = "sessions/pool.rs"]
mod pool;
#[path = "sessions/pull_requests.rs"]
mod pull_requests;
#[path = "sessions/reads.rs"]
mod reads;
#[path = "sessions/removal.rs"]
mod removal;
#[path = "sessions/requested_snapshots.rs"]
mod requested_snapshots;
#[path = "sessions/restarts.rs"]
mod restarts;
#[path = "sessions/schedule.rs"]
mod schedule;
#[path = "sessions/secrets.rs"]
mod secrets;
#[path = "sessions/soak.rs"]
mod soak;
#[path = "sessions/standalone.rs"]
mod standalone;
#[path = "sessions/syncs.rs"]
mod syncs;
#[path = "sessions/tokens.rs"]
mod tokens;
#[path = "sessions/tools.rs"]
mod tools;
#[path = "sessions/verify.rs"]
mod verify;

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::StreamExt;
use harvest_gateway::{
    DoorListener,
    ledger::{
        DoorPolicy, GitAccess, Ledger, NamedSecret, Refusal, SecretsUnavailable, Tools, Used,
    },
    vault::Vault,
};
use harvest_proto::{
    BranchName, Event, EventBody, PromptId, RepositoryName, SandboxId, Secret, SecretOwner,
    SessionId, StateReason, Timestamp,
    api::{
        AddRepository, BuildRepository, CheckOutcome, CreatePrompt, CreateSandbox, CreateSession,
        ExecLine, ExecRequest, ForkSession, Prompt, PromptStatus, PullRequest, PullRequestState,
        SandboxLimits, SandboxOwner, Session, SessionState,
    },
    bridge::{Author, Exit},
    event::{SnapshotKind, Usage},
};
use harvest_providers::{Fake, contract, fake::FakeOp};
use harvest_session::{
    Config, Dependencies, DoorObserver, Doors, Lease, RestorePoint, ServerParts, SessionError,
    SessionKey, Sessions, Store, StoreLedger,
    sandboxes::{ExecLines, SandboxProvider, SandboxSpec, StartFrom, StateVolume, TerminalRequest},
    timeouts::Timeouts,
};

use harness::*;

#[tokio::test]
async fn fake_provider_passes_contract() {
    contract::run(Arc::new(Fake::new()), "claude").await;
}

#[tokio::test]
async fn prompt_completes_and_its_turn_is_snapshotted() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let session = harness.session(&sessions, Some("say hello")).await;
    assert_eq!(session.title, "say hello");
    until_state(&sessions, &session.id, SessionState::Idle).await;
    let prompt = &sessions.prompts(&session.id).await.unwrap()[0];
    assert_eq!(prompt.status, PromptStatus::Completed);
    let turn = &sessions.turns(&session.id).await.unwrap()[0];
    assert_eq!((Some(&turn.id), turn.number), (prompt.turn.as_ref(), 1));
    assert_eq!(turn.snapshot_id, sessions.get(&session.id).await.unwrap().snapshot_id);
    assert_eq!(
        harness.fake.snapshots_taken(),
        [(turn.snapshot_id.clone().unwrap(), SnapshotKind::Turn)]
    );
    assert_gapless(&all(&sessions, &session.id).await);
    let pass = harness.doors.0.lock().unwrap()[0].clone();
    assert_eq!(pass.repositories[0].branch, Some(session.branch));
}

#[tokio::test]
async fn second_prompt_waits_for_first_turn() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let second = send(&sessions, &id, "again").await;
    assert_eq!(status(&sessions, &id, &second).await, PromptStatus::Queued);
    assert_eq!(harness.fake.prompts_run().len(), 1);
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    until_status(&sessions, &id, &second, PromptStatus::Completed).await;
    let bodies: Vec<EventBody> =
        all(&sessions, &id).await.into_iter().map(|event| event.body).collect();
    let position = |fits: &dyn Fn(&EventBody) -> bool| bodies.iter().position(fits).unwrap();
    let saved = position(&|body| matches!(body, EventBody::SnapshotTaken { .. }));
    let next = position(&|body| matches!(body, EventBody::TurnStarted { number: 2, .. }));
    assert!(saved < next, "the first turn is saved before the second starts");
}

#[tokio::test]
async fn queued_prompts_can_be_moved_and_cancelled() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let first = sessions.prompts(&id).await.unwrap()[0].id.clone();
    let (b, c, d) = (
        send(&sessions, &id, "b").await,
        send(&sessions, &id, "c").await,
        send(&sessions, &id, "d").await,
    );
    assert_eq!(sessions.prompt_move(&id, &d, 1).await.unwrap().position, Some(1));
    assert_eq!(sessions.prompt_cancel(&id, &b).await.unwrap().status, PromptStatus::Cancelled);
    let refused = sessions.prompt_cancel(&id, &first).await.unwrap_err();
    assert_eq!(refused.code(), "not_queued");
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    until_status(&sessions, &id, &c, PromptStatus::Completed).await;
    assert_eq!(harness.fake.prompts_run(), [first, d, c]);
}

#[tokio::test]
async fn session_continues_after_stopped_turn() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    sessions.stop(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
    let prompts = sessions.prompts(&id).await.unwrap();
    assert_eq!(prompts[0].status, PromptStatus::Stopped);
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
}

#[tokio::test]
async fn urgent_prompt_stops_turn_and_runs_next() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let waiting = send(&sessions, &id, "later").await;
    let urgent = CreatePrompt { now: true, ..CreatePrompt::new("urgent".parse().unwrap()) };
    let urgent = sessions.prompt(&id, urgent, ada()).await.unwrap().id;
    until_status(&sessions, &id, &waiting, PromptStatus::Completed).await;
    assert_eq!(harness.fake.prompts_run()[1..], [urgent, waiting]);
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Stopped);
}

#[tokio::test]
async fn unconfirmed_stop_kills_sandbox_and_saves_disk() {
    let timeouts = Timeouts { stop: Duration::from_millis(50), ..Timeouts::default() };
    let harness = Harness::with(timeouts).await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("deaf")).await.id;
    until(&sessions, &id, started).await;
    sessions.stop(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Stopped);
    assert_eq!(harness.fake.snapshots_taken()[0].1, SnapshotKind::Recovered);
}

#[tokio::test]
async fn paused_session_resumes_from_its_snapshot() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /workspace/demo/a one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let snapshot = sessions.pause(&id).await.unwrap();
    let paused = sessions.get(&id).await.unwrap();
    assert_eq!((paused.state, paused.sandbox), (SessionState::Paused, None));
    assert_eq!(paused.snapshot_id, Some(snapshot.clone()));
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert_eq!(harness.fake.created()[1].from, StartFrom::Snapshot(snapshot));
    let states: Vec<_> = harness.fake.created().into_iter().map(|order| order.state).collect();
    let state = Some(StateVolume::Repository(demo()));
    assert_eq!(states, [state.clone(), state]);
    let file = harness.fake.file(&sandbox(&sessions, &id).await, "/workspace/demo/a");
    assert_eq!(file.as_deref(), Some(&b"one"[..]));
}

#[tokio::test]
async fn idle_session_is_paused_after_timeout() {
    let timeouts = Timeouts { idle_pause: Duration::from_millis(50), ..Timeouts::default() };
    let harness = Harness::with(timeouts).await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, None).await.id;
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, StateReason::Idle);
}

#[tokio::test]
async fn fork_starts_from_its_turn_on_own_branch() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let source = harness.session(&sessions, Some("write /f one")).await;
    until_state(&sessions, &source.id, SessionState::Idle).await;
    let second = send(&sessions, &source.id, "write /f two").await;
    until_status(&sessions, &source.id, &second, PromptStatus::Completed).await;
    let order = ForkSession {
        turn: Some(1),
        prompt: Some("hold".parse().unwrap()),
        ..ForkSession::default()
    };
    let fork = sessions.fork(&source.id, order, ada()).await.unwrap().remove(0);
    assert_eq!(fork.forked_from, Some(source.id.clone()));
    assert_ne!(fork.branch, source.branch);
    until(&sessions, &fork.id, started).await;
    let file = harness.fake.file(&sandbox(&sessions, &fork.id).await, "/f");
    assert_eq!(file.as_deref(), Some(&b"one"[..]));
    sessions.delete(&source.id).await.unwrap();
    sessions.terminate(&fork.id).await.unwrap();
    assert!(matches!(sessions.get(&source.id).await, Err(SessionError::NotFound { .. })));
    sessions.resume(&fork.id).await.unwrap();
    until_state(&sessions, &fork.id, SessionState::Idle).await;
}

#[tokio::test]
async fn prompt_during_a_question_is_the_answer() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("ask which colour?")).await.id;
    until_state(&sessions, &id, SessionState::NeedsInput).await;
    let answer = send(&sessions, &id, "blue").await;
    until_status(&sessions, &id, &answer, PromptStatus::Completed).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let closed =
        until(&sessions, &id, |event| matches!(event.body, EventBody::RequestClosed { .. })).await;
    assert!(
        matches!(closed.body, EventBody::RequestClosed { answer: Some(text), .. } if text == "blue")
    );
    assert_eq!(harness.fake.prompts_run().len(), 1, "an answer is not a turn");
}

#[tokio::test]
async fn failed_save_blocks_session_until_resumed() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.fake.set_failing(FakeOp::SnapshotAndRemove, true);
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sessions.pause(&id).await.unwrap_err().code(), "save_unknown");
    let held = sessions.get(&id).await.unwrap();
    assert_eq!((held.state, held.reason), (SessionState::Failed, StateReason::SaveUnknown));
    let waiting = send(&sessions, &id, "wait").await;
    harness.fake.set_failing(FakeOp::SnapshotAndRemove, false);
    sessions.resume(&id).await.unwrap();
    until_status(&sessions, &id, &waiting, PromptStatus::Completed).await;
}

#[tokio::test]
async fn failed_boot_reports_reason_and_keeps_prompt() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.fake.set_boot_failing(true);
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Failed).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, StateReason::BootFailed);
    let event = until(&sessions, &id, |event| {
        matches!(&event.body, EventBody::StateChanged { state: SessionState::Failed, .. })
    })
    .await;
    assert!(
        matches!(event.body, EventBody::StateChanged { detail: Some(detail), .. } if detail.contains("made to fail by the test"))
    );
    harness.fake.set_boot_failing(false);
    sessions.resume(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(harness.fake.prompts_run().len(), 1);
}

#[tokio::test]
async fn missing_image_fails_at_once() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.fake.break_image("agents");
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Failed).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, StateReason::StartFailed);
    assert!(harness.fake.created().is_empty());
}

#[tokio::test]
async fn startup_removes_orphaned_sandboxes() {
    let harness = Harness::new().await;
    let orphan = SandboxId::random();
    let from = StartFrom::Image("claude".into());
    let spec = SandboxSpec::of_session(orphan, from, SandboxLimits::default());
    harness.fake.create(spec).await.unwrap();
    harness.serve().await;
    assert!(harness.fake.sandboxes().is_empty());
}

#[tokio::test]
async fn command_resumes_paused_but_not_archived_session() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, None).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let request = ExecRequest { argv: vec!["echo".into(), "hi".into()], ..ExecRequest::default() };
    let lines: Vec<ExecLine> = exec(&sessions, &id, request.clone()).await.unwrap().collect().await;
    assert!(
        matches!(&lines[..], [ExecLine::Stdout { data }, ExecLine::Exited { exit: Exit::Code(0), .. }] if data == "aGkK")
    );
    let stdin = ExecRequest {
        argv: vec!["cat".into()],
        stdin: Some("aGkK".into()),
        ..ExecRequest::default()
    };
    let lines: Vec<ExecLine> = exec(&sessions, &id, stdin).await.unwrap().collect().await;
    assert!(matches!(&lines[0], ExecLine::Stdout { data } if data == "aGkK"));
    let unknown = ExecRequest { argv: vec!["nope".into()], ..ExecRequest::default() };
    let lines: Vec<ExecLine> = exec(&sessions, &id, unknown).await.unwrap().collect().await;
    assert!(matches!(&lines[..], [ExecLine::Failed { code, .. }] if code == "not_found"));
    sessions.pause(&id).await.unwrap();
    let lines: Vec<ExecLine> = exec(&sessions, &id, request.clone()).await.unwrap().collect().await;
    assert!(matches!(&lines[..], [ExecLine::Stdout { .. }, ExecLine::Exited { .. }]));
    // The fake has no terminals.
    let order =
        TerminalRequest { argv: vec!["sleep".into(), "1".into()], ..TerminalRequest::default() };
    let refused = sessions.sandbox_handle(&id).await.unwrap().terminal(order).await.err().unwrap();
    assert_eq!(refused.code(), "invalid");
    sessions.archive(&id).await.unwrap();
    assert_eq!(exec(&sessions, &id, request).await.err().unwrap().code(), "not_ready");
}

#[tokio::test]
async fn archived_session_refuses_prompts_until_resumed() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let waiting = send(&sessions, &id, "never").await;
    sessions.archive(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Archived).await;
    assert_eq!(status(&sessions, &id, &waiting).await, PromptStatus::Cancelled);
    let create = CreatePrompt::new("late".parse().unwrap());
    assert_eq!(sessions.prompt(&id, create, ada()).await.unwrap_err().code(), "archived");
    sessions.resume(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
}

#[tokio::test]
async fn failed_build_keeps_previous_build() {
    let harness = Harness::new().await;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    let lines: Vec<harvest_proto::api::BuildLine> = repositories
        .build(&demo(), BuildRepository::default(), &ada())
        .await
        .unwrap()
        .collect()
        .await;
    let stateless = |spec: &SandboxSpec| spec.state.is_none();
    assert!(harness.fake.created().iter().all(stateless), "builds mount no state volume");
    let Some(harvest_proto::api::BuildLine::Built { build }) = lines.last() else {
        panic!("{lines:?}")
    };
    assert_eq!(build.check, None, "the repository has no check");
    harness.fake.set_boot_failing(true);
    let lines: Vec<harvest_proto::api::BuildLine> = repositories
        .build(&demo(), BuildRepository::default(), &ada())
        .await
        .unwrap()
        .collect()
        .await;
    assert!(
        matches!(lines.last(), Some(harvest_proto::api::BuildLine::Failed { message, .. }) if message.contains("made to fail by the test"))
    );
    harness.fake.set_boot_failing(false);
    assert_eq!(repositories.get(&demo()).await.unwrap().build.as_ref(), Some(&**build));
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let last = harness.fake.created().last().unwrap().from.clone();
    assert_eq!(last, StartFrom::Snapshot(build.snapshot_id.clone()));
    assert_eq!(
        harness.fake.sandboxes(),
        [sandbox(&sessions, &id).await],
        "builds leave no sandbox"
    );
}

#[tokio::test]
async fn pushed_commit_gets_pull_request_and_evidence() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), Some(100));
    let session = harness.session(&sessions, Some("hold")).await;
    let id = session.id;
    until(&sessions, &id, started).await;
    let commit = "c0ffee".to_owned();
    let pushed =
        EventBody::Pushed { repository: demo(), branch: session.branch, commit: commit.clone() };
    ledger.log(&id, pushed).await;
    let call = planned_call();
    assert_eq!(ledger.reserve(&id, &call).await, Ok(()));
    let used = Usage { input_tokens: 90, output_tokens: 20, ..Usage::default() };
    ledger.settle(&id, &call, Used::Counted(used)).await;
    let Err(Refusal::Final(refused)) = ledger.reserve(&id, &planned_call()).await else { panic!() };
    assert!(
        refused.contains("110 of 100 tokens") && refused.contains("budget_tokens"),
        "{refused}"
    );
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    let event = until(&sessions, &id, |event| matches!(event.body, EventBody::Evidence(_))).await;
    let EventBody::Evidence(evidence) = event.body else { unreachable!() };
    assert_eq!((evidence.commit, evidence.outcome), (commit, CheckOutcome::NoneDeclared));
    let pull = sessions.get(&id).await.unwrap().repositories.remove(0).pr.unwrap();
    assert_eq!((pull.number, pull.title.as_str()), (7, "hold"));
    assert!(pull.evidence.is_some());
    assert_eq!(harness.pulls.opened.lock().unwrap().len(), 1);
    assert_eq!(
        harness.fake.sandboxes(),
        [sandbox(&sessions, &id).await],
        "the check leaves no sandbox"
    );
    let passes = harness.doors.0.lock().unwrap().clone();
    assert_eq!(passes.last().unwrap().repositories[0].branch, None, "the check cannot push");
    let secrets = &passes.last().unwrap().secrets;
    let own = SecretOwner::Session(id.clone());
    assert!(!secrets.contains(&own), "the check does not use the session's secrets");
    let push = until(&sessions, &id, |event| matches!(event.body, EventBody::Pushed { .. })).await;
    assert_eq!(push.turn, Some(sessions.turns(&id).await.unwrap()[0].id.clone()));
    assert_eq!(sessions.get(&id).await.unwrap().usage.input_tokens, 90);
    assert_gapless(&all(&sessions, &id).await);
}

#[tokio::test]
async fn secrets_are_readable_only_by_gateway() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let accounts = harness.serve_parts(lease).await.accounts;
    let global = SecretOwner::Global;
    let set = async |name: &str| {
        accounts.secret_set(&global, name, Secret::new("s3cr3t-value".into()), None).await
    };
    set("TOKEN").await.unwrap();
    assert_eq!(set("bad name").await.unwrap_err().code(), "invalid_name");
    assert_eq!(accounts.secret_list().await.unwrap()[0].1.name, "TOKEN");
    let owners = std::slice::from_ref(&global);
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    assert_eq!(ledger.secret(owners, "TOKEN").await.unwrap().expose(), "s3cr3t-value");
    for file in std::fs::read_dir(harness.folder.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(12).any(|window| window == b"s3cr3t-value"));
    }
    accounts.secret_delete(&global, "TOKEN").await.unwrap();
    assert!(ledger.secret(owners, "TOKEN").await.is_none());
}

#[tokio::test]
async fn session_list_is_paged() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let mut created = Vec::new();
    for _ in 0..3 {
        created.push(harness.session(&sessions, None).await.id);
    }
    let first = sessions.list(None, 2).await.unwrap();
    let rest = sessions.list(first.next_cursor.as_deref(), 2).await.unwrap();
    let mut seen: Vec<SessionId> =
        first.items.into_iter().chain(rest.items).map(|item| item.id).collect();
    seen.sort();
    created.sort();
    assert_eq!(seen, created);
    assert_eq!(rest.next_cursor, None);
}
