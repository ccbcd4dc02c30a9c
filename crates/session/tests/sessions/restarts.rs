//! Servers, connections and sandboxes that die, and what the next ones make of it.

use super::*;

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
