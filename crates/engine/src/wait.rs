//! Waits for the end of a sandbox without one thread per sandbox: the zygote's answer arrives on a
//! socket that can be polled. [`Engine::wait`] is the blocking form.

use std::{os::fd::OwnedFd, thread, time::Duration};

use harvest_proto::SandboxId;

use crate::{
    Engine, EngineError,
    sandbox_record::RecordedState,
    zygote::{
        client,
        protocol::{Answer, Request},
    },
};

/// Delay before asking the next zygote: one that keeps dying must not cause a busy loop.
pub const WAIT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// State of a wait for a sandbox's end.
#[derive(Debug)]
pub enum EndWait {
    /// The sandbox has ended, for this reason.
    Ended(String),
    /// The zygote was asked. This socket becomes readable when it has answered or exited.
    Pending(OwnedFd),
}

impl Engine {
    /// Starts waiting for the end of a sandbox, without blocking.
    ///
    /// # Errors
    /// When the zygote cannot be reached.
    pub fn wait_begin(&self, id: &SandboxId) -> Result<EndWait, EngineError> {
        self.store.ensure_mounted()?;
        if let Some(RecordedState::Ended { reason, .. }) = RecordedState::read(&self.disk.home, id)?
        {
            return Ok(EndWait::Ended(reason));
        }
        Ok(EndWait::Pending(client::send_request(&self.config, &Request::Wait { id: id.clone() })?))
    }

    /// The zygote's answer: why the sandbox ended, or `None` when that zygote exited and the next
    /// one is to be asked. Blocks until the socket is readable.
    ///
    /// # Errors
    /// When there is no such sandbox.
    pub fn wait_finish(
        &self,
        id: &SandboxId,
        pending: &OwnedFd,
    ) -> Result<Option<String>, EngineError> {
        match client::receive_answer(pending)? {
            Some(Answer::Ended { reason }) => Ok(Some(reason)),
            Some(Answer::Outdated) => {
                client::wait_for_exit(pending);
                Ok(None)
            }
            None => Ok(None),
            Some(_) => Err(EngineError::NotRunning { sandbox: id.clone() }),
        }
    }

    /// Blocks until a sandbox has ended; returns the reason.
    ///
    /// # Errors
    /// When there is no such sandbox.
    pub fn wait(&self, id: &SandboxId) -> Result<String, EngineError> {
        loop {
            match self.wait_begin(id)? {
                EndWait::Ended(reason) => return Ok(reason),
                EndWait::Pending(pending) => {
                    if let Some(reason) = self.wait_finish(id, &pending)? {
                        return Ok(reason);
                    }
                    thread::sleep(WAIT_RETRY_DELAY);
                }
            }
        }
    }
}
