//! Deleting frees and nothing leaks, wherever the server dies; and what the store and the machine think
//! there is agrees after every start.

use std::sync::atomic::{AtomicBool, Ordering};

use harvest_proto::SnapshotId;
use harvest_session::provider::StartOrder;

use super::*;

/// Waits until a test's own look at the fake says so.
pub(super) async fn eventually(what: &str, so: impl Fn() -> bool) {
    let wait = async {
        while !so() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "never: {what}");
}

async fn two_turns(house: &House, sessions: &Sessions) -> SessionId {
    let id = house.session(sessions, Some("write /a one")).await.id;
    until_state(sessions, &id, SessionState::Idle).await;
    let second = send(sessions, &id, "two").await;
    until_status(sessions, &id, &second, PromptStatus::Completed).await;
    until_state(sessions, &id, SessionState::Idle).await;
    id
}

#[tokio::test]
async fn a_server_that_dies_anywhere_in_a_delete_leaves_nothing_to_the_next_but_the_work() {
    for (failing, left) in
        [(vec![Act::End, Act::Remove], (1, 2)), (vec![Act::Remove], (0, 2)), (vec![], (0, 0))]
    {
        let house = House::new().await;
        let sessions = house.serve().await;
        let id = two_turns(&house, &sessions).await;
        for act in &failing {
            house.fake.set_failing(*act, true);
        }
        sessions.delete(&id).await.unwrap();
        assert!(matches!(sessions.get(&id).await, Err(SessionError::NotFound { .. })));
        // The server dies here, with so much of it done.
        drop(sessions);
        let there = (house.fake.list().await.unwrap().len(), house.fake.kept().len());
        assert_eq!(there, left, "{failing:?}");
        let noted = house.store.removal_list().await.unwrap().len();
        assert_eq!(noted, left.0 + left.1, "what is left to do is noted: {failing:?}");
        for act in failing {
            house.fake.set_failing(act, false);
        }
        let _sessions = house.serve().await;
        eventually("everything is gone", || house.fake.kept().is_empty()).await;
        assert!(house.fake.list().await.unwrap().is_empty());
        forgotten(&house).await;
    }
}

/// Returns when nothing is left that is to be removed.
async fn forgotten(house: &House) {
    let waiting = async {
        while !house.store.removal_list().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    assert!(
        tokio::time::timeout(Duration::from_secs(20), waiting).await.is_ok(),
        "it is not forgotten"
    );
}

#[tokio::test]
async fn what_could_not_be_removed_is_tried_again_without_a_restart() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = two_turns(&house, &sessions).await;
    house.fake.set_failing(Act::Remove, true);
    sessions.delete(&id).await.unwrap();
    assert_eq!(
        house.store.removal_list().await.unwrap().len(),
        2,
        "the sandbox went, the snapshots did not"
    );
    house.fake.set_failing(Act::Remove, false);
    eventually("the task has done it", || house.fake.kept().is_empty()).await;
}

#[tokio::test]
async fn a_snapshot_two_sessions_use_goes_with_the_last_of_them() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = two_turns(&house, &sessions).await;
    let shared = sessions.turns(&id).await.unwrap()[0].snapshot.clone().unwrap();
    let order = ForkSession { turn: Some(1), ..ForkSession::default() };
    let fork = sessions.fork(&id, order, ada()).await.unwrap().remove(0);
    until_state(&sessions, &fork.id, SessionState::Idle).await;
    sessions.delete(&id).await.unwrap();
    let left: Vec<_> = house.fake.kept().into_iter().map(|kept| kept.0).collect();
    assert_eq!(left, std::slice::from_ref(&shared));
    drop(sessions);
    let sessions = house.serve().await;
    assert_eq!(house.fake.kept().len(), 1, "a restart changes nothing");
    let kept = &sessions.snapshots(&fork.id).await.unwrap()[0];
    assert_eq!((&kept.id, kept.turn), (&shared, Some(0)));
    sessions.delete(&fork.id).await.unwrap();
    assert!(house.fake.kept().is_empty());
    assert!(house.store.removal_list().await.unwrap().is_empty());
}

#[tokio::test]
async fn what_nobody_knows_is_removed_at_the_start_and_what_a_save_under_way_means_is_not() {
    let house = House::new().await;
    let sessions = house.serve().await;
    house.fake.set_failing(Act::EndKept, true);
    let id = house.session(&sessions, Some("one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sessions.pause(&id).await.unwrap_err().code(), "save_unknown");
    drop(sessions);
    // What the save came to, for all anybody knows; and something nobody does.
    let drive = house.store.session_get(&id).await.unwrap().drive;
    let meant: Vec<SnapshotId> = drive.split('"').filter_map(|word| word.parse().ok()).collect();
    assert_eq!(meant.len(), 2, "the turn's and the pause's: {drive}");
    let stranger = SnapshotId::random();
    house.fake.plant(&stranger);
    meant.iter().for_each(|snapshot| house.fake.plant(snapshot));
    let _sessions = house.serve().await;
    eventually("the stranger is gone", || !house.fake.kept().iter().any(|kept| kept.0 == stranger))
        .await;
    assert_eq!(house.fake.kept().len(), 2);
}

#[tokio::test]
async fn disks_of_another_store_are_left_alone() {
    let house = House::new().await;
    let stranger = SnapshotId::random();
    house.fake.plant(&stranger);
    house.fake.give_to("another");
    let sandbox = SandboxId::random();
    let from = StartFrom::Image("claude".into());
    house.fake.start(StartOrder { sandbox: sandbox.clone(), from, state: None }).await.unwrap();
    let _sessions = house.serve().await;
    eventually("the server has swept", || house.fake.sweeps() > 0).await;
    assert_eq!(house.fake.kept().len(), 1);
    assert_eq!(house.fake.list().await.unwrap(), [sandbox]);
}

#[tokio::test]
async fn a_snapshot_that_vanished_is_told_once_and_its_turn_cannot_be_forked() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = two_turns(&house, &sessions).await;
    let first = sessions.turns(&id).await.unwrap()[0].snapshot.clone().unwrap();
    drop(sessions);
    house.fake.lose(&first);
    for _ in 0..2 {
        let sessions = house.serve().await;
        let warnings = all(&sessions, &id).await.into_iter().filter(
            |event| matches!(&event.body, EventBody::Warning { message } if message.contains("turn 1")),
        );
        assert_eq!(warnings.count(), 1, "it is told, and not again at every start");
        let turn = &sessions.turns(&id).await.unwrap()[0];
        assert_eq!((&turn.snapshot, turn.dropped.as_deref()), (&None, Some("gone")));
        let order = ForkSession { turn: Some(1), ..ForkSession::default() };
        assert_eq!(sessions.fork(&id, order, ada()).await.unwrap_err().code(), "no_snapshot");
        drop(sessions);
    }
    house.fake.plant(&first);
    let sessions = house.serve().await;
    assert_eq!(sessions.turns(&id).await.unwrap()[0].snapshot, Some(first), "it came back");
}

#[tokio::test]
async fn an_archived_session_keeps_its_last_snapshot_and_pinned_ones() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = two_turns(&house, &sessions).await;
    let third = send(&sessions, &id, "three").await;
    until_status(&sessions, &id, &third, PromptStatus::Completed).await;
    let turns = sessions.turns(&id).await.unwrap();
    let pinned = turns[0].snapshot.clone().unwrap();
    assert!(sessions.snapshot_pin(&id, &pinned, true).await.unwrap().pinned);
    sessions.archive(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Archived).await;
    eventually("the rest is gone", || house.fake.kept().len() == 2).await;
    let newest = sessions.get(&id).await.unwrap().snapshot.unwrap();
    let mut kept: Vec<_> = house.fake.kept().into_iter().map(|kept| kept.0).collect();
    let mut wanted = vec![pinned, newest];
    kept.sort();
    wanted.sort();
    assert_eq!(kept, wanted);
    assert_eq!(sessions.turns(&id).await.unwrap()[1].dropped.as_deref(), Some("archived"));
}

#[tokio::test]
async fn a_forgotten_repository_takes_its_builds_and_its_state_along() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let _lines: Vec<_> = sessions.repository_build("demo").await.unwrap().collect().await;
    assert_eq!(house.fake.kept().len(), 1);
    house.fake.set_failing(Act::Remove, true);
    sessions.repository_delete("demo").await.unwrap();
    assert_eq!(house.fake.states_removed(), ["demo"]);
    drop(sessions);
    house.fake.set_failing(Act::Remove, false);
    let _sessions = house.serve().await;
    eventually("the build is gone", || house.fake.kept().is_empty()).await;
}

/// A forge that holds everything, and at times refuses to let go of it.
#[derive(Default)]
struct Copies {
    refuses: AtomicBool,
    forgotten: Mutex<Vec<String>>,
}

#[async_trait]
impl Pulls for Copies {
    async fn open(&self, _order: PullOrder) -> Result<Option<Pull>, PullsError> {
        Ok(None)
    }

    async fn set_evidence(
        &self,
        _url: &str,
        _number: u64,
        _evidence: Evidence,
    ) -> Result<(), PullsError> {
        Ok(())
    }

    async fn forget(&self, url: &str) -> Result<bool, PullsError> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(PullsError("the disk is full".into()));
        }
        self.forgotten.lock().unwrap().push(url.to_owned());
        Ok(true)
    }
}

#[tokio::test]
async fn what_the_forge_holds_of_a_forgotten_repository_is_removed_by_whichever_server_lives() {
    let house = House::new().await;
    let copies = Arc::new(Copies::default());
    let serve = || async {
        let parts = Parts { pulls: copies.clone(), ..house.parts(house.lease().await) };
        Sessions::open(parts).await.unwrap()
    };
    let sessions = serve().await;
    let add = |name: &str, of: &str, secret: &str| AddRepository {
        url: format!("http://forge.example.org/{of}.git"),
        name: Some(name.to_owned()),
        secret: Some(secret.to_owned()),
        ..AddRepository::default()
    };
    for one in [add("one", "one", "KEY"), add("two", "one", "KEY"), add("three", "three", "OTHER")]
    {
        sessions
            .secret_set(one.secret.as_ref().unwrap(), Secret::new("token".to_owned()))
            .await
            .unwrap();
        sessions.repository_add(one).await.unwrap();
    }
    // Somebody else knows it by another name.
    sessions.repository_delete("one").await.unwrap();
    assert_eq!(*copies.forgotten.lock().unwrap(), Vec::<String>::new());
    copies.refuses.store(true, Ordering::SeqCst);
    sessions.repository_delete("two").await.unwrap();
    // A server that died right after it was written down.
    sessions.close().await;
    drop(sessions);
    house.store.repository_delete("three", Timestamp::from_millis(0)).await.unwrap();
    copies.refuses.store(false, Ordering::SeqCst);
    let sessions = serve().await;
    eventually("both are gone", || copies.forgotten.lock().unwrap().len() == 2).await;
    let mut gone = copies.forgotten.lock().unwrap().clone();
    gone.sort();
    assert_eq!(gone, ["http://forge.example.org/one.git", "http://forge.example.org/three.git"]);
    forgotten(&house).await;
    assert_eq!(sessions.secret_list().await.unwrap(), Vec::<String>::new(), "nor the keys to it");
}

#[tokio::test]
async fn an_open_session_keeps_its_newest_snapshots_and_the_rules_are_told_before_they_act() {
    let mut house = House::new().await;
    let sessions = house.serve().await;
    let id = two_turns(&house, &sessions).await;
    for text in ["three", "four"] {
        let prompt = send(&sessions, &id, text).await;
        until_status(&sessions, &id, &prompt, PromptStatus::Completed).await;
        until_state(&sessions, &id, SessionState::Idle).await;
    }
    sessions.close().await;
    drop(sessions);
    house.config.retention.snapshots_per_session = 2;
    let sessions = house.serve().await;
    eventually("the oldest two are gone", || house.fake.kept().len() == 2).await;
    let turns = sessions.turns(&id).await.unwrap();
    let dropped: Vec<_> = turns.iter().map(|turn| turn.dropped.as_deref()).collect();
    assert_eq!(dropped, [Some("too_many"), Some("too_many"), None, None]);
    let told = sessions.retention().await.unwrap();
    assert_eq!((told.items[0].snapshots, told.dropped.len()), (2, 0));
    sessions.close().await;
    drop(sessions);
    // With no room at all only what the session goes on from stays.
    house.config.retention.snapshots_bytes = Some(0);
    let sessions = house.serve().await;
    eventually("one is left", || house.fake.kept().len() == 1).await;
    assert!(sessions.get(&id).await.unwrap().snapshot.is_some());
}

#[tokio::test]
async fn a_session_archived_long_ago_is_deleted_with_all_it_holds() {
    let mut house = House::new().await;
    house.config.retention.archived = Some(Duration::ZERO);
    let sessions = house.serve().await;
    let id = two_turns(&house, &sessions).await;
    sessions.archive(&id).await.unwrap();
    eventually("nothing is left", || house.fake.kept().is_empty()).await;
    assert!(matches!(sessions.get(&id).await, Err(SessionError::NotFound { .. })));
}
