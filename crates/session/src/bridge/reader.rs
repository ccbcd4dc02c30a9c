//! What comes over the bridge, handed to whoever waits for it.

use std::{
    future::poll_fn,
    mem::MaybeUninit,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Poll, ready},
};

use harvest_proto::bridge::{Decoder, Frame, FromSupervisor, RequestId, StreamId, ToSupervisor};
use tokio::{
    io::{AsyncRead, ReadBuf, ReadHalf},
    sync::mpsc,
    time::Instant,
};

use super::{
    ExecOutput, FromBridge, StreamKind, Table, lock,
    vigil::{Duty, Vigil},
};
use crate::provider::BridgeStream;

// Whether we are heard is asked with this number, and about this command. Nobody else has either, so that
// every supervisor has an answer at once: there is no such command.
const NOBODYS: RequestId = 0;

const READ_BYTES: usize = 64 * 1024;

/// Reads what comes next; `false` when nothing will. The room for it is on the stack, for as long as a read takes:
/// there are many connections, and most of the time none of them has anything to say.
pub(super) async fn more(
    read: &mut ReadHalf<Box<dyn BridgeStream>>,
    decoder: &mut Decoder,
) -> bool {
    poll_fn(|context| {
        let mut room = [const { MaybeUninit::uninit() }; READ_BYTES];
        let mut came = ReadBuf::uninit(&mut room);
        let result = ready!(Pin::new(&mut *read).poll_read(context, &mut came));
        decoder.push(came.filled());
        Poll::Ready(result.is_ok() && !came.filled().is_empty())
    })
    .await
}

pub(super) struct Reader {
    pub(super) read: ReadHalf<Box<dyn BridgeStream>>,
    pub(super) decoder: Decoder,
    pub(super) table: Arc<Mutex<Table>>,
    pub(super) events: mpsc::Sender<FromBridge>,
    pub(super) out: mpsc::UnboundedSender<Vec<u8>>,
    /// An owner's; a guest trusts.
    pub(super) vigil: Option<Vigil>,
}

/// Closes the table however the reader ends, an abort included.
struct Closing(Arc<Mutex<Table>>);

impl Drop for Closing {
    fn drop(&mut self) {
        close(&self.0);
    }
}

/// Nobody waits for anything any more: every waiting receiver hears that its sender is gone.
pub(super) fn close(table: &Mutex<Table>) {
    let mut table = lock(table);
    for semaphore in table.outgoing.values() {
        semaphore.close();
    }
    *table = Table { closed: true, ..Table::default() };
}

impl Reader {
    pub(super) async fn run(mut self) {
        let _closing = Closing(Arc::clone(&self.table));
        loop {
            loop {
                match self.decoder.take() {
                    Ok(Some(frame)) => {
                        let came = Instant::now();
                        if !self.hear(frame).await {
                            return;
                        }
                        if let Some(vigil) = &mut self.vigil {
                            vigil.heard(came);
                            vigil.away(came.elapsed());
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "a supervisor sent what is no frame");
                        return;
                    }
                }
            }
            if !self.more().await {
                return;
            }
        }
    }

    /// The same, and asks meanwhile whether we are heard; `false` also when we are not.
    async fn more(&mut self) -> bool {
        loop {
            let read = more(&mut self.read, &mut self.decoder);
            let read = match &self.vigil {
                Some(vigil) => tokio::time::timeout_at(vigil.due(), read).await,
                None => Ok(read.await),
            };
            if let Ok(came) = read {
                return came;
            }
            match self.vigil.as_mut().map(|vigil| vigil.look(Instant::now())) {
                Some(Duty::GiveUp) => {
                    tracing::debug!("a supervisor says or answers nothing");
                    return false;
                }
                Some(Duty::Ask) => {
                    let knock = ToSupervisor::Kill { id: NOBODYS, exec: NOBODYS };
                    let _ = self.out.send(Frame::Control(knock).encode());
                }
                Some(Duty::Wait) | None => {}
            }
        }
    }

    /// Answers whether the connection is of any use still.
    async fn hear(&mut self, frame: Frame<FromSupervisor>) -> bool {
        let message = match frame {
            Frame::Data { stream, bytes } => return self.data(stream, bytes),
            Frame::Control(message) => message,
        };
        match message {
            FromSupervisor::Event(event) => {
                return self.events.send(FromBridge::Event(Box::new(event))).await.is_ok();
            }
            FromSupervisor::Heartbeat { busy, detached } => {
                // Nobody misses a heartbeat while events wait to be read.
                let _ = self.events.try_send(FromBridge::Heartbeat { busy, detached });
            }
            FromSupervisor::Welcome { .. } => {}
            FromSupervisor::Reply { id: NOBODYS, .. } => {
                if let Some(vigil) = &mut self.vigil {
                    vigil.answered(Instant::now());
                }
            }
            FromSupervisor::Reply { id, result } => {
                let waiting = lock(&self.table).replies.remove(&id);
                if let Some(waiting) = waiting {
                    let _ = waiting.send(result);
                }
            }
            FromSupervisor::Exited { exec, exit, millis } => {
                let waiting = lock(&self.table).execs.remove(&exec);
                if let Some(waiting) = waiting {
                    let _ = waiting.send(ExecOutput::Exited { exit, millis });
                }
            }
            FromSupervisor::Credit { stream, bytes } => {
                if let Some(credit) = lock(&self.table).outgoing.get(&stream) {
                    credit.add_permits(bytes as usize);
                }
            }
            FromSupervisor::End { stream } => {
                if let Some(ended) = lock(&self.table).incoming.remove(&stream)
                    && ended.kind == StreamKind::File
                {
                    let _ = ended.to.send(ExecOutput::End);
                }
            }
        }
        true
    }

    fn data(&self, stream: StreamId, bytes: Vec<u8>) -> bool {
        let mut table = lock(&self.table);
        // A stream nobody reads any more: its command is being killed.
        let Some(incoming) = table.incoming.get_mut(&stream) else { return true };
        let Some(left) = incoming.allowance.checked_sub(bytes.len() as u64) else {
            tracing::warn!(stream, "a supervisor sent more than it was granted");
            return false;
        };
        incoming.allowance = left;
        let output = match incoming.kind {
            StreamKind::Stdout | StreamKind::File => ExecOutput::Stdout { stream, bytes },
            StreamKind::Stderr => ExecOutput::Stderr { stream, bytes },
        };
        let _ = incoming.to.send(output);
        true
    }
}
