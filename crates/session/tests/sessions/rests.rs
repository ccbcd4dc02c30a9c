//! Sessions that stand still, wait in line, go back, and are put to rest.

use harvest_session::Limits;

use super::*;

pub(super) async fn until_reason(sessions: &Sessions, session: &SessionId, reason: &str) {
    let wait = async {
        let mut events = sessions.follow(session, 0).await.unwrap();
        while sessions.get(session).await.unwrap().reason != reason {
            events.next().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
        panic!("never {reason}: {:#?}", all(sessions, session).await);
    }
}

fn freezing_soon() -> Clocks {
    Clocks { idle_freeze: Some(Duration::from_millis(50)), ..Clocks::default() }
}

async fn echo(sessions: &Sessions, session: &SessionId) -> Vec<ExecLine> {
    let request = ExecRequest { argv: vec!["echo".into(), "hi".into()], ..ExecRequest::default() };
    sessions.exec(session, request).await.unwrap().collect().await
}

#[tokio::test]
async fn a_command_has_a_machine_that_somebody_else_made_stand_still_go_on_at_once() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let sandbox = sandbox(&sessions, &id).await;
    let freezing = house.fake.freezing().unwrap();
    for _ in 0..2 {
        freezing.freeze(&sandbox, Duration::from_secs(3600)).await.unwrap();
        let lines = echo(&sessions, &id).await;
        assert!(
            matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
            "{lines:?}"
        );
    }
}

#[tokio::test]
async fn a_detached_command_is_activity_also_for_the_next_server() {
    let house = House::with(freezing_soon()).await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &id, "frozen").await;
    let machine = sandbox(&sessions, &id).await;
    house.fake.set_detached(&machine, 1);
    until_reason(&sessions, &id, "ready").await;
    sessions.close().await;
    let sessions = house.serve().await;
    // By the same clock: had the first been idle, it would have stood still before the second.
    until(
        &sessions,
        &house.session(&sessions, Some("hello")).await.id,
        |event| matches!(&event.body, EventBody::StateChanged { reason, .. } if reason == "frozen"),
    )
    .await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, "ready");
    assert!(!house.fake.is_still(&machine));
    house.fake.set_detached(&machine, 0);
    until_reason(&sessions, &id, "frozen").await;
}

#[tokio::test]
async fn an_idle_session_stands_still_and_goes_on_for_a_prompt_and_for_a_command() {
    let house = House::with(freezing_soon()).await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("write /kept yes")).await.id;
    until_reason(&sessions, &id, "frozen").await;
    let machine = sandbox(&sessions, &id).await;
    assert!(house.fake.is_still(&machine));
    assert_eq!(sessions.get(&id).await.unwrap().state, SessionState::Idle);
    let lines = echo(&sessions, &id).await;
    assert!(
        matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
        "{lines:?}"
    );
    until_reason(&sessions, &id, "frozen").await;
    // The fake refuses a prompt while everything stands still.
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert_eq!(sandbox(&sessions, &id).await, machine, "in the same machine");
}

#[tokio::test]
async fn what_stood_still_when_the_server_died_is_used_by_the_next() {
    let house = House::with(freezing_soon()).await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &id, "frozen").await;
    sessions.close().await;
    let sessions = house.serve().await;
    let lines = echo(&sessions, &id).await;
    assert!(
        matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
        "{lines:?}"
    );
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
}

#[tokio::test]
async fn what_cannot_stand_still_works_all_the_same() {
    let clocks = Clocks { idle_pause: Duration::from_millis(200), ..freezing_soon() };
    let house = House::with(clocks).await;
    house.fake.set_failing(Act::Freeze, true);
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &id, "idle").await;
    assert!(!all(&sessions, &id).await.iter().any(|event| {
        matches!(&event.body, EventBody::StateChanged { reason, .. } if reason == "frozen")
    }));
}

async fn limited(sandboxes: usize, sandboxes_per_user: Option<usize>) -> House {
    let mut house = House::new().await;
    house.config.limits = Limits { sandboxes, sandboxes_per_user, checks: 1 };
    house
}

#[tokio::test]
async fn six_sessions_share_two_places_in_the_order_they_came() {
    let house = limited(2, None).await;
    let sessions = house.serve().await;
    let mut ids = Vec::new();
    for _ in 0..6 {
        ids.push(house.session(&sessions, Some("hold")).await.id);
    }
    for id in &ids[..2] {
        until(&sessions, id, started).await;
    }
    for (place, id) in ids[2..].iter().enumerate() {
        until_reason(&sessions, id, "limit_sandboxes").await;
        let waiting = sessions.get(id).await.unwrap();
        assert_eq!(waiting.state, SessionState::Queued);
        assert_eq!(waiting.position, Some(u32::try_from(place + 1).unwrap()));
    }
    let mut begun = ids[..2].to_vec();
    for turn in 0..6 {
        // Whoever runs ends; who is idle then makes room for the next in line.
        let id = begun[turn].clone();
        assert!(house.fake.list().await.unwrap().len() <= 2, "never more than the limit run");
        house.fake.release(&sandbox(&sessions, &id).await);
        if let Some(next) = ids.get(turn + 2) {
            until(&sessions, next, started).await;
            begun.push(next.clone());
        }
    }
    let order: Vec<PromptId> = house.fake.runs();
    let mut prompts = Vec::new();
    for id in &ids {
        prompts.push(sessions.prompts(id).await.unwrap()[0].id.clone());
    }
    assert_eq!(order, prompts, "first come, first served");
    until_reason(&sessions, &ids[0], "place_needed").await;
    let last = sessions.get(&ids[5]).await.unwrap();
    assert_eq!(last.position, None);
}

#[tokio::test]
async fn the_line_keeps_its_order_when_the_server_dies() {
    let house = limited(1, None).await;
    let sessions = house.serve().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(house.session(&sessions, Some("hold")).await.id);
    }
    until(&sessions, &ids[0], started).await;
    until_reason(&sessions, &ids[3], "limit_sandboxes").await;
    sessions.close().await;
    let sessions = house.serve().await;
    for pair in ids.windows(2) {
        house.fake.release(&sandbox(&sessions, &pair[0]).await);
        until(&sessions, &pair[1], started).await;
        assert_eq!(house.fake.list().await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn one_users_sessions_wait_for_each_other_and_not_for_anybody_elses() {
    let house = limited(4, Some(1)).await;
    let sessions = house.serve().await;
    let first = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &first, started).await;
    let second = house.session(&sessions, Some("hello")).await;
    until_reason(&sessions, &second.id, "limit_user").await;
    let grace = Author { name: "Grace".into(), email: "grace@example.org".into() };
    // Whose name commits get makes no difference.
    let create = CreateSession {
        repository: Some("demo".into()),
        prompt: Some("hello".into()),
        author: Some(ada()),
        ..CreateSession::default()
    };
    let other = sessions.create(create, grace).await.unwrap().id;
    until_state(&sessions, &other, SessionState::Idle).await;
    sessions.delete(&first).await.unwrap();
    until_state(&sessions, &second.id, SessionState::Idle).await;
}

#[tokio::test]
async fn a_session_with_a_command_running_keeps_its_place() {
    let house = limited(1, None).await;
    let sessions = house.serve().await;
    let first = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &first, SessionState::Idle).await;
    let request =
        ExecRequest { argv: vec!["sleep".into(), "600".into()], ..ExecRequest::default() };
    let command = sessions.exec(&first, request).await.unwrap();
    let second = house.session(&sessions, Some("hello")).await.id;
    until_reason(&sessions, &second, "limit_sandboxes").await;
    assert_eq!(sessions.get(&first).await.unwrap().state, SessionState::Idle);
    drop(command);
    until_state(&sessions, &second, SessionState::Idle).await;
    assert_eq!(sessions.get(&first).await.unwrap().reason, "place_needed");
}

#[tokio::test]
async fn a_command_that_waits_for_a_machine_hears_when_somebody_has_the_session_rest() {
    let house = limited(1, None).await;
    let sessions = house.serve().await;
    let first = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &first, SessionState::Idle).await;
    sessions.pause(&first).await.unwrap();
    until_state(&sessions, &first, SessionState::Paused).await;
    let second = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &second, started).await;
    let request = ExecRequest { argv: vec!["true".into()], ..ExecRequest::default() };
    let pausing = async {
        until_reason(&sessions, &first, "limit_sandboxes").await;
        sessions.pause(&first).await.unwrap();
    };
    let both = async { tokio::join!(sessions.exec(&first, request), pausing).0 };
    let refused =
        tokio::time::timeout(Duration::from_secs(20), both).await.expect("it does not wait on");
    assert_eq!(refused.err().unwrap().code(), "not_ready");
}

#[tokio::test]
async fn a_push_is_checked_although_every_place_is_taken() {
    let house = limited(1, None).await;
    let lease = house.lease().await;
    let sessions = house.serve_with(lease).await;
    let session = house.session(&sessions, Some("hold")).await;
    until(&sessions, &session.id, started).await;
    let books = Books::new(house.store.clone(), lease, house.vault.clone(), None);
    let (repository, branch, commit) = ("demo".into(), session.branch, "c0ffee".into());
    books.log(&session.id, EventBody::Pushed { repository, branch, commit }).await;
    house.fake.release(&sandbox(&sessions, &session.id).await);
    let told = until(&sessions, &session.id, |event| {
        matches!(event.body, EventBody::Evidence(_) | EventBody::Warning { .. })
    });
    assert!(matches!(told.await.body, EventBody::Evidence(_)));
}

#[tokio::test]
async fn a_session_goes_back_to_a_turn_and_forth_again() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("write /note one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let second = send(&sessions, &id, "write /note two").await;
    until_status(&sessions, &id, &second, PromptStatus::Completed).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let note = async |sessions: &Sessions| house.fake.file(&sandbox(sessions, &id).await, "/note");
    for (turn, expected) in [(1, "one"), (2, "two"), (1, "one")] {
        sessions.restore(&id, turn).await.unwrap();
        until_state(&sessions, &id, SessionState::Idle).await;
        assert_eq!(note(&sessions).await, Some(expected.as_bytes().to_vec()));
    }
    let restored = |event: &&Event| matches!(event.body, EventBody::Restored { .. });
    assert_eq!(all(&sessions, &id).await.iter().filter(restored).count(), 3);
    let third = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &third, PromptStatus::Completed).await;
    let numbers: Vec<u32> =
        sessions.turns(&id).await.unwrap().iter().map(|turn| turn.number).collect();
    assert_eq!(numbers, [1, 2, 3]);
    assert_eq!(sessions.restore(&id, 9).await.unwrap_err().code(), "not_found");
}

#[tokio::test]
async fn a_turn_in_progress_is_stopped_before_its_session_goes_back() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("write /note one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let second = send(&sessions, &id, "hold").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. }))
        .await;
    sessions.restore(&id, 1).await.unwrap();
    assert_eq!(status(&sessions, &id, &second).await, PromptStatus::Stopped);
    until_state(&sessions, &id, SessionState::Idle).await;
    assert!(
        sessions.turns(&id).await.unwrap()[1].snapshot.is_some(),
        "what it did can be gone back to"
    );
}

#[tokio::test]
async fn a_terminated_session_leaves_its_disk_and_goes_on_with_it() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("write /kept yes")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let held = send(&sessions, &id, "hold").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. }))
        .await;
    sessions.terminate(&id).await.unwrap();
    let ended = sessions.get(&id).await.unwrap();
    assert_eq!(
        (ended.state, &ended.reason[..], &ended.sandbox),
        (SessionState::Paused, "terminated", &None)
    );
    assert_eq!(status(&sessions, &id, &held).await, PromptStatus::Stopped);
    let kinds: Vec<SnapshotKind> =
        sessions.snapshots(&id).await.unwrap().iter().map(|snapshot| snapshot.kind).collect();
    assert_eq!(kinds, [SnapshotKind::Turn, SnapshotKind::Recovered]);
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert!(house.fake.file(&sandbox(&sessions, &id).await, "/kept").is_some());
}

#[tokio::test]
async fn what_waited_when_the_server_ended_goes_on_with_the_next() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let busy = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &busy, started).await;
    let waiting = send(&sessions, &busy, "hello").await;
    let idle = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &idle, SessionState::Idle).await;
    sessions.suspend_all(Duration::from_secs(20)).await;
    let late = send(&sessions, &idle, "too late for this server").await;
    assert!(house.fake.list().await.unwrap().is_empty(), "every machine is kept");
    sessions.close().await;
    let sessions = house.serve().await;
    until_status(&sessions, &busy, &waiting, PromptStatus::Completed).await;
    until_status(&sessions, &idle, &late, PromptStatus::Completed).await;
    assert_eq!(house.fake.runs().len(), 4, "nothing ran twice");
}
