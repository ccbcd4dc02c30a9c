//! Commands whose input comes while they run, however much it is.

use futures_util::{StreamExt, stream::BoxStream};
use harvest_proto::bridge::{Command, Frame, MAX_DATA_BYTES, StreamId, ToSupervisor};
use tokio::{
    sync::{Semaphore, oneshot},
    task::AbortHandle,
};

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
    pub async fn exec_fed(&self, mut command: Command, feed: Feed) -> Result<(Exec, Feeding), BridgeError> {
        let stream = self.new_stream();
        let credit = self.sending(stream);
        command.stdin = Some(stream);
        let exec = match self.exec(command, None).await {
            Ok(exec) => exec,
            Err(error) => {
                self.table().outgoing.remove(&stream);
                return Err(error);
            }
        };
        let (tell, torn) = oneshot::channel();
        let bridge = self.clone();
        let task = tokio::spawn(async move {
            if pass_on(&bridge, stream, &credit, feed).await.is_err() {
                let _ = tell.send(());
            }
        });
        Ok((exec, Feeding { task: task.abort_handle(), torn }))
    }
}

async fn pass_on(
    bridge: &Bridge,
    stream: StreamId,
    credit: &Semaphore,
    mut feed: Feed,
) -> Result<(), FeedTorn> {
    while let Some(bytes) = feed.next().await {
        for piece in bytes?.chunks(MAX_DATA_BYTES) {
            let Ok(length) = u32::try_from(piece.len()) else { return Err(FeedTorn) };
            // Closed when the connection is lost, which whoever listens to the command is told.
            let Ok(permit) = credit.acquire_many(length).await else { return Ok(()) };
            permit.forget();
            let frame: Frame<ToSupervisor> = Frame::Data { stream, bytes: piece.to_vec() };
            if bridge.wire.out.send(frame.encode()).is_err() {
                return Ok(());
            }
        }
    }
    bridge.say(ToSupervisor::End { stream });
    bridge.table().outgoing.remove(&stream);
    Ok(())
}
