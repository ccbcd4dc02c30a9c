//! The background tasks of a server. Shutdown cancels them and waits until all have ended.

use tokio::task::JoinHandle;
use tokio_util::{future::FutureExt as _, sync::CancellationToken, task::TaskTracker};

#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks {
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Tasks {
    /// Spawns a task that is cancelled when the server stops.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<Option<T>> {
        // Not wrapped in an async block, which would hold the task's future twice.
        self.tracker.spawn(task.with_cancellation_token_owned(self.stop.clone()))
    }

    /// Spawns a task that shutdown awaits but does not cancel.
    pub(crate) fn spawn_to_completion<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.tracker.spawn(task)
    }

    /// Cancels all tasks without waiting for them.
    pub(crate) fn cancel(&self) {
        self.stop.cancel();
    }

    /// Cancels all tasks and waits until they have ended.
    pub(crate) async fn close(&self) {
        self.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}
