//! Slots of the warm pool: only those that nothing else wants, and the first to be given up.

use harvest_proto::SessionId;

use super::policy::{Notice, SlotPolicy};

/// The slot of a sandbox in the pool.
#[derive(Debug, Default)]
pub(super) struct PoolSlot {
    /// A session that is being created takes the sandbox, and with it the slot.
    taken: bool,
    /// The sandbox must end: its slot is wanted.
    end_requested: bool,
}

impl SlotPolicy {
    /// Claims a slot for a new sandbox of the pool, which this session will take.
    pub(crate) fn pool_claim(&mut self, session: &SessionId) -> bool {
        let free = self.open && self.queue().is_empty() && self.usage().0 < self.limits.sandboxes;
        if free {
            self.pool_adopt(session.clone());
        }
        free
    }

    /// A sandbox of the pool that runs gets a slot even beyond the limit.
    pub(crate) fn pool_adopt(&mut self, session: SessionId) {
        self.pool.insert(session, PoolSlot::default());
    }

    /// Reserves a sandbox's slot for its session, which this user creates. Not while other sessions
    /// wait, or when the user is at the limit. The slot becomes the session's when that registers.
    pub(crate) fn pool_take(&mut self, session: &SessionId, user: &str) -> bool {
        let used = self.usage().1.get(user).copied().unwrap_or(0);
        let within_limit = self.limits.sandboxes_per_user.is_none_or(|limit| used < limit);
        let free = self.open && within_limit && self.queue().is_empty();
        match self.pool.get_mut(session) {
            Some(slot) if free && !slot.end_requested => {
                slot.taken = true;
                true
            }
            _ => false,
        }
    }

    /// The sandbox has ended, or its session has it.
    pub(crate) fn pool_release(&mut self, session: &SessionId) -> Vec<(SessionId, Notice)> {
        self.pool.remove(session);
        self.assign()
    }

    /// The sandboxes that must end.
    pub(crate) fn pool_ending(&self) -> Vec<SessionId> {
        let ending = self.pool.iter().filter(|(_, slot)| slot.end_requested && !slot.taken);
        ending.map(|(session, _)| session.clone()).collect()
    }

    /// How many slots the pool gives up, or would give up on request.
    pub(super) fn pool_free(&self) -> usize {
        self.pool.values().filter(|slot| !slot.taken).count()
    }

    /// Requests the end of this many sandboxes, those included that end already.
    pub(super) fn pool_request_ends(&mut self, count: usize) {
        let mut free: Vec<&mut PoolSlot> =
            self.pool.values_mut().filter(|slot| !slot.taken).collect();
        free.sort_by_key(|slot| !slot.end_requested);
        free.into_iter().take(count).for_each(|slot| slot.end_requested = true);
    }
}
