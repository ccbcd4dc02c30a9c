//! Going back and sideways: forks, turns, diffs.

use super::*;

fn fork_of(turn: Option<u32>, count: u32) -> ForkSession {
    ForkSession { turn, count: Some(count), ..ForkSession::default() }
}

#[tokio::test]
async fn several_forks_are_made_at_once_each_on_its_own_branch_with_its_own_prompt() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let source = house.session(&sessions, Some("write /f one")).await;
    until_state(&sessions, &source.id, SessionState::Idle).await;
    let prompts = ["write /f a", "write /f b", "write /f c"].map(str::to_owned).to_vec();
    let order = ForkSession { turn: Some(1), prompts, ..ForkSession::default() };
    let forks = sessions.fork(&source.id, order, ada()).await.unwrap();
    let branches: std::collections::BTreeSet<_> = forks.iter().map(|fork| fork.branch.clone()).collect();
    assert_eq!(branches.len(), 3);
    for (fork, content) in forks.iter().zip(["a", "b", "c"]) {
        until(&sessions, &fork.id, ended).await;
        let file = house.fake.file(&sandbox(&sessions, &fork.id).await, "/f");
        assert_eq!(file.as_deref(), Some(content.as_bytes()));
        let began = sessions.snapshots(&fork.id).await.unwrap()[0].clone();
        assert_eq!(Some(began.id), sessions.turns(&source.id).await.unwrap()[0].snapshot);
    }
    let again = sessions.fork(&forks[0].id, fork_of(Some(0), 1), ada()).await.unwrap().remove(0);
    until_state(&sessions, &again.id, SessionState::Idle).await;
    let file = house.fake.file(&sandbox(&sessions, &again.id).await, "/f");
    assert_eq!(file.as_deref(), Some(&b"one"[..]), "turn 0 is what the fork began as");
    let none = sessions.fork(&source.id, fork_of(Some(0), 1), ada()).await.unwrap_err();
    assert_eq!(none.code(), "no_snapshot");
}

#[tokio::test]
async fn a_running_session_is_forked_at_its_newest_ended_turn_and_a_paused_one_as_it_was_left() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    assert_eq!(sessions.fork(&id, fork_of(None, 1), ada()).await.unwrap_err().code(), "no_snapshot");
    house.fake.release(&sandbox(&sessions, &id).await);
    until_state(&sessions, &id, SessionState::Idle).await;
    send(&sessions, &id, "hold").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. })).await;
    let first = sessions.turns(&id).await.unwrap()[0].snapshot.clone().unwrap();
    let fork = sessions.fork(&id, fork_of(None, 1), ada()).await.unwrap().remove(0);
    assert_eq!(fork.snapshot, Some(first));
    let paused = sessions.pause(&id).await.unwrap();
    let fork = sessions.fork(&id, fork_of(None, 2), ada()).await.unwrap();
    assert!(fork.iter().all(|fork| fork.snapshot.as_ref() == Some(&paused)));
}

#[tokio::test]
async fn forks_are_made_all_or_none() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let before = sessions.list(None, 50).await.unwrap().items.len();
    let prompts = vec!["fine".to_owned(), " ".to_owned()];
    let order = ForkSession { prompts, ..ForkSession::default() };
    assert_eq!(sessions.fork(&id, order, ada()).await.unwrap_err().code(), "invalid_prompt");
    assert_eq!(sessions.list(None, 50).await.unwrap().items.len(), before);
    assert_eq!(sessions.fork(&id, fork_of(None, 17), ada()).await.unwrap_err().code(), "invalid_fork");
    let kept = sessions.get(&id).await.unwrap().snapshot.unwrap();
    sessions.fork(&id, fork_of(None, 16), ada()).await.unwrap();
    assert_eq!(sessions.list(None, 50).await.unwrap().items.len(), before + 16);
    let listed = sessions.snapshots(&id).await.unwrap();
    assert_eq!(listed.last().unwrap().id, kept);
}
