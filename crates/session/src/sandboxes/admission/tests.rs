//! Limits hold and the queue keeps its order, whatever sessions do.

use std::collections::BTreeSet;

use harvest_proto::Timestamp;
use proptest::prelude::*;

use crate::decide::Limit;

use super::*;

fn limits(sandboxes: usize, sandboxes_per_user: Option<usize>) -> Limits {
    Limits { sandboxes, sandboxes_per_user, checks: 1, ..Limits::default() }
}

/// Sessions that act on notices as their drivers would, and report their new state.
struct SimulatedSessions {
    policy: SlotPolicy,
    limits: Limits,
    sessions: Vec<(SessionId, String, SlotState)>,
    /// Not delivered yet.
    notices: Vec<(SessionId, Notice)>,
    now: i64,
    /// The sequence numbers of the waiting sessions that got a slot, in order.
    granted: Vec<u64>,
    /// Standalone sandboxes, with their user and claim.
    standalone: Vec<(SandboxId, String, u64)>,
    /// The sandboxes of the warm pool.
    pool: Vec<SessionId>,
}

impl SimulatedSessions {
    fn new(count: usize, limits: Limits) -> Self {
        let mut sim = Self {
            policy: SlotPolicy::new(limits),
            limits,
            sessions: Vec::new(),
            notices: Vec::new(),
            now: 0,
            granted: Vec::new(),
            standalone: Vec::new(),
            pool: Vec::new(),
        };
        for index in 0..count {
            let (session, user) = (SessionId::random(), format!("user{}", index % 2));
            sim.sessions.push((session.clone(), user.clone(), SlotState::Unwanted));
            sim.policy.register(session, user, SlotState::Unwanted);
        }
        sim.policy.set_open(true);
        sim
    }

    fn report(&mut self, index: usize, state: SlotState, answered: bool) {
        self.sessions[index].2 = state;
        let notices = self.policy.report(&self.sessions[index].0, state, answered);
        self.notices.extend(notices);
        self.assert_limits();
    }

    fn assert_limits(&self) {
        let holds = |state: &SlotState| matches!(state, SlotState::Holding { .. });
        let held = self.sessions.iter().filter(|(_, _, state)| holds(state));
        let standalone = self.standalone.iter().map(|(_, user, _)| user);
        let users: Vec<&String> = held.map(|(_, user, _)| user).chain(standalone).collect();
        let all = users.len() + self.pool.len();
        assert!(all <= self.limits.sandboxes, "the sandbox limit holds");
        for user in &users {
            let same = users.iter().filter(|other| *other == user).count();
            assert!(
                self.limits.sandboxes_per_user.is_none_or(|limit| same <= limit),
                "the limit per user holds"
            );
        }
    }

    fn request(&mut self, index: usize) {
        if self.sessions[index].2 != SlotState::Unwanted {
            return;
        }
        match self.policy.claim(&self.sessions[index].0) {
            SlotClaim::Granted => {
                self.report(index, SlotState::Holding { idle_since: None, releasing: false }, false)
            }
            SlotClaim::Queued { .. } => {
                let sequence = self.policy.next_sequence();
                self.report(index, SlotState::Waiting { sequence }, false);
            }
        }
    }

    /// The oldest notice arrives.
    fn deliver(&mut self) -> bool {
        if self.notices.is_empty() {
            return false;
        }
        let (session, notice) = self.notices.remove(0);
        let index = self.sessions.iter().position(|(id, _, _)| *id == session).unwrap();
        match (notice, self.sessions[index].2) {
            (Notice::Granted { sequence }, SlotState::Waiting { sequence: own })
                if sequence == own =>
            {
                self.granted.push(sequence);
                self.report(
                    index,
                    SlotState::Holding { idle_since: None, releasing: false },
                    false,
                );
            }
            (
                Notice::ReleaseRequested,
                SlotState::Holding { idle_since: Some(since), releasing: false },
            ) => {
                self.report(
                    index,
                    SlotState::Holding { idle_since: Some(since), releasing: true },
                    true,
                );
            }
            (Notice::ReleaseRequested, state) => self.report(index, state, true),
            _ => {}
        }
        true
    }

    fn idle(&mut self, index: usize) {
        self.now += 1;
        if matches!(self.sessions[index].2, SlotState::Holding { releasing: false, .. }) {
            let idle_since = Some(Timestamp::from_millis(self.now));
            self.report(index, SlotState::Holding { idle_since, releasing: false }, false);
        }
    }

    fn busy(&mut self, index: usize) {
        if matches!(self.sessions[index].2, SlotState::Holding { releasing: false, .. }) {
            self.report(index, SlotState::Holding { idle_since: None, releasing: false }, false);
        }
    }

    fn stop(&mut self, index: usize) {
        if matches!(self.sessions[index].2, SlotState::Holding { .. } | SlotState::Waiting { .. }) {
            self.report(index, SlotState::Unwanted, false);
        }
    }

    fn create_standalone(&mut self, index: usize) -> Result<(), SlotRefusal> {
        let (sandbox, user) = (SandboxId::random(), format!("user{}", index % 2));
        let (claimed, notices) =
            self.policy.claim_standalone(std::slice::from_ref(&sandbox), Some(&user), true);
        self.notices.extend(notices);
        self.standalone.push((sandbox, user, claimed?));
        self.assert_limits();
        Ok(())
    }

    fn stop_standalone(&mut self, index: usize) {
        if !self.standalone.is_empty() {
            let (sandbox, _, claim) = self.standalone.remove(index % self.standalone.len());
            self.notices.extend(self.policy.release_standalone(&sandbox, claim));
        }
    }

    fn fill_pool(&mut self) {
        let session = SessionId::random();
        if self.policy.pool_claim(&session) {
            self.pool.push(session);
        }
        self.assert_limits();
    }

    /// A new session of a user takes a sandbox of the pool.
    fn take_from_pool(&mut self, index: usize) {
        let user = format!("user{}", index % 2);
        let Some(session) = self.pool.first().cloned() else { return };
        if self.policy.pool_take(&session, &user) {
            self.pool.remove(0);
            let state = SlotState::Holding { idle_since: None, releasing: false };
            self.sessions.push((session.clone(), user.clone(), state));
            self.notices.extend(self.policy.register(session, user, state));
        }
        self.assert_limits();
    }

    /// The sandboxes of the pool whose slots are wanted end.
    fn end_requested_of_pool(&mut self) {
        for session in self.policy.pool_ending() {
            self.pool.retain(|one| *one != session);
            self.notices.extend(self.policy.pool_release(&session));
        }
    }

    /// The server crashes and restarts: only the sessions' states and running sandboxes are known.
    fn crash(&mut self) {
        self.notices.clear();
        self.policy = SlotPolicy::new(self.limits);
        for (claim, standalone) in (0..).zip(&mut self.standalone) {
            standalone.2 = claim;
            self.policy.adopt_standalone(standalone.0.clone(), Some(standalone.1.clone()), claim);
        }
        for session in &self.pool {
            self.policy.pool_adopt(session.clone());
        }
        for (session, user, state) in &self.sessions {
            self.notices.extend(self.policy.register(session.clone(), user.clone(), *state));
        }
        assert!(self.notices.is_empty(), "no slot is granted before all holders are registered");
        self.notices = self.policy.set_open(true);
        self.assert_limits();
    }

    fn is_waiting(&self) -> bool {
        self.sessions.iter().any(|(_, _, state)| matches!(state, SlotState::Waiting { .. }))
    }
}

#[test]
fn waiting_session_gets_the_longest_idle_slot() {
    let mut sim = SimulatedSessions::new(4, limits(2, None));
    (0..4).for_each(|index| sim.request(index));
    let waits = |position| Notice::Queued {
        sequence: u64::from(position),
        limit: Limit::Sandboxes(2),
        position,
    };
    assert_eq!(
        sim.notices,
        [(sim.sessions[2].0.clone(), waits(1)), (sim.sessions[3].0.clone(), waits(2))]
    );
    sim.notices.clear();
    sim.idle(1);
    assert_eq!(sim.notices, [(sim.sessions[1].0.clone(), Notice::ReleaseRequested)]);
    sim.idle(0);
    assert_eq!(
        sim.notices[1..],
        [(sim.sessions[0].0.clone(), Notice::ReleaseRequested)],
        "two wait, so two are asked"
    );
    sim.deliver();
    sim.stop(1);
    assert!(
        sim.notices.contains(&(sim.sessions[2].0.clone(), Notice::Granted { sequence: 1 })),
        "{:?}",
        sim.notices
    );
}

#[test]
fn busy_session_keeps_slot_and_next_is_requested() {
    let mut sim = SimulatedSessions::new(3, limits(2, None));
    sim.request(0);
    sim.request(1);
    sim.idle(0);
    sim.idle(1);
    sim.request(2);
    let asked = |sim: &SimulatedSessions| -> Vec<SessionId> {
        let needed = sim.notices.iter().filter(|(_, notice)| *notice == Notice::ReleaseRequested);
        needed.map(|(session, _)| session.clone()).collect()
    };
    assert_eq!(asked(&sim), [sim.sessions[0].0.clone()]);
    sim.busy(0);
    assert_eq!(asked(&sim)[1..], [sim.sessions[1].0.clone()]);
}

#[test]
fn user_limit_does_not_block_other_users() {
    let mut sim = SimulatedSessions::new(4, limits(3, Some(1)));
    sim.request(0);
    sim.request(2);
    sim.request(1);
    assert!(matches!(sim.sessions[1].2, SlotState::Holding { .. }), "another user's");
    let told = Notice::Queued { sequence: 1, limit: Limit::User(1), position: 1 };
    assert_eq!(sim.notices, [(sim.sessions[2].0.clone(), told)]);
    sim.idle(1);
    assert_eq!(sim.notices.len(), 1, "another user's slot would not help");
    sim.idle(0);
    assert_eq!(sim.notices[1..], [(sim.sessions[0].0.clone(), Notice::ReleaseRequested)]);
}

#[test]
fn unused_grant_passes_to_the_next_session() {
    let mut sim = SimulatedSessions::new(3, limits(1, None));
    (0..3).for_each(|index| sim.request(index));
    sim.notices.clear();
    sim.stop(0);
    sim.stop(1);
    assert_eq!(
        sim.notices.last(),
        Some(&(sim.sessions[2].0.clone(), Notice::Granted { sequence: 2 }))
    );
}

#[test]
fn standalone_sandbox_takes_a_slot_or_is_refused() {
    let mut sim = SimulatedSessions::new(3, limits(2, None));
    assert_eq!(sim.create_standalone(0), Ok(()));
    sim.request(0);
    sim.request(1);
    let waits = Notice::Queued { sequence: 2, limit: Limit::Sandboxes(2), position: 1 };
    assert_eq!(sim.notices, [(sim.sessions[1].0.clone(), waits)], "the session waits");
    sim.notices.clear();
    assert_eq!(
        sim.create_standalone(1),
        Err(refusal(Limit::Sandboxes(2), false)),
        "a standalone sandbox is not queued"
    );
    sim.stop_standalone(0);
    assert_eq!(
        sim.notices,
        [(sim.sessions[1].0.clone(), Notice::Granted { sequence: 2 })],
        "the waiting session is granted the slot"
    );
}

fn refusal(limit: Limit, releasing: bool) -> SlotRefusal {
    SlotRefusal { limit, releasing, can_succeed: true }
}

#[test]
fn refused_claim_requests_an_idle_slot_once() {
    let mut sim = SimulatedSessions::new(2, limits(2, None));
    sim.request(0);
    sim.request(1);
    sim.idle(1);
    let refused = Err(refusal(Limit::Sandboxes(2), true));
    assert_eq!((sim.create_standalone(0), sim.create_standalone(0)), (refused, refused));
    assert_eq!(sim.notices, [(sim.sessions[1].0.clone(), Notice::ReleaseRequested)]);
    sim.deliver();
    sim.stop(1);
    assert_eq!(sim.create_standalone(0), Ok(()), "a retry succeeds");
}

#[test]
fn claim_without_request_releases_nothing() {
    let mut sim = SimulatedSessions::new(1, limits(1, None));
    sim.request(0);
    sim.idle(0);
    let (claimed, notices) = sim.policy.claim_standalone(&[SandboxId::random()], None, false);
    assert_eq!((claimed, notices), (Err(refusal(Limit::Sandboxes(1), true)), Vec::new()));
}

#[test]
fn release_is_requested_only_if_it_suffices() {
    let mut sim = SimulatedSessions::new(3, limits(3, None));
    sim.request(0);
    sim.request(1);
    sim.request(2);
    sim.idle(1);
    for (forks, can_succeed) in [(2, true), (4, false)] {
        let forks: Vec<_> = (0..forks).map(|_| SandboxId::random()).collect();
        let (claimed, notices) = sim.policy.claim_standalone(&forks, None, true);
        let refused = SlotRefusal { limit: Limit::Sandboxes(3), releasing: false, can_succeed };
        assert_eq!(claimed, Err(refused));
        assert_eq!(notices, []);
    }
    sim.idle(2);
    let forks = [SandboxId::random(), SandboxId::random()];
    let (claimed, notices) = sim.policy.claim_standalone(&forks, None, true);
    assert_eq!(claimed, Err(refusal(Limit::Sandboxes(3), true)));
    assert_eq!(notices.len(), 2);
}

#[test]
fn user_limit_counts_sessions_and_standalone_sandboxes() {
    let mut sim = SimulatedSessions::new(2, limits(9, Some(3)));
    sim.request(0);
    assert_eq!(sim.create_standalone(0), Ok(()));
    let forks = [SandboxId::random(), SandboxId::random()];
    let (claimed, _) = sim.policy.claim_standalone(&forks, Some("user0"), true);
    assert_eq!(claimed, Err(refusal(Limit::User(3), false)));
    assert_eq!(sim.create_standalone(0), Ok(()), "the refused claim took no slot");
    assert_eq!(sim.create_standalone(1), Ok(()), "the limit is per user");
    assert!(
        sim.policy.claim_standalone(&forks, None, true).0.is_ok(),
        "no user, no limit per user"
    );
}

#[test]
fn late_release_does_not_free_a_newer_claim() {
    let mut sim = SimulatedSessions::new(1, limits(1, None));
    let sandbox = [SandboxId::random()];
    let first = sim.policy.claim_standalone(&sandbox, None, true).0.unwrap();
    sim.policy.release_standalone(&sandbox[0], first);
    let second = sim.policy.claim_standalone(&sandbox, None, true).0.unwrap();
    sim.policy.release_standalone(&sandbox[0], first);
    assert_eq!(sim.policy.standalone_claim(&sandbox[0]), Some(second));
    let again = sim.policy.claim_standalone(&sandbox, None, true).0;
    assert!(again.is_ok(), "a sandbox with a slot needs no other");
}

#[test]
fn pool_gives_up_its_slot_first() {
    let mut sim = SimulatedSessions::new(2, limits(2, None));
    sim.request(0);
    sim.idle(0);
    sim.fill_pool();
    assert_eq!((sim.pool.len(), sim.policy.pool_ending().len()), (1, 0));
    sim.request(1);
    assert_eq!(sim.policy.pool_ending(), sim.pool);
    let asked = |(_, notice): &(SessionId, Notice)| *notice == Notice::ReleaseRequested;
    assert!(!sim.notices.iter().any(asked), "the idle session keeps its slot");
    assert!(!sim.policy.pool_take(&sim.pool[0], "user0"), "the waiting session comes first");
    sim.notices.clear();
    sim.end_requested_of_pool();
    assert!(matches!(sim.notices[..], [(_, Notice::Granted { .. })]), "{:?}", sim.notices);
    sim.fill_pool();
    assert_eq!(sim.pool, [], "no slot is free");
}

#[test]
fn standalone_sandbox_gets_slot_of_the_pool() {
    let mut sim = SimulatedSessions::new(1, limits(1, None));
    sim.fill_pool();
    let sandbox = [SandboxId::random()];
    let refused = sim.policy.claim_standalone(&sandbox, None, false).0;
    assert_eq!(refused, Err(refusal(Limit::Sandboxes(1), true)));
    sim.end_requested_of_pool();
    assert!(sim.policy.claim_standalone(&sandbox, None, false).0.is_ok());
}

#[test]
fn user_at_limit_takes_nothing_from_pool() {
    let mut sim = SimulatedSessions::new(1, limits(9, Some(1)));
    sim.request(0);
    sim.fill_pool();
    assert!(!sim.policy.pool_take(&sim.pool[0], "user0"));
    assert!(sim.policy.pool_take(&sim.pool[0], "user1"));
}

#[test]
fn default_limits_follow_cores_and_memory() {
    assert_eq!(Limits::for_host(2, 24 << 30).sandboxes, 8);
    assert_eq!(Limits::for_host(16, 16 << 30).sandboxes, 16);
    assert_eq!(Limits::for_host(1, 0).sandboxes, 2);
    assert_eq!(Limits::for_host(8, u64::MAX).checks, 8);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]
    #[test]
    fn limits_hold_and_every_waiting_session_starts(
        sandboxes in 1usize..4,
        per_user in proptest::option::of(1usize..3),
        events in proptest::collection::vec((0u8..14, 0usize..7), 0..80),
    ) {
        let mut sim = SimulatedSessions::new(7, limits(sandboxes, per_user));
        for (what, which) in events {
            match what {
                0 | 1 => sim.request(which),
                2 | 3 => drop(sim.deliver()),
                4 => sim.idle(which),
                5 => sim.busy(which),
                6 => sim.stop(which),
                7 => drop(sim.create_standalone(which)),
                8 | 9 => sim.stop_standalone(which),
                10 => sim.fill_pool(),
                11 => sim.take_from_pool(which),
                12 => sim.end_requested_of_pool(),
                _ => sim.crash(),
            }
        }
        (0..sim.standalone.len()).for_each(|_| sim.stop_standalone(0));
        // No new requests: running sessions become idle, and those asked for their slot release it.
        for _ in 0..100 {
            while sim.deliver() {}
            sim.end_requested_of_pool();
            for index in 0..sim.sessions.len() {
                match sim.sessions[index].2 {
                    SlotState::Holding { releasing: true, .. } => sim.stop(index),
                    SlotState::Holding { idle_since: None, .. } => sim.idle(index),
                    _ => {}
                }
            }
        }
        prop_assert!(!sim.is_waiting(), "{:?}", sim.sessions);
    }

    #[test]
    fn slots_are_granted_in_queue_order(
        crashes in proptest::collection::vec(any::<bool>(), 6),
    ) {
        let mut sim = SimulatedSessions::new(7, limits(1, None));
        (0..7).for_each(|index| sim.request(index));
        for crash in crashes {
            if crash {
                sim.crash();
            }
            for index in 0..7 {
                if matches!(sim.sessions[index].2, SlotState::Holding { .. }) {
                    sim.stop(index);
                    break;
                }
            }
            while sim.deliver() {}
        }
        let sorted: BTreeSet<u64> = sim.granted.iter().copied().collect();
        prop_assert_eq!(&sim.granted, &sorted.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(sim.granted.len(), 6);
    }
}

#[test]
fn sandbox_that_exists_with_slot_counts_once() {
    let ids: Vec<SandboxId> = (0..3).map(|_| SandboxId::random()).collect();
    let refused = |claimed: usize, with_slot: &[SandboxId], existing: &[SandboxId]| {
        let refusal = over_own_limit(2, &ids[claimed..=claimed], with_slot, existing);
        refusal.map(|refusal| refusal.can_succeed)
    };
    assert_eq!(refused(1, &ids[..1], &ids[..2]), None, "one runs, the other starts");
    assert_eq!(refused(2, &ids[..2], &ids[..2]), Some(true), "both run");
    assert_eq!(refused(2, &ids[1..2], &ids[..2]), Some(true), "one is stopped, one runs");
    assert_eq!(refused(2, &[], &ids[..2]), Some(false), "only deleting helps");
    assert_eq!(refused(2, &ids[..2], &[]), Some(true), "two are being created");
}
