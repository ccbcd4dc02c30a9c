//! One bridge connection to a fake supervisor, with real frames and flow control.

use std::{collections::BTreeMap, sync::Arc};

use harvest_proto::bridge::{
    BridgeRole, Decoder, Exit, Fault, FaultCode, FileRequest, Frame, FromSupervisor, GitRequest,
    INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, Reply, RequestId, StreamId, ToSupervisor, VERSION,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::{
    commands::{self, CommandResult},
    sandbox::FakeSandbox,
};

pub(crate) async fn serve(sandbox: Arc<FakeSandbox>, stream: DuplexStream) {
    let mut changes = sandbox.changes();
    let cuts = sandbox.cuts();
    let mut connection = Connection {
        sandbox,
        stream,
        owner: None,
        welcomed: false,
        sent: 0,
        detached: 0,
        outgoing: BTreeMap::new(),
        incoming: BTreeMap::new(),
        sleeping: Vec::new(),
        waiting: Vec::new(),
    };
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        while let Ok(Some(frame)) = decoder.take() {
            if connection.handle_frame(frame).await.is_none() {
                return;
            }
        }
        let sandbox = &connection.sandbox;
        let replaced = connection.owner.is_some_and(|number| number != sandbox.owner());
        if sandbox.ended().is_some() || sandbox.cuts() != cuts || replaced {
            return;
        }
        if connection.send_events().await.is_none() || connection.start_waiting().await.is_none() {
            return;
        }
        tokio::select! {
            count = connection.stream.read(&mut buffer) => match count {
                Ok(count) if count > 0 => decoder.push(&buffer[..count]),
                _ => return,
            },
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}

struct Connection {
    sandbox: Arc<FakeSandbox>,
    stream: DuplexStream,
    owner: Option<u64>,
    welcomed: bool,
    sent: u64,
    /// The number of detached commands last reported.
    detached: u32,
    outgoing: BTreeMap<StreamId, OutgoingStream>,
    incoming: BTreeMap<StreamId, Incoming>,
    sleeping: Vec<(RequestId, StreamId, StreamId)>,
    /// Commands received while the sandbox was frozen.
    waiting: Vec<(RequestId, harvest_proto::bridge::Command)>,
}

struct OutgoingStream {
    bytes: Vec<u8>,
    credit: usize,
    /// Sent once all bytes are out.
    after: Option<FromSupervisor>,
}

enum Incoming {
    Stdin { exec: RequestId, stdout: StreamId, stderr: StreamId, bytes: Vec<u8> },
    File { id: RequestId, path: String, bytes: Vec<u8> },
}

/// `None` when the connection is closed.
type Alive = Option<()>;

impl Connection {
    async fn send_message(&mut self, message: FromSupervisor) -> Alive {
        self.stream.write_all(&Frame::Control(message).encode()).await.ok()
    }

    async fn reply(&mut self, id: RequestId, result: Result<Reply, Fault>) -> Alive {
        self.send_message(FromSupervisor::Reply { id, result }).await
    }

    async fn send_events(&mut self) -> Alive {
        if self.owner.is_some() && self.welcomed {
            for event in self.sandbox.events_after(self.sent) {
                self.sent = event.number;
                self.send_message(FromSupervisor::Event(event)).await?;
            }
            let detached = self.sandbox.detached();
            if std::mem::replace(&mut self.detached, detached) != detached {
                self.send_message(FromSupervisor::Heartbeat { busy: false, detached }).await?;
            }
        }
        Some(())
    }

    async fn handle_frame(&mut self, frame: Frame<ToSupervisor>) -> Alive {
        match frame {
            Frame::Control(ToSupervisor::Hello { role, .. }) => self.hello(role).await,
            _ if !self.welcomed => None,
            Frame::Control(message) => self.message(message).await,
            Frame::Data { stream, bytes } => self.data(stream, bytes).await,
        }
    }

    async fn hello(&mut self, role: BridgeRole) -> Alive {
        if let BridgeRole::Owner { lease, epoch, stored } = role {
            self.owner = Some(self.sandbox.own(lease, epoch, stored)?);
            self.sent = stored;
        }
        self.welcomed = true;
        let status = self.sandbox.status();
        self.detached = status.detached;
        self.send_message(FromSupervisor::Welcome { version: VERSION, status }).await
    }

    async fn message(&mut self, message: ToSupervisor) -> Alive {
        let sandbox = Arc::clone(&self.sandbox);
        let owned = self.owner.is_some();
        let only_owner = |result: &dyn Fn() -> Result<Reply, Fault>| {
            if owned {
                result()
            } else {
                Err(Fault::new(FaultCode::NotOwner, "only the owner may do this"))
            }
        };
        match message {
            ToSupervisor::Hello { .. } => None,
            ToSupervisor::Boot { id, boot } => {
                let result = only_owner(&|| sandbox.boot((*boot).clone()));
                self.reply(id, result).await
            }
            ToSupervisor::Prompt { id, prompt } => {
                let result = only_owner(&|| sandbox.prompt((*prompt).clone()));
                self.reply(id, result).await
            }
            ToSupervisor::Sync { id, sync } => {
                let result = only_owner(&|| sandbox.sync(&sync));
                self.reply(id, result).await
            }
            ToSupervisor::Stop { id, turn } => {
                self.reply(id, only_owner(&|| sandbox.stop(&turn))).await
            }
            ToSupervisor::Answer { id, request, answer } => {
                let result = only_owner(&|| sandbox.answer(&request, answer.clone()));
                self.reply(id, result).await
            }
            ToSupervisor::Ping => self.send_message(FromSupervisor::Pong).await,
            ToSupervisor::Status { id } => {
                self.reply(id, Ok(Reply::Status(sandbox.status()))).await
            }
            ToSupervisor::EventsStored { upto } => {
                sandbox.stored(upto);
                Some(())
            }
            ToSupervisor::Blob { id, blob, stream } => match sandbox.blob(&blob) {
                None => self.reply(id, Err(commands::missing(blob.part()))).await,
                Some(bytes) => {
                    self.reply(id, Ok(Reply::Done)).await?;
                    self.send(stream, bytes, None).await
                }
            },
            ToSupervisor::Exec { id, command } => self.exec(id, *command).await,
            ToSupervisor::Kill { id, exec } => self.kill(id, exec).await,
            ToSupervisor::Resize { id, .. } => {
                self.reply(id, Err(Fault::new(FaultCode::NotFound, "the fake has no terminals")))
                    .await
            }
            ToSupervisor::File { id, request, .. } => self.file(id, request).await,
            ToSupervisor::Git { id, request } => {
                if let GitRequest::Query { stream, .. } = request {
                    self.send_message(FromSupervisor::End { stream }).await?;
                }
                self.reply(id, commands::git(&request)).await
            }
            ToSupervisor::Credit { stream, bytes } => {
                if let Some(outgoing) = self.outgoing.get_mut(&stream) {
                    outgoing.credit += bytes as usize;
                }
                self.pump(stream).await
            }
            ToSupervisor::End { stream } => self.end(stream).await,
            ToSupervisor::Shutdown { id } => {
                self.reply(id, Ok(Reply::Done)).await?;
                sandbox.die("exited");
                None
            }
        }
    }

    /// Starts the waiting commands once the sandbox is thawed.
    async fn start_waiting(&mut self) -> Alive {
        if !self.sandbox.is_frozen() {
            for (id, command) in std::mem::take(&mut self.waiting) {
                self.exec(id, command).await?;
            }
        }
        Some(())
    }

    async fn exec(&mut self, id: RequestId, command: harvest_proto::bridge::Command) -> Alive {
        if self.sandbox.is_frozen() {
            self.waiting.push((id, command));
            return Some(());
        }
        if command.terminal.is_some() {
            let fault = Fault::new(FaultCode::Invalid, "the fake has no terminals");
            return self.reply(id, Err(fault)).await;
        }
        let (stdout, stderr) = (command.stdout, command.stderr);
        if let Some(stream) = command.stdin {
            self.reply(id, Ok(Reply::Started { pid: 2 })).await?;
            self.incoming
                .insert(stream, Incoming::Stdin { exec: id, stdout, stderr, bytes: Vec::new() });
            return Some(());
        }
        match commands::run(&command.argv, &self.sandbox) {
            Err(fault) => self.reply(id, Err(fault)).await,
            Ok(CommandResult::Sleeping) => {
                self.sleeping.push((id, stdout, stderr));
                self.reply(id, Ok(Reply::Started { pid: 2 })).await
            }
            Ok(CommandResult::Exited { stdout: bytes, exit }) => {
                self.reply(id, Ok(Reply::Started { pid: 2 })).await?;
                self.exited(id, stdout, stderr, bytes, exit).await
            }
        }
    }

    async fn exited(
        &mut self,
        exec: RequestId,
        stdout: StreamId,
        stderr: StreamId,
        bytes: Vec<u8>,
        exit: Exit,
    ) -> Alive {
        self.send_message(FromSupervisor::End { stream: stderr }).await?;
        let after = FromSupervisor::Exited { exec, exit, millis: 1 };
        self.send(stdout, bytes, Some(after)).await
    }

    async fn kill(&mut self, id: RequestId, exec: RequestId) -> Alive {
        let Some(index) = self.sleeping.iter().position(|(sleeping, ..)| *sleeping == exec) else {
            return self.reply(id, Err(Fault::new(FaultCode::NotFound, "no such command"))).await;
        };
        let (exec, stdout, stderr) = self.sleeping.remove(index);
        self.reply(id, Ok(Reply::Done)).await?;
        self.exited(exec, stdout, stderr, Vec::new(), Exit::Killed).await
    }

    async fn file(&mut self, id: RequestId, request: FileRequest) -> Alive {
        match request {
            FileRequest::Write { path, stream, .. } => {
                self.incoming.insert(stream, Incoming::File { id, path, bytes: Vec::new() });
                Some(())
            }
            FileRequest::Read { path, stream } => match self.sandbox.files().remove(&path) {
                None => self.reply(id, Err(commands::missing(&path))).await,
                Some(bytes) => {
                    self.reply(id, Ok(Reply::Done)).await?;
                    self.send(stream, bytes, None).await
                }
            },
            FileRequest::Stat { path, .. } => {
                let result = commands::stat(&self.sandbox, &path).map(Reply::Stat);
                self.reply(id, result).await
            }
            FileRequest::List { path, .. } => {
                let entries = commands::list(&self.sandbox, &path);
                self.reply(id, Ok(Reply::List { entries, more: false })).await
            }
            _ => {
                self.reply(id, Err(Fault::new(FaultCode::Invalid, "the fake has no folders"))).await
            }
        }
    }

    async fn data(&mut self, stream: StreamId, mut bytes: Vec<u8>) -> Alive {
        let length = u32::try_from(bytes.len()).ok()?;
        match self.incoming.get_mut(&stream)? {
            Incoming::Stdin { bytes: all, .. } | Incoming::File { bytes: all, .. } => {
                all.append(&mut bytes)
            }
        }
        self.send_message(FromSupervisor::Credit { stream, bytes: length }).await
    }

    async fn end(&mut self, stream: StreamId) -> Alive {
        match self.incoming.remove(&stream)? {
            Incoming::File { id, path, bytes } => {
                self.sandbox.write(&path, bytes);
                self.reply(id, Ok(Reply::Done)).await
            }
            // Only `cat` reads stdin here, and prints it.
            Incoming::Stdin { exec, stdout, stderr, bytes } => {
                self.exited(exec, stdout, stderr, bytes, Exit::Code(0)).await
            }
        }
    }

    async fn send(
        &mut self,
        stream: StreamId,
        bytes: Vec<u8>,
        after: Option<FromSupervisor>,
    ) -> Alive {
        let credit = INITIAL_CREDIT_BYTES as usize;
        self.outgoing.insert(stream, OutgoingStream { bytes, credit, after });
        self.pump(stream).await
    }

    /// Sends as much as the receiver's credit allows.
    async fn pump(&mut self, stream: StreamId) -> Alive {
        while let Some(outgoing) = self.outgoing.get_mut(&stream) {
            if outgoing.bytes.is_empty() {
                let after = self.outgoing.remove(&stream).and_then(|outgoing| outgoing.after);
                self.send_message(FromSupervisor::End { stream }).await?;
                if let Some(after) = after {
                    self.send_message(after).await?;
                }
                return Some(());
            }
            let count = outgoing.bytes.len().min(outgoing.credit).min(MAX_DATA_BYTES);
            if count == 0 {
                return Some(());
            }
            outgoing.credit -= count;
            let bytes = outgoing.bytes.drain(..count).collect();
            let frame: Frame<FromSupervisor> = Frame::Data { stream, bytes };
            self.stream.write_all(&frame.encode()).await.ok()?;
        }
        Some(())
    }
}
