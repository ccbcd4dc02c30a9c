//! Appends are done together where they can be; nobody can tell.

use harvest_proto::SessionId;
use harvest_store::{Committed, StoreError, Write};

use crate::home::{Home, NOW, on_both, outbox, warning};

on_both! {
    what_is_asked_for_at_once_ends_as_one_after_the_other,
    one_append_that_is_refused_leaves_the_others_of_its_row,
    more_appends_than_are_done_together_are_all_done,
    an_append_under_an_old_lease_is_refused,
    activity_never_goes_back,
}

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// One commit: of which session, and what. Mostly the next number, at times one again, one too far, another
/// sandbox's, or what is no append.
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
            of(epoch as u64, number)
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

/// What a commit answered, as far as it does not name the session.
fn told(result: Result<Committed, StoreError>) -> Result<(usize, u64), String> {
    result.map(|done| (done.events.len(), done.seq)).map_err(|error| match error {
        StoreError::NotFound { .. } => "not found".to_owned(),
        other => other.to_string(),
    })
}

async fn what_is_asked_for_at_once_ends_as_one_after_the_other(home: Home) {
    let mut dice = Dice(7);
    for round in 0..12 {
        let (mut once, mut after) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            once.push(home.session().await);
            after.push(home.session().await);
        }
        // The fourth is nowhere, and not asked for in every round: a row without it is plain.
        let sides = if round % 2 == 0 { 3 } else { 4 };
        once.push(SessionId::random());
        after.push(SessionId::random());
        let mut next = [[0; 3]; 3];
        for _ in 0..6 {
            let commits: Vec<_> = (0..10)
                .map(|_| commit(&mut dice, &mut next))
                .map(|(session, writes)| (session % sides, writes))
                .collect();
            let asked: Vec<_> = commits
                .iter()
                .map(|(session, writes)| {
                    let (store, lease) = (home.store.clone(), home.lease);
                    let (session, writes) = (once[*session].clone(), writes.clone());
                    tokio::spawn(
                        async move { store.session_commit(&session, lease, NOW, writes).await },
                    )
                })
                .collect();
            let mut together = Vec::new();
            for one in asked {
                together.push(told(one.await.unwrap()));
            }
            let mut alone = Vec::new();
            for (session, writes) in commits {
                let done =
                    home.store.session_commit(&after[session], home.lease, NOW, writes).await;
                alone.push(told(done));
            }
            assert_eq!(together, alone);
        }
        for (one, other) in once.iter().zip(&after).take(3) {
            assert_eq!(home.seqs(one).await, home.seqs(other).await);
            let last = home.store.session_get(one).await.unwrap().session.seq;
            assert_eq!(home.seqs(one).await, (1..=last).collect::<Vec<_>>());
            for epoch in [1, 2] {
                let stored = home.store.outbox_stored(one, epoch).await.unwrap();
                assert_eq!(stored, home.store.outbox_stored(other, epoch).await.unwrap());
            }
        }
    }
}

async fn one_append_that_is_refused_leaves_the_others_of_its_row(home: Home) {
    let (one, two, gone) = (home.session().await, home.session().await, SessionId::random());
    let results = tokio::join!(
        home.commit(&one, vec![outbox(1)]),
        home.commit(&two, vec![outbox(2)]),
        home.commit(&gone, vec![outbox(1)]),
        home.commit(&one, vec![outbox(2), warning("and a word")]),
        home.commit(&two, vec![outbox(1)]),
        home.commit(&one, vec![outbox(2)]),
    );
    assert_eq!(
        (results.0.unwrap(), results.3.unwrap(), results.4.unwrap(), results.5.unwrap()),
        (1, 3, 1, 3)
    );
    assert!(matches!(results.1, Err(StoreError::OutboxGap { number: 2, stored: 0, .. })));
    assert!(matches!(results.2, Err(StoreError::NotFound { .. })));
    assert_eq!((home.seqs(&one).await.len(), home.seqs(&two).await.len()), (3, 1));
}

async fn more_appends_than_are_done_together_are_all_done(home: Home) {
    let mut sessions = Vec::new();
    for _ in 0..70 {
        sessions.push(home.session().await);
    }
    for number in 1..=3 {
        let asked: Vec<_> = sessions
            .iter()
            .map(|session| {
                let (store, session, lease) = (home.store.clone(), session.clone(), home.lease);
                tokio::spawn(async move {
                    store.session_commit(&session, lease, NOW, vec![outbox(number)]).await
                })
            })
            .collect();
        for one in asked {
            assert_eq!(one.await.unwrap().unwrap().seq, number);
        }
    }
    for session in &sessions {
        assert_eq!(home.seqs(session).await, [1, 2, 3]);
    }
}

async fn an_append_under_an_old_lease_is_refused(home: Home) {
    let (one, two) = (home.session().await, home.session().await);
    let newer = home.kept.store().await;
    newer.server_lease(NOW).await.unwrap();
    let results =
        tokio::join!(home.commit(&one, vec![warning("w")]), home.commit(&two, vec![warning("w")]));
    assert!(
        matches!(results.0, Err(StoreError::LeaseLost))
            && matches!(results.1, Err(StoreError::LeaseLost))
    );
    assert_eq!(home.seqs(&one).await.len() + home.seqs(&two).await.len(), 0);
}

async fn activity_never_goes_back(home: Home) {
    let (one, two) = (home.session().await, home.session().await);
    let at = |millis: i64| harvest_proto::Timestamp::from_millis(NOW.as_millis() + millis);
    let write = |session: SessionId, millis: i64| {
        let (store, lease) = (home.store.clone(), home.lease);
        async move {
            store.session_commit(&session, lease, at(millis), vec![warning("w")]).await.unwrap()
        }
    };
    tokio::join!(write(one.clone(), 50), write(two.clone(), 60));
    tokio::join!(write(one.clone(), 10), write(two.clone(), 20));
    for session in [&one, &two] {
        assert_eq!(home.store.session_get(session).await.unwrap().session.last_activity, at(60));
    }
}
