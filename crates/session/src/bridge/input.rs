//! Commands whose stdin is a stream of unknown length.

use futures_util::{StreamExt, stream::BoxStream};
use tokio::{sync::oneshot, task::AbortHandle};

use super::ExecInput;

/// The stdin of a command. After an error (the sender is gone) the command gets no end of file,
/// because its input is incomplete.
pub type InputStream = BoxStream<'static, Result<Vec<u8>, InputAborted>>;

#[derive(Debug, thiserror::Error)]
#[error("the input was aborted")]
pub struct InputAborted;

/// The task that sends the input; dropping this stops it.
#[derive(Debug)]
pub struct InputTask {
    task: Option<AbortHandle>,
    aborted: oneshot::Receiver<()>,
}

impl InputTask {
    /// Returns when the input is aborted; never when it ends regularly.
    pub async fn aborted(&mut self) {
        if self.aborted.is_terminated() || (&mut self.aborted).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for InputTask {
    fn drop(&mut self) {
        self.task.iter().for_each(AbortHandle::abort);
    }
}

impl InputTask {
    /// Sends a stream to a command's stdin. The stream is polled only as credit allows.
    #[must_use]
    pub fn spawn(mut stdin: InputStream, mut input: ExecInput) -> Self {
        let (abort, aborted) = oneshot::channel();
        let task = tokio::spawn(async move {
            while let Some(bytes) = stdin.next().await {
                let Ok(bytes) = bytes else {
                    let _ = abort.send(());
                    return;
                };
                if !input.write(&bytes).await {
                    return;
                }
            }
            input.end();
        });
        Self { task: Some(task.abort_handle()), aborted }
    }

    /// Lets the task go on without its handle.
    pub(crate) fn leave(mut self) -> Option<Self> {
        self.task = None;
        None
    }
}
