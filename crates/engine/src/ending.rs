//! Waits for the end of a sandbox without a thread for each: the zygote is asked, and its answer can be waited for
//! beside other things. Whoever has nothing else to do uses [`Engine::wait`].

use std::{os::fd::OwnedFd, thread, time::Duration};

use harvest_proto::SandboxId;

use crate::{
    Engine, EngineError,
    sandbox::State,
    zygote::{
        client,
        protocol::{Answer, Request},
    },
};

/// How long to wait before the next zygote is asked: one that dies over the question must not keep us busy.
pub const ASK_AGAIN: Duration = Duration::from_millis(100);

/// What is known of a sandbox's end.
#[derive(Debug)]
pub enum Ending {
    /// It has ended, for this reason.
    Over(String),
    /// The zygote was asked. This socket is readable as soon as it has answered, or is no more.
    Asked(OwnedFd),
}

impl Engine {
    /// Asks for the end of a sandbox, and does not wait for it.
    ///
    /// # Errors
    /// When the zygote cannot be reached.
    pub fn ending(&self, id: &SandboxId) -> Result<Ending, EngineError> {
        self.store.wake()?;
        if let Some(State::Ended { reason, .. }) = State::read(&self.home, id)? {
            return Ok(Ending::Over(reason));
        }
        Ok(Ending::Asked(client::begin(&self.config, &Request::Wait { id: id.clone() })?))
    }

    /// What a zygote answered that was asked for the end of this sandbox: why it ended, or `None` when that zygote is
    /// no more and the next one is to be asked. Blocks until the socket is readable.
    ///
    /// # Errors
    /// When there is no such sandbox.
    pub fn ended(&self, id: &SandboxId, asked: &OwnedFd) -> Result<Option<String>, EngineError> {
        match client::answer(asked)? {
            Some(Answer::Ended { reason }) => Ok(Some(reason)),
            Some(Answer::Outdated) => {
                client::await_end(asked);
                Ok(None)
            }
            None => Ok(None),
            Some(_) => Err(EngineError::NotRunning { sandbox: id.clone() }),
        }
    }

    /// Blocks until a sandbox has ended and says why.
    ///
    /// # Errors
    /// When there is no such sandbox.
    pub fn wait(&self, id: &SandboxId) -> Result<String, EngineError> {
        loop {
            match self.ending(id)? {
                Ending::Over(reason) => return Ok(reason),
                Ending::Asked(asked) => {
                    if let Some(reason) = self.ended(id, &asked)? {
                        return Ok(reason);
                    }
                    thread::sleep(ASK_AGAIN);
                }
            }
        }
    }
}
