//! One connection of the bridge: greets, reads frames, hands requests to the part they are for, and
//! carries replies, streams and events back. A garbled frame ends this connection and nothing else;
//! its commands end with it, the agent does not.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::{Rc, Weak},
    time::Duration,
};

use harvest_proto::bridge::{
    Decoder, Exit, Fault, FaultCode, FileRequest, Frame, FromSupervisor, MAX_DATA_BYTES, Reply,
    RequestId, Role, StreamId, ToSupervisor, VERSION,
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
    blobs, boot, cut, exec, files, log,
    streams::{Credit, Inbox},
    supervisor::Supervisor,
    terminal::Master,
};

const GREETING: Duration = Duration::from_secs(10);
const HEARTBEAT: Duration = Duration::from_secs(30);
// However often an owner asks for one.
const SHORTEST_HEARTBEAT: Duration = Duration::from_millis(10);

// Frames on their way to a reader: at most 16 of 64 KiB, then every sender of this connection waits.
const QUEUED_FRAMES: usize = 16;

// More streams than any client of ours opens at once.
const MAX_STREAMS: usize = 1024;

/// Serves a connection until it ends.
pub(crate) async fn serve(supervisor: Rc<Supervisor>, stream: UnixStream, shutdown: Rc<Notify>) {
    let (mut reader, writer) = stream.into_split();
    let mut decoder = Decoder::default();
    let greeted = timeout(GREETING, greeting(&mut reader, &mut decoder)).await;
    let Ok(Some((role, heartbeat))) = greeted else { return };
    let bell = match admit(&supervisor, &role) {
        Ok(bell) => bell,
        Err(reason) => return log::line(format_args!("refused a connection: {reason}")),
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
        over: Cell::new(false),
        shutdown,
    });
    // Before anything else: a dialer may send requests right behind its greeting.
    let status = connection.supervisor.status();
    let detached = status.detached;
    connection.say(FromSupervisor::Welcome { version: VERSION, status }).await;
    let over = bell.as_ref().map_or_else(|| Rc::new(Notify::new()), |(_, bell)| Rc::clone(bell));
    let ended = tokio::select! {
        ended = connection.read(&mut reader, decoder) => ended,
        () = write(writer, queue, &connection.flushed) => "the dialer stopped reading",
        () = connection.broken.notified() => "a stream broke off",
        () = over.notified() => "another owner took over",
        () = connection.tell(bell, role, heartbeat, detached) => "",
    };
    if !ended.is_empty() && connection.owner.is_some() {
        log::line(format_args!("the owner's connection ended: {ended}"));
    }
    // Commands hold the connection; without this neither would ever end.
    connection.tasks.take().abort_all();
    connection.close();
}

fn owner_epoch(role: &Role) -> Option<u64> {
    match role {
        Role::Owner { epoch, .. } => Some(*epoch),
        Role::Guest => None,
    }
}

async fn greeting(reader: &mut OwnedReadHalf, decoder: &mut Decoder) -> Option<(Role, Duration)> {
    loop {
        match decoder.take::<ToSupervisor>() {
            Ok(Some(Frame::Control(ToSupervisor::Hello { role, heartbeat_millis, .. }))) => {
                let heartbeat = heartbeat_millis.map_or(HEARTBEAT, Duration::from_millis);
                return Some((role, heartbeat.max(SHORTEST_HEARTBEAT)));
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
    let mut piece = [0u8; 16 * 1024];
    match reader.read(&mut piece).await? {
        0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
        count => {
            decoder.push(&piece[..count]);
            Ok(())
        }
    }
}

type Bell = (u64, Rc<Notify>);

fn admit(supervisor: &Supervisor, role: &Role) -> Result<Option<Bell>, String> {
    let Role::Owner { lease, epoch, .. } = role else { return Ok(None) };
    if let Some(booted) = supervisor.boot.borrow().as_ref().map(|boot| boot.epoch)
        && booted != *epoch
    {
        return Err(format!("epoch {epoch} is not ours, which is {booted}"));
    }
    supervisor.ownership.claim(*lease).map(Some).ok_or_else(|| format!("lease {lease} is old"))
}

// An empty frame is a mark of ours: everything before it is written.
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

/// A greeted connection.
pub(crate) struct Connection {
    pub(crate) supervisor: Rc<Supervisor>,
    /// The epoch it owns; a guest owns none.
    owner: Option<u64>,
    frames: mpsc::Sender<Vec<u8>>,
    credits: RefCell<HashMap<StreamId, Rc<Credit>>>,
    inboxes: RefCell<HashMap<StreamId, Rc<Inbox>>>,
    kills: RefCell<HashMap<RequestId, Rc<Notify>>>,
    terminals: RefCell<HashMap<RequestId, Weak<Master>>>,
    tasks: RefCell<JoinSet<()>>,
    flushed: Notify,
    /// Rung when a stream cannot be ended honestly: the connection closes instead.
    pub(crate) broken: Notify,
    /// Nobody is on the other side any more.
    over: Cell<bool>,
    shutdown: Rc<Notify>,
}

impl Connection {
    /// Whether nobody hears what is said here.
    pub(crate) fn is_over(&self) -> bool {
        self.over.get()
    }

    // What outlives the connection waits for nobody on its other side.
    fn close(&self) {
        self.over.set(true);
        self.credits.take().values().for_each(|credit| credit.lift());
        self.inboxes.take().values().for_each(|inbox| inbox.end());
    }

    /// Sends a message.
    pub(crate) async fn say(&self, message: FromSupervisor) {
        let _connection_is_over = self.frames.send(Frame::Control(message).encode()).await;
    }

    /// Answers a request.
    pub(crate) async fn reply(&self, id: RequestId, result: Result<Reply, Fault>) {
        // Words about a request may repeat it, and the request may have been a whole frame.
        let result = result.map_err(|fault| Fault {
            message: cut::text(&fault.message, cut::MAX_TEXT_BYTES),
            ..fault
        });
        self.say(FromSupervisor::Reply { id, result }).await;
    }

    /// Tells how a command ended; its number is free again.
    pub(crate) async fn exited(&self, exec: RequestId, exit: Exit, millis: u64) {
        self.kills.borrow_mut().remove(&exec);
        self.terminals.borrow_mut().remove(&exec);
        self.say(FromSupervisor::Exited { exec, exit, millis }).await;
    }

    /// Rung when the dialer gives a transfer up. A number that is in use already cannot be given up.
    pub(crate) fn killable(&self, id: RequestId) -> Rc<Notify> {
        let bell = Rc::new(Notify::new());
        self.kills.borrow_mut().entry(id).or_insert_with(|| Rc::clone(&bell));
        bell
    }

    /// The transfer is over.
    pub(crate) fn no_longer_killable(&self, id: RequestId) {
        self.kills.borrow_mut().remove(&id);
    }

    /// This command has that terminal.
    pub(crate) fn has_terminal(&self, exec: RequestId, master: &Rc<Master>) {
        self.terminals.borrow_mut().insert(exec, Rc::downgrade(master));
    }

    fn resize(&self, exec: RequestId, rows: u16, cols: u16) -> Result<Reply, Fault> {
        let master = self.terminals.borrow().get(&exec).and_then(Weak::upgrade);
        let master =
            master.ok_or_else(|| Fault::new(FaultCode::NotFound, "no such terminal is open"))?;
        let resized = master.resize(rows, cols);
        resized
            .map_err(|error| Fault::new(FaultCode::System, format!("cannot resize: {error}")))?;
        Ok(Reply::Done)
    }

    /// Sends bytes of a stream; the caller has the credit for them.
    pub(crate) async fn data(&self, stream: StreamId, bytes: &[u8]) {
        for piece in bytes.chunks(MAX_DATA_BYTES) {
            let frame = Frame::<FromSupervisor>::Data { stream, bytes: piece.to_vec() };
            let _connection_is_over = self.frames.send(frame.encode()).await;
        }
    }

    /// Ends a stream we send on.
    pub(crate) async fn end(&self, stream: StreamId) {
        self.credits.borrow_mut().remove(&stream);
        self.say(FromSupervisor::End { stream }).await;
    }

    /// Opens a stream we send on.
    pub(crate) fn sends(&self, stream: StreamId) -> Result<Rc<Credit>, Fault> {
        self.check_free(stream)?;
        Ok(Rc::clone(self.credits.borrow_mut().entry(stream).or_default()))
    }

    /// Opens a stream we receive on.
    pub(crate) fn receives(&self, stream: StreamId) -> Result<Rc<Inbox>, Fault> {
        self.check_free(stream)?;
        Ok(Rc::clone(self.inboxes.borrow_mut().entry(stream).or_default()))
    }

    /// Forgets a stream, whichever way it went; bytes that still come for it are dropped.
    pub(crate) fn forget(&self, stream: StreamId) {
        self.credits.borrow_mut().remove(&stream);
        self.inboxes.borrow_mut().remove(&stream);
    }

    fn check_free(&self, stream: StreamId) -> Result<(), Fault> {
        let (credits, inboxes) = (self.credits.borrow(), self.inboxes.borrow());
        if credits.contains_key(&stream) || inboxes.contains_key(&stream) {
            return Err(Fault::new(FaultCode::Invalid, format!("stream {stream} is in use")));
        }
        if credits.len() + inboxes.len() >= MAX_STREAMS {
            return Err(Fault::new(FaultCode::Busy, "too many open streams"));
        }
        Ok(())
    }

    /// Runs something for as long as this connection lives.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_local(task);
    }

    // What is said without being asked: events and heartbeats, to the owner.
    async fn tell(&self, bell: Option<Bell>, role: Role, heartbeat: Duration, mut detached: u32) {
        let supervisor = &self.supervisor;
        let (Some((number, _)), Role::Owner { stored, .. }) = (bell, role) else {
            return std::future::pending().await;
        };
        supervisor.outbox.reconnect(stored);
        let mut heartbeat = interval(heartbeat);
        heartbeat.reset();
        while supervisor.ownership.is_current(number) {
            let (news, other) =
                (supervisor.outbox.news.notified(), supervisor.detached.news.notified());
            if supervisor.detached.count() != detached {
                heartbeat.reset_immediately();
            }
            if let Some(event) = supervisor.outbox.next() {
                self.say(FromSupervisor::Event(event)).await;
                continue;
            }
            tokio::select! {
                () = news => {}
                () = other => {}
                _ = heartbeat.tick() => {
                    detached = supervisor.detached.count();
                    self.say(FromSupervisor::Heartbeat { busy: supervisor.turns.busy(), detached }).await;
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
                    Ok(Some(Frame::Control(message))) => self.hear(message).await,
                    Ok(Some(Frame::Data { stream, bytes })) => {
                        let inbox = self.inboxes.borrow().get(&stream).cloned();
                        if inbox.is_some_and(|inbox| !inbox.push(&bytes)) {
                            return "more bytes than were granted";
                        }
                    }
                    Ok(None) => break,
                    Err(_) => return "a garbled frame",
                }
            }
            if fill(reader, &mut decoder).await.is_err() {
                return "the dialer closed it";
            }
        }
    }

    async fn hear(self: &Rc<Self>, message: ToSupervisor) {
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
                        format!("request {id} is a running command"),
                    );
                    return self.reply(id, Err(fault)).await;
                }
                self.kills.borrow_mut().insert(id, Rc::clone(&kill));
                if let Err(fault) = exec::start(self, id, *command, kill) {
                    self.refuse_exec(id, fault).await;
                }
            }
            ToSupervisor::Kill { id, exec } => {
                let kill = self.kills.borrow().get(&exec).cloned();
                let result = kill.map(|kill| kill.notify_one()).map(|()| Reply::Done);
                let result =
                    result.ok_or_else(|| Fault::new(FaultCode::NotFound, "no such command runs"));
                self.reply(id, result).await;
            }
            ToSupervisor::Resize { id, exec, rows, cols } => {
                self.reply(id, self.resize(exec, rows, cols)).await;
            }
            ToSupervisor::File { id, request } => self.file(id, request).await,
            ToSupervisor::Status { id } => {
                self.reply(id, Ok(Reply::Status(self.supervisor.status()))).await
            }
            other => self.hear_owner(other).await,
        }
    }

    /// Answers an `Exec` that never ran.
    pub(crate) async fn refuse_exec(&self, id: RequestId, fault: Fault) {
        self.kills.borrow_mut().remove(&id);
        self.reply(id, Err(fault)).await;
    }

    async fn file(self: &Rc<Self>, id: RequestId, request: FileRequest) {
        if let Err(fault) = files::start(self, id, request) {
            self.reply(id, Err(fault)).await;
        }
    }

    async fn hear_owner(self: &Rc<Self>, message: ToSupervisor) {
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
                    "the boot is for another epoch than this owner's",
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
                // The writer runs beside this: only a task of its own may wait for it.
                let _connection_is_over = self.frames.send(Vec::new()).await;
                let (here, shutdown) = (Rc::clone(self), Rc::clone(&self.shutdown));
                return self.spawn(async move {
                    let _dialer_is_gone = timeout(GREETING, here.flushed.notified()).await;
                    shutdown.notify_one();
                });
            }
            _ => return,
        };
        self.reply(id, result).await;
    }
}
