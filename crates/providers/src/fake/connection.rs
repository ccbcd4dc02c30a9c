//! One connection to a fake supervisor, in the real frames and with the real credit.

use std::{collections::BTreeMap, sync::Arc};

use harvest_proto::bridge::{
    Decoder, Exit, Fault, FaultCode, FileRequest, Frame, FromSupervisor, INITIAL_CREDIT_BYTES,
    MAX_DATA_BYTES, Reply, RequestId, Role, StreamId, ToSupervisor, VERSION,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::{
    commands::{self, Ran},
    machine::Machine,
};

pub(crate) async fn serve(machine: Arc<Machine>, stream: DuplexStream) {
    let mut pulse = machine.pulse();
    let cuts = machine.cuts();
    let mut connection = Connection {
        machine,
        stream,
        owner: None,
        welcomed: false,
        sent: 0,
        detached: 0,
        outgoing: BTreeMap::new(),
        incoming: BTreeMap::new(),
        sleeping: Vec::new(),
        frozen: Vec::new(),
    };
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        while let Ok(Some(frame)) = decoder.take() {
            if connection.hear(frame).await.is_none() {
                return;
            }
        }
        let machine = &connection.machine;
        let replaced = connection.owner.is_some_and(|number| number != machine.owner());
        if machine.ended().is_some() || machine.cuts() != cuts || replaced {
            return;
        }
        if connection.send_events().await.is_none() || connection.go_on().await.is_none() {
            return;
        }
        tokio::select! {
            count = connection.stream.read(&mut buffer) => match count {
                Ok(count) if count > 0 => decoder.push(&buffer[..count]),
                _ => return,
            },
            changed = pulse.changed() => if changed.is_err() { return },
        }
    }
}

struct Connection {
    machine: Arc<Machine>,
    stream: DuplexStream,
    owner: Option<u64>,
    welcomed: bool,
    sent: u64,
    /// How many detached commands run, as was said last.
    detached: u32,
    outgoing: BTreeMap<StreamId, Outgoing>,
    incoming: BTreeMap<StreamId, Incoming>,
    sleeping: Vec<(RequestId, StreamId, StreamId)>,
    /// Commands that came while everything stood still.
    frozen: Vec<(RequestId, harvest_proto::bridge::Command)>,
}

struct Outgoing {
    bytes: Vec<u8>,
    credit: usize,
    /// Said once everything is out.
    after: Option<FromSupervisor>,
}

enum Incoming {
    Stdin { exec: RequestId, stdout: StreamId, stderr: StreamId, bytes: Vec<u8> },
    File { id: RequestId, path: String, bytes: Vec<u8> },
}

/// `None` when the connection is of no use any more.
type Alive = Option<()>;

impl Connection {
    async fn say(&mut self, message: FromSupervisor) -> Alive {
        self.stream.write_all(&Frame::Control(message).encode()).await.ok()
    }

    async fn reply(&mut self, id: RequestId, result: Result<Reply, Fault>) -> Alive {
        self.say(FromSupervisor::Reply { id, result }).await
    }

    async fn send_events(&mut self) -> Alive {
        if self.owner.is_some() && self.welcomed {
            for event in self.machine.events_after(self.sent) {
                self.sent = event.number;
                self.say(FromSupervisor::Event(event)).await?;
            }
            let detached = self.machine.detached();
            if std::mem::replace(&mut self.detached, detached) != detached {
                self.say(FromSupervisor::Heartbeat { busy: false, detached }).await?;
            }
        }
        Some(())
    }

    async fn hear(&mut self, frame: Frame<ToSupervisor>) -> Alive {
        match frame {
            Frame::Control(ToSupervisor::Hello { role, .. }) => self.hello(role).await,
            _ if !self.welcomed => None,
            Frame::Control(message) => self.message(message).await,
            Frame::Data { stream, bytes } => self.data(stream, bytes).await,
        }
    }

    async fn hello(&mut self, role: Role) -> Alive {
        if let Role::Owner { lease, epoch, stored } = role {
            self.owner = Some(self.machine.own(lease, epoch, stored)?);
            self.sent = stored;
        }
        self.welcomed = true;
        let status = self.machine.status();
        self.detached = status.detached;
        self.say(FromSupervisor::Welcome { version: VERSION, status }).await
    }

    async fn message(&mut self, message: ToSupervisor) -> Alive {
        let machine = Arc::clone(&self.machine);
        let owned = self.owner.is_some();
        let only_owner = |result: &dyn Fn() -> Result<Reply, Fault>| {
            if owned { result() } else { Err(Fault::new(FaultCode::NotOwner, "a guest may not")) }
        };
        match message {
            ToSupervisor::Hello { .. } => None,
            ToSupervisor::Boot { id, boot } => {
                let result = only_owner(&|| machine.boot((*boot).clone()));
                self.reply(id, result).await
            }
            ToSupervisor::Prompt { id, prompt } => {
                let result = only_owner(&|| machine.prompt((*prompt).clone()));
                self.reply(id, result).await
            }
            ToSupervisor::Stop { id, turn } => {
                self.reply(id, only_owner(&|| machine.stop(&turn))).await
            }
            ToSupervisor::Answer { id, request, answer } => {
                let result = only_owner(&|| machine.answer(&request, answer.clone()));
                self.reply(id, result).await
            }
            ToSupervisor::Status { id } => {
                self.reply(id, Ok(Reply::Status(machine.status()))).await
            }
            ToSupervisor::EventsStored { upto } => {
                machine.stored(upto);
                Some(())
            }
            ToSupervisor::Blob { id, blob, stream } => match machine.blob(&blob) {
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
            ToSupervisor::File { id, request } => self.file(id, request).await,
            ToSupervisor::Credit { stream, bytes } => {
                if let Some(outgoing) = self.outgoing.get_mut(&stream) {
                    outgoing.credit += bytes as usize;
                }
                self.pump(stream).await
            }
            ToSupervisor::End { stream } => self.end(stream).await,
            ToSupervisor::Shutdown { id } => {
                self.reply(id, Ok(Reply::Done)).await?;
                machine.die("exited");
                None
            }
        }
    }

    /// What came while everything stood still begins once it does not.
    async fn go_on(&mut self) -> Alive {
        if !self.machine.is_still() {
            for (id, command) in std::mem::take(&mut self.frozen) {
                self.exec(id, command).await?;
            }
        }
        Some(())
    }

    async fn exec(&mut self, id: RequestId, command: harvest_proto::bridge::Command) -> Alive {
        if self.machine.is_still() {
            self.frozen.push((id, command));
            return Some(());
        }
        let (stdout, stderr) = (command.stdout, command.stderr);
        if let Some(stream) = command.stdin {
            self.reply(id, Ok(Reply::Started { pid: 2, terminal: false })).await?;
            self.incoming
                .insert(stream, Incoming::Stdin { exec: id, stdout, stderr, bytes: Vec::new() });
            return Some(());
        }
        match commands::run(&command.argv, &self.machine) {
            Err(fault) => self.reply(id, Err(fault)).await,
            Ok(Ran::Sleeps) => {
                self.sleeping.push((id, stdout, stderr));
                self.reply(id, Ok(Reply::Started { pid: 2, terminal: false })).await
            }
            Ok(Ran::Ended { stdout: bytes, exit }) => {
                self.reply(id, Ok(Reply::Started { pid: 2, terminal: false })).await?;
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
        self.say(FromSupervisor::End { stream: stderr }).await?;
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
            FileRequest::Read { path, stream } => match self.machine.files().remove(&path) {
                None => self.reply(id, Err(commands::missing(&path))).await,
                Some(bytes) => {
                    self.reply(id, Ok(Reply::Done)).await?;
                    self.send(stream, bytes, None).await
                }
            },
            FileRequest::Stat { path, .. } => {
                let result = commands::stat(&self.machine, &path).map(Reply::Stat);
                self.reply(id, result).await
            }
            FileRequest::List { path, .. } => {
                let entries = commands::list(&self.machine, &path);
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
        self.say(FromSupervisor::Credit { stream, bytes: length }).await
    }

    async fn end(&mut self, stream: StreamId) -> Alive {
        match self.incoming.remove(&stream)? {
            Incoming::File { id, path, bytes } => {
                self.machine.write(&path, bytes);
                self.reply(id, Ok(Reply::Done)).await
            }
            // Only `cat` reads here: it says what it read.
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
        self.outgoing.insert(stream, Outgoing { bytes, credit, after });
        self.pump(stream).await
    }

    /// Sends what the receiver has granted.
    async fn pump(&mut self, stream: StreamId) -> Alive {
        while let Some(outgoing) = self.outgoing.get_mut(&stream) {
            if outgoing.bytes.is_empty() {
                let after = self.outgoing.remove(&stream).and_then(|outgoing| outgoing.after);
                self.say(FromSupervisor::End { stream }).await?;
                if let Some(after) = after {
                    self.say(after).await?;
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
