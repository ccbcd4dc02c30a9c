//! The line keeps its order, whatever sessions do.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn limits(sandboxes: usize, sandboxes_per_user: Option<usize>) -> Limits {
    Limits { sandboxes, sandboxes_per_user, checks: 1 }
}

/// Sessions as their drivers would act: told something, they do it and say how they stand.
struct Hall {
    places: Places,
    limits: Limits,
    sessions: Vec<(SessionId, String, Standing)>,
    /// Words on their way.
    post: Vec<(SessionId, Word)>,
    now: i64,
    /// In which order places were given to those who waited.
    given: Vec<u64>,
    /// Sandboxes that no session has, with who made them and the number of their place.
    raw: Vec<(SandboxId, String, u64)>,
}

impl Hall {
    fn new(count: usize, limits: Limits) -> Self {
        let mut hall = Self {
            places: Places::new(limits),
            limits,
            sessions: Vec::new(),
            post: Vec::new(),
            now: 0,
            given: Vec::new(),
            raw: Vec::new(),
        };
        for index in 0..count {
            let (session, user) = (SessionId::random(), format!("user{}", index % 2));
            hall.sessions.push((session.clone(), user.clone(), Standing::Away));
            hall.places.join(session, user, Standing::Away);
        }
        hall.places.set_open(true);
        hall
    }

    fn tell(&mut self, index: usize, standing: Standing, answers: bool) {
        self.sessions[index].2 = standing;
        let words = self.places.tell(&self.sessions[index].0, standing, answers);
        self.post.extend(words);
        self.check();
    }

    fn check(&self) {
        let holds = |standing: &Standing| matches!(standing, Standing::Holds { .. });
        let held = self.sessions.iter().filter(|(_, _, standing)| holds(standing));
        let raw = self.raw.iter().map(|(_, user, _)| user);
        let users: Vec<&String> = held.map(|(_, user, _)| user).chain(raw).collect();
        assert!(users.len() <= self.limits.sandboxes, "never more than the limit run");
        for user in &users {
            let same = users.iter().filter(|other| *other == user).count();
            assert!(
                self.limits.sandboxes_per_user.is_none_or(|limit| same <= limit),
                "nor of one user"
            );
        }
    }

    fn wants(&mut self, index: usize) {
        if self.sessions[index].2 != Standing::Away {
            return;
        }
        match self.places.claim(&self.sessions[index].0) {
            Room::Free => {
                self.tell(index, Standing::Holds { idle_since: None, leaving: false }, false)
            }
            Room::Full { .. } => {
                let ticket = self.places.ticket();
                self.tell(index, Standing::Waits { ticket }, false);
            }
        }
    }

    /// The oldest word arrives.
    fn hear(&mut self) -> bool {
        if self.post.is_empty() {
            return false;
        }
        let (session, word) = self.post.remove(0);
        let index = self.sessions.iter().position(|(id, _, _)| *id == session).unwrap();
        match (word, self.sessions[index].2) {
            (Word::Given { ticket }, Standing::Waits { ticket: own }) if ticket == own => {
                self.given.push(ticket);
                self.tell(index, Standing::Holds { idle_since: None, leaving: false }, false);
            }
            (Word::Needed, Standing::Holds { idle_since: Some(since), leaving: false }) => {
                self.tell(index, Standing::Holds { idle_since: Some(since), leaving: true }, true);
            }
            (Word::Needed, standing) => self.tell(index, standing, true),
            _ => {}
        }
        true
    }

    fn idle(&mut self, index: usize) {
        self.now += 1;
        if matches!(self.sessions[index].2, Standing::Holds { leaving: false, .. }) {
            let idle_since = Some(Timestamp::from_millis(self.now));
            self.tell(index, Standing::Holds { idle_since, leaving: false }, false);
        }
    }

    fn busy(&mut self, index: usize) {
        if matches!(self.sessions[index].2, Standing::Holds { leaving: false, .. }) {
            self.tell(index, Standing::Holds { idle_since: None, leaving: false }, false);
        }
    }

    fn end(&mut self, index: usize) {
        if matches!(self.sessions[index].2, Standing::Holds { .. } | Standing::Waits { .. }) {
            self.tell(index, Standing::Away, false);
        }
    }

    /// Somebody wants a sandbox of their own.
    fn creates(&mut self, index: usize) -> Result<(), Refusal> {
        let (sandbox, user) = (SandboxId::random(), format!("user{}", index % 2));
        let (claimed, words) =
            self.places.claim_raw(std::slice::from_ref(&sandbox), Some(&user), true);
        self.post.extend(words);
        self.raw.push((sandbox, user, claimed?));
        self.check();
        Ok(())
    }

    /// One of those ends.
    fn ends(&mut self, index: usize) {
        if !self.raw.is_empty() {
            let (sandbox, _, number) = self.raw.remove(index % self.raw.len());
            self.post.extend(self.places.leave_raw(&sandbox, number));
        }
    }

    /// The server dies and comes back: only how sessions stand is known, and which sandboxes run.
    fn crash(&mut self) {
        self.post.clear();
        self.places = Places::new(self.limits);
        for (number, raw) in (0..).zip(&mut self.raw) {
            raw.2 = number;
            self.places.take_raw(raw.0.clone(), Some(raw.1.clone()), number);
        }
        for (session, user, standing) in &self.sessions {
            self.post.extend(self.places.join(session.clone(), user.clone(), *standing));
        }
        assert!(self.post.is_empty(), "nobody gets a place before everybody is there");
        self.post = self.places.set_open(true);
        self.check();
    }

    fn is_waiting(&self) -> bool {
        self.sessions.iter().any(|(_, _, standing)| matches!(standing, Standing::Waits { .. }))
    }
}

#[test]
fn the_third_of_two_waits_and_is_next_when_the_longest_idle_has_left() {
    let mut hall = Hall::new(4, limits(2, None));
    (0..4).for_each(|index| hall.wants(index));
    let waits =
        |position| Word::Wait { ticket: u64::from(position), limit: Limit::Sandboxes, position };
    assert_eq!(
        hall.post,
        [(hall.sessions[2].0.clone(), waits(1)), (hall.sessions[3].0.clone(), waits(2))]
    );
    hall.post.clear();
    hall.idle(1);
    assert_eq!(hall.post, [(hall.sessions[1].0.clone(), Word::Needed)]);
    hall.idle(0);
    assert_eq!(
        hall.post[1..],
        [(hall.sessions[0].0.clone(), Word::Needed)],
        "two wait, two are asked"
    );
    hall.hear();
    hall.end(1);
    assert!(
        hall.post.contains(&(hall.sessions[2].0.clone(), Word::Given { ticket: 1 })),
        "{:?}",
        hall.post
    );
}

#[test]
fn who_is_in_use_again_keeps_its_place_and_the_next_is_asked() {
    let mut hall = Hall::new(3, limits(2, None));
    hall.wants(0);
    hall.wants(1);
    hall.idle(0);
    hall.idle(1);
    hall.wants(2);
    let asked = |hall: &Hall| -> Vec<SessionId> {
        let needed = hall.post.iter().filter(|(_, word)| *word == Word::Needed);
        needed.map(|(session, _)| session.clone()).collect()
    };
    assert_eq!(asked(&hall), [hall.sessions[0].0.clone()]);
    hall.busy(0);
    assert_eq!(asked(&hall)[1..], [hall.sessions[1].0.clone()]);
}

#[test]
fn one_users_limit_holds_up_nobody_else() {
    let mut hall = Hall::new(4, limits(3, Some(1)));
    hall.wants(0);
    hall.wants(2);
    hall.wants(1);
    assert!(matches!(hall.sessions[1].2, Standing::Holds { .. }), "another user's");
    let told = Word::Wait { ticket: 1, limit: Limit::User, position: 1 };
    assert_eq!(hall.post, [(hall.sessions[2].0.clone(), told)]);
    hall.idle(1);
    assert_eq!(hall.post.len(), 1, "another user's place would not help");
    hall.idle(0);
    assert_eq!(hall.post[1..], [(hall.sessions[0].0.clone(), Word::Needed)]);
}

#[test]
fn a_place_given_to_somebody_who_went_away_goes_to_the_next() {
    let mut hall = Hall::new(3, limits(1, None));
    (0..3).for_each(|index| hall.wants(index));
    hall.post.clear();
    hall.end(0);
    hall.end(1);
    assert_eq!(hall.post.last(), Some(&(hall.sessions[2].0.clone(), Word::Given { ticket: 2 })));
}

#[test]
fn a_sandbox_without_a_session_takes_a_place_and_is_refused_where_there_is_none() {
    let mut hall = Hall::new(3, limits(2, None));
    assert_eq!(hall.creates(0), Ok(()));
    hall.wants(0);
    hall.wants(1);
    let waits = Word::Wait { ticket: 2, limit: Limit::Sandboxes, position: 1 };
    assert_eq!(hall.post, [(hall.sessions[1].0.clone(), waits)], "a session waits for it");
    hall.post.clear();
    assert_eq!(
        hall.creates(1),
        Err(Refusal { limit: Limit::Sandboxes, soon: false }),
        "and is not queued itself"
    );
    hall.ends(0);
    assert_eq!(
        hall.post,
        [(hall.sessions[1].0.clone(), Word::Given { ticket: 2 })],
        "who waits starts by itself"
    );
}

#[test]
fn who_is_refused_a_sandbox_has_an_idle_session_asked_once() {
    let mut hall = Hall::new(2, limits(2, None));
    hall.wants(0);
    hall.wants(1);
    hall.idle(1);
    let refused = Err(Refusal { limit: Limit::Sandboxes, soon: true });
    assert_eq!((hall.creates(0), hall.creates(0)), (refused, refused));
    assert_eq!(hall.post, [(hall.sessions[1].0.clone(), Word::Needed)]);
    hall.hear();
    hall.end(1);
    assert_eq!(hall.creates(0), Ok(()), "asking again helps");
}

#[test]
fn who_only_looks_for_a_place_has_nobody_asked() {
    let mut hall = Hall::new(1, limits(1, None));
    hall.wants(0);
    hall.idle(0);
    let (claimed, words) = hall.places.claim_raw(&[SandboxId::random()], None, false);
    assert_eq!(
        (claimed, words),
        (Err(Refusal { limit: Limit::Sandboxes, soon: true }), Vec::new())
    );
}

#[test]
fn nobody_is_asked_for_a_place_that_would_not_be_enough() {
    let mut hall = Hall::new(3, limits(3, None));
    hall.wants(0);
    hall.wants(1);
    hall.wants(2);
    hall.idle(1);
    for forks in [2, 4] {
        let forks: Vec<_> = (0..forks).map(|_| SandboxId::random()).collect();
        let (claimed, words) = hall.places.claim_raw(&forks, None, true);
        assert_eq!(claimed, Err(Refusal { limit: Limit::Sandboxes, soon: false }));
        assert_eq!(words, []);
    }
    hall.idle(2);
    let forks = [SandboxId::random(), SandboxId::random()];
    let (claimed, words) = hall.places.claim_raw(&forks, None, true);
    assert_eq!(claimed, Err(Refusal { limit: Limit::Sandboxes, soon: true }));
    assert_eq!(words.len(), 2);
}

#[test]
fn a_users_own_sandboxes_and_sessions_count_together_and_forks_are_all_or_none() {
    let mut hall = Hall::new(2, limits(9, Some(3)));
    hall.wants(0);
    assert_eq!(hall.creates(0), Ok(()));
    let forks = [SandboxId::random(), SandboxId::random()];
    let (claimed, _) = hall.places.claim_raw(&forks, Some("user0"), true);
    assert_eq!(claimed, Err(Refusal { limit: Limit::User, soon: false }));
    assert_eq!(hall.creates(0), Ok(()), "no place was lost on the way");
    assert_eq!(hall.creates(1), Ok(()), "another user's are their own");
    assert!(hall.places.claim_raw(&forks, None, true).0.is_ok(), "and nobody's count for nobody");
}

#[test]
fn a_sandbox_started_again_keeps_its_new_place_when_its_old_end_is_heard_of() {
    let mut hall = Hall::new(1, limits(1, None));
    let sandbox = [SandboxId::random()];
    let first = hall.places.claim_raw(&sandbox, None, true).0.unwrap();
    hall.places.leave_raw(&sandbox[0], first);
    let second = hall.places.claim_raw(&sandbox, None, true).0.unwrap();
    hall.places.leave_raw(&sandbox[0], first);
    assert_eq!(hall.places.all_raw(), [(sandbox[0].clone(), second)]);
    let again = hall.places.claim_raw(&sandbox, None, true).0;
    assert!(again.is_ok(), "who has a place needs no other");
}

#[test]
fn a_machine_bears_four_sandboxes_per_core_and_one_per_gibibyte() {
    assert_eq!(Limits::of_machine(2, 24 << 30).sandboxes, 8);
    assert_eq!(Limits::of_machine(16, 16 << 30).sandboxes, 16);
    assert_eq!(Limits::of_machine(1, 0).sandboxes, 2);
    assert_eq!(Limits::of_machine(8, u64::MAX).checks, 4);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn never_too_many_run_and_everybody_who_waits_gets_a_place(
        sandboxes in 1usize..4,
        per_user in proptest::option::of(1usize..3),
        story in proptest::collection::vec((0u8..11, 0usize..7), 0..80),
    ) {
        let mut hall = Hall::new(7, limits(sandboxes, per_user));
        for (what, which) in story {
            match what {
                0 | 1 => hall.wants(which),
                2 | 3 => drop(hall.hear()),
                4 => hall.idle(which),
                5 => hall.busy(which),
                6 => hall.end(which),
                7 => drop(hall.creates(which)),
                8 | 9 => hall.ends(which),
                _ => hall.crash(),
            }
        }
        (0..hall.raw.len()).for_each(|_| hall.ends(0));
        // From here on nothing new comes, and whatever runs comes to rest; who is asked for its place goes.
        for _ in 0..100 {
            while hall.hear() {}
            for index in 0..hall.sessions.len() {
                match hall.sessions[index].2 {
                    Standing::Holds { leaving: true, .. } => hall.end(index),
                    Standing::Holds { idle_since: None, .. } => hall.idle(index),
                    _ => {}
                }
            }
        }
        prop_assert!(!hall.is_waiting(), "{:?}", hall.sessions);
    }

    #[test]
    fn places_are_given_in_the_order_they_were_asked_for(
        crashes in proptest::collection::vec(any::<bool>(), 6),
    ) {
        let mut hall = Hall::new(7, limits(1, None));
        (0..7).for_each(|index| hall.wants(index));
        for crash in crashes {
            if crash {
                hall.crash();
            }
            for index in 0..7 {
                if matches!(hall.sessions[index].2, Standing::Holds { .. }) {
                    hall.end(index);
                    break;
                }
            }
            while hall.hear() {}
        }
        let sorted: BTreeSet<u64> = hall.given.iter().copied().collect();
        prop_assert_eq!(&hall.given, &sorted.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(hall.given.len(), 6);
    }
}
