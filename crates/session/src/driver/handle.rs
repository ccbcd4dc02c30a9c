//! The handle by which the rest of the server reaches a driver.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use harvest_proto::api::Prompt;
use harvest_store::{NewPrompt, Write};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    bridge::Bridge,
    decide::{Input, State},
    error::SessionError,
};

// A driver that exits needs microseconds; one that got work meanwhile stays.
const LEAVE_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) enum Command {
    Prompt(Box<PromptCommand>),
    Apply {
        input: Box<Input>,
        /// Written in the same transaction.
        writes: Vec<Write>,
        reply: Reply<()>,
    },
    Bridge {
        reply: oneshot::Sender<Option<Bridge>>,
    },
    Delete {
        reply: Reply<()>,
    },
    /// A command, terminal or file transfer begins in the sandbox.
    UseBegan,
    /// It has ended.
    UseEnded,
    /// The session rests: the driver exits.
    Exit,
}

pub(crate) struct PromptCommand {
    pub(crate) new: NewPrompt,
    /// Stop the turn in progress and run this prompt next.
    pub(crate) now: bool,
    /// Written in the same transaction.
    pub(crate) writes: Vec<Write>,
    pub(crate) reply: Reply<Prompt>,
}

pub(crate) type Reply<T> = oneshot::Sender<Result<T, SessionError>>;

#[derive(Clone)]
pub(crate) struct DriverHandle {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(crate) view: watch::Receiver<State>,
    pub(super) execs: Arc<AtomicUsize>,
    pub(super) rest: Arc<Rest>,
}

/// Whether a driver could exit. Loading it again costs one read of the store.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// The session has nothing to do.
    pub(super) resting: AtomicBool,
    /// Commands that the driver has not handled yet.
    pub(super) pending: AtomicUsize,
    /// The driver was told to exit.
    pub(super) leaving: AtomicBool,
}

impl DriverHandle {
    /// Tells a driver to exit if its session rests and no other handle can send it a command. The
    /// caller prevents that one is cloned meanwhile.
    pub(crate) fn exit_if_resting(&self) {
        let only_handle = self.commands.strong_count() == 1;
        let unused = self.execs.load(Ordering::SeqCst) == 0;
        let no_command = self.rest.pending.load(Ordering::SeqCst) == 0;
        if only_handle && unused && no_command && self.rest.resting.load(Ordering::SeqCst) {
            self.rest.leaving.store(true, Ordering::SeqCst);
            let _ = self.send(Command::Exit);
        }
    }

    /// Waits while the driver exits. Returns at once when it does not.
    pub(crate) async fn wait_while_leaving(&self) {
        while self.rest.leaving.load(Ordering::SeqCst) && !self.is_closed() {
            let _ = tokio::time::timeout(LEAVE_INTERVAL, self.commands.closed()).await;
        }
    }

    fn send(&self, command: Command) -> Result<(), SessionError> {
        self.rest.pending.fetch_add(1, Ordering::SeqCst);
        self.commands.send(command).map_err(|_| SessionError::Stopped)
    }

    pub(crate) async fn apply(&self, input: Input) -> Result<(), SessionError> {
        self.apply_with(input, Vec::new()).await
    }

    pub(crate) async fn apply_with(
        &self,
        input: Input,
        writes: Vec<Write>,
    ) -> Result<(), SessionError> {
        self.call(|reply| Command::Apply { input: Box::new(input), writes, reply }).await
    }

    pub(crate) async fn call<T>(
        &self,
        make: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, SessionError> {
        let (reply, answer) = oneshot::channel();
        self.send(make(reply))?;
        answer.await.map_err(|_| SessionError::Stopped)?
    }

    pub(crate) fn same_driver(&self, other: &Self) -> bool {
        self.commands.same_channel(&other.commands)
    }

    /// Whether the driver has exited.
    pub(crate) fn is_closed(&self) -> bool {
        self.commands.is_closed()
    }

    pub(crate) async fn bridge(&self) -> Option<Bridge> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Bridge { reply }).ok()?;
        answer.await.ok()?
    }

    /// Waits until the state fulfils a condition.
    pub(crate) async fn wait_for(
        &self,
        condition: impl FnMut(&State) -> bool,
    ) -> Result<State, SessionError> {
        let mut view = self.view.clone();
        let state = view.wait_for(condition).await.map_err(|_| SessionError::Stopped)?.clone();
        Ok(state)
    }

    /// The sandbox counts as in use until the guard is dropped.
    pub(crate) fn busy(&self) -> BusyGuard {
        self.execs.fetch_add(1, Ordering::SeqCst);
        let _ = self.send(Command::UseBegan);
        BusyGuard { handle: self.clone() }
    }
}

pub(crate) struct BusyGuard {
    handle: DriverHandle,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.handle.execs.fetch_sub(1, Ordering::SeqCst);
        let _ = self.handle.send(Command::UseEnded);
    }
}
