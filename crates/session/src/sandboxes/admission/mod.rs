//! Admission: which sessions and standalone sandboxes have a slot. Holds the [`SlotPolicy`] behind
//! a lock and passes its notices to the drivers; decides nothing itself.

mod policy;
mod pool;
mod standalone;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use harvest_proto::{SandboxId, SessionId};
use tokio::sync::{Notify, watch};

use crate::decide::{SandboxState, SlotClaim, State};

pub use policy::Limits;
pub(crate) use policy::Notice;
use policy::{SlotPolicy, SlotState};
pub(crate) use standalone::{SlotRefusal, over_own_limit};

pub(crate) struct Admission {
    state: Mutex<AdmissionState>,
    /// Notified whenever a slot may have become free.
    changes: watch::Sender<()>,
    /// Wakes the pool, which must end sandboxes.
    pub(crate) pool_ending: Arc<Notify>,
}

struct AdmissionState {
    policy: SlotPolicy,
    /// Passes notices to the sessions' drivers; called under the lock.
    drivers: HashMap<SessionId, NotifyDriver>,
}

/// Passes a notice on; must not block.
type NotifyDriver = Box<dyn Fn(Notice) + Send>;

/// Who claims slots of standalone sandboxes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Claimant<'a> {
    /// E-mail address; absent without a server.
    pub(crate) user: Option<&'a str>,
    /// The most standalone sandboxes that this user may have; no such limit when absent.
    pub(crate) own_limit: Option<usize>,
}

impl Admission {
    pub(crate) fn new(limits: Limits) -> Self {
        let state = AdmissionState { policy: SlotPolicy::new(limits), drivers: HashMap::new() };
        let (changes, pool_ending) = Default::default();
        Self { state: Mutex::new(state), changes, pool_ending }
    }

    fn state(&self) -> MutexGuard<'_, AdmissionState> {
        self.state.lock().expect("no holder of this lock can panic")
    }

    fn update(&self, change: impl FnOnce(&mut SlotPolicy) -> Vec<(SessionId, Notice)>) {
        let mut state = self.state();
        state.update(change);
        if !state.policy.pool_ending().is_empty() {
            self.pool_ending.notify_one();
        }
    }

    /// Starts or stops granting slots.
    pub(crate) fn set_open(&self, open: bool) {
        self.update(|policy| policy.set_open(open));
        self.changes.send_replace(());
    }

    /// Later sequence numbers are larger than this one.
    pub(crate) fn reserve_sequence(&self, sequence: u64) {
        self.state().policy.reserve_sequence(sequence);
    }

    /// A sequence number at the end of the queue.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.state().policy.next_sequence()
    }

    pub(crate) fn register(
        &self,
        session: &SessionId,
        user: String,
        state: &State,
        notify: impl Fn(Notice) + Send + 'static,
    ) {
        self.state().drivers.insert(session.clone(), Box::new(notify));
        self.update(|policy| {
            policy.register(session.clone(), user_key(&user), slot_state(state, false))
        });
    }

    pub(crate) fn unregister(&self, session: &SessionId) {
        self.state().drivers.remove(session);
        self.update(|policy| policy.unregister(session));
        self.changes.send_replace(());
    }

    /// Claims a slot; the sequence number is for the queue in case there is none.
    pub(crate) fn claim(&self, session: &SessionId) -> (SlotClaim, u64) {
        let mut admission = self.state();
        (admission.policy.claim(session), admission.policy.next_sequence())
    }

    /// A session's state changed. `answered` when it has just decided on a release request.
    pub(crate) fn report(&self, session: &SessionId, state: &State, busy: bool, answered: bool) {
        self.update(|policy| policy.report(session, slot_state(state, busy), answered));
        self.changes.send_replace(());
    }

    /// Claims slots for all of these standalone sandboxes or for none; returns the number of the
    /// claim. `existing` are the user's sandboxes, which count against the own limit without a slot
    /// too. With `request_release`, idle sessions are asked for their slots if that would help.
    pub(crate) fn claim_standalone(
        &self,
        sandboxes: &[SandboxId],
        claimant: Claimant<'_>,
        existing: &[SandboxId],
        request_release: bool,
    ) -> Result<u64, SlotRefusal> {
        let mut claimed = Err(SlotRefusal::CLOSED);
        self.update(|policy| {
            let user = claimant.user.map(user_key);
            let over = claimant.own_limit.and_then(|limit| {
                policy.own_limit_reached(sandboxes, user.as_deref(), limit, existing)
            });
            if let Some(refusal) = over {
                claimed = Err(refusal);
                return Vec::new();
            }
            let (result, notices) =
                policy.claim_standalone(sandboxes, user.as_deref(), request_release);
            claimed = result;
            notices
        });
        claimed
    }

    /// A running standalone sandbox gets a slot even beyond the limit; returns the number of the
    /// claim.
    pub(crate) fn adopt_standalone(&self, sandbox: SandboxId, user: Option<String>) -> u64 {
        let mut admission = self.state();
        let claim = admission.policy.next_sequence();
        admission.policy.adopt_standalone(sandbox, user.as_deref().map(user_key), claim);
        claim
    }

    /// The number of a standalone sandbox's claim.
    pub(crate) fn standalone_claim(&self, sandbox: &SandboxId) -> Option<u64> {
        self.state().policy.standalone_claim(sandbox)
    }

    /// The standalone sandboxes of a user that have a slot.
    pub(crate) fn standalone_of(&self, user: &str) -> Vec<SandboxId> {
        let user = user_key(user);
        self.state().policy.standalone_of(Some(&user)).cloned().collect()
    }

    /// Wakes the claims that wait: a sandbox without a slot was deleted.
    pub(crate) fn standalone_deleted(&self) {
        self.changes.send_replace(());
    }

    /// Releases a standalone sandbox's slot, unless a newer claim holds it.
    pub(crate) fn release_standalone(&self, sandbox: &SandboxId, claim: u64) {
        self.update(|policy| policy.release_standalone(sandbox, claim));
        self.changes.send_replace(());
    }

    /// Claims a slot for a new sandbox of the pool.
    pub(crate) fn pool_claim(&self, session: &SessionId) -> bool {
        self.state().policy.pool_claim(session)
    }

    /// A sandbox of the pool that runs gets a slot even beyond the limit.
    pub(crate) fn pool_adopt(&self, session: &SessionId) {
        self.state().policy.pool_adopt(session.clone());
    }

    /// Reserves a pool sandbox's slot for its session, which this user creates.
    pub(crate) fn pool_take(&self, session: &SessionId, user: &str) -> bool {
        self.state().policy.pool_take(session, &user_key(user))
    }

    /// Releases the slot of a pool sandbox that has ended.
    pub(crate) fn pool_release(&self, session: &SessionId) {
        self.update(|policy| policy.pool_release(session));
        self.changes.send_replace(());
    }

    /// The pool's sandboxes that must end, because their slots are wanted.
    pub(crate) fn pool_to_end(&self) -> Vec<SessionId> {
        self.state().policy.pool_ending()
    }

    /// Changes whenever a slot may have become free.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }
}

impl AdmissionState {
    fn update(&mut self, change: impl FnOnce(&mut SlotPolicy) -> Vec<(SessionId, Notice)>) {
        for (session, notice) in change(&mut self.policy) {
            // A driver that has just exited unregisters itself.
            if let Some(notify) = self.drivers.get(&session) {
                notify(notice);
            }
        }
    }
}

/// E-mail addresses are compared without case.
fn user_key(email: &str) -> String {
    email.to_ascii_lowercase()
}

fn slot_state(state: &State, busy: bool) -> SlotState {
    match (&state.sandbox, state.waiting) {
        (SandboxState::Absent, Some(waiting)) => SlotState::Waiting { sequence: waiting.sequence },
        (SandboxState::Absent, None) => SlotState::Unwanted,
        (sandbox, _) => SlotState::Holding {
            idle_since: state.idle_since(busy),
            releasing: state.yielding_slot || matches!(sandbox, SandboxState::Stopping { .. }),
        },
    }
}
