//! Commands whose stdin is a stream of unknown length.

use std::time::Duration;

use futures_util::{StreamExt, stream::BoxStream};
use tokio::{sync::oneshot, task::AbortHandle, time::timeout};

use super::ExecInput;

// Input after the end of its command is read until none comes for this long, or for the limit.
const DRAIN_IDLE: Duration = Duration::from_millis(100);
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

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
    command_ended: Option<oneshot::Sender<()>>,
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
        let (command_ended, mut ended) = oneshot::channel();
        let task = tokio::spawn(async move {
            loop {
                let bytes = tokio::select! {
                    bytes = stdin.next() => bytes,
                    Ok(()) = &mut ended => break,
                };
                match bytes {
                    None => return input.end(),
                    Some(Err(_)) => {
                        let _ = abort.send(());
                        return;
                    }
                    Some(Ok(bytes)) if input.write(&bytes).await => {}
                    Some(Ok(_)) => break,
                }
            }
            while let Ok(Some(Ok(_))) = timeout(DRAIN_IDLE, stdin.next()).await {}
        });
        let (task, command_ended) = (Some(task.abort_handle()), Some(command_ended));
        Self { task, aborted, command_ended }
    }

    /// Reads on after the command has ended, for a while: a client that is still sending would not
    /// receive the rest of the answer otherwise.
    pub(crate) async fn drain(mut self) {
        let _ = self.command_ended.take().map(|ended| ended.send(()));
        if !self.aborted.is_terminated() {
            let _ = timeout(DRAIN_LIMIT, &mut self.aborted).await;
        }
    }

    /// Lets the task go on without its handle.
    pub(crate) fn leave(mut self) -> Option<Self> {
        self.task = None;
        None
    }
}
