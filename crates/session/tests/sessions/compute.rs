//! CPU time and memory of sandboxes, by session, repository and user.

use harvest_proto::{SpendingScope, api::Spending};

use super::*;

const SECOND: u64 = 1_000_000;

/// Names and CPU milliseconds.
async fn cpu(sessions: &Sessions, by: SpendingScope) -> Vec<(String, u64)> {
    let sums = sessions.spending(by, Timestamp::from_millis(0)).await.unwrap();
    sums.into_iter().map(|sum: Spending| (sum.name, sum.cpu_millis)).collect()
}

async fn of_session(sessions: &Sessions, session: &SessionId) -> u64 {
    let name = session.to_string();
    let sums = cpu(sessions, SpendingScope::Session).await;
    sums.into_iter().find(|(one, _)| *one == name).map_or(0, |(_, millis)| millis)
}

#[tokio::test]
async fn sandbox_counts_for_session_repository_and_user() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    harness.fake.use_cpu(&sandbox(&sessions, &id).await, 100 * SECOND);
    // The checkout runs commands, too.
    for (by, name) in [
        (SpendingScope::Session, id.to_string()),
        (SpendingScope::Repository, demo().to_string()),
        (SpendingScope::User, ada().email),
    ] {
        let [(found, millis)] = &cpu(&sessions, by).await[..] else { panic!("one {by}") };
        assert!(*found == name && (100_000..101_000).contains(millis), "{by}: {found} {millis}");
    }
}

#[tokio::test]
async fn killed_server_loses_no_cpu_time() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let sandbox = sandbox(&sessions, &id).await;
    harness.fake.use_cpu(&sandbox, 100 * SECOND);
    assert!((100_000..101_000).contains(&of_session(&sessions, &id).await));
    // What it uses from here on, this server never reads.
    harness.fake.use_cpu(&sandbox, 100 * SECOND);
    let next = harness.serve().await;
    harness.fake.finish_turn(&sandbox);
    until(&next, &id, ended).await;
    let counted = of_session(&next, &id).await;
    assert!((200_000..201_000).contains(&counted), "{counted}");
    drop(sessions);
}

#[tokio::test]
async fn ended_and_dead_sandboxes_are_counted() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("one")).await.id;
    until(&sessions, &id, ended).await;
    harness.fake.use_cpu(&sandbox(&sessions, &id).await, 100 * SECOND);
    sessions.pause(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Paused).await;
    assert!((100_000..101_000).contains(&of_session(&sessions, &id).await));
    send(&sessions, &id, "hold").await;
    until(
        &sessions,
        &id,
        |event| matches!(&event.body, EventBody::TurnStarted { number, .. } if *number == 2),
    )
    .await;
    let second = sandbox(&sessions, &id).await;
    harness.fake.use_cpu(&second, 100 * SECOND);
    harness.fake.crash(&second, "killed");
    until(&sessions, &id, |event| matches!(event.body, EventBody::SnapshotTaken { kind, .. } if kind == SnapshotKind::Recovered)).await;
    let counted = of_session(&sessions, &id).await;
    assert!((200_000..202_000).contains(&counted), "{counted}");
}

#[tokio::test]
async fn build_counts_for_its_repository() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let parts = harness.serve_parts(lease).await;
    let lines =
        parts.repositories.build(&demo(), BuildRepository::default(), &ada()).await.unwrap();
    let _lines: Vec<_> = lines.collect().await;
    let [(name, millis)] = &cpu(&parts.sessions, SpendingScope::Repository).await[..] else {
        panic!("one repository")
    };
    assert_eq!(*name, demo().to_string());
    assert!(*millis > 0, "its commands used CPU time");
    assert_eq!(cpu(&parts.sessions, SpendingScope::Session).await[0].0, "", "no session");
}
