//! Freezes a sandbox's work for a limited time: without renewal it is thawed, because the client
//! that asked may be dead.

use std::{
    io,
    time::{Duration, Instant},
};

use harvest_proto::SandboxId;

use super::{Event, SandboxTable};
use crate::{error::StepError, process::is_exiting};

// How long a freeze lasts without renewal: the client that asked may be dead.
pub(super) const FREEZE_HOLD: Duration = Duration::from_secs(5);
// Upper bound for a requested duration: a server that shuts down freezes its turns for the next.
const MAX_FREEZE_HOLD: Duration = Duration::from_secs(30 * 24 * 60 * 60);
// How long freezing may take: a process that waits for a busy disk cannot be stopped.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);

impl SandboxTable {
    /// Freezes a sandbox's work; `Event::FreezeDone` follows. `None` when it is not running.
    pub(in crate::zygote) fn freeze(
        &mut self,
        id: &SandboxId,
        hold_millis: Option<u64>,
    ) -> Option<Result<(), StepError>> {
        // A sandbox being killed must not be frozen: frozen processes on cgroup v1 do not die.
        let live = self.live.get_mut(id).filter(|live| {
            live.ended.is_none() && live.killed.is_none() && !is_exiting(live.pid)
        })?;
        let result = self.cgroups.freeze(id, &live.cgroup, &live.pidfd, true);
        if result.is_ok() {
            live.hold = hold_millis.map_or(FREEZE_HOLD, Duration::from_millis).min(MAX_FREEZE_HOLD);
            live.thaw_at = None;
            live.freezing_until = Some(Instant::now() + FREEZE_TIMEOUT);
        }
        Some(result)
    }

    /// Thaws a sandbox's work. `None` when it is not running.
    pub(in crate::zygote) fn thaw(&mut self, id: &SandboxId) -> Option<Result<(), StepError>> {
        let live = self.live.get_mut(id)?;
        (live.thaw_at, live.freezing_until) = (None, None);
        Some(self.cgroups.freeze(id, &live.cgroup, &live.pidfd, false))
    }

    /// Checks whether requested freezes are complete.
    pub(super) fn poll_freezing(&mut self, now: Instant) -> Vec<Event> {
        let mut events = Vec::new();
        for (id, live) in &mut self.live {
            let Some(until) = live.freezing_until else { continue };
            let result = if live.killed.is_some() || live.ended.is_some() {
                Err(StepError::new("freeze an ended sandbox", io::ErrorKind::NotFound))
            } else if self.cgroups.is_frozen(id, &live.cgroup, live.pid) {
                live.thaw_at = Some(now + live.hold);
                Ok(())
            } else if until <= now {
                let _ = self.cgroups.freeze(id, &live.cgroup, &live.pidfd, false);
                Err(StepError::new("freeze its processes", io::ErrorKind::TimedOut))
            } else {
                continue;
            };
            live.freezing_until = None;
            events.push(Event::FreezeDone { id: id.clone(), result });
        }
        events
    }
}
