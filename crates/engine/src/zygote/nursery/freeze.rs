//! Work that stands still for a while, and goes on by itself when nobody renews that.

use std::{
    io,
    time::{Duration, Instant},
};

use harvest_proto::SandboxId;

use super::{Nursery, Told};
use crate::error::StepError;

// Nobody renews it: whoever asked for it may be dead.
pub(super) const FREEZE: Duration = Duration::from_secs(5);
// However long somebody wants it.
const LONGEST_FREEZE: Duration = Duration::from_secs(600);
// How long work may take to stand still: a process that waits for a busy disk cannot be stopped.
const STILL: Duration = Duration::from_secs(10);

impl Nursery {
    /// Lets work stand still; `Told::Still` follows. `None` when it does not run.
    pub(in crate::zygote) fn freeze(
        &mut self,
        id: &SandboxId,
        hold_millis: Option<u64>,
    ) -> Option<Result<(), StepError>> {
        // Who is being killed must not be caught by it: on cgroup v1 the frozen do not die.
        let live =
            self.live.get_mut(id).filter(|live| live.ended.is_none() && live.killed.is_none())?;
        let result = self.brake.freeze(id, &live.pidfd, true);
        if result.is_ok() {
            live.hold = hold_millis.map_or(FREEZE, Duration::from_millis).min(LONGEST_FREEZE);
            live.thaw_at = None;
            live.freezing_until = Some(Instant::now() + STILL);
        }
        Some(result)
    }

    /// Lets work go on. `None` when it does not run.
    pub(in crate::zygote) fn thaw(&mut self, id: &SandboxId) -> Option<Result<(), StepError>> {
        let live = self.live.get_mut(id)?;
        (live.thaw_at, live.freezing_until) = (None, None);
        Some(self.brake.freeze(id, &live.pidfd, false))
    }

    /// Looks whether those that are to stand still do.
    pub(super) fn look_at_freezing(&mut self, now: Instant) -> Vec<Told> {
        let mut told = Vec::new();
        for (id, live) in &mut self.live {
            let Some(until) = live.freezing_until else { continue };
            let result = if live.killed.is_some() || live.ended.is_some() {
                Err(StepError::new("freeze what has ended", io::ErrorKind::NotFound.into()))
            } else if self.brake.has_stopped(id, live.pid) {
                live.thaw_at = Some(now + live.hold);
                Ok(())
            } else if until <= now {
                let _ = self.brake.freeze(id, &live.pidfd, false);
                Err(StepError::new("make its work stand still", io::ErrorKind::TimedOut.into()))
            } else {
                continue;
            };
            live.freezing_until = None;
            told.push(Told::Still { id: id.clone(), result });
        }
        told
    }
}
