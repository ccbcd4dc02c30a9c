//! What a turn has come to so far, and its result.

use std::time::Duration;

use harvest_proto::TurnReason;
use tokio::time::Instant;

use crate::agents::{AgentProcess, SILENT_TURN, Signal};

/// Time for an interrupted agent to save its conversation; usually it takes 50 ms.
pub(super) const INTERRUPT_TIMEOUT: Duration = Duration::from_secs(10);

/// A turn that cannot succeed any more. Its agent is interrupted.
pub(super) struct Failing {
    pub(super) why: TurnReason,
    pub(super) error: String,
    /// When the agent is killed.
    pub(super) deadline: Instant,
}

impl Failing {
    pub(super) fn begin(agent: &mut AgentProcess, why: TurnReason, error: String) -> Self {
        agent.interrupt();
        Self { why, error, deadline: Instant::now() + INTERRUPT_TIMEOUT }
    }
}

/// What a turn has come to so far.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) failing: Option<Failing>,
    /// Whether the agent has said or done anything.
    pub(super) spoke: bool,
    /// The result of a turn that ends with the sync.
    pub(super) finished: Option<Result<(), TurnError>>,
}

impl Progress {
    /// The result of the turn, if it is among the signals.
    pub(super) fn result_in(
        &mut self,
        signals: Vec<Signal>,
        agent: &mut AgentProcess,
    ) -> Option<Result<(), TurnError>> {
        for signal in signals {
            match signal {
                Signal::Done(result) => return Some(self.result(result)),
                Signal::Repeated => return Some(self.repeated()),
                Signal::Unrecoverable(reason) if self.failing.is_none() => {
                    self.failing = Some(Failing::begin(agent, TurnReason::KeyRejected, reason));
                }
                _ => {}
            }
        }
        None
    }

    // The prompt was executed before, unless this turn was interrupted as it failed.
    fn repeated(&mut self) -> Result<(), TurnError> {
        self.failing.take().map_or(Ok(()), |failing| Err((failing.why, failing.error)))
    }

    fn result(&mut self, result: Result<(), String>) -> Result<(), TurnError> {
        let result = match self.failing.take() {
            Some(failing) => return Err((failing.why, failing.error)),
            None if self.spoke => result,
            None => result.and_then(|()| Err(SILENT_TURN.to_owned())),
        };
        result.map_err(|error| (TurnReason::AgentFailed, error))
    }
}

/// Why a turn failed, for programs and for people.
pub(super) type TurnError = (TurnReason, String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_turn_fails_even_if_repeated() {
        assert_eq!(Progress::default().repeated(), Ok(()));
        let (why, deadline) = (TurnReason::KeyRejected, Instant::now());
        let failing = Failing { why, error: "401".into(), deadline };
        let mut progress = Progress { failing: Some(failing), spoke: true, finished: None };
        assert_eq!(progress.repeated(), Err((TurnReason::KeyRejected, "401".into())));
    }
}
