//! Slots of builds and checks, apart from those of sessions: a turn whose push is being checked
//! must not wait for itself. Users take turns, and none of them holds every slot, so that one
//! hanging check delays only its own user. `CheckQueue` decides and is pure; `CheckSlots` waits.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

type Ticket = u64;

/// The waiting and running checks.
#[derive(Debug)]
struct CheckQueue {
    slots: usize,
    /// By ticket: the smallest came first.
    waiting: BTreeMap<Ticket, String>,
    users: HashMap<String, UserChecks>,
    next_ticket: Ticket,
    /// The number of grants so far.
    grants: u64,
}

#[derive(Debug, Default)]
struct UserChecks {
    waiting: usize,
    running: usize,
    /// The number of the user's last grant.
    last_grant: u64,
}

impl CheckQueue {
    fn new(slots: usize) -> Self {
        let (waiting, users) = (BTreeMap::new(), HashMap::new());
        Self { slots, waiting, users, next_ticket: 0, grants: 0 }
    }

    fn enqueue(&mut self, user: &str) -> Ticket {
        self.next_ticket += 1;
        self.waiting.insert(self.next_ticket, user.to_owned());
        self.users.entry(user.to_owned()).or_default().waiting += 1;
        self.next_ticket
    }

    /// Removes a ticket that still waits.
    fn cancel(&mut self, ticket: Ticket) {
        if let Some(user) = self.waiting.remove(&ticket) {
            self.update(&user, |checks| checks.waiting -= 1);
        }
    }

    fn release(&mut self, user: &str) {
        self.update(user, |checks| checks.running -= 1);
    }

    /// Grants one free slot: to the user with the fewest running checks, then to the one who has
    /// waited longest for a grant. The last free slot goes to a user without a running check.
    fn grant(&mut self) -> Option<(Ticket, String)> {
        let free = self.slots.saturating_sub(self.users.values().map(|one| one.running).sum());
        let may_run = |checks: &UserChecks| match free {
            0 => false,
            1 => checks.running == 0 || self.slots == 1,
            _ => true,
        };
        let next = self
            .waiting
            .iter()
            .filter_map(|(ticket, user)| Some((ticket, user, self.users.get(user)?)))
            .filter(|(_, _, checks)| may_run(checks))
            .min_by_key(|(ticket, _, checks)| (checks.running, checks.last_grant, **ticket));
        let ticket = next.map(|(ticket, ..)| *ticket)?;
        let user = self.waiting.remove(&ticket)?;
        self.grants += 1;
        let grants = self.grants;
        self.update(&user, |checks| {
            checks.waiting -= 1;
            checks.running += 1;
            checks.last_grant = grants;
        });
        Some((ticket, user))
    }

    /// Users without checks are forgotten.
    fn update(&mut self, user: &str, change: impl FnOnce(&mut UserChecks)) {
        let Some(checks) = self.users.get_mut(user) else { return };
        change(checks);
        if checks.waiting == 0 && checks.running == 0 {
            self.users.remove(user);
        }
    }
}

/// Hands out slots in the order of the queue.
pub(crate) struct CheckSlots {
    state: Mutex<(CheckQueue, HashMap<Ticket, oneshot::Sender<CheckSlot>>)>,
}

impl CheckSlots {
    pub(crate) fn new(slots: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new((CheckQueue::new(slots), HashMap::new())) })
    }

    /// Waits for a slot.
    pub(crate) async fn acquire(self: &Arc<Self>, user: &str) -> CheckSlot {
        let (sender, granted) = oneshot::channel();
        let ticket = {
            let mut state = self.lock();
            let ticket = state.0.enqueue(user);
            state.1.insert(ticket, sender);
            ticket
        };
        let _waiting = WaitingCheck { slots: self, ticket };
        self.grant_free_slots();
        granted.await.expect("a sender is dropped only with its `WaitingCheck`")
    }

    fn grant_free_slots(self: &Arc<Self>) {
        loop {
            let (user, sender) = {
                let mut state = self.lock();
                let Some((ticket, user)) = state.0.grant() else { return };
                (user, state.1.remove(&ticket))
            };
            // A slot that is not received is dropped, which releases it.
            let slot = CheckSlot { slots: Arc::clone(self), user };
            let _ = sender.map(|sender| sender.send(slot));
        }
    }

    fn lock(&self) -> MutexGuard<'_, (CheckQueue, HashMap<Ticket, oneshot::Sender<CheckSlot>>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leaves the queue when the waiting future is dropped.
struct WaitingCheck<'a> {
    slots: &'a CheckSlots,
    ticket: Ticket,
}

impl Drop for WaitingCheck<'_> {
    fn drop(&mut self) {
        let mut state = self.slots.lock();
        state.0.cancel(self.ticket);
        state.1.remove(&self.ticket);
    }
}

/// A slot; released on drop.
pub(crate) struct CheckSlot {
    slots: Arc<CheckSlots>,
    user: String,
}

impl Drop for CheckSlot {
    fn drop(&mut self) {
        self.slots.lock().0.release(&self.user);
        self.slots.grant_free_slots();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn users(queue: &mut CheckQueue) -> Vec<String> {
        std::iter::from_fn(|| queue.grant().map(|(_, user)| user)).collect()
    }

    #[test]
    fn one_user_never_holds_every_slot() {
        let mut queue = CheckQueue::new(3);
        for _ in 0..5 {
            queue.enqueue("ada");
        }
        assert_eq!(users(&mut queue), ["ada", "ada"]);
        queue.enqueue("bob");
        assert_eq!(users(&mut queue), ["bob"]);
        let mut single = CheckQueue::new(1);
        single.enqueue("ada");
        assert_eq!(users(&mut single), ["ada"]);
    }

    #[test]
    fn users_take_turns() {
        let mut queue = CheckQueue::new(1);
        for user in ["ada", "ada", "ada", "bob", "cyd"] {
            queue.enqueue(user);
        }
        let mut order = Vec::new();
        while let Some((_, user)) = queue.grant() {
            queue.release(&user);
            order.push(user);
        }
        assert_eq!(order, ["ada", "bob", "cyd", "ada", "ada"]);
        assert!(queue.users.is_empty(), "users without checks are forgotten");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Enqueue(u8),
        Cancel(usize),
        Release(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..4_u8).prop_map(Step::Enqueue),
            1 => any::<usize>().prop_map(Step::Cancel),
            2 => any::<usize>().prop_map(Step::Release),
        ]
    }

    proptest! {
        #[test]
        fn slots_are_shared_fairly(slots in 1..5_usize, steps in prop::collection::vec(step(), 0..80)) {
            let mut queue = CheckQueue::new(slots);
            let mut running: Vec<String> = Vec::new();
            for step in steps {
                match step {
                    Step::Enqueue(user) => drop(queue.enqueue(&user.to_string())),
                    Step::Cancel(nth) => {
                        let tickets: Vec<_> = queue.waiting.keys().copied().collect();
                        if let Some(ticket) = tickets.get(nth % tickets.len().max(1)) {
                            queue.cancel(*ticket);
                        }
                    }
                    Step::Release(nth) if !running.is_empty() => {
                        queue.release(&running.swap_remove(nth % running.len()));
                    }
                    Step::Release(_) => {}
                }
                running.extend(users(&mut queue));
                prop_assert!(running.len() <= slots);
                let held = |user: &str| running.iter().filter(|one| *one == user).count();
                for user in queue.waiting.values() {
                    // A user waits only while every slot is taken, or for the one reserved.
                    let free = slots - running.len();
                    prop_assert!(free == 0 || (free == 1 && held(user) > 0), "{queue:?}");
                }
                if slots > 1 {
                    prop_assert!(queue.users.keys().all(|user| held(user) < slots));
                }
            }
        }
    }

    #[tokio::test]
    async fn hanging_check_delays_only_its_own_user() {
        let slots = CheckSlots::new(2);
        let _hanging = slots.acquire("ada").await;
        let mut second = Box::pin(slots.acquire("ada"));
        assert!(futures_util::poll!(&mut second).is_pending());
        for _ in 0..3 {
            drop(slots.acquire("bob").await);
        }
        drop(second);
        let state = slots.lock();
        assert!(state.0.waiting.is_empty() && state.1.is_empty(), "a dropped wait leaves nothing");
    }
}
