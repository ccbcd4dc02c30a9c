//! Sessions on a real store and sandboxes that speak the real frames.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

#[path = "sessions/blobs.rs"]
mod blobs;
#[path = "sessions/garbage.rs"]
mod garbage;
#[path = "sessions/history.rs"]
mod history;
#[path = "sessions/house.rs"]
mod house;
#[path = "sessions/inputs.rs"]
mod inputs;
#[path = "sessions/mishaps.rs"]
mod mishaps;
#[path = "sessions/raw.rs"]
mod raw;
#[path = "sessions/restarts.rs"]
mod restarts;
#[path = "sessions/rests.rs"]
mod rests;
#[path = "sessions/tokens.rs"]
mod tokens;

use std::{
    any::Any,
    io,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::StreamExt;
use harvest_gateway::{
    ledger::{Ledger, Pass, Policy},
    vault::Vault,
};
use harvest_proto::{
    Event, EventBody, PromptId, SandboxId, Secret, SessionId, Timestamp,
    api::{
        AddRepository, CreatePrompt, CreateSession, Evidence, ExecLine, ExecRequest, ForkSession,
        PromptStatus, Pull, Session, SessionState,
    },
    bridge::{Author, Exit},
    event::{SnapshotKind, Usage},
};
use harvest_providers::{Fake, contract, fake::Act};
use harvest_session::{
    Books, Config, Doors, Lease, Parts, PullOrder, Pulls, PullsError, SessionError, Sessions,
    Store,
    clocks::Clocks,
    inside::TerminalOrder,
    provider::{Provider, StartFrom},
};

use house::*;

#[tokio::test]
async fn the_fake_keeps_the_contract() {
    contract::run(Arc::new(Fake::new()), "claude").await;
}

#[tokio::test]
async fn a_prompt_runs_to_the_end_and_its_turn_is_kept() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let session = house.session(&sessions, Some("say hello")).await;
    assert_eq!(session.title, "say hello");
    until_state(&sessions, &session.id, SessionState::Idle).await;
    let prompt = &sessions.prompts(&session.id).await.unwrap()[0];
    assert_eq!(prompt.status, PromptStatus::Completed);
    let turn = &sessions.turns(&session.id).await.unwrap()[0];
    assert_eq!((Some(&turn.id), turn.number), (prompt.turn.as_ref(), 1));
    assert_eq!(turn.snapshot, sessions.get(&session.id).await.unwrap().snapshot);
    assert_eq!(house.fake.kept(), [(turn.snapshot.clone().unwrap(), SnapshotKind::Turn)]);
    assert_gapless(&all(&sessions, &session.id).await);
    let pass = house.doors.0.lock().unwrap()[0].clone();
    assert_eq!(pass.repositories[0].branch, Some(session.branch));
}

#[tokio::test]
async fn a_second_prompt_waits_and_runs_after_the_first() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let second = send(&sessions, &id, "again").await;
    assert_eq!(status(&sessions, &id, &second).await, PromptStatus::Queued);
    assert_eq!(house.fake.runs().len(), 1);
    house.fake.release(&sandbox(&sessions, &id).await);
    until_status(&sessions, &id, &second, PromptStatus::Completed).await;
    let bodies: Vec<EventBody> =
        all(&sessions, &id).await.into_iter().map(|event| event.body).collect();
    let place = |fits: &dyn Fn(&EventBody) -> bool| bodies.iter().position(fits).unwrap();
    let kept = place(&|body| matches!(body, EventBody::SnapshotTaken { .. }));
    let next = place(&|body| matches!(body, EventBody::TurnStarted { number: 2, .. }));
    assert!(kept < next, "the first turn is kept before the second begins");
}

#[tokio::test]
async fn waiting_prompts_are_moved_and_cancelled() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
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
    house.fake.release(&sandbox(&sessions, &id).await);
    until_status(&sessions, &id, &c, PromptStatus::Completed).await;
    assert_eq!(house.fake.runs(), [first, d, c]);
}

#[tokio::test]
async fn a_stopped_turn_is_stopped_and_the_session_goes_on() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    sessions.stop(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
    let prompts = sessions.prompts(&id).await.unwrap();
    assert_eq!(prompts[0].status, PromptStatus::Stopped);
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
}

#[tokio::test]
async fn a_prompt_sent_now_stops_the_turn_and_goes_first() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let waiting = send(&sessions, &id, "later").await;
    let urgent = CreatePrompt { text: "urgent".into(), now: true, author: None };
    let urgent = sessions.prompt(&id, urgent, ada()).await.unwrap().id;
    until_status(&sessions, &id, &waiting, PromptStatus::Completed).await;
    assert_eq!(house.fake.runs()[1..], [urgent, waiting]);
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Stopped);
}

#[tokio::test]
async fn a_stop_nobody_confirms_kills_the_sandbox_and_keeps_its_disk() {
    let clocks = Clocks { stop: Duration::from_millis(50), ..Clocks::default() };
    let house = House::with(clocks).await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("deaf")).await.id;
    until(&sessions, &id, started).await;
    sessions.stop(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Stopped);
    assert_eq!(house.fake.kept()[0].1, SnapshotKind::Recovered);
}

#[tokio::test]
async fn a_paused_session_goes_on_where_it_was() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("write /workspace/demo/a one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let snapshot = sessions.pause(&id).await.unwrap();
    let paused = sessions.get(&id).await.unwrap();
    assert_eq!((paused.state, paused.sandbox), (SessionState::Paused, None));
    assert_eq!(paused.snapshot, Some(snapshot.clone()));
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert_eq!(house.fake.orders()[1].from, StartFrom::Snapshot(snapshot));
    let whose: Vec<_> = house.fake.orders().into_iter().map(|order| order.state).collect();
    assert_eq!(whose, [Some("demo".to_owned()), Some("demo".to_owned())]);
    let file = house.fake.file(&sandbox(&sessions, &id).await, "/workspace/demo/a");
    assert_eq!(file.as_deref(), Some(&b"one"[..]));
}

#[tokio::test]
async fn an_idle_session_is_paused_by_the_clock() {
    let clocks = Clocks { idle_pause: Duration::from_millis(50), ..Clocks::default() };
    let house = House::with(clocks).await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, None).await.id;
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, "idle");
}

#[tokio::test]
async fn a_fork_goes_on_from_its_turn_on_a_branch_of_its_own() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let source = house.session(&sessions, Some("write /f one")).await;
    until_state(&sessions, &source.id, SessionState::Idle).await;
    let second = send(&sessions, &source.id, "write /f two").await;
    until_status(&sessions, &source.id, &second, PromptStatus::Completed).await;
    let order =
        ForkSession { turn: Some(1), prompt: Some("hold".into()), ..ForkSession::default() };
    let fork = sessions.fork(&source.id, order, ada()).await.unwrap().remove(0);
    assert_eq!(fork.forked_from, Some(source.id.clone()));
    assert_ne!(fork.branch, source.branch);
    until(&sessions, &fork.id, started).await;
    let file = house.fake.file(&sandbox(&sessions, &fork.id).await, "/f");
    assert_eq!(file.as_deref(), Some(&b"one"[..]));
    sessions.delete(&source.id).await.unwrap();
    sessions.terminate(&fork.id).await.unwrap();
    assert!(matches!(sessions.get(&source.id).await, Err(SessionError::NotFound { .. })));
    sessions.resume(&fork.id).await.unwrap();
    until_state(&sessions, &fork.id, SessionState::Idle).await;
}

#[tokio::test]
async fn a_prompt_sent_while_the_agent_asks_is_the_answer() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("ask which colour?")).await.id;
    until_state(&sessions, &id, SessionState::NeedsInput).await;
    let answer = send(&sessions, &id, "blue").await;
    until_status(&sessions, &id, &answer, PromptStatus::Completed).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let closed =
        until(&sessions, &id, |event| matches!(event.body, EventBody::RequestClosed { .. })).await;
    assert!(
        matches!(closed.body, EventBody::RequestClosed { answer: Some(text), .. } if text == "blue")
    );
    assert_eq!(house.fake.runs().len(), 1, "an answer is not a turn");
}

#[tokio::test]
async fn a_save_that_failed_holds_the_session_until_it_is_resumed() {
    let house = House::new().await;
    let sessions = house.serve().await;
    house.fake.set_failing(Act::EndKept, true);
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sessions.pause(&id).await.unwrap_err().code(), "save_unknown");
    let held = sessions.get(&id).await.unwrap();
    assert_eq!((held.state, held.reason.as_str()), (SessionState::Failed, "save_unknown"));
    let waiting = send(&sessions, &id, "wait").await;
    house.fake.set_failing(Act::EndKept, false);
    sessions.resume(&id).await.unwrap();
    until_status(&sessions, &id, &waiting, PromptStatus::Completed).await;
}

#[tokio::test]
async fn a_failing_boot_says_why_and_the_prompt_waits_for_a_person() {
    let house = House::new().await;
    let sessions = house.serve().await;
    house.fake.set_boots_failing(true);
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Failed).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, "boot_failed");
    let told = until(&sessions, &id, |event| {
        matches!(&event.body, EventBody::StateChanged { state: SessionState::Failed, .. })
    })
    .await;
    assert!(
        matches!(told.body, EventBody::StateChanged { detail: Some(detail), .. } if detail.contains("told to fail"))
    );
    house.fake.set_boots_failing(false);
    sessions.resume(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(house.fake.runs().len(), 1);
}

#[tokio::test]
async fn a_missing_image_fails_at_once_with_its_name() {
    let house = House::new().await;
    let sessions = house.serve().await;
    house.fake.forget_image("claude");
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Failed).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, "start_failed");
    assert!(house.fake.orders().is_empty());
}

#[tokio::test]
async fn sandboxes_nobody_owns_are_ended_at_the_start() {
    let house = House::new().await;
    let stray = SandboxId::random();
    let from = StartFrom::Image("claude".into());
    let order = harvest_session::provider::StartOrder { sandbox: stray, from, state: None };
    house.fake.start(order).await.unwrap();
    house.serve().await;
    assert!(house.fake.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn commands_run_in_a_machine_which_is_resumed_for_them_unless_it_was_put_away() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, None).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let request = ExecRequest { argv: vec!["echo".into(), "hi".into()], ..ExecRequest::default() };
    let lines: Vec<ExecLine> = sessions.exec(&id, request.clone()).await.unwrap().collect().await;
    assert!(
        matches!(&lines[..], [ExecLine::Stdout { data }, ExecLine::Exited { exit: Exit::Code(0), .. }] if data == "aGkK")
    );
    let stdin = ExecRequest {
        argv: vec!["cat".into()],
        stdin: Some("aGkK".into()),
        ..ExecRequest::default()
    };
    let lines: Vec<ExecLine> = sessions.exec(&id, stdin).await.unwrap().collect().await;
    assert!(matches!(&lines[0], ExecLine::Stdout { data } if data == "aGkK"));
    let unknown = ExecRequest { argv: vec!["nope".into()], ..ExecRequest::default() };
    let lines: Vec<ExecLine> = sessions.exec(&id, unknown).await.unwrap().collect().await;
    assert!(matches!(&lines[..], [ExecLine::Failed { code, .. }] if code == "not_found"));
    sessions.pause(&id).await.unwrap();
    let lines: Vec<ExecLine> = sessions.exec(&id, request.clone()).await.unwrap().collect().await;
    assert!(matches!(&lines[..], [ExecLine::Stdout { .. }, ExecLine::Exited { .. }]));
    // The fake knows no terminals, as an older supervisor does not: the command is not left running.
    let order =
        TerminalOrder { argv: vec!["sleep".into(), "1".into()], ..TerminalOrder::default() };
    let refused = sessions.inside(&id).await.unwrap().terminal(order).await.err().unwrap();
    assert_eq!(refused.code(), "supervisor_outdated");
    sessions.archive(&id).await.unwrap();
    assert_eq!(sessions.exec(&id, request).await.err().unwrap().code(), "not_ready");
}

#[tokio::test]
async fn an_archived_session_takes_no_prompt_until_it_is_resumed() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let waiting = send(&sessions, &id, "never").await;
    sessions.archive(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Archived).await;
    assert_eq!(status(&sessions, &id, &waiting).await, PromptStatus::Cancelled);
    let create = CreatePrompt { text: "late".into(), ..CreatePrompt::default() };
    assert_eq!(sessions.prompt(&id, create, ada()).await.unwrap_err().code(), "archived");
    sessions.resume(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
}

#[tokio::test]
async fn a_build_is_what_sessions_start_from_and_a_failed_one_keeps_the_older() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let lines: Vec<harvest_proto::api::BuildLine> =
        sessions.repository_build("demo").await.unwrap().collect().await;
    let stateless = |order: &harvest_session::provider::StartOrder| order.state.is_none();
    assert!(house.fake.orders().iter().all(stateless), "what sessions leave gets into no image");
    let Some(harvest_proto::api::BuildLine::Built { build }) = lines.last() else {
        panic!("{lines:?}")
    };
    assert_eq!(build.check, None, "no check is declared");
    house.fake.set_boots_failing(true);
    let lines: Vec<harvest_proto::api::BuildLine> =
        sessions.repository_build("demo").await.unwrap().collect().await;
    assert!(
        matches!(lines.last(), Some(harvest_proto::api::BuildLine::Failed { message, .. }) if message.contains("told to fail"))
    );
    house.fake.set_boots_failing(false);
    assert_eq!(sessions.repository("demo").await.unwrap().build.as_ref(), Some(build));
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let last = house.fake.orders().last().unwrap().from.clone();
    assert_eq!(last, StartFrom::Snapshot(build.snapshot.clone()));
    assert_eq!(
        house.fake.list().await.unwrap(),
        [sandbox(&sessions, &id).await],
        "builds leave nothing"
    );
}

#[tokio::test]
async fn a_pushed_commit_gets_a_pull_request_and_honest_evidence() {
    let house = House::new().await;
    let lease = house.lease().await;
    let sessions = house.serve_with(lease).await;
    let books = Books::new(house.store.clone(), lease, house.vault.clone(), Some(100));
    let session = house.session(&sessions, Some("hold")).await;
    let id = session.id;
    until(&sessions, &id, started).await;
    let commit = "c0ffee".to_owned();
    let pushed = EventBody::Pushed {
        repository: "demo".into(),
        branch: session.branch,
        commit: commit.clone(),
    };
    books.log(&id, pushed).await;
    assert!(books.reserve(&id).await.is_ok());
    books.settle(&id, Usage { input_tokens: 90, output_tokens: 20, ..Usage::default() }).await;
    assert!(books.reserve(&id).await.is_err(), "the budget is used up");
    house.fake.release(&sandbox(&sessions, &id).await);
    let told = until(&sessions, &id, |event| matches!(event.body, EventBody::Evidence(_))).await;
    let EventBody::Evidence(evidence) = told.body else { unreachable!() };
    assert_eq!(
        (evidence.commit, evidence.check.as_str(), evidence.passed),
        (commit, "none declared", false)
    );
    let pull = sessions.get(&id).await.unwrap().pull.unwrap();
    assert_eq!((pull.number, pull.title.as_str()), (7, "hold"));
    assert!(pull.evidence.is_some());
    assert_eq!(house.pulls.0.lock().unwrap().len(), 1);
    assert_eq!(
        house.fake.list().await.unwrap(),
        [sandbox(&sessions, &id).await],
        "the check leaves nothing"
    );
    let passes = house.doors.0.lock().unwrap().clone();
    assert_eq!(passes.last().unwrap().repositories[0].branch, None, "the check cannot push");
    let push = until(&sessions, &id, |event| matches!(event.body, EventBody::Pushed { .. })).await;
    assert_eq!(push.turn, Some(sessions.turns(&id).await.unwrap()[0].id.clone()));
    assert_eq!(sessions.get(&id).await.unwrap().usage.input_tokens, 90);
    assert_gapless(&all(&sessions, &id).await);
}

#[tokio::test]
async fn a_secret_is_read_by_the_gateway_and_by_nobody_else() {
    let house = House::new().await;
    let lease = house.lease().await;
    let sessions = house.serve_with(lease).await;
    sessions.secret_set("TOKEN", Secret::new("s3cr3t-value".into())).await.unwrap();
    assert_eq!(
        sessions.secret_set("bad name", Secret::new("x".into())).await.unwrap_err().code(),
        "invalid_name"
    );
    assert_eq!(sessions.secret_list().await.unwrap(), ["TOKEN"]);
    let books = Books::new(house.store.clone(), lease, house.vault.clone(), None);
    assert_eq!(books.secret("TOKEN").await.unwrap().expose(), "s3cr3t-value");
    for file in std::fs::read_dir(house.folder.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(12).any(|window| window == b"s3cr3t-value"));
    }
    sessions.secret_delete("TOKEN").await.unwrap();
    assert!(books.secret("TOKEN").await.is_none());
}

#[tokio::test]
async fn lists_are_paged_newest_first() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let mut made = Vec::new();
    for _ in 0..3 {
        made.push(house.session(&sessions, None).await.id);
    }
    let first = sessions.list(None, 2).await.unwrap();
    let rest = sessions.list(first.next_cursor.as_deref(), 2).await.unwrap();
    let mut seen: Vec<SessionId> =
        first.items.into_iter().chain(rest.items).map(|item| item.id).collect();
    seen.sort();
    made.sort();
    assert_eq!(seen, made);
    assert_eq!(rest.next_cursor, None);
}
