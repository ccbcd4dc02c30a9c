//! Batched appends behave exactly like single ones.

use harvest_proto::SessionId;
use harvest_store::{Committed, StoreError, Write};

use crate::test_store::{NOW, TestStore, on_both, outbox, warning};

on_both! {
    what_is_requests_for_at_once_ends_as_one_after_the_other,
    refused_append_does_not_affect_its_batch,
    appends_beyond_one_batch_are_stored,
    append_with_old_lease_is_refused,
    last_activity_never_decreases,
}

/// Pseudo-random numbers, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// A random commit: session and writes. Mostly the next event; sometimes a repeated one, a gap,
/// another epoch, or another kind of write.
fn commit(dice: &mut Dice, next: &mut [[u64; 3]; 3]) -> (usize, Vec<Write>) {
    let session = usize::try_from(dice.below(4)).unwrap();
    let writes = (0..=dice.below(3)).map(|_| match (next.get_mut(session), dice.below(12)) {
        (None, _) | (_, 0..3) => warning("of the server"),
        (Some(_), 3) => Write::Title("another".to_owned()),
        (Some(numbers), chance) => {
            let epoch = if chance == 4 { 2 } else { 1 };
            let number = &mut numbers[epoch];
            let number = match chance {
                5 => (*number).max(1),
                6 if dice.below(3) == 0 => *number + 2,
                _ => {
                    *number += 1;
                    *number
                }
            };
            match chance {
                7 => Write::OutboxSkip { epoch: epoch as u64, number },
                _ => of(epoch as u64, number),
            }
        }
    });
    (session, writes.collect())
}

fn of(epoch: u64, number: u64) -> Write {
    match outbox(number) {
        Write::Outbox { event, .. } => Write::Outbox { epoch, event },
        other => other,
    }
}

/// Result of a commit, without the session id.
fn result_of(result: Result<Committed, StoreError>) -> Result<(usize, u64), String> {
    result.map(|done| (done.events.len(), done.seq)).map_err(|error| match error {
        StoreError::NotFound { .. } => "not found".to_owned(),
        other => other.to_string(),
    })
}

async fn what_is_requests_for_at_once_ends_as_one_after_the_other(test: TestStore) {
    let mut dice = Dice(7);
    for round in 0..12 {
        let (mut once, mut after) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            once.push(test.session().await);
            after.push(test.session().await);
        }
        // The fourth session does not exist. It is left out of every other round, whose batches are
        // then regular.
        let sides = if round % 2 == 0 { 3 } else { 4 };
        once.push(SessionId::random());
        after.push(SessionId::random());
        let mut next = [[0; 3]; 3];
        for _ in 0..6 {
            let commits: Vec<_> = (0..10)
                .map(|_| commit(&mut dice, &mut next))
                .map(|(session, writes)| (session % sides, writes))
                .collect();
            let requests: Vec<_> = commits
                .iter()
                .map(|(session, writes)| {
                    let (store, lease) = (test.store.clone(), test.lease);
                    let (session, writes) = (once[*session].clone(), writes.clone());
                    tokio::spawn(
                        async move { store.session_commit(&session, lease, NOW, writes).await },
                    )
                })
                .collect();
            let mut together = Vec::new();
            for one in requests {
                together.push(result_of(one.await.unwrap()));
            }
            let mut alone = Vec::new();
            for (session, writes) in commits {
                let done =
                    test.store.session_commit(&after[session], test.lease, NOW, writes).await;
                alone.push(result_of(done));
            }
            assert_eq!(together, alone);
        }
        for (one, other) in once.iter().zip(&after).take(3) {
            assert_eq!(test.seqs(one).await, test.seqs(other).await);
            let last = test.store.session_get(one).await.unwrap().session.seq;
            assert_eq!(test.seqs(one).await, (1..=last).collect::<Vec<_>>());
            for epoch in [1, 2] {
                let stored = test.store.outbox_stored(one, epoch).await.unwrap();
                assert_eq!(stored, test.store.outbox_stored(other, epoch).await.unwrap());
            }
        }
    }
}

async fn refused_append_does_not_affect_its_batch(test: TestStore) {
    let (one, two, gone) = (test.session().await, test.session().await, SessionId::random());
    let results = tokio::join!(
        test.commit(&one, vec![outbox(1)]),
        test.commit(&two, vec![outbox(2)]),
        test.commit(&gone, vec![outbox(1)]),
        test.commit(&one, vec![outbox(2), warning("warning")]),
        test.commit(&two, vec![outbox(1)]),
        test.commit(&one, vec![outbox(2)]),
    );
    assert_eq!(
        (results.0.unwrap(), results.3.unwrap(), results.4.unwrap(), results.5.unwrap()),
        (1, 3, 1, 3)
    );
    assert!(matches!(results.1, Err(StoreError::OutboxGap { number: 2, stored: 0, .. })));
    assert!(matches!(results.2, Err(StoreError::NotFound { .. })));
    assert_eq!((test.seqs(&one).await.len(), test.seqs(&two).await.len()), (3, 1));
}

async fn appends_beyond_one_batch_are_stored(test: TestStore) {
    let mut sessions = Vec::new();
    for _ in 0..70 {
        sessions.push(test.session().await);
    }
    for number in 1..=3 {
        let requests: Vec<_> = sessions
            .iter()
            .map(|session| {
                let (store, session, lease) = (test.store.clone(), session.clone(), test.lease);
                tokio::spawn(async move {
                    store.session_commit(&session, lease, NOW, vec![outbox(number)]).await
                })
            })
            .collect();
        for one in requests {
            assert_eq!(one.await.unwrap().unwrap().seq, number);
        }
    }
    for session in &sessions {
        assert_eq!(test.seqs(session).await, [1, 2, 3]);
    }
}

async fn append_with_old_lease_is_refused(test: TestStore) {
    let (one, two) = (test.session().await, test.session().await);
    let newer = test.database.store().await;
    newer.server_lease(NOW).await.unwrap();
    let results =
        tokio::join!(test.commit(&one, vec![warning("w")]), test.commit(&two, vec![warning("w")]));
    assert!(
        matches!(results.0, Err(StoreError::LeaseLost))
            && matches!(results.1, Err(StoreError::LeaseLost))
    );
    assert_eq!(test.seqs(&one).await.len() + test.seqs(&two).await.len(), 0);
}

async fn last_activity_never_decreases(test: TestStore) {
    let (one, two) = (test.session().await, test.session().await);
    let at = |millis: i64| harvest_proto::Timestamp::from_millis(NOW.as_millis() + millis);
    let write = |session: SessionId, millis: i64| {
        let (store, lease) = (test.store.clone(), test.lease);
        async move {
            store.session_commit(&session, lease, at(millis), vec![warning("w")]).await.unwrap()
        }
    };
    tokio::join!(write(one.clone(), 50), write(two.clone(), 60));
    tokio::join!(write(one.clone(), 10), write(two.clone(), 20));
    for session in [&one, &two] {
        assert_eq!(test.store.session_get(session).await.unwrap().session.last_activity, at(60));
    }
}
