//! Which sessions may have a sandbox. Pure: from the slot states of all sessions and the running
//! standalone sandboxes it decides which sessions get a slot, which wait at which position, and
//! which are asked to release theirs. Nothing of it is stored: the sessions' states are, and with
//! them the sequence numbers that keep the queue in order across a restart.
//!
//! First come, first served; a session is passed over only when its own user is at the limit. When
//! a session waits, the session that has been idle longest is asked for its slot.

use std::collections::{BTreeMap, HashMap};

use harvest_proto::{SandboxId, SessionId, Timestamp};

use super::{pool::PoolSlot, standalone::StandaloneSlot};
use crate::decide::{Limit, SlotClaim};

/// How many sandboxes may run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sandboxes of sessions and standalone sandboxes together.
    pub sandboxes: usize,
    /// The same, of one user.
    pub sandboxes_per_user: Option<usize>,
    /// Standalone sandboxes of one member, for whom no other number is set.
    pub member_sandboxes: u32,
    /// Builds and checks of pushed commits. They never wait for a session, nor a session for them.
    pub checks: usize,
}

/// How many standalone sandboxes a member may have by default.
const MEMBER_SANDBOXES: u32 = 2;

impl Limits {
    pub(crate) const UNLIMITED: Self = Self {
        sandboxes: usize::MAX,
        sandboxes_per_user: None,
        member_sandboxes: MEMBER_SANDBOXES,
        checks: usize::MAX,
    };

    /// Defaults for a host of this size: four sandboxes per core, because an agent mostly waits for
    /// its model, and one per GiB, because a waiting agent uses less than that.
    #[must_use]
    pub fn for_host(cores: usize, memory_bytes: u64) -> Self {
        let fit = usize::try_from(memory_bytes >> 30).unwrap_or(usize::MAX);
        Self {
            sandboxes: cores.saturating_mul(4).min(fit).max(2),
            sandboxes_per_user: None,
            member_sandboxes: MEMBER_SANDBOXES,
            // One user holds all of them but one.
            checks: cores.max(3),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sandboxes: usize::MAX,
            sandboxes_per_user: None,
            member_sandboxes: MEMBER_SANDBOXES,
            checks: 3,
        }
    }
}

/// What a session has to do with slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// It has no sandbox and wants none.
    Unwanted,
    Waiting {
        /// The smallest is next.
        sequence: u64,
    },
    /// It has a sandbox.
    Holding {
        /// `None` while the sandbox is in use.
        idle_since: Option<Timestamp>,
        /// The sandbox is being stopped.
        releasing: bool,
    },
}

/// What a session is notified of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// It may start its sandbox.
    Granted { sequence: u64 },
    /// It waits at this position, for this reason.
    Queued { sequence: u64, limit: Limit, position: u32 },
    /// Another session waits: it should release its slot if it is idle.
    ReleaseRequested,
}

pub(crate) struct SlotPolicy {
    pub(super) limits: Limits,
    pub(super) holders: BTreeMap<SessionId, Holder>,
    pub(super) standalone: BTreeMap<SandboxId, StandaloneSlot>,
    /// The sandboxes of the warm pool, by the session that will take each.
    pub(super) pool: BTreeMap<SessionId, PoolSlot>,
    next_sequence: u64,
    pub(super) open: bool,
}

pub(super) struct Holder {
    pub(super) user: String,
    pub(super) state: SlotState,
    /// A slot is granted and not taken yet.
    granted: bool,
    /// It was asked to release its slot and has not answered yet.
    release_requested: bool,
    /// The limit and position it was last notified of.
    notified: Option<(Limit, u32)>,
}

impl Holder {
    fn uses_slot(&self) -> bool {
        self.granted || matches!(self.state, SlotState::Holding { .. })
    }
}

impl SlotPolicy {
    /// Grants nothing before [`SlotPolicy::set_open`]: first every holder must be registered.
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            holders: BTreeMap::new(),
            standalone: BTreeMap::new(),
            pool: BTreeMap::new(),
            next_sequence: 1,
            open: false,
        }
    }

    /// Starts or stops granting slots.
    pub(crate) fn set_open(&mut self, open: bool) -> Vec<(SessionId, Notice)> {
        self.open = open;
        self.assign()
    }

    /// A number larger than any before.
    pub(crate) fn next_sequence(&mut self) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        sequence
    }

    /// Later sequence numbers are larger than this one.
    pub(crate) fn reserve_sequence(&mut self, sequence: u64) {
        self.next_sequence = self.next_sequence.max(sequence.saturating_add(1));
    }

    pub(crate) fn register(
        &mut self,
        session: SessionId,
        user: String,
        state: SlotState,
    ) -> Vec<(SessionId, Notice)> {
        if let SlotState::Waiting { sequence } = state {
            self.reserve_sequence(sequence);
        }
        // The slot of its sandbox, if that comes from the pool.
        self.pool.remove(&session);
        let holder =
            Holder { user, state, granted: false, release_requested: false, notified: None };
        self.holders.insert(session, holder);
        self.assign()
    }

    pub(crate) fn unregister(&mut self, session: &SessionId) -> Vec<(SessionId, Notice)> {
        self.holders.remove(session);
        self.assign()
    }

    /// Claims a slot for a session that would have to wait otherwise.
    pub(crate) fn claim(&mut self, session: &SessionId) -> SlotClaim {
        let waiting = self.queue().len();
        let position = u32::try_from(waiting + 1).unwrap_or(u32::MAX);
        let queued = |limit| SlotClaim::Queued { limit, position };
        let Some(user) = self.holders.get(session).map(|holder| holder.user.clone()) else {
            return queued(Limit::Closed);
        };
        if !self.open {
            return queued(Limit::Closed);
        }
        let (total, users) = self.usage();
        if let Some(limit) = self.reached(&user, total, &users) {
            return queued(limit);
        }
        if let Some(holder) = self.holders.get_mut(session) {
            holder.granted = true;
        }
        SlotClaim::Granted
    }

    /// A session's slot state. `answered` when it has just decided on a release request.
    pub(crate) fn report(
        &mut self,
        session: &SessionId,
        state: SlotState,
        answered: bool,
    ) -> Vec<(SessionId, Notice)> {
        let Some(holder) = self.holders.get_mut(session) else { return Vec::new() };
        // A grant stays with a waiting session until it has received the notice.
        let granted =
            holder.granted && holder.state == state && matches!(state, SlotState::Waiting { .. });
        if holder.state == state && holder.granted == granted && !answered {
            return Vec::new();
        }
        let idle = matches!(state, SlotState::Holding { idle_since: Some(_), releasing: false });
        holder.release_requested &= idle && !answered;
        if !matches!(state, SlotState::Waiting { .. }) {
            holder.notified = None;
        }
        (holder.state, holder.granted) = (state, granted);
        self.assign()
    }

    /// Grants free slots in queue order; the sessions that stay queued are notified of their
    /// position.
    pub(super) fn assign(&mut self) -> Vec<(SessionId, Notice)> {
        if !self.open {
            return Vec::new();
        }
        let (mut total, mut users) = self.usage();
        let (mut notices, mut blocked) = (Vec::new(), Vec::new());
        for (sequence, session, user) in self.queue() {
            let Some(limit) = self.reached(&user, total, &users) else {
                total += 1;
                *users.entry(user).or_default() += 1;
                self.with(&session, |holder| (holder.granted, holder.notified) = (true, None));
                notices.push((session, Notice::Granted { sequence }));
                continue;
            };
            let position = u32::try_from(blocked.len() + 1).unwrap_or(u32::MAX);
            let notified = Some((limit, position));
            let before =
                self.with(&session, |holder| std::mem::replace(&mut holder.notified, notified));
            if before != Some(notified) {
                notices.push((session, Notice::Queued { sequence, limit, position }));
            }
            blocked.push((limit, user));
        }
        notices.extend(self.request_releases(blocked));
        notices
    }

    /// Every waiting session needs one slot: one that is being released, or else that of a sandbox
    /// of the pool, or else that of an idle session, which is asked for it.
    pub(super) fn request_releases(
        &mut self,
        blocked: Vec<(Limit, String)>,
    ) -> Vec<(SessionId, Notice)> {
        let (mut releasing, mut idle) = (Vec::new(), Vec::new());
        for (session, holder) in &self.holders {
            match holder.state {
                SlotState::Holding { releasing: now, .. } if now || holder.release_requested => {
                    releasing.push(holder.user.clone());
                }
                SlotState::Holding { idle_since: Some(since), .. } => {
                    idle.push((since, session.clone(), holder.user.clone()));
                }
                _ => {}
            }
        }
        idle.sort();
        let (mut requested, mut pooled, mut from_pool) = (Vec::new(), self.pool_free(), 0);
        for (limit, user) in blocked {
            let fits = |other: &String| !matches!(limit, Limit::User(_)) || *other == user;
            if let Some(found) = releasing.iter().position(fits) {
                releasing.remove(found);
            } else if matches!(limit, Limit::Sandboxes(_)) && pooled > 0 {
                pooled -= 1;
                from_pool += 1;
            } else if let Some(found) = idle.iter().position(|(_, _, other)| fits(other)) {
                let session = idle.remove(found).1;
                self.with(&session, |holder| holder.release_requested = true);
                requested.push((session, Notice::ReleaseRequested));
            }
        }
        self.pool_request_ends(from_pool);
        requested
    }

    fn with<T>(&mut self, session: &SessionId, change: impl FnOnce(&mut Holder) -> T) -> Option<T> {
        self.holders.get_mut(session).map(change)
    }

    /// The waiting sessions, the next one first.
    pub(super) fn queue(&self) -> Vec<(u64, SessionId, String)> {
        let mut queue: Vec<_> = self
            .holders
            .iter()
            .filter_map(|(session, holder)| match holder.state {
                SlotState::Waiting { sequence } if !holder.granted => {
                    Some((sequence, session.clone(), holder.user.clone()))
                }
                _ => None,
            })
            .collect();
        queue.sort();
        queue
    }

    /// The slots in use, in total and by user.
    pub(super) fn usage(&self) -> (usize, HashMap<String, usize>) {
        let mut users: HashMap<String, usize> = HashMap::new();
        let mut total = 0;
        for holder in self.holders.values().filter(|holder| holder.uses_slot()) {
            total += 1;
            *users.entry(holder.user.clone()).or_default() += 1;
        }
        total += self.pool.len();
        for slot in self.standalone.values() {
            total += 1;
            if let Some(user) = &slot.user {
                *users.entry(user.clone()).or_default() += 1;
            }
        }
        (total, users)
    }

    /// The limit for which a user gets no further slot.
    fn reached(&self, user: &str, total: usize, users: &HashMap<String, usize>) -> Option<Limit> {
        let used = users.get(user).copied().unwrap_or(0);
        let sandboxes = self.limits.sandboxes;
        match self.limits.sandboxes_per_user.filter(|limit| used >= *limit) {
            Some(limit) => Some(Limit::User(limit)),
            None => (total >= sandboxes).then_some(Limit::Sandboxes(sandboxes)),
        }
    }
}
