//! The rules the store keeps by itself, on a real file.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

use harvest_proto::{
    EventBody, PromptId, SessionId, SnapshotId, Timestamp, TurnId,
    api::PromptStatus,
    bridge::{Author, OutboxEvent},
    event::SnapshotKind,
};
use harvest_store::{Claim, Lease, NewCheckout, NewPrompt, NewSession, Store, StoreError, Write};

const NOW: Timestamp = Timestamp::from_millis(1_000);

struct Home {
    store: Store,
    lease: Lease,
    folder: tempfile::TempDir,
}

async fn home() -> Home {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().join("store.db")).await.unwrap();
    let lease = store.server_lease(NOW).await.unwrap();
    Home { store, lease, folder }
}

fn author() -> Author {
    Author { name: "Ada".into(), email: "ada@example.org".into() }
}

fn checkout(repository: &str) -> NewCheckout {
    NewCheckout { repository: repository.into(), base: None, base_commit: None }
}

fn new_session() -> NewSession {
    NewSession {
        id: SessionId::random(),
        title: "t".into(),
        checkouts: vec![checkout("r"), checkout("s")],
        branch: "b".into(),
        agent: "claude".into(),
        model: None,
        network: "trusted".into(),
        author: author(),
        conversation: "c".into(),
        forked_from: None,
        forked_turn: None,
        key: None,
        env: std::collections::BTreeMap::new(),
        at: NOW,
    }
}

impl Home {
    async fn session(&self) -> SessionId {
        let new = new_session();
        let id = new.id.clone();
        self.store.session_insert(self.lease, new, Vec::new()).await.unwrap();
        id
    }

    async fn commit(&self, session: &SessionId, writes: Vec<Write>) -> Result<u64, StoreError> {
        self.store.session_commit(session, self.lease, NOW, writes).await.map(|done| done.seq)
    }
}

fn warning(text: &str) -> Write {
    Write::Event { at: NOW, turn: None, body: Box::new(EventBody::Warning { message: text.into() }) }
}

fn prompt(id: &PromptId) -> Write {
    Write::PromptInsert(Box::new(NewPrompt { id: id.clone(), text: "do".into(), author: author(), at: NOW }))
}

fn outbox(number: u64) -> Write {
    let body = EventBody::TextDelta { text: number.to_string() };
    Write::Outbox { epoch: 1, event: Box::new(OutboxEvent { number, at: NOW, turn: None, body }) }
}

fn dispatch(id: &PromptId) -> Write {
    Write::PromptStatus { prompt: id.clone(), from: PromptStatus::Queued, to: PromptStatus::Dispatched }
}

#[tokio::test]
async fn concurrent_appends_give_numbers_without_gap_or_repeat() {
    let home = home().await;
    let session = home.session().await;
    let all = (0..200).map(|n| {
        let (store, session, lease) = (home.store.clone(), session.clone(), home.lease);
        tokio::spawn(async move {
            store.session_commit(&session, lease, NOW, vec![warning(&n.to_string()), warning("x")]).await
        })
    });
    for done in all.collect::<Vec<_>>() {
        done.await.unwrap().unwrap();
    }
    let seqs: Vec<u64> =
        home.store.event_list(&session, 0, 1000).await.unwrap().iter().map(|event| event.seq).collect();
    assert_eq!(seqs, (1..=400).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_failing_request_does_not_spoil_the_others_of_its_group() {
    let home = home().await;
    let (good, gone) = (home.session().await, SessionId::random());
    let duplicate = PromptId::random();
    let results = tokio::join!(
        home.commit(&good, vec![warning("one")]),
        home.commit(&gone, vec![warning("nowhere")]),
        home.commit(&good, vec![prompt(&duplicate)]),
        home.commit(&good, vec![warning("rolled back"), prompt(&duplicate)]),
        home.commit(&good, vec![warning("two")]),
    );
    assert!(results.0.is_ok() && results.2.is_ok() && results.4.is_ok());
    assert!(matches!(results.1, Err(StoreError::NotFound { .. })));
    assert!(matches!(results.3, Err(StoreError::Exists { .. })));
    let events = home.store.event_list(&good, 0, 10).await.unwrap();
    assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [1, 2, 3]);
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_no_transaction_open() {
    let home = home().await;
    let session = home.session().await;
    for _ in 0..20 {
        let commit = home.commit(&session, vec![warning("w")]);
        // Polled once, so that it is on its way, then dropped.
        tokio::select! { biased; _ = commit => {}, () = std::future::ready(()) => {} }
    }
    assert_eq!(home.commit(&session, vec![warning("last")]).await.unwrap(), 21);
}

#[tokio::test]
async fn who_lost_the_lease_writes_nothing_more() {
    let home = home().await;
    let session = home.session().await;
    let newer = home.store.server_lease(NOW).await.unwrap();
    assert!(newer > home.lease);
    assert!(matches!(home.commit(&session, vec![warning("late")]).await, Err(StoreError::LeaseLost)));
    assert!(matches!(
        home.store.session_insert(home.lease, new_session(), Vec::new()).await,
        Err(StoreError::LeaseLost)
    ));
    assert!(matches!(home.store.session_delete(&session, home.lease).await, Err(StoreError::LeaseLost)));
    home.store.session_commit(&session, newer, NOW, vec![warning("ours")]).await.unwrap();
    assert_eq!(home.store.event_list(&session, 0, 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn at_most_one_prompt_of_a_session_is_dispatched() {
    let home = home().await;
    let session = home.session().await;
    let (first, second) = (PromptId::random(), PromptId::random());
    home.commit(&session, vec![prompt(&first), prompt(&second), dispatch(&first)]).await.unwrap();
    assert!(matches!(home.commit(&session, vec![dispatch(&second)]).await, Err(StoreError::Exists { .. })));
    assert!(matches!(home.commit(&session, vec![dispatch(&first)]).await, Err(StoreError::NotFound { .. })));
    assert_eq!(home.store.prompt_queue(&session).await.unwrap(), [second]);
}

#[tokio::test]
async fn an_event_sent_again_is_stored_once_and_a_skipped_one_is_refused() {
    let home = home().await;
    let session = home.session().await;
    home.commit(&session, vec![outbox(1), outbox(2)]).await.unwrap();
    home.commit(&session, vec![outbox(1), outbox(2), outbox(3)]).await.unwrap();
    assert!(matches!(
        home.commit(&session, vec![outbox(5)]).await,
        Err(StoreError::OutboxGap { number: 5, stored: 3, .. })
    ));
    assert_eq!(home.store.outbox_stored(&session, 1).await.unwrap(), 3);
    assert_eq!(home.store.outbox_stored(&session, 2).await.unwrap(), 0);
    assert_eq!(home.store.event_list(&session, 0, 10).await.unwrap().len(), 3);
}

#[tokio::test]
async fn what_is_answered_is_there_after_opening_again() {
    let home = home().await;
    let session = home.session().await;
    let id = PromptId::random();
    home.commit(&session, vec![prompt(&id)]).await.unwrap();
    // Not closed on purpose: the file is opened a second time as it would be after a kill.
    let again = Store::open(&home.folder.path().join("store.db")).await.unwrap();
    assert_eq!(again.prompt_get(&session, &id).await.unwrap().seq, 1);
    assert_eq!(again.server_lease(NOW).await.unwrap(), Lease(home.lease.0 + 1));
}

#[tokio::test]
async fn followers_see_only_what_is_stored_and_in_order() {
    let home = home().await;
    let session = home.session().await;
    let mut follower = home.store.event_follow(&session);
    for n in 0..50 {
        home.commit(&session, vec![warning(&n.to_string())]).await.unwrap();
    }
    for seq in 1..=50 {
        assert_eq!(follower.recv().await.unwrap().seq, seq);
    }
}

#[tokio::test]
async fn the_queue_keeps_the_order_it_is_given() {
    let home = home().await;
    let session = home.session().await;
    let ids: Vec<PromptId> = (0..3).map(|_| PromptId::random()).collect();
    home.commit(&session, ids.iter().map(prompt).collect()).await.unwrap();
    let order = vec![ids[2].clone(), ids[0].clone(), ids[1].clone()];
    home.commit(&session, vec![Write::PromptOrder(order.clone())]).await.unwrap();
    assert_eq!(home.store.prompt_queue(&session).await.unwrap(), order);
    assert_eq!(home.store.prompt_get(&session, &ids[2]).await.unwrap().position, Some(1));
    let late = PromptId::random();
    home.commit(&session, vec![prompt(&late)]).await.unwrap();
    assert_eq!(home.store.prompt_get(&session, &late).await.unwrap().position, Some(4));
}

#[tokio::test]
async fn a_snapshot_a_fork_uses_outlives_the_session_that_took_it() {
    let home = home().await;
    let (source, fork) = (home.session().await, home.session().await);
    let (shared, own) = (SnapshotId::random(), SnapshotId::random());
    let turn = TurnId::random();
    let keep = |snapshot: &SnapshotId, turn| Write::SnapshotInsert {
        snapshot: snapshot.clone(),
        kind: SnapshotKind::Turn,
        turn,
        at: NOW,
    };
    let begin = Write::TurnInsert { turn: turn.clone(), number: 1, prompt: PromptId::random(), at: NOW };
    home.commit(&source, vec![begin, keep(&shared, Some(turn)), keep(&own, None)]).await.unwrap();
    home.commit(&fork, vec![keep(&shared, None)]).await.unwrap();
    assert_eq!(home.store.turn_list(&source).await.unwrap()[0].snapshot, Some(shared.clone()));
    assert_eq!(home.store.session_delete(&source, home.lease).await.unwrap(), [own]);
    assert_eq!(home.store.session_delete(&fork, home.lease).await.unwrap(), [shared]);
}

#[tokio::test]
async fn an_idempotency_key_gives_the_first_answer_again() {
    let home = home().await;
    let claim = async |request: &str| home.store.idempotency_claim("k", request, NOW).await.unwrap();
    assert_eq!(claim("a").await, Claim::New);
    assert_eq!(claim("a").await, Claim::InProgress);
    home.store.idempotency_finish("k", "answer").await.unwrap();
    assert_eq!(claim("a").await, Claim::Done { answer: "answer".into() });
    assert_eq!(claim("b").await, Claim::Mismatch);
}

#[tokio::test]
async fn a_closed_store_says_so() {
    let home = home().await;
    let session = home.session().await;
    home.store.close().await;
    home.store.close().await;
    assert!(matches!(home.commit(&session, vec![warning("w")]).await, Err(StoreError::Closed)));
}

#[tokio::test]
async fn what_is_learned_of_one_repository_is_not_said_of_another() {
    let home = home().await;
    let session = home.session().await;
    let of = |repository: &str| repository.to_owned();
    let facts = vec![
        Write::BaseCommit { repository: of("s"), commit: "b".into() },
        Write::DefaultBase { repository: of("s"), base: "main".into() },
        Write::DefaultBase { repository: of("s"), base: "other".into() },
        Write::Pushed { repository: of("r"), commit: "p".into() },
    ];
    home.commit(&session, facts).await.unwrap();
    let record = home.store.session_get(&session).await.unwrap();
    let [r, s] = &record.checkouts[..] else { panic!("{record:?}") };
    assert_eq!(
        (r.base.as_deref(), s.base.as_deref(), s.base_commit.as_deref()),
        (None, Some("main"), Some("b"))
    );
    assert_eq!((r.unreviewed(), s.unreviewed()), (Some("p"), None));
    home.commit(&session, vec![Write::Reviewed { repository: of("r"), commit: "p".into() }]).await.unwrap();
    assert_eq!(home.store.session_get(&session).await.unwrap().checkouts[0].unreviewed(), None);
}

#[tokio::test]
async fn a_session_has_a_pull_request_in_each_of_its_repositories() {
    let home = home().await;
    let session = home.session().await;
    let pull = |number: u64| harvest_proto::api::Pull {
        number,
        url: format!("http://forge/{number}"),
        title: "t".into(),
        body: String::new(),
        state: "open".into(),
        branch: "b".into(),
        base: "main".into(),
        commit: "c".into(),
        evidence: None,
    };
    for (repository, number) in [("s", 1), ("r", 2), ("s", 3)] {
        home.store.pull_upsert(home.lease, &session, repository, &pull(number), NOW).await.unwrap();
    }
    let shown = home.store.session_get(&session).await.unwrap().session;
    let numbers: Vec<_> = shown.repositories.iter().map(|one| one.pull.as_ref().unwrap().number).collect();
    assert_eq!((numbers, shown.pr_number), (vec![2, 3], Some(2)));
    assert_eq!(home.store.pull_list().await.unwrap().len(), 2);
}
