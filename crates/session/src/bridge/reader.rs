//! Reads frames from the bridge and dispatches them to their receivers; probes the supervisor's
//! liveness meanwhile.

use std::{
    future::poll_fn,
    mem::MaybeUninit,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Poll, ready},
};

use harvest_proto::bridge::{
    Decoder, Frame, FrameError, FromSupervisor, OutboxEvent, StreamId, ToSupervisor,
};
use tokio::{
    io::{AsyncRead, ReadBuf, ReadHalf},
    sync::mpsc,
    time::Instant,
};

use super::{
    ExecOutput, OwnerMessage, PendingTable, StreamKind,
    liveness::{LivenessMonitor, Probe},
    lock,
};
use crate::sandboxes::BridgeStream;

const READ_BYTES: usize = 64 * 1024;

/// Reads the next bytes; `false` at the end of the connection. The buffer is on the stack and only
/// lives as long as one read: there are many connections, and most are idle.
pub(super) async fn read_more(
    read: &mut ReadHalf<Box<dyn BridgeStream>>,
    decoder: &mut Decoder,
) -> bool {
    poll_fn(|context| {
        let mut buffer = [const { MaybeUninit::uninit() }; READ_BYTES];
        let mut bytes = ReadBuf::uninit(&mut buffer);
        let result = ready!(Pin::new(&mut *read).poll_read(context, &mut bytes));
        decoder.push(bytes.filled());
        Poll::Ready(result.is_ok() && !bytes.filled().is_empty())
    })
    .await
}

pub(super) struct Reader {
    pub(super) read: ReadHalf<Box<dyn BridgeStream>>,
    pub(super) decoder: Decoder,
    pub(super) table: Arc<Mutex<PendingTable>>,
    pub(super) events: mpsc::Sender<OwnerMessage>,
    pub(super) out: mpsc::UnboundedSender<Vec<u8>>,
    /// Absent for guests.
    pub(super) liveness: Option<LivenessMonitor>,
}

/// Closes the table when the reader ends, also by an abort.
struct CloseOnDrop(Arc<Mutex<PendingTable>>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        close(&self.0);
    }
}

/// Drops every sender, so that all waiting receivers fail.
pub(super) fn close(table: &Mutex<PendingTable>) {
    let mut table = lock(table);
    for semaphore in table.outgoing.values() {
        semaphore.close();
    }
    *table = PendingTable { closed: true, ..PendingTable::default() };
}

impl Reader {
    pub(super) async fn run(mut self) {
        let _close = CloseOnDrop(Arc::clone(&self.table));
        loop {
            loop {
                match self.decoder.take() {
                    Ok(Some(frame)) => {
                        let received = Instant::now();
                        if !self.dispatch(frame).await {
                            return;
                        }
                        if let Some(liveness) = &mut self.liveness {
                            liveness.frame_received(received);
                            liveness.exclude(received.elapsed());
                        }
                    }
                    Ok(None) => break,
                    Err(FrameError::Message { message, source }) => {
                        tracing::warn!(error = %source, "a supervisor sent an unreadable message");
                        let Some(event) = OutboxEvent::unreadable(&message) else { return };
                        let event = OwnerMessage::Event(Box::new(event));
                        if self.events.send(event).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a supervisor sent an invalid frame");
                        return;
                    }
                }
            }
            if !self.read_more().await {
                return;
            }
        }
    }

    /// Reads the next bytes and probes liveness meanwhile; `false` also when the probe times out.
    async fn read_more(&mut self) -> bool {
        loop {
            let read = read_more(&mut self.read, &mut self.decoder);
            let read = match &self.liveness {
                Some(liveness) => tokio::time::timeout_at(liveness.deadline(), read).await,
                None => Ok(read.await),
            };
            if let Ok(open) = read {
                return open;
            }
            match self.liveness.as_mut().map(|liveness| liveness.probe(Instant::now())) {
                Some(Probe::TimedOut) => {
                    tracing::debug!("a supervisor does not answer");
                    return false;
                }
                Some(Probe::SendPing) => {
                    let _ = self.out.send(Frame::Control(ToSupervisor::Ping).encode());
                }
                Some(Probe::Wait) | None => {}
            }
        }
    }

    /// Returns `false` when the connection is to be closed.
    async fn dispatch(&mut self, frame: Frame<FromSupervisor>) -> bool {
        let message = match frame {
            Frame::Data { stream, bytes } => return self.data(stream, bytes),
            Frame::Control(message) => message,
        };
        match message {
            FromSupervisor::Event(event) => {
                return self.events.send(OwnerMessage::Event(Box::new(event))).await.is_ok();
            }
            FromSupervisor::Heartbeat { detached, .. } => {
                // A heartbeat may be dropped while the queue is full of events.
                let _ = self.events.try_send(OwnerMessage::Heartbeat { detached });
            }
            FromSupervisor::Welcome { .. } => {}
            FromSupervisor::Pong => {
                if let Some(liveness) = &mut self.liveness {
                    liveness.pong_received(Instant::now());
                }
            }
            FromSupervisor::Reply { id, result } => {
                let waiting = lock(&self.table).replies.remove(&id);
                let _ = waiting.map(|waiting| waiting.send(result));
            }
            FromSupervisor::Exited { exec, exit, millis } => {
                let waiting = lock(&self.table).execs.remove(&exec);
                let _ = waiting.map(|waiting| waiting.send(ExecOutput::Exited { exit, millis }));
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
        // The receiver is gone: its command is being killed.
        let Some(incoming) = table.incoming.get_mut(&stream) else { return true };
        let Some(left) = incoming.allowance.checked_sub(bytes.len() as u64) else {
            tracing::warn!(stream, "a supervisor exceeded its credit");
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
