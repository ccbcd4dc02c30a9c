//! Freezes and thaws a sandbox: one operation at a time, and the last request wins. A freeze is a
//! lease that is renewed: if this server dies, the sandbox thaws by itself. A server that shuts
//! down takes a long one for its turns in progress, which the next server thaws.

use std::{sync::Arc, time::Duration};

use harvest_proto::SandboxId;
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
};

use super::{Driver, TaskReport};
use crate::{
    context::Shared,
    decide::{Input, SandboxState},
    error_chain::error_chain,
    sandboxes::{FreezeControl, SandboxError},
    timeouts::FREEZE_RENEWAL,
};

// A machine whose server stays down for longer runs the turn on rather than keep it forever.
pub(super) const HAND_OVER: Duration = Duration::from_secs(30 * 24 * 60 * 60);

// Until the thaw timeout replaces the sandbox.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// The freeze task of one sandbox.
pub(super) struct Freezer {
    epoch: u64,
    /// The lease of the requested freeze; `None` for a thaw.
    lease: watch::Sender<Option<Duration>>,
    task: AbortHandle,
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Driver {
    /// Thaws a sandbox that is about to be used and is believed to run: if something else froze it,
    /// it runs at once rather than after a timeout. Does not wait for the thaw.
    pub(super) fn thaw_if_frozen(&self) {
        let SandboxState::Ready { sandbox, .. } = &self.state.sandbox else { return };
        if !self.state.accepts_work() || self.shared.sandboxes.provider.freeze_control().is_none() {
            return;
        }
        let (shared, sandbox) = (Arc::clone(&self.shared), sandbox.clone());
        self.shared.tasks.spawn(async move { thaw_now(&shared, &sandbox).await });
    }

    /// Requests a freeze with this lease, or a thaw.
    pub(super) fn set_frozen(&mut self, sandbox: SandboxId, lease: Option<Duration>) {
        let epoch = self.state.epoch;
        if let Some(freezer) = self.freezer.as_ref().filter(|freezer| freezer.epoch == epoch) {
            freezer.lease.send_replace(lease);
            return;
        }
        let (request, requested) = watch::channel(lease);
        let freeze_task = FreezeTask {
            shared: Arc::clone(&self.shared),
            reports: self.report_sender.clone(),
            sandbox,
            epoch,
        };
        let task = self.shared.tasks.spawn(freeze_task.run(requested)).abort_handle();
        self.freezer = Some(Freezer { epoch, lease: request, task });
    }
}

/// Thaws a sandbox, best effort: one that has exited is reported elsewhere.
pub(super) async fn thaw_now(shared: &Shared, sandbox: &SandboxId) {
    if let Some(control) = shared.sandboxes.provider.freeze_control()
        && let Err(error) = control.thaw_unless_saving(sandbox).await
    {
        tracing::debug!(%sandbox, error = error_chain(&error), "cannot thaw a sandbox");
    }
}

struct FreezeTask {
    shared: Arc<Shared>,
    reports: mpsc::UnboundedSender<TaskReport>,
    sandbox: SandboxId,
    epoch: u64,
}

impl FreezeTask {
    async fn run(self, mut requested: watch::Receiver<Option<Duration>>) {
        let Some(control) = self.shared.sandboxes.provider.freeze_control() else {
            return self.without_control(requested).await;
        };
        loop {
            let lease = *requested.borrow_and_update();
            let wait = match lease {
                Some(lease) => self.freeze(control, lease, &mut requested).await,
                None => self.thaw(control).await,
            };
            // Without a lease to renew: until the next request.
            let wait = wait.unwrap_or(Duration::MAX);
            if let Ok(Err(_)) = tokio::time::timeout(wait, requested.changed()).await {
                return;
            }
        }
    }

    /// The provider cannot freeze sandboxes: every freeze fails, every thaw succeeds.
    async fn without_control(self, mut requested: watch::Receiver<Option<Duration>>) {
        let epoch = self.epoch;
        loop {
            self.report(match *requested.borrow_and_update() {
                Some(_) => Input::FreezeFailed { epoch },
                None => Input::Thawed { epoch },
            });
            if requested.changed().await.is_err() {
                return;
            }
        }
    }

    fn report(&self, input: Input) {
        let _ = self.reports.send(input.into());
    }

    /// Returns when to renew the freeze.
    async fn freeze(
        &self,
        control: &dyn FreezeControl,
        lease: Duration,
        requested: &mut watch::Receiver<Option<Duration>>,
    ) -> Option<Duration> {
        let mut freeze = control.freeze(&self.sandbox, lease);
        let result = tokio::select! {
            result = &mut freeze => result,
            // A process that waits for a busy disk delays the freeze, and a thaw ends that wait.
            // The thaw is repeated afterwards, in case it came before the freeze.
            () = thaw_requested(requested) => {
                let _ = control.thaw(&self.sandbox).await;
                let _ = freeze.await;
                // `run` reads the request again and thaws.
                requested.mark_changed();
                return None;
            }
        };
        match result {
            Ok(()) => {
                self.report(Input::Frozen { epoch: self.epoch });
                Some(FREEZE_RENEWAL)
            }
            Err(error) => {
                tracing::debug!(sandbox = %self.sandbox, error = error_chain(&error), "cannot freeze a sandbox");
                self.report(Input::FreezeFailed { epoch: self.epoch });
                None
            }
        }
    }

    async fn thaw(&self, control: &dyn FreezeControl) -> Option<Duration> {
        match control.thaw(&self.sandbox).await {
            // The end of a sandbox that has exited is reported elsewhere.
            Ok(()) | Err(SandboxError::NotRunning { .. }) => {
                self.report(Input::Thawed { epoch: self.epoch });
                None
            }
            Err(error) => {
                tracing::warn!(sandbox = %self.sandbox, error = error_chain(&error), "cannot thaw a sandbox; retrying");
                Some(RETRY_DELAY)
            }
        }
    }
}

async fn thaw_requested(requested: &mut watch::Receiver<Option<Duration>>) {
    // The returned guard is dropped at once: while it lives, no request can be sent.
    let _ = requested.wait_for(Option::is_none).await;
}
