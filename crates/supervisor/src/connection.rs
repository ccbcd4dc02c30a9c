//! One connection of the bridge: performs the handshake, dispatches requests, and sends replies,
//! streams and events. A malformed frame closes this connection only. Its commands are killed when
//! it closes, the agent is not.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::{Rc, Weak},
    time::Duration,
};

use harvest_proto::bridge::{
    BridgeRole, Decoder, Exit, Fault, FaultCode, FileRequest, Frame, FromSupervisor,
    MAX_DATA_BYTES, Reply, RequestId, StreamId, ToSupervisor, VERSION,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Notify, mpsc},
    task::JoinSet,
    time::{interval, timeout},
};

use crate::{
    blobs, boot, exec, files, log,
    streams::{Credit, Inbox},
    supervisor::Supervisor,
    terminal::PtyMaster,
    truncate,
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(30);
const MIN_HEARTBEAT: Duration = Duration::from_millis(10);

// Frames waiting to be written: at most 16 of 64 KiB, then every sender of this connection waits.
const QUEUED_FRAMES: usize = 16;

// More than any of our clients opens at once.
const MAX_STREAMS: usize = 1024;

pub(crate) async fn serve(supervisor: Rc<Supervisor>, stream: UnixStream, shutdown: Rc<Notify>) {
    let (mut reader, writer) = stream.into_split();
    let mut decoder = Decoder::default();
    let hello = timeout(HANDSHAKE_TIMEOUT, read_hello(&mut reader, &mut decoder)).await;
    let Ok(Some((role, heartbeat))) = hello else { return };
    let claim = match admit(&supervisor, &role) {
        Ok(claim) => claim,
        Err(reason) => return log::line(format_args!("rejected a connection: {reason}")),
    };
    let (frames, queue) = mpsc::channel(QUEUED_FRAMES);
    let connection = Rc::new(Connection {
        supervisor,
        owner: owner_epoch(&role),
        frames,
        credits: RefCell::default(),
        inboxes: RefCell::default(),
        kills: RefCell::default(),
        terminals: RefCell::default(),
        tasks: RefCell::default(),
        flushed: Notify::new(),
        broken: Notify::new(),
        closed: Cell::new(false),
        shutdown,
    });
    // Sent before any reply: requests may follow the hello at once.
    let status = connection.supervisor.status();
    let detached = status.detached;
    connection.send(FromSupervisor::Welcome { version: VERSION, status }).await;
    let superseded =
        claim.as_ref().map_or_else(|| Rc::new(Notify::new()), |(_, lost)| Rc::clone(lost));
    let reason = tokio::select! {
        reason = connection.read(&mut reader, decoder) => reason,
        () = write(writer, queue, &connection.flushed) => "the client stopped reading",
        () = connection.broken.notified() => "a stream failed",
        () = superseded.notified() => "another owner took over",
        () = connection.push_events(claim, role, heartbeat, detached) => "",
    };
    if !reason.is_empty() && connection.owner.is_some() {
        log::line(format_args!("the owner's connection closed: {reason}"));
    }
    // Command tasks hold a reference to the connection and must be aborted to free it.
    connection.tasks.take().abort_all();
    connection.close();
}

fn owner_epoch(role: &BridgeRole) -> Option<u64> {
    match role {
        BridgeRole::Owner { epoch, .. } => Some(*epoch),
        BridgeRole::Client => None,
    }
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

type OwnerClaim = (u64, Rc<Notify>);

fn admit(supervisor: &Supervisor, role: &BridgeRole) -> Result<Option<OwnerClaim>, String> {
    let BridgeRole::Owner { lease, epoch, .. } = role else { return Ok(None) };
    if let Some(booted) = supervisor.boot.borrow().as_ref().map(|boot| boot.epoch)
        && booted != *epoch
    {
        return Err(format!("the epoch is {booted}, not {epoch}"));
    }
    supervisor.ownership.claim(*lease).map(Some).ok_or_else(|| format!("lease {lease} is outdated"))
}

// An empty frame is a marker: everything before it has been written.
async fn write(mut writer: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>, flushed: &Notify) {
    while let Some(frame) = queue.recv().await {
        if frame.is_empty() {
            flushed.notify_one();
        }
        if writer.write_all(&frame).await.is_err() {
            return;
        }
    }
}

/// A connection after the handshake.
pub(crate) struct Connection {
    pub(crate) supervisor: Rc<Supervisor>,
    /// The epoch of an owner; `None` for other clients.
    owner: Option<u64>,
    frames: mpsc::Sender<Vec<u8>>,
    credits: RefCell<HashMap<StreamId, Rc<Credit>>>,
    inboxes: RefCell<HashMap<StreamId, Rc<Inbox>>>,
    kills: RefCell<HashMap<RequestId, Rc<Notify>>>,
    terminals: RefCell<HashMap<RequestId, Weak<PtyMaster>>>,
    tasks: RefCell<JoinSet<()>>,
    flushed: Notify,
    /// Notified when a stream fails midway: the connection closes, because an `End` would look
    /// complete.
    pub(crate) broken: Notify,
    closed: Cell<bool>,
    shutdown: Rc<Notify>,
}

impl Connection {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    // Releases detached commands, which outlive the connection, from waiting for its client.
    fn close(&self) {
        self.closed.set(true);
        self.credits.take().values().for_each(|credit| credit.lift_limit());
        self.inboxes.take().values().for_each(|inbox| inbox.end());
    }

    pub(crate) async fn send(&self, message: FromSupervisor) {
        let _connection_closed = self.frames.send(Frame::Control(message).encode()).await;
    }

    pub(crate) async fn reply(&self, id: RequestId, result: Result<Reply, Fault>) {
        // A message may quote the request, which may be as long as a frame.
        let result = result.map_err(|fault| Fault {
            message: truncate::text(&fault.message, truncate::MAX_TEXT_BYTES),
            ..fault
        });
        self.send(FromSupervisor::Reply { id, result }).await;
    }

    /// Reports the exit of a command and frees its id.
    pub(crate) async fn exited(&self, exec: RequestId, exit: Exit, millis: u64) {
        self.kills.borrow_mut().remove(&exec);
        self.terminals.borrow_mut().remove(&exec);
        self.send(FromSupervisor::Exited { exec, exit, millis }).await;
    }

    /// Notified when the client cancels a transfer. With an id that is already in use it never is.
    pub(crate) fn register_kill(&self, id: RequestId) -> Rc<Notify> {
        let kill = Rc::new(Notify::new());
        self.kills.borrow_mut().entry(id).or_insert_with(|| Rc::clone(&kill));
        kill
    }

    pub(crate) fn unregister_kill(&self, id: RequestId) {
        self.kills.borrow_mut().remove(&id);
    }

    pub(crate) fn register_terminal(&self, exec: RequestId, master: &Rc<PtyMaster>) {
        self.terminals.borrow_mut().insert(exec, Rc::downgrade(master));
    }

    fn resize(&self, exec: RequestId, rows: u16, cols: u16) -> Result<Reply, Fault> {
        let master = self.terminals.borrow().get(&exec).and_then(Weak::upgrade);
        let master = master.ok_or_else(|| Fault::new(FaultCode::NotFound, "no such terminal"))?;
        let resized = master.resize(rows, cols);
        resized.map_err(|error| {
            Fault::new(FaultCode::System, format!("cannot resize the terminal: {error}"))
        })?;
        Ok(Reply::Done)
    }

    /// Sends bytes of a stream; the caller has checked the credit.
    pub(crate) async fn data(&self, stream: StreamId, bytes: &[u8]) {
        for chunk in bytes.chunks(MAX_DATA_BYTES) {
            let frame = Frame::<FromSupervisor>::Data { stream, bytes: chunk.to_vec() };
            let _connection_closed = self.frames.send(frame.encode()).await;
        }
    }

    /// Ends an outgoing stream.
    pub(crate) async fn end(&self, stream: StreamId) {
        self.credits.borrow_mut().remove(&stream);
        self.send(FromSupervisor::End { stream }).await;
    }

    pub(crate) fn open_outgoing(&self, stream: StreamId) -> Result<Rc<Credit>, Fault> {
        self.check_free(stream)?;
        Ok(Rc::clone(self.credits.borrow_mut().entry(stream).or_default()))
    }

    pub(crate) fn open_incoming(&self, stream: StreamId) -> Result<Rc<Inbox>, Fault> {
        self.check_free(stream)?;
        Ok(Rc::clone(self.inboxes.borrow_mut().entry(stream).or_default()))
    }

    /// Drops a stream; bytes that still arrive for it are ignored.
    pub(crate) fn forget(&self, stream: StreamId) {
        self.credits.borrow_mut().remove(&stream);
        self.inboxes.borrow_mut().remove(&stream);
    }

    fn check_free(&self, stream: StreamId) -> Result<(), Fault> {
        let (credits, inboxes) = (self.credits.borrow(), self.inboxes.borrow());
        if credits.contains_key(&stream) || inboxes.contains_key(&stream) {
            return Err(Fault::new(
                FaultCode::Invalid,
                format!("stream {stream} is already in use"),
            ));
        }
        if credits.len() + inboxes.len() >= MAX_STREAMS {
            return Err(Fault::new(FaultCode::Busy, "too many open streams"));
        }
        Ok(())
    }

    /// Runs a task that is aborted when the connection closes.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_local(task);
    }

    // Sends events and heartbeats to the owner.
    async fn push_events(
        &self,
        claim: Option<OwnerClaim>,
        role: BridgeRole,
        heartbeat: Duration,
        mut detached: u32,
    ) {
        let supervisor = &self.supervisor;
        let (Some((number, _)), BridgeRole::Owner { stored, .. }) = (claim, role) else {
            return std::future::pending().await;
        };
        supervisor.outbox.reconnect(stored);
        let mut heartbeat = interval(heartbeat);
        heartbeat.reset();
        while supervisor.ownership.is_current(number) {
            let (events, commands) =
                (supervisor.outbox.changed.notified(), supervisor.detached.changed.notified());
            if supervisor.detached.count() != detached {
                heartbeat.reset_immediately();
            }
            if let Some(event) = supervisor.outbox.next() {
                self.send(FromSupervisor::Event(event)).await;
                continue;
            }
            tokio::select! {
                () = events => {}
                () = commands => {}
                _ = heartbeat.tick() => {
                    detached = supervisor.detached.count();
                    let busy = supervisor.turns.busy();
                    self.send(FromSupervisor::Heartbeat { busy, detached }).await;
                }
            }
        }
    }

    async fn read(
        self: &Rc<Self>,
        reader: &mut OwnedReadHalf,
        mut decoder: Decoder,
    ) -> &'static str {
        loop {
            loop {
                match decoder.take::<ToSupervisor>() {
                    Ok(Some(Frame::Control(message))) => self.handle(message).await,
                    Ok(Some(Frame::Data { stream, bytes })) => {
                        let inbox = self.inboxes.borrow().get(&stream).cloned();
                        if inbox.is_some_and(|inbox| !inbox.push(&bytes)) {
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

    async fn handle(self: &Rc<Self>, message: ToSupervisor) {
        match message {
            ToSupervisor::Credit { stream, bytes } => {
                if let Some(credit) = self.credits.borrow().get(&stream) {
                    credit.grant(bytes);
                }
            }
            ToSupervisor::End { stream } => {
                if let Some(inbox) = self.inboxes.borrow_mut().remove(&stream) {
                    inbox.end();
                }
            }
            ToSupervisor::Exec { id, command } => {
                let kill = Rc::new(Notify::new());
                if self.kills.borrow().contains_key(&id) {
                    let fault = Fault::new(
                        FaultCode::Invalid,
                        format!("request id {id} belongs to a running command"),
                    );
                    return self.reply(id, Err(fault)).await;
                }
                self.kills.borrow_mut().insert(id, Rc::clone(&kill));
                if let Err(fault) = exec::start(self, id, *command, kill) {
                    self.reject_exec(id, fault).await;
                }
            }
            ToSupervisor::Kill { id, exec } => {
                let kill = self.kills.borrow().get(&exec).cloned();
                let result = kill.map(|kill| kill.notify_one()).map(|()| Reply::Done);
                let result = result
                    .ok_or_else(|| Fault::new(FaultCode::NotFound, "no such command is running"));
                self.reply(id, result).await;
            }
            ToSupervisor::Resize { id, exec, rows, cols } => {
                self.reply(id, self.resize(exec, rows, cols)).await;
            }
            ToSupervisor::File { id, request } => self.file(id, request).await,
            ToSupervisor::Ping => self.send(FromSupervisor::Pong).await,
            ToSupervisor::Status { id } => {
                self.reply(id, Ok(Reply::Status(self.supervisor.status()))).await
            }
            other => self.handle_owner(other).await,
        }
    }

    /// Replies to an `Exec` that could not be started.
    pub(crate) async fn reject_exec(&self, id: RequestId, fault: Fault) {
        self.kills.borrow_mut().remove(&id);
        self.reply(id, Err(fault)).await;
    }

    async fn file(self: &Rc<Self>, id: RequestId, request: FileRequest) {
        if let Err(fault) = files::start(self, id, request) {
            self.reply(id, Err(fault)).await;
        }
    }

    async fn handle_owner(self: &Rc<Self>, message: ToSupervisor) {
        let supervisor = &self.supervisor;
        let (id, result) = match message {
            ToSupervisor::EventsStored { upto } => {
                if self.owner.is_some() {
                    supervisor.outbox.stored(upto);
                }
                return;
            }
            ToSupervisor::Blob { id, .. }
            | ToSupervisor::Boot { id, .. }
            | ToSupervisor::Prompt { id, .. }
            | ToSupervisor::Stop { id, .. }
            | ToSupervisor::Answer { id, .. }
            | ToSupervisor::Shutdown { id }
                if self.owner.is_none() =>
            {
                (id, Err(Fault::new(FaultCode::NotOwner, "only the owner may do this")))
            }
            ToSupervisor::Blob { id, blob, stream } => {
                match blobs::start(self, id, &blob, stream) {
                    Ok(()) => return,
                    Err(fault) => (id, Err(fault)),
                }
            }
            ToSupervisor::Boot { id, boot } if self.owner != Some(boot.epoch) => (
                id,
                Err(Fault::new(
                    FaultCode::Invalid,
                    "the boot is for another epoch than the owner's",
                )),
            ),
            ToSupervisor::Boot { id, boot } => (id, boot::accept(supervisor, *boot)),
            ToSupervisor::Prompt { id, prompt } => (id, supervisor.turns.prompt(*prompt)),
            ToSupervisor::Stop { id, turn } => (id, supervisor.turns.stop(&turn)),
            ToSupervisor::Answer { id, request, answer } => {
                (id, supervisor.turns.answer(request, answer))
            }
            ToSupervisor::Shutdown { id } => {
                self.reply(id, Ok(Reply::Done)).await;
                // Must be a separate task: awaiting here would block the writer.
                let _connection_closed = self.frames.send(Vec::new()).await;
                let (shared, shutdown) = (Rc::clone(self), Rc::clone(&self.shutdown));
                return self.spawn(async move {
                    let _client_gone = timeout(HANDSHAKE_TIMEOUT, shared.flushed.notified()).await;
                    shutdown.notify_one();
                });
            }
            _ => return,
        };
        self.reply(id, result).await;
    }
}
