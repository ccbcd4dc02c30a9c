//! Serves one connection: performs the handshake, dispatches requests, and sends events to the
//! owner. A malformed frame closes this connection only. Its commands are killed when it closes,
//! the agent is not.

use std::{rc::Rc, time::Duration};

use harvest_proto::bridge::{
    BridgeRole, Decoder, Fault, FaultCode, Frame, FromSupervisor, Reply, RequestId, ToSupervisor,
    VERSION,
};
use tokio::{
    io::AsyncReadExt,
    net::{UnixStream, unix::OwnedReadHalf},
    sync::Notify,
    time::{interval, timeout},
};

use super::Bridge;
use crate::{blobs, connection::Connection, exec, files, git, log};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(30);
const MIN_HEARTBEAT: Duration = Duration::from_millis(10);

/// Serves a connection until it closes.
pub(super) async fn serve(bridge: Rc<Bridge>, stream: UnixStream) {
    let (mut reader, writer) = stream.into_split();
    let mut decoder = Decoder::default();
    let hello = timeout(HANDSHAKE_TIMEOUT, read_hello(&mut reader, &mut decoder)).await;
    let Ok(Some((role, heartbeat))) = hello else { return };
    let owner = match admit(&bridge, &role) {
        Ok(owner) => owner,
        Err(reason) => return log::line(format_args!("rejected a connection: {reason}")),
    };
    let (connection, queue) = Connection::new(Rc::clone(&bridge.sandbox));
    // Sent before any reply: requests may follow the hello at once.
    let status = bridge.status();
    let detached = status.detached;
    connection.send(FromSupervisor::Welcome { version: VERSION, status }).await;
    let superseded = owner.as_ref().map(|owner| Rc::clone(&owner.claim)).unwrap_or_default();
    let client = Client { bridge, connection, owner };
    let connection = &client.connection;
    let reason = tokio::select! {
        reason = client.read(&mut reader, decoder) => reason,
        () = connection.write(writer, queue) => "the client stopped reading",
        () = connection.broken.notified() => "a stream failed",
        () = superseded.notified() => "another owner took over",
        () = client.push_events(heartbeat, detached) => "",
    };
    if !reason.is_empty() && client.owner.is_some() {
        log::line(format_args!("the owner's connection closed: {reason}"));
    }
    connection.close();
}

async fn read_hello(
    reader: &mut OwnedReadHalf,
    decoder: &mut Decoder,
) -> Option<(BridgeRole, Duration)> {
    loop {
        match decoder.take::<ToSupervisor>() {
            Ok(Some(Frame::Control(ToSupervisor::Hello { role, heartbeat_millis, .. }))) => {
                let heartbeat = heartbeat_millis.map_or(DEFAULT_HEARTBEAT, Duration::from_millis);
                return Some((role, heartbeat.max(MIN_HEARTBEAT)));
            }
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return None,
        }
        if fill(reader, decoder).await.is_err() {
            return None;
        }
    }
}

async fn fill(reader: &mut OwnedReadHalf, decoder: &mut Decoder) -> std::io::Result<()> {
    let mut chunk = [0u8; 16 * 1024];
    match reader.read(&mut chunk).await? {
        0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
        count => {
            decoder.push(&chunk[..count]);
            Ok(())
        }
    }
}

/// The owner of the session.
struct Owner {
    epoch: u64,
    stored: u64,
    claim: Rc<Notify>,
}

fn admit(bridge: &Bridge, role: &BridgeRole) -> Result<Option<Owner>, String> {
    let BridgeRole::Owner { lease, epoch, stored } = *role else { return Ok(None) };
    if let Some(booted) = bridge.boot.epoch()
        && booted != epoch
    {
        return Err(format!("the epoch is {booted}, not {epoch}"));
    }
    let claim = bridge.ownership.claim(lease);
    let claim = claim.ok_or_else(|| format!("lease {lease} is outdated"))?;
    Ok(Some(Owner { epoch, stored, claim }))
}

/// A client after the handshake.
struct Client {
    bridge: Rc<Bridge>,
    connection: Rc<Connection>,
    owner: Option<Owner>,
}

impl Client {
    // Sends events and heartbeats to the owner.
    async fn push_events(&self, heartbeat: Duration, mut detached: u32) {
        let Bridge { sandbox, outbox, turns, ownership, .. } = &*self.bridge;
        let Some(owner) = &self.owner else { return std::future::pending().await };
        outbox.reconnect(owner.stored);
        let mut heartbeat = interval(heartbeat);
        heartbeat.reset();
        while ownership.is_current(&owner.claim) {
            let (events, commands) =
                (outbox.changed.notified(), sandbox.detached.changed.notified());
            if sandbox.detached.count() != detached {
                heartbeat.reset_immediately();
            }
            if let Some(event) = outbox.next() {
                self.connection.send(FromSupervisor::Event(event)).await;
                continue;
            }
            tokio::select! {
                () = events => {}
                () = commands => {}
                _ = heartbeat.tick() => {
                    detached = sandbox.detached.count();
                    let busy = turns.busy();
                    self.connection.send(FromSupervisor::Heartbeat { busy, detached }).await;
                }
            }
        }
    }

    async fn read(&self, reader: &mut OwnedReadHalf, mut decoder: Decoder) -> &'static str {
        loop {
            loop {
                match decoder.take::<ToSupervisor>() {
                    Ok(Some(Frame::Control(message))) => self.handle(message).await,
                    Ok(Some(Frame::Data { stream, bytes })) => {
                        if !self.connection.receive(stream, &bytes) {
                            return "the client exceeded its credit";
                        }
                    }
                    Ok(None) => break,
                    Err(_) => return "malformed frame",
                }
            }
            if fill(reader, &mut decoder).await.is_err() {
                return "closed by the client";
            }
        }
    }

    async fn handle(&self, message: ToSupervisor) {
        let connection = &self.connection;
        let (id, result) = match message {
            ToSupervisor::Credit { stream, bytes } => return connection.grant(stream, bytes),
            ToSupervisor::End { stream } => return connection.end_incoming(stream),
            ToSupervisor::Ping => return connection.send(FromSupervisor::Pong).await,
            ToSupervisor::Exec { id, command } => {
                (id, later(exec::start(connection, id, *command)))
            }
            ToSupervisor::Kill { id, exec } => (id, connection.kill(exec).map(Some)),
            ToSupervisor::Resize { id, exec, rows, cols } => {
                (id, connection.resize(exec, rows, cols).map(Some))
            }
            ToSupervisor::File { id, user, request } => {
                (id, later(files::start(connection, id, user.as_deref(), request)))
            }
            ToSupervisor::Git { id, request } => (id, later(git::start(connection, id, request))),
            ToSupervisor::Status { id } => (id, Ok(Some(Reply::Status(self.bridge.status())))),
            other => return self.handle_owner(other).await,
        };
        self.reply(id, result).await;
    }

    async fn reply(&self, id: RequestId, result: Result<Option<Reply>, Fault>) {
        if let Some(result) = result.transpose() {
            self.connection.reply(id, result).await;
        }
    }

    async fn handle_owner(&self, message: ToSupervisor) {
        let Bridge { outbox, turns, boot: boot_runner, shutdown, .. } = &*self.bridge;
        let (id, result) = match message {
            ToSupervisor::EventsStored { upto } => {
                if self.owner.is_some() {
                    outbox.stored(upto);
                }
                return;
            }
            ToSupervisor::Blob { id, .. }
            | ToSupervisor::Boot { id, .. }
            | ToSupervisor::Prompt { id, .. }
            | ToSupervisor::Sync { id, .. }
            | ToSupervisor::Stop { id, .. }
            | ToSupervisor::Answer { id, .. }
            | ToSupervisor::Shutdown { id }
                if self.owner.is_none() =>
            {
                (id, Err(Fault::new(FaultCode::NotOwner, "only the owner may do this")))
            }
            ToSupervisor::Blob { id, blob, stream } => {
                (id, later(blobs::start(&self.connection, outbox, id, &blob, stream)))
            }
            ToSupervisor::Boot { id, boot }
                if self.owner.as_ref().is_none_or(|owner| owner.epoch != boot.epoch) =>
            {
                (id, Err(Fault::invalid("the boot is for another epoch than the owner's")))
            }
            ToSupervisor::Boot { id, boot } => (id, boot_runner.accept(*boot).map(Some)),
            ToSupervisor::Prompt { id, prompt } => (id, turns.prompt(*prompt).map(Some)),
            ToSupervisor::Sync { id, sync } => {
                (id, later(git::carry::start(&self.connection, outbox, turns, id, *sync)))
            }
            ToSupervisor::Stop { id, turn } => (id, turns.stop(&turn).map(Some)),
            ToSupervisor::Answer { id, request, answer } => {
                (id, turns.answer(request, answer).map(Some))
            }
            ToSupervisor::Shutdown { id } => {
                self.connection.reply(id, Ok(Reply::Done)).await;
                return self.connection.notify_when_flushed(Rc::clone(shutdown)).await;
            }
            _ => return,
        };
        self.reply(id, result).await;
    }
}

// A request that has been started as a task replies later.
fn later(started: Result<(), Fault>) -> Result<Option<Reply>, Fault> {
    started.map(|()| None)
}
