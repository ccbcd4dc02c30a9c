//! The way to a driver, for everybody else of the server.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use harvest_store::{NewPrompt, Write};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    bridge::Bridge,
    decide::{Input, State},
    error::SessionError,
};

/// What others ask of a driver.
pub(crate) enum Command {
    Prompt {
        new: Box<NewPrompt>,
        now: bool,
        /// What is written with it.
        also: Vec<Write>,
        reply: Reply<()>,
    },
    Ask {
        input: Box<Input>,
        reply: Reply<()>,
    },
    Bridge {
        reply: oneshot::Sender<Option<Bridge>>,
    },
    Delete {
        reply: Reply<()>,
    },
    /// Somebody begins to use the machine.
    Used,
    /// Somebody has used it.
    Touched,
}

pub(crate) type Reply<T> = oneshot::Sender<Result<T, SessionError>>;

/// A way to a driver.
#[derive(Clone)]
pub(crate) struct Handle {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(crate) view: watch::Receiver<State>,
    pub(super) execs: Arc<AtomicUsize>,
}

impl Handle {
    pub(crate) async fn ask(&self, input: Input) -> Result<(), SessionError> {
        self.call(|reply| Command::Ask { input: Box::new(input), reply }).await
    }

    pub(crate) async fn call<T>(
        &self,
        make: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, SessionError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(make(reply)).map_err(|_| SessionError::Stopped)?;
        answer.await.map_err(|_| SessionError::Stopped)?
    }

    /// Whether both lead to the same driver.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.commands.same_channel(&other.commands)
    }

    /// Nobody listens any more.
    pub(crate) fn is_over(&self) -> bool {
        self.commands.is_closed()
    }

    pub(crate) async fn bridge(&self) -> Option<Bridge> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Bridge { reply }).ok()?;
        answer.await.ok()?
    }

    /// Waits until the session stands so.
    pub(crate) async fn until(
        &self,
        so: impl FnMut(&State) -> bool,
    ) -> Result<State, SessionError> {
        let mut view = self.view.clone();
        let state = view.wait_for(so).await.map_err(|_| SessionError::Stopped)?.clone();
        Ok(state)
    }

    /// While this lives, the machine is not idle.
    pub(crate) fn busy(&self) -> Busy {
        self.execs.fetch_add(1, Ordering::SeqCst);
        let _ = self.commands.send(Command::Used);
        Busy { handle: self.clone() }
    }
}

/// Somebody uses the machine.
pub(crate) struct Busy {
    handle: Handle,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.handle.execs.fetch_sub(1, Ordering::SeqCst);
        let _ = self.handle.commands.send(Command::Touched);
    }
}
