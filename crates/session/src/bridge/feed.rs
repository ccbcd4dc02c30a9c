//! Commands whose input comes while they run, however much it is.

use futures_util::{StreamExt, stream::BoxStream};
use harvest_proto::bridge::Command;
use tokio::{sync::oneshot, task::AbortHandle};

use super::{Bridge, BridgeError, Exec};

/// What a command is to read. An error means that whoever sent it is gone: the command is not told that
/// its input has ended, because it has not.
pub type Feed = BoxStream<'static, Result<Vec<u8>, FeedTorn>>;

/// The input broke off.
#[derive(Debug, thiserror::Error)]
#[error("the input broke off")]
pub struct FeedTorn;

/// An input on its way; it stops when this is dropped.
#[derive(Debug)]
pub struct Feeding {
    task: AbortHandle,
    torn: oneshot::Receiver<()>,
}

impl Feeding {
    /// Returns when the input has broken off; never when it comes to its end.
    pub async fn torn(&mut self) {
        if self.torn.is_terminated() || (&mut self.torn).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Feeding {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Bridge {
    /// Runs a command that reads `feed` as it comes. Never more of it is taken than the command's side
    /// has granted room for.
    ///
    /// # Errors
    /// When it could not be started.
    pub async fn exec_fed(
        &self,
        command: Command,
        mut feed: Feed,
    ) -> Result<(Exec, Feeding), BridgeError> {
        let (exec, input) = self.exec_open(command, true).await?;
        let (tell, torn) = oneshot::channel();
        let task = tokio::spawn(async move {
            let Some(mut input) = input else { return };
            while let Some(bytes) = feed.next().await {
                let Ok(bytes) = bytes else {
                    let _ = tell.send(());
                    return;
                };
                if !input.write(&bytes).await {
                    return;
                }
            }
            input.end();
        });
        Ok((exec, Feeding { task: task.abort_handle(), torn }))
    }
}
