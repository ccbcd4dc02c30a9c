//! What comes over the bridge, handed to whoever waits for it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use harvest_proto::bridge::{Decoder, Frame, FromSupervisor, StreamId};
use tokio::{
    io::{AsyncReadExt, ReadHalf},
    sync::mpsc,
};

use super::{ExecOutput, FromBridge, StreamKind, Table, lock};
use crate::provider::BridgeStream;

pub(super) struct Reader {
    pub(super) read: ReadHalf<Box<dyn BridgeStream>>,
    pub(super) decoder: Decoder,
    pub(super) table: Arc<Mutex<Table>>,
    pub(super) events: mpsc::Sender<FromBridge>,
    pub(super) silence: Option<Duration>,
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
        let mut buffer = vec![0; 64 * 1024];
        loop {
            loop {
                match self.decoder.take() {
                    Ok(Some(frame)) => {
                        if !self.hear(frame).await {
                            return;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "a supervisor sent what is no frame");
                        return;
                    }
                }
            }
            let read = self.read.read(&mut buffer);
            let count = match self.silence {
                Some(silence) => tokio::time::timeout(silence, read).await,
                None => Ok(read.await),
            };
            match count {
                Ok(Ok(count)) if count > 0 => self.decoder.push(&buffer[..count]),
                _ => return,
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
            FromSupervisor::Heartbeat { busy } => {
                // Nobody misses a heartbeat while events wait to be read.
                let _ = self.events.try_send(FromBridge::Heartbeat { busy });
            }
            FromSupervisor::Welcome { .. } => {}
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
