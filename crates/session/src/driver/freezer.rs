//! Has what runs in a sandbox stand still or go on, one thing at a time and the last wish at last. A
//! freeze is renewed for as long as it is wished for: if this server dies, the machine thaws by itself.

use std::{sync::Arc, time::Duration};

use harvest_proto::SandboxId;
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
};

use super::{Driver, Note};
use crate::{
    decide::{Input, Machine},
    provider::{Freezing, ProviderError},
    wiring::{Shared, words},
};

// Long enough that a busy server keeps up with hundreds, short enough that nobody waits for a dead one.
const HOLD: Duration = Duration::from_secs(60);
const RENEW: Duration = Duration::from_secs(20);

// A machine that does not answer is asked again; its sandbox is given up by the clock.
const AGAIN: Duration = Duration::from_millis(200);

/// What is wished for one sandbox.
pub(super) struct Freezer {
    epoch: u64,
    still: watch::Sender<bool>,
    task: AbortHandle,
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Driver {
    /// The machine is to do something and is believed awake. Whoever has it stand still did so behind our back:
    /// it goes on at once rather than when a clock strikes. Nobody waits for that.
    pub(super) fn rouse(&self) {
        let Machine::Ready { sandbox, .. } = &self.state.machine else { return };
        if !self.state.is_awake() || self.shared.provider.freezing().is_none() {
            return;
        }
        let (shared, sandbox) = (Arc::clone(&self.shared), sandbox.clone());
        self.shared.spawn(async move { go_on(&shared, &sandbox).await });
    }

    /// What runs in the sandbox is to stand still, or to go on.
    pub(super) fn wish_still(&mut self, sandbox: SandboxId, still: bool) {
        let epoch = self.state.epoch;
        if let Some(freezer) = self.freezer.as_ref().filter(|freezer| freezer.epoch == epoch) {
            freezer.still.send_replace(still);
            return;
        }
        let (wish, wished) = watch::channel(still);
        let work =
            Work { shared: Arc::clone(&self.shared), notes: self.notes_in.clone(), sandbox, epoch };
        let task = self.shared.spawn(work.run(wished)).abort_handle();
        self.freezer = Some(Freezer { epoch, still: wish, task });
    }
}

/// Has a sandbox go on, as far as that works: one that does not run is told of by others.
pub(super) async fn go_on(shared: &Shared, sandbox: &SandboxId) {
    if let Some(freezing) = shared.provider.freezing()
        && let Err(error) = freezing.rouse(sandbox).await
    {
        tracing::debug!(%sandbox, error = words(&error), "it cannot be made to go on");
    }
}

struct Work {
    shared: Arc<Shared>,
    notes: mpsc::UnboundedSender<Note>,
    sandbox: SandboxId,
    epoch: u64,
}

impl Work {
    async fn run(self, mut wished: watch::Receiver<bool>) {
        let Some(freezing) = self.shared.provider.freezing() else {
            return self.report(Input::Thawed { epoch: self.epoch });
        };
        loop {
            let still = *wished.borrow_and_update();
            let wait = if still {
                self.freeze(freezing, &mut wished).await
            } else {
                self.thaw(freezing).await
            };
            // Nothing to renew: until something else is wished for.
            let wait = wait.unwrap_or(Duration::MAX);
            if let Ok(Err(_)) = tokio::time::timeout(wait, wished.changed()).await {
                return;
            }
        }
    }

    fn report(&self, input: Input) {
        let _ = self.notes.send(Note::Input(input, Vec::new()));
    }

    /// Answers when to do it again.
    async fn freeze(
        &self,
        freezing: &dyn Freezing,
        wished: &mut watch::Receiver<bool>,
    ) -> Option<Duration> {
        let mut frozen = freezing.freeze(&self.sandbox, HOLD);
        let result = tokio::select! {
            result = &mut frozen => result,
            // What waits for a busy disk takes its time to stand still. Who wants it to go on does not:
            // a thaw ends the wait. It is done once more after that, in case it came first.
            () = wish_to_go_on(wished) => {
                let _ = freezing.thaw(&self.sandbox).await;
                let _ = frozen.await;
                // `run` looks at the wish again and thaws.
                wished.mark_changed();
                return None;
            }
        };
        match result {
            Ok(()) => {
                self.report(Input::Froze { epoch: self.epoch });
                Some(RENEW)
            }
            Err(error) => {
                tracing::debug!(sandbox = %self.sandbox, error = words(&error), "it does not stand still");
                self.report(Input::FreezeFailed { epoch: self.epoch });
                None
            }
        }
    }

    async fn thaw(&self, freezing: &dyn Freezing) -> Option<Duration> {
        match freezing.thaw(&self.sandbox).await {
            // One that does not run has nothing to go on; its end is told by others.
            Ok(()) | Err(ProviderError::NotRunning { .. }) => {
                self.report(Input::Thawed { epoch: self.epoch });
                None
            }
            Err(error) => {
                tracing::warn!(sandbox = %self.sandbox, error = words(&error), "a sandbox cannot be thawed");
                Some(AGAIN)
            }
        }
    }
}

async fn wish_to_go_on(wished: &mut watch::Receiver<bool>) {
    // What is answered is not held on to: nobody could wish for anything meanwhile.
    let _ = wished.wait_for(|still| !still).await;
}
