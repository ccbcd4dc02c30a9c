//! Slots of standalone sandboxes. They have no place in the queue: a claim gets its slots or is
//! refused, and is never asked to release them. A refused claim may request the slot of an idle
//! session, as a waiting session does; the claim is repeated whenever a slot may be free.

use std::collections::BTreeSet;

use harvest_proto::{SandboxId, SessionId};

use super::policy::{Holder, Notice, SlotPolicy, SlotState};
use crate::decide::Limit;

pub(super) struct StandaloneSlot {
    /// The user who created the sandbox; absent without a server.
    pub(super) user: Option<String>,
    /// Tells this claim from an earlier one of the same sandbox.
    claim: u64,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotRefusal {
    pub(crate) limit: Limit,
    /// Enough slots are about to be released: a retry may succeed.
    pub(crate) releasing: bool,
    /// There may be enough slots later. Not so in a server that shuts down, nor for more sandboxes
    /// than it may run.
    pub(crate) can_succeed: bool,
}

impl SlotRefusal {
    pub(super) const CLOSED: Self =
        Self { limit: Limit::Closed, releasing: false, can_succeed: false };
}

impl SlotPolicy {
    /// Claims slots for all of these sandboxes or for none; returns the number of the claim, which
    /// releases them. A sandbox that has a slot keeps it under the new number. Sandboxes
    /// of the pool give theirs up; only with `request_release` are idle sessions asked, too.
    pub(crate) fn claim_standalone(
        &mut self,
        sandboxes: &[SandboxId],
        user: Option<&str>,
        request_release: bool,
    ) -> (Result<u64, SlotRefusal>, Vec<(SessionId, Notice)>) {
        if !self.open {
            return (Err(SlotRefusal::CLOSED), Vec::new());
        }
        let new = sandboxes.iter().filter(|sandbox| !self.standalone.contains_key(sandbox)).count();
        if let Some((limit, missing)) = self.exceeded(new, user) {
            let user = user.unwrap_or_default().to_owned();
            // No session gives up its slot for a claim that cannot succeed anyway.
            let can_succeed = new <= self.maximum(limit);
            let releasing = can_succeed && missing <= self.releasable(limit, &user);
            let notices = match releasing && request_release {
                true => self.request_releases(vec![(limit, user); missing]),
                false if releasing && matches!(limit, Limit::Sandboxes(_)) => {
                    self.pool_request_ends(missing.min(self.pool_free()));
                    Vec::new()
                }
                false => Vec::new(),
            };
            return (Err(SlotRefusal { limit, releasing, can_succeed }), notices);
        }
        let claim = self.next_sequence();
        for sandbox in sandboxes {
            self.adopt_standalone(sandbox.clone(), user.map(str::to_owned), claim);
        }
        (Ok(claim), Vec::new())
    }

    /// The refusal of a claim that exceeds the user's own limit. `existing` are the user's
    /// sandboxes, with or without a slot; no other slot would help.
    pub(crate) fn own_limit_reached(
        &self,
        sandboxes: &[SandboxId],
        user: Option<&str>,
        limit: usize,
        existing: &[SandboxId],
    ) -> Option<SlotRefusal> {
        let with_slot: Vec<SandboxId> = self.standalone_of(user).cloned().collect();
        over_own_limit(limit, sandboxes, &with_slot, existing)
            .map(|refusal| SlotRefusal { can_succeed: self.open && refusal.can_succeed, ..refusal })
    }

    /// The sandboxes of a user that have a slot.
    pub(crate) fn standalone_of(&self, user: Option<&str>) -> impl Iterator<Item = &SandboxId> {
        let own = move |slot: &StandaloneSlot| slot.user.as_deref() == user;
        self.standalone.iter().filter(move |(_, slot)| own(slot)).map(|(sandbox, _)| sandbox)
    }

    /// A running sandbox gets a slot even beyond the limit.
    pub(crate) fn adopt_standalone(
        &mut self,
        sandbox: SandboxId,
        user: Option<String>,
        claim: u64,
    ) {
        self.standalone.insert(sandbox, StandaloneSlot { user, claim });
    }

    /// The number of a sandbox's claim.
    pub(crate) fn standalone_claim(&self, sandbox: &SandboxId) -> Option<u64> {
        self.standalone.get(sandbox).map(|slot| slot.claim)
    }

    /// Releases the slot of a sandbox, unless a newer claim holds it: the sandbox may have been
    /// started again since.
    pub(crate) fn release_standalone(
        &mut self,
        sandbox: &SandboxId,
        claim: u64,
    ) -> Vec<(SessionId, Notice)> {
        if self.standalone_claim(sandbox) != Some(claim) {
            return Vec::new();
        }
        self.standalone.remove(sandbox);
        self.assign()
    }

    /// The limit that `new` more sandboxes would exceed, and by how many.
    fn exceeded(&self, new: usize, user: Option<&str>) -> Option<(Limit, usize)> {
        let (total, users) = self.usage();
        let of_user = user.map_or(0, |user| users.get(user).copied().unwrap_or(0));
        let per_user =
            self.limits.sandboxes_per_user.filter(|_| user.is_some()).unwrap_or(usize::MAX);
        let over = |used: usize, limit: usize| (used + new).saturating_sub(limit).min(new);
        match (over(of_user, per_user), over(total, self.limits.sandboxes)) {
            (0, 0) => None,
            (0, missing) => Some((Limit::Sandboxes(self.limits.sandboxes), missing)),
            (missing, _) => Some((Limit::User(per_user), missing)),
        }
    }

    fn maximum(&self, limit: Limit) -> usize {
        match limit {
            Limit::User(limit) | Limit::Sandboxes(limit) => limit,
            Limit::Closed => self.limits.sandboxes,
        }
    }

    /// How many slots are being released, or would be on request.
    fn releasable(&self, limit: Limit, user: &str) -> usize {
        let releasable = |holder: &&Holder| match holder.state {
            SlotState::Holding { idle_since, releasing } => releasing || idle_since.is_some(),
            _ => false,
        };
        let fits = |holder: &&Holder| !matches!(limit, Limit::User(_)) || holder.user == user;
        let pooled = if matches!(limit, Limit::User(_)) { 0 } else { self.pool_free() };
        pooled + self.holders.values().filter(releasable).filter(fits).count()
    }
}

/// The refusal of a claim that exceeds the user's own limit: each sandbox counts once, whether it
/// has a slot, exists without one, or is claimed. When only deleting would help, a retry cannot
/// succeed.
pub(crate) fn over_own_limit(
    limit: usize,
    claimed: &[SandboxId],
    with_slot: &[SandboxId],
    existing: &[SandboxId],
) -> Option<SlotRefusal> {
    let with_slot: BTreeSet<_> = with_slot.iter().collect();
    let stay = existing.iter().filter(|sandbox| !with_slot.contains(sandbox));
    let lasting: BTreeSet<_> = stay.chain(claimed).collect();
    (lasting.union(&with_slot).count() > limit).then_some(SlotRefusal {
        limit: Limit::User(limit),
        releasing: false,
        can_succeed: lasting.len() <= limit,
    })
}
