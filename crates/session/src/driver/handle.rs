//! The handle by which the rest of the server reaches a driver.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use harvest_proto::api::Prompt;
use harvest_store::{NewPrompt, Write};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    bridge::Bridge,
    decide::{Input, State},
    error::SessionError,
};

pub(crate) enum Command {
    Prompt(Box<PromptCommand>),
    Apply {
        input: Box<Input>,
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
}

pub(crate) struct PromptCommand {
    pub(crate) new: NewPrompt,
    /// For a session that has none.
    pub(crate) title: String,
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
}

impl DriverHandle {
    pub(crate) async fn apply(&self, input: Input) -> Result<(), SessionError> {
        self.call(|reply| Command::Apply { input: Box::new(input), reply }).await
    }

    pub(crate) async fn call<T>(
        &self,
        make: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, SessionError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(make(reply)).map_err(|_| SessionError::Stopped)?;
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
        self.commands.send(Command::Bridge { reply }).ok()?;
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
        let _ = self.commands.send(Command::UseBegan);
        BusyGuard { handle: self.clone() }
    }
}

pub(crate) struct BusyGuard {
    handle: DriverHandle,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.handle.execs.fetch_sub(1, Ordering::SeqCst);
        let _ = self.handle.commands.send(Command::UseEnded);
    }
}
