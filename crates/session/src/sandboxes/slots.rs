//! Slots of standalone sandboxes: each running one holds a slot, like a session's, until it exits.

use std::{sync::Arc, time::Duration};

use harvest_proto::{SandboxId, api::SandboxOwner};
use tokio::time::{Instant, timeout_at};

use super::{
    Found, ListedSandbox, SandboxError, Sandboxes,
    admission::{Admission, Claimant, SlotRefusal, over_own_limit},
};
use crate::error_chain::error_chain;

// Retry interval while the provider cannot report whether a sandbox has exited.
const WAIT_RETRY: Duration = Duration::from_secs(5);

// Idle sessions are asked for their slot only after this time: most commands end sooner.
const PREEMPT_AFTER: Duration = Duration::from_secs(2);

impl Sandboxes {
    /// Gives every standalone sandbox that runs a slot, even beyond the limit.
    pub(crate) async fn adopt_running(&self) -> Result<(), SandboxError> {
        for listed in self.provider.list().await? {
            let standalone = listed.owner == SandboxOwner::Standalone;
            if standalone && matches!(self.provider.find(&listed.id).await, Ok(Found::Running)) {
                let number = self.admission.adopt_standalone(listed.id.clone(), listed.made_by);
                self.slot(&listed.id, number).watch(self);
            }
        }
        Ok(())
    }

    /// Claims a slot for each sandbox, released on drop. With `preempt`, idle sessions are asked
    /// for theirs.
    fn claim(
        &self,
        ids: &[SandboxId],
        claimant: Claimant<'_>,
        existing: &[SandboxId],
        preempt: bool,
    ) -> Result<Vec<SandboxSlot>, SlotRefusal> {
        let number = self.admission.claim_standalone(ids, claimant, existing, preempt)?;
        Ok(ids.iter().map(|id| self.slot(id, number)).collect())
    }

    /// Claims slots within the user's own limit, which counts stopped sandboxes too.
    ///
    /// The sandboxes are listed again after the claim: another of the user's requests may have
    /// created and stopped one since the first list. It held its slot at that claim or exists by
    /// now, so of two requests that pass the limit together the later one is refused.
    async fn claim_within_own_limit(
        &self,
        ids: &[SandboxId],
        claimant: Claimant<'_>,
        preempt: bool,
    ) -> Result<Result<Vec<SandboxSlot>, SlotRefusal>, SandboxError> {
        let (Some(limit), Some(user)) = (claimant.own_limit, claimant.user) else {
            return Ok(self.claim(ids, claimant, &[], preempt));
        };
        let existing = self.existing_of(user).await?;
        let slots = match self.claim(ids, claimant, &existing, preempt) {
            Ok(slots) => slots,
            Err(refused) => return Ok(Err(refused)),
        };
        // In this order: a sandbox that loses its slot in between is in the list.
        let with_slot = self.admission.standalone_of(user);
        let existing = self.existing_of(user).await?;
        Ok(match over_own_limit(limit, ids, &with_slot, &existing) {
            None => Ok(slots),
            Some(refused) => {
                self.keep_slots(slots).await;
                Err(refused)
            }
        })
    }

    /// The standalone sandboxes that a user has created and not deleted.
    async fn existing_of(&self, user: &str) -> Result<Vec<SandboxId>, SandboxError> {
        let own = |listed: &ListedSandbox| {
            listed.owner == SandboxOwner::Standalone
                && listed.made_by.as_ref().is_some_and(|by| by.eq_ignore_ascii_case(user))
        };
        let listed = self.provider.list().await?.into_iter();
        Ok(listed.filter(own).map(|listed| listed.id).collect())
    }

    fn slot(&self, sandbox: &SandboxId, number: u64) -> SandboxSlot {
        let admission = Arc::clone(&self.admission);
        SandboxSlot { admission, sandbox: sandbox.clone(), number }
    }

    /// Waits for a free slot for a one-shot command.
    pub(super) async fn wait_for_slot(
        &self,
        id: &SandboxId,
        claimant: Claimant<'_>,
    ) -> Result<Option<SandboxSlot>, SandboxError> {
        let id = std::slice::from_ref(id);
        Ok(self.wait_to_claim(id, claimant, PREEMPT_AFTER).await?.pop())
    }

    /// Waits for a free slot for each sandbox; idle sessions are asked for theirs at once.
    pub(super) async fn wait_for_slots(
        &self,
        ids: &[SandboxId],
        claimant: Claimant<'_>,
    ) -> Result<Vec<SandboxSlot>, SandboxError> {
        self.wait_to_claim(ids, claimant, Duration::ZERO).await
    }

    /// Waits for free slots; after `preempt_after` idle sessions are asked for theirs. Queued
    /// sessions come first.
    async fn wait_to_claim(
        &self,
        ids: &[SandboxId],
        claimant: Claimant<'_>,
        preempt_after: Duration,
    ) -> Result<Vec<SandboxSlot>, SandboxError> {
        let (mut moved, now) = (self.admission.changes(), Instant::now());
        let (deadline, preempt_at) =
            (now + self.slot_timeout, now + preempt_after.min(self.slot_timeout));
        let mut permit = None;
        loop {
            moved.borrow_and_update();
            let preempt = Instant::now() >= preempt_at;
            let refused = match self.claim_within_own_limit(ids, claimant, preempt).await? {
                Ok(slots) => return Ok(slots),
                Err(refused) => refused,
            };
            // A longer queue would move too slowly.
            permit = permit.or_else(|| self.waiting.try_acquire().ok());
            if permit.is_none() || !refused.can_succeed {
                return Err(refused.for_claimant(claimant));
            }
            let change =
                timeout_at(if preempt { deadline } else { preempt_at }, moved.changed()).await;
            if matches!(change, Ok(Err(_))) || Instant::now() >= deadline {
                return Err(refused.for_claimant(claimant));
            }
        }
    }

    /// Keeps the slots of sandboxes that run, until they exit; the others are released.
    pub(super) async fn keep_slots(&self, slots: Vec<SandboxSlot>) {
        for slot in slots {
            match self.provider.find(&slot.sandbox).await {
                Ok(Found::Dead { .. } | Found::Gone) => {}
                Ok(Found::Running) | Err(_) => slot.watch(self),
            }
        }
    }

    /// Releases the slot of an exited sandbox at once, without waiting for its watcher.
    pub(super) fn release(&self, sandbox: &SandboxId, slot: Option<u64>) {
        if let Some(number) = slot {
            self.admission.release_standalone(sandbox, number);
        }
    }
}

/// A sandbox's slot, released on drop.
pub(crate) struct SandboxSlot {
    admission: Arc<Admission>,
    pub(super) sandbox: SandboxId,
    number: u64,
}

impl SandboxSlot {
    /// Holds the slot until the sandbox exits or the server stops.
    pub(super) fn watch(self, sandboxes: &Sandboxes) {
        let provider = Arc::clone(&sandboxes.provider);
        let watching = async move {
            loop {
                match provider.wait(&self.sandbox).await {
                    // An unknown sandbox counts as exited.
                    Ok(_) | Err(SandboxError::NotRunning { .. } | SandboxError::Missing(_)) => {
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(sandbox = %self.sandbox, error = error_chain(&error), "cannot wait for a sandbox to exit");
                        tokio::time::sleep(WAIT_RETRY).await;
                    }
                }
            }
        };
        sandboxes.tasks.spawn(watching);
    }
}

impl Drop for SandboxSlot {
    fn drop(&mut self) {
        self.admission.release_standalone(&self.sandbox, self.number);
    }
}
