//! The client of a connection as its requests see it: replies, streams with flow control, kills,
//! and the tasks that end with the connection.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::{Rc, Weak},
    time::Duration,
};

use harvest_proto::bridge::{
    Exit, Fault, FaultCode, Frame, FromSupervisor, MAX_DATA_BYTES, Reply, RequestId, StreamId,
};
use tokio::{
    io::AsyncWriteExt,
    net::unix::OwnedWriteHalf,
    sync::{Notify, mpsc},
    task::JoinSet,
    time::timeout,
};

use crate::{
    pty::PtyMaster,
    sandbox::Sandbox,
    streams::{Credit, Inbox},
    truncate,
};

// Frames waiting to be written: at most 16 of 64 KiB, then every sender of this connection waits.
const QUEUED_FRAMES: usize = 16;

// For the client to read the last reply before a shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

// More than any of our clients opens at once.
const MAX_STREAMS: usize = 1024;

/// Frames on their way to the client.
pub(crate) type FrameQueue = mpsc::Receiver<Vec<u8>>;

/// A connection after the handshake.
pub(crate) struct Connection {
    pub(crate) sandbox: Rc<Sandbox>,
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
}

impl Connection {
    /// A connection and the frames to pass to [`Connection::write`].
    pub(crate) fn new(sandbox: Rc<Sandbox>) -> (Rc<Self>, FrameQueue) {
        let (frames, queue) = mpsc::channel(QUEUED_FRAMES);
        let connection = Rc::new(Self {
            sandbox,
            frames,
            credits: RefCell::default(),
            inboxes: RefCell::default(),
            kills: RefCell::default(),
            terminals: RefCell::default(),
            tasks: RefCell::default(),
            flushed: Notify::new(),
            broken: Notify::new(),
            closed: Cell::new(false),
        });
        (connection, queue)
    }

    /// Writes queued frames until the client stops reading. An empty frame is a marker: everything
    /// before it has been written.
    pub(crate) async fn write(&self, mut writer: OwnedWriteHalf, mut queue: FrameQueue) {
        while let Some(frame) = queue.recv().await {
            if frame.is_empty() {
                self.flushed.notify_one();
            }
            if writer.write_all(&frame).await.is_err() {
                return;
            }
        }
    }

    /// Notifies `done` when the client has got all frames sent so far, or after a timeout.
    pub(crate) async fn notify_when_flushed(self: &Rc<Self>, done: Rc<Notify>) {
        let _connection_closed = self.frames.send(Vec::new()).await;
        let shared = Rc::clone(self);
        // Must be a separate task: awaiting here would block the writer.
        self.spawn(async move {
            let _client_gone = timeout(FLUSH_TIMEOUT, shared.flushed.notified()).await;
            done.notify_one();
        });
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Aborts the tasks and releases detached commands, which outlive the connection, from waiting
    /// for its client.
    pub(crate) fn close(&self) {
        // Tasks hold a reference to the connection and must be aborted to free it.
        self.tasks.take().abort_all();
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

    /// Reports the exit of a command, or why it did not start, and frees its id.
    pub(crate) async fn exited(&self, exec: RequestId, ended: Result<Exit, Fault>, millis: u64) {
        self.kills.borrow_mut().remove(&exec);
        self.terminals.borrow_mut().remove(&exec);
        match ended {
            Ok(exit) => self.send(FromSupervisor::Exited { exec, exit, millis }).await,
            Err(fault) => self.reply(exec, Err(fault)).await,
        }
    }

    /// Notified when the client kills this command; fails when the id is already in use.
    pub(crate) fn register_command(&self, id: RequestId) -> Result<Rc<Notify>, Fault> {
        if self.kills.borrow().contains_key(&id) {
            let message = format!("request id {id} belongs to a running command");
            return Err(Fault::invalid(message));
        }
        Ok(self.register_kill(id))
    }

    /// Kills a command or cancels a transfer.
    pub(crate) fn kill(&self, id: RequestId) -> Result<Reply, Fault> {
        let kill = self.kills.borrow().get(&id).cloned();
        let kill = kill.ok_or_else(|| Fault::not_found("no such command is running"))?;
        kill.notify_one();
        Ok(Reply::Done)
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

    /// Resizes the terminal of a running command.
    pub(crate) fn resize(&self, exec: RequestId, rows: u16, cols: u16) -> Result<Reply, Fault> {
        let master = self.terminals.borrow().get(&exec).and_then(Weak::upgrade);
        let master = master.ok_or_else(|| Fault::not_found("no such terminal"))?;
        let resized = master.resize(rows, cols);
        resized.map_err(|error| Fault::system(format!("cannot resize the terminal: {error}")))?;
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

    /// Allows more bytes on an outgoing stream.
    pub(crate) fn grant(&self, stream: StreamId, bytes: u32) {
        if let Some(credit) = self.credits.borrow().get(&stream) {
            credit.grant(bytes);
        }
    }

    /// Takes bytes of an incoming stream; false when the client exceeded its credit.
    pub(crate) fn receive(&self, stream: StreamId, bytes: &[u8]) -> bool {
        let inbox = self.inboxes.borrow().get(&stream).cloned();
        inbox.is_none_or(|inbox| inbox.push(bytes))
    }

    /// Ends an incoming stream.
    pub(crate) fn end_incoming(&self, stream: StreamId) {
        if let Some(inbox) = self.inboxes.borrow_mut().remove(&stream) {
            inbox.end();
        }
    }

    /// Drops a stream; bytes that still arrive for it are ignored.
    pub(crate) fn forget(&self, stream: StreamId) {
        self.credits.borrow_mut().remove(&stream);
        self.inboxes.borrow_mut().remove(&stream);
    }

    fn check_free(&self, stream: StreamId) -> Result<(), Fault> {
        let (credits, inboxes) = (self.credits.borrow(), self.inboxes.borrow());
        if credits.contains_key(&stream) || inboxes.contains_key(&stream) {
            return Err(Fault::invalid(format!("stream {stream} is already in use")));
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
}
