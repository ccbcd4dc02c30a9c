//! Sessions on a real store and sandboxes that speak the real frames.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

#[path = "sessions/blobs.rs"]
mod blobs;
#[path = "sessions/garbage.rs"]
mod garbage;
#[path = "sessions/history.rs"]
mod history;
#[path = "sessions/inputs.rs"]
mod inputs;
#[path = "sessions/mishaps.rs"]
mod mishaps;
#[path = "sessions/raw.rs"]
mod raw;
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
    Books, Config, Doors, Lease, Parts, PullOrder, Pulls, PullsError, SessionError, Sessions, Store,
    clocks::Clocks,
    inside::TerminalOrder,
    provider::{Provider, StartFrom},
};

/// Everything a server would have, in its own folder.
struct House {
    folder: tempfile::TempDir,
    store: Store,
    fake: Fake,
    doors: Arc<RecordingDoors>,
    pulls: Arc<RecordingPulls>,
    vault: Arc<Vault>,
    config: Config,
}

#[derive(Default)]
struct RecordingDoors(Mutex<Vec<Pass>>);

impl Doors for RecordingDoors {
    fn open(&self, _socket: &Path, pass: Pass) -> io::Result<Box<dyn Any + Send>> {
        self.0.lock().unwrap().push(pass);
        Ok(Box::new(()))
    }
}

#[derive(Default)]
struct RecordingPulls(Mutex<Vec<PullOrder>>);

#[async_trait]
impl Pulls for RecordingPulls {
    async fn open(&self, order: PullOrder) -> Result<Option<Pull>, PullsError> {
        self.0.lock().unwrap().push(order.clone());
        Ok(Some(Pull {
            number: 7,
            url: "http://forge/7".into(),
            title: order.title,
            body: order.body,
            state: "open".into(),
            branch: order.branch,
            base: order.base,
            commit: "c0ffee".into(),
            evidence: None,
        }))
    }

    async fn set_evidence(&self, _url: &str, _number: u64, _evidence: Evidence) -> Result<(), PullsError> {
        Ok(())
    }
}

fn ada() -> Author {
    Author { name: "Ada".into(), email: "ada@example.org".into() }
}

impl House {
    async fn new() -> Self {
        Self::with(Clocks::default()).await
    }

    async fn with(clocks: Clocks) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            store: Store::open(&folder.path().join("store.db")).await.unwrap(),
            vault: Arc::new(Vault::open(&folder.path().join("key")).unwrap()),
            fake: Fake::new(),
            doors: Arc::default(),
            pulls: Arc::default(),
            config: Config { clocks, ..Config::default() },
            folder,
        }
    }

    async fn lease(&self) -> Lease {
        self.store.server_lease(Timestamp::from_millis(0)).await.unwrap()
    }

    /// A server, with a newer lease than the one before.
    async fn serve(&self) -> Sessions {
        let lease = self.lease().await;
        self.serve_with(lease).await
    }

    async fn serve_with(&self, lease: Lease) -> Sessions {
        let sessions = Sessions::open(self.parts(lease)).await.unwrap();
        let url = "https://example.org/demo.git".to_owned();
        let _there_already = sessions.repository_add(AddRepository { url, ..AddRepository::default() }).await;
        sessions
    }

    fn parts(&self, lease: Lease) -> Parts {
        Parts {
            store: self.store.clone(),
            lease,
            provider: Arc::new(self.fake.clone()),
            doors: self.doors.clone(),
            pulls: self.pulls.clone(),
            vault: self.vault.clone(),
            config: self.config.clone(),
        }
    }

    async fn session(&self, sessions: &Sessions, prompt: Option<&str>) -> Session {
        let create = CreateSession {
            repository: Some("demo".into()),
            prompt: prompt.map(str::to_owned),
            ..CreateSession::default()
        };
        sessions.create(create, ada()).await.unwrap()
    }
}

async fn send(sessions: &Sessions, session: &SessionId, text: &str) -> PromptId {
    let create = CreatePrompt { text: text.into(), ..CreatePrompt::default() };
    sessions.prompt(session, create, ada()).await.unwrap().id
}

/// Follows the session until an event fits. Bounded, so that a mistake is a failure and not a hang.
async fn until(sessions: &Sessions, session: &SessionId, mut fits: impl FnMut(&Event) -> bool) -> Event {
    let mut events = sessions.follow(session, 0).await.unwrap();
    let wait = async {
        while let Some(event) = events.next().await {
            if fits(&event) {
                return event;
            }
        }
        panic!("the events ended");
    };
    match tokio::time::timeout(Duration::from_secs(20), wait).await {
        Ok(event) => event,
        Err(_) => panic!("it never happened: {:#?}", all(sessions, session).await),
    }
}

async fn until_state(sessions: &Sessions, session: &SessionId, wanted: SessionState) {
    let wait = async {
        let mut events = sessions.follow(session, 0).await.unwrap();
        loop {
            if sessions.get(session).await.unwrap().state == wanted {
                return;
            }
            events.next().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
        panic!("never {wanted:?}: {:#?}", all(sessions, session).await);
    }
}

async fn until_status(sessions: &Sessions, session: &SessionId, prompt: &PromptId, wanted: PromptStatus) {
    let wait = async {
        let mut events = sessions.follow(session, 0).await.unwrap();
        while status(sessions, session, prompt).await != wanted {
            events.next().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
        panic!("never {wanted:?}: {:#?}", all(sessions, session).await);
    }
}

async fn all(sessions: &Sessions, session: &SessionId) -> Vec<Event> {
    sessions.events(session, 0, 1000).await.unwrap()
}

async fn status(sessions: &Sessions, session: &SessionId, prompt: &PromptId) -> PromptStatus {
    let prompts = sessions.prompts(session).await.unwrap();
    prompts.iter().find(|row| row.id == *prompt).unwrap().status
}

fn assert_gapless(events: &[Event]) {
    let seqs: Vec<u64> = events.iter().map(|event| event.seq).collect();
    assert_eq!(seqs, (1..=events.len() as u64).collect::<Vec<_>>());
}

async fn sandbox(sessions: &Sessions, session: &SessionId) -> SandboxId {
    sessions.get(session).await.unwrap().sandbox.unwrap()
}

fn ended(event: &Event) -> bool {
    matches!(event.body, EventBody::TurnEnded { .. })
}

fn started(event: &Event) -> bool {
    matches!(event.body, EventBody::TurnStarted { .. })
}

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
    let bodies: Vec<EventBody> = all(&sessions, &id).await.into_iter().map(|event| event.body).collect();
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
    let (b, c, d) =
        (send(&sessions, &id, "b").await, send(&sessions, &id, "c").await, send(&sessions, &id, "d").await);
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
    let order = ForkSession { turn: Some(1), prompt: Some("hold".into()), ..ForkSession::default() };
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
async fn a_sandbox_that_dies_mid_turn_interrupts_its_prompt_once_and_is_recovered() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    house.fake.crash(&sandbox(&sessions, &id).await, "oom");
    until_state(&sessions, &id, SessionState::Paused).await;
    let first = sessions.prompts(&id).await.unwrap()[0].clone();
    assert_eq!(first.status, PromptStatus::Interrupted);
    let (recovered, kind) = house.fake.kept()[0].clone();
    assert_eq!(kind, SnapshotKind::Recovered);
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert_eq!(house.fake.orders()[1].from, StartFrom::Snapshot(recovered));
    assert_eq!(house.fake.runs(), [first.id, next]);
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 2);
}

#[tokio::test]
async fn a_running_turn_survives_a_restart_of_the_server() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let before = sandbox(&sessions, &id).await;
    drop(sessions);
    let sessions = house.serve().await;
    house.fake.release(&before);
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sandbox(&sessions, &id).await, before, "the sandbox is adopted");
    assert_eq!(sessions.get(&id).await.unwrap().epoch, 1, "a restart is no new epoch");
    assert_eq!(house.fake.runs().len(), 1, "the prompt ran once");
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 1);
    assert_eq!(events.iter().filter(|event| started(event)).count(), 1);
}

#[tokio::test]
async fn a_turn_that_ended_while_no_server_ran_is_told_once_and_kept() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let machine = sandbox(&sessions, &id).await;
    sessions.close().await;
    drop(sessions);
    house.fake.release(&machine);
    let sessions = house.serve().await;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Completed);
    assert_gapless(&all(&sessions, &id).await);
    assert!(sessions.turns(&id).await.unwrap()[0].snapshot.is_some());
}

#[tokio::test]
async fn a_sandbox_that_died_while_no_server_ran_is_recovered() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let machine = sandbox(&sessions, &id).await;
    sessions.close().await;
    drop(sessions);
    house.fake.crash(&machine, "power");
    let sessions = house.serve().await;
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.prompts(&id).await.unwrap()[0].status, PromptStatus::Interrupted);
    assert_eq!(house.fake.kept()[0].1, SnapshotKind::Recovered);
    assert_eq!(house.fake.runs().len(), 1);
}

#[tokio::test]
async fn a_prompt_written_but_never_sent_runs_once_after_a_restart() {
    let house = House::new().await;
    let sessions = house.serve().await;
    house.fake.set_failing(Act::Dial, true);
    let id = house.session(&sessions, Some("hello")).await.id;
    until(&sessions, &id, |event| matches!(event.body, EventBody::SandboxStarted { .. })).await;
    // The server dies with the prompt on disk and nothing sent.
    drop(sessions);
    assert!(house.fake.runs().is_empty());
    house.fake.set_failing(Act::Dial, false);
    let sessions = house.serve().await;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(house.fake.runs().len(), 1);
    assert_gapless(&all(&sessions, &id).await);
}

#[tokio::test]
async fn a_server_that_was_taken_over_changes_nothing_more() {
    let house = House::new().await;
    let old = house.serve().await;
    let id = house.session(&old, Some("hold")).await.id;
    until(&old, &id, started).await;
    let new = house.serve().await;
    let create = CreatePrompt { text: "late".into(), ..CreatePrompt::default() };
    assert!(matches!(old.prompt(&id, create, ada()).await, Err(SessionError::Stopped)));
    house.fake.release(&sandbox(&new, &id).await);
    until_state(&new, &id, SessionState::Idle).await;
    assert_gapless(&all(&new, &id).await);
    assert_eq!(house.fake.runs().len(), 1);
}

#[tokio::test]
async fn a_broken_connection_loses_and_repeats_no_event() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let machine = sandbox(&sessions, &id).await;
    for turn in 2..=6 {
        house.fake.drop_connections(&machine);
        house.fake.release(&machine);
        send(&sessions, &id, "hold").await;
        until(
            &sessions,
            &id,
            |event| matches!(event.body, EventBody::TurnStarted { number, .. } if number == turn),
        )
        .await;
    }
    house.fake.release(&machine);
    until_state(&sessions, &id, SessionState::Idle).await;
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 6);
    assert_eq!(house.fake.runs().len(), 6);
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
    let closed = until(&sessions, &id, |event| matches!(event.body, EventBody::RequestClosed { .. })).await;
    assert!(matches!(closed.body, EventBody::RequestClosed { answer: Some(text), .. } if text == "blue"));
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
    let stdin =
        ExecRequest { argv: vec!["cat".into()], stdin: Some("aGkK".into()), ..ExecRequest::default() };
    let lines: Vec<ExecLine> = sessions.exec(&id, stdin).await.unwrap().collect().await;
    assert!(matches!(&lines[0], ExecLine::Stdout { data } if data == "aGkK"));
    let unknown = ExecRequest { argv: vec!["nope".into()], ..ExecRequest::default() };
    let lines: Vec<ExecLine> = sessions.exec(&id, unknown).await.unwrap().collect().await;
    assert!(matches!(&lines[..], [ExecLine::Failed { code, .. }] if code == "not_found"));
    sessions.pause(&id).await.unwrap();
    let lines: Vec<ExecLine> = sessions.exec(&id, request.clone()).await.unwrap().collect().await;
    assert!(matches!(&lines[..], [ExecLine::Stdout { .. }, ExecLine::Exited { .. }]));
    // The fake knows no terminals, as an older supervisor does not: the command is not left running.
    let order = TerminalOrder { argv: vec!["sleep".into(), "1".into()], ..TerminalOrder::default() };
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
    let Some(harvest_proto::api::BuildLine::Built { build }) = lines.last() else { panic!("{lines:?}") };
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
    assert_eq!(house.fake.list().await.unwrap(), [sandbox(&sessions, &id).await], "builds leave nothing");
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
    let pushed =
        EventBody::Pushed { repository: "demo".into(), branch: session.branch, commit: commit.clone() };
    books.log(&id, pushed).await;
    assert!(books.reserve(&id).await.is_ok());
    books.settle(&id, Usage { input_tokens: 90, output_tokens: 20, ..Usage::default() }).await;
    assert!(books.reserve(&id).await.is_err(), "the budget is used up");
    house.fake.release(&sandbox(&sessions, &id).await);
    let told = until(&sessions, &id, |event| matches!(event.body, EventBody::Evidence(_))).await;
    let EventBody::Evidence(evidence) = told.body else { unreachable!() };
    assert_eq!((evidence.commit, evidence.check.as_str(), evidence.passed), (commit, "none declared", false));
    let pull = sessions.get(&id).await.unwrap().pull.unwrap();
    assert_eq!((pull.number, pull.title.as_str()), (7, "hold"));
    assert!(pull.evidence.is_some());
    assert_eq!(house.pulls.0.lock().unwrap().len(), 1);
    assert_eq!(house.fake.list().await.unwrap(), [sandbox(&sessions, &id).await], "the check leaves nothing");
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
    let mut seen: Vec<SessionId> = first.items.into_iter().chain(rest.items).map(|item| item.id).collect();
    seen.sort();
    made.sort();
    assert_eq!(seen, made);
    assert_eq!(rest.next_cursor, None);
}
