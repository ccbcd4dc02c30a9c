//! A command that runs while its streams move: outputs come as they are written, input goes as it is
//! read, from another thread if need be. Neither side ever holds more than the credit it granted, so a
//! slow reader stalls the command and nothing else.

use std::{
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use harvest_proto::bridge::{
    Command, Exit, Frame, FromSupervisor, INITIAL_CREDIT_BYTES, MAX_DATA_BYTES, RequestId,
    StreamId, ToSupervisor,
};

use super::{Guest, GuestError, Output};

/// Something a command did.
#[derive(Debug)]
pub enum Heard {
    /// It wrote these bytes.
    Output(Output, Vec<u8>),
    /// It ended; both outputs have been told whole.
    Exited {
        /// How.
        exit: Exit,
        /// From start to end.
        millis: u64,
    },
}

/// A command that runs. Dropping it closes the bridge, which kills the command and all it started.
pub struct Live {
    guest: Guest,
    exec: RequestId,
    stdout: StreamId,
    stderr: StreamId,
    /// What was told last, to be granted again once the next is asked for.
    told: Option<(StreamId, usize)>,
    input: Option<Arc<Shared>>,
}

/// The command's standard input; for another thread, because who writes may wait.
pub struct Input {
    shared: Arc<Shared>,
    socket: UnixStream,
}

/// What both ends know of the input.
#[derive(Debug)]
struct Shared {
    stream: StreamId,
    room: Mutex<Room>,
    changed: Condvar,
    /// Held while a frame is written: two threads write to one socket. Nobody waits for it long, since
    /// the supervisor takes every frame of a running command without waiting for anything.
    writing: Mutex<()>,
}

#[derive(Debug)]
struct Room {
    credit: u64,
    /// The command has ended: nobody reads any more.
    over: bool,
}

impl Guest {
    /// Starts a command and hands over its outputs and, when wanted, its input. Stream numbers in
    /// `command` are chosen here.
    ///
    /// # Errors
    /// When it cannot be started or the bridge breaks.
    pub fn live(
        mut self,
        mut command: Command,
        with_input: bool,
    ) -> Result<(Live, Option<Input>), GuestError> {
        let exec = self.request();
        let (stdout, stderr) = (self.stream(), self.stream());
        let stdin = with_input.then(|| self.stream());
        (command.stdout, command.stderr, command.stdin) = (stdout, stderr, stdin);
        self.say(&ToSupervisor::Exec { id: exec, command: Box::new(command) })?;
        loop {
            if let Frame::Control(FromSupervisor::Reply { id, result }) = self.hear()?
                && id == exec
            {
                result?;
                break;
            }
        }
        let shared = stdin.map(|stream| {
            let room = Room { credit: INITIAL_CREDIT_BYTES.into(), over: false };
            let (room, changed, writing) = (Mutex::new(room), Condvar::new(), Mutex::new(()));
            Arc::new(Shared { stream, room, changed, writing })
        });
        let input = match &shared {
            Some(shared) => {
                let socket = self.socket.try_clone().map_err(GuestError::Broken)?;
                Some(Input { shared: Arc::clone(shared), socket })
            }
            None => None,
        };
        Ok((Live { guest: self, exec, stdout, stderr, told: None, input: shared }, input))
    }
}

impl Live {
    /// Waits for what the command does next. What was told before may be sent again from now on.
    ///
    /// # Errors
    /// When the bridge breaks: its sandbox or the supervisor in it is gone.
    pub fn listen(&mut self) -> Result<Heard, GuestError> {
        if let Some((stream, bytes)) = self.told.take() {
            let _alone = self.input.as_deref().map(Shared::write_alone);
            self.guest.grant(stream, bytes)?;
        }
        loop {
            match self.guest.hear()? {
                Frame::Data { stream, bytes } if stream == self.stdout || stream == self.stderr => {
                    self.told = Some((stream, bytes.len()));
                    let output =
                        if stream == self.stdout { Output::Stdout } else { Output::Stderr };
                    return Ok(Heard::Output(output, bytes));
                }
                Frame::Control(FromSupervisor::Credit { stream, bytes }) => {
                    if let Some(input) = self.input.as_ref().filter(|input| input.stream == stream)
                    {
                        input.change(|room| room.credit += u64::from(bytes));
                    }
                }
                Frame::Control(FromSupervisor::Exited { exec, exit, millis })
                    if exec == self.exec =>
                {
                    return Ok(Heard::Exited { exit, millis });
                }
                _ => {}
            }
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // Whoever writes to the command may hold the socket still.
        let _ = self.guest.socket.shutdown(Shutdown::Both);
        if let Some(input) = &self.input {
            input.change(|room| room.over = true);
        }
    }
}

impl Input {
    /// Sends all of these bytes, as far as the command goes on; false when nobody will read them.
    ///
    /// # Errors
    /// When the bridge breaks.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<bool, GuestError> {
        while !bytes.is_empty() {
            let Some(may) = self.shared.spend(bytes.len().min(MAX_DATA_BYTES)) else {
                return Ok(false);
            };
            let (now, rest) = bytes.split_at(may);
            let frame: Frame<ToSupervisor> =
                Frame::Data { stream: self.shared.stream, bytes: now.to_vec() };
            self.send(&frame)?;
            bytes = rest;
        }
        Ok(true)
    }

    /// Says that no more comes.
    ///
    /// # Errors
    /// When the bridge breaks.
    pub fn end(self) -> Result<(), GuestError> {
        self.send(&Frame::Control(ToSupervisor::End { stream: self.shared.stream }))
    }

    fn send(&self, frame: &Frame<ToSupervisor>) -> Result<(), GuestError> {
        let _alone = self.shared.write_alone();
        let mut socket = &self.socket;
        std::io::Write::write_all(&mut socket, &frame.encode()).map_err(GuestError::Broken)
    }
}

impl Shared {
    fn write_alone(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, how: impl FnOnce(&mut Room)) {
        how(&mut self.room.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits for room and takes at most `wanted` of it; `None` when the command is over.
    fn spend(&self, wanted: usize) -> Option<usize> {
        let room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.changed.wait_while(room, |room| room.credit == 0 && !room.over);
        let mut room = wait.unwrap_or_else(PoisonError::into_inner);
        let may = usize::try_from(room.credit).unwrap_or(usize::MAX).min(wanted);
        room.credit -= may as u64;
        (!room.over).then_some(may)
    }
}
