//! Timeouts, and the recovery of a session after a restart of the server.

use harvest_proto::{
    StateReason,
    event::{SnapshotKind, TurnOutcome},
};

use super::{
    Action, Activity, DiskOnStop, FreezeState, LinkState, SandboxState, Turn, decider::Decider,
};

impl Decider<'_> {
    pub(super) fn tick(&mut self) {
        let (now, timeouts) = (self.context.now, self.context.timeouts);
        if self.state.retry_at.take_if(|at| now >= *at).is_some() {
            self.retry_failed();
        }
        match &self.state.sandbox {
            SandboxState::Starting { since, .. } if now.since(*since) >= timeouts.boot => {
                let detail =
                    format!("the sandbox did not start within {} s", timeouts.boot.as_secs());
                self.failed_to_start(StateReason::StartTimeout, detail, true, timeouts.breaker);
            }
            SandboxState::Booting { since, .. } if now.since(*since) >= timeouts.boot => {
                let detail =
                    format!("the sandbox was not ready within {} s", timeouts.boot.as_secs());
                self.boot_failed(StateReason::BootTimeout, detail, true);
            }
            SandboxState::Booting { link: LinkState::Down { since }, .. }
            | SandboxState::Ready { link: LinkState::Down { since }, .. }
                if now.since(*since) >= timeouts.stale =>
            {
                self.sandbox_lost("unreachable");
            }
            SandboxState::Ready {
                activity: Activity::Turn(turn @ Turn { stopping: Some(since), .. }),
                ..
            } if now.since(*since) >= timeouts.stop => {
                let (why, reason) = (turn.stop_reason(), StateReason::Stopped.into());
                self.stop_abruptly(
                    TurnOutcome::Stopped,
                    why,
                    "the agent did not confirm the stop in time",
                    reason,
                );
            }
            SandboxState::Ready { activity: Activity::Turn(turn), .. }
                if now.since(turn.since) >= timeouts.turn =>
            {
                self.stop_overdue_turn()
            }
            SandboxState::Ready {
                ready_since,
                link: LinkState::Up,
                activity: Activity::Idle { .. },
                ..
            } if now.since(*ready_since) >= timeouts.lifetime && !self.context.busy => {
                self.stop_and_save(SnapshotKind::Pause, None, StateReason::Lifetime.into());
            }
            SandboxState::Ready {
                activity: Activity::Idle { freeze: FreezeState::Thawing { since }, .. },
                ..
            } if now.since(*since) >= timeouts.stale => {
                self.sandbox_lost("frozen");
            }
            SandboxState::Ready { .. } => self.tick_idle(),
            _ => {}
        }
    }

    fn stop_overdue_turn(&mut self) {
        if let SandboxState::Ready { activity: Activity::Turn(turn), .. } = &mut self.state.sandbox
        {
            turn.overdue = turn.stopping.is_none();
        }
        self.request_turn_stop();
    }

    fn tick_idle(&mut self) {
        let (now, timeouts) = (self.context.now, self.context.timeouts);
        let Some(since) = self.state.idle_since(self.context.busy) else { return };
        let idle = now.since(since);
        if idle >= timeouts.idle_pause {
            self.pause(StateReason::Idle);
        } else if timeouts.idle_freeze.is_some_and(|freeze| idle >= freeze)
            && matches!(
                self.state.sandbox,
                SandboxState::Ready {
                    activity: Activity::Idle { freeze: FreezeState::Running, .. },
                    ..
                }
            )
        {
            self.freeze();
        }
    }

    pub(super) fn recover(&mut self) {
        let now = self.context.now;
        match &mut self.state.sandbox {
            SandboxState::Absent | SandboxState::SaveUnknown { .. } => {}
            // What it was started from is no longer known, and it holds no work.
            SandboxState::Starting { .. } => self.stop_and_discard("restart".into()),
            SandboxState::Booting { sandbox, link, since, .. } => {
                (*link, *since) = (LinkState::Down { since: now }, now);
                self.actions.push(Action::Find { sandbox: sandbox.clone() });
            }
            SandboxState::Ready { sandbox, link, activity, .. } => {
                *link = LinkState::Down { since: now };
                if let Activity::Turn(Turn { stopping: Some(since), .. })
                | Activity::Idle { since, .. } = activity
                {
                    *since = now;
                }
                if let Activity::Idle { freeze: FreezeState::Thawing { since }, .. } = activity {
                    *since = now;
                }
                if let Activity::Turn(turn) = activity
                    && let Some(at) = turn.handed_over.take()
                {
                    turn.since = turn.since.after(now.since(at));
                }
                if let Activity::Saving(save) = activity {
                    save.deferred = true;
                }
                self.actions.push(Action::Find { sandbox: sandbox.clone() });
            }
            SandboxState::Stopping { sandbox, disk: DiskOnStop::Discard, .. } => {
                self.actions.push(Action::StopAndDiscard { sandbox: sandbox.clone() });
            }
            SandboxState::Stopping { sandbox, disk: DiskOnStop::Save(save), .. } => {
                self.actions.push(Action::StopAndSave {
                    sandbox: sandbox.clone(),
                    snapshot: save.snapshot.clone(),
                    kind: save.kind,
                })
            }
        }
        self.actions.push(Action::Review);
    }
}
