//! What comes over the bridge, handed to whoever waits for it.

use std::sync::{Arc, Mutex};

use harvest_proto::bridge::{Decoder, Frame, FromSupervisor, RequestId, StreamId, ToSupervisor};
use tokio::{
    io::{AsyncReadExt, ReadHalf},
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

// Most of the time a sandbox has little to say, and there are many; one that talks is read in long pieces.
const LEAST_READ_BYTES: usize = 4 * 1024;
const MOST_READ_BYTES: usize = 64 * 1024;

/// Room for the next read, by how much the last one brought.
fn fit(buffer: &mut Vec<u8>, count: usize) {
    if count == buffer.len() && count < MOST_READ_BYTES {
        buffer.resize(count * 2, 0);
    } else if count < buffer.len() / 8 {
        buffer.truncate((buffer.len() / 2).max(LEAST_READ_BYTES));
        buffer.shrink_to_fit();
    }
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
        let mut buffer = vec![0; LEAST_READ_BYTES];
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
            match self.more(&mut buffer).await {
                Some(count) => {
                    self.decoder.push(&buffer[..count]);
                    fit(&mut buffer, count);
                }
                None => return,
            }
        }
    }

    /// Reads what comes next; `None` when nothing will.
    async fn more(&mut self, buffer: &mut [u8]) -> Option<usize> {
        loop {
            let read = self.read.read(buffer);
            let read = match &self.vigil {
                Some(vigil) => tokio::time::timeout_at(vigil.due(), read).await,
                None => Ok(read.await),
            };
            if let Ok(read) = read {
                return read.ok().filter(|count| *count > 0);
            }
            match self.vigil.as_mut().map(|vigil| vigil.look(Instant::now())) {
                Some(Duty::GiveUp) => {
                    tracing::debug!("a supervisor says or answers nothing");
                    return None;
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
            FromSupervisor::Event(event) => return self.events.send(FromBridge::Event(event)).await.is_ok(),
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
