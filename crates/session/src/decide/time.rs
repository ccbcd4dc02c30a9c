//! What time brings about, and what a server does first that finds a session another one left.

use harvest_proto::event::{SnapshotKind, TurnOutcome};

use super::{Action, Ending, Link, Machine, Still, Turn, Work, step::Deciding};

impl Deciding<'_> {
    pub(super) fn tick(&mut self) {
        let (now, clocks) = (self.moment.now, self.moment.clocks);
        match &self.state.machine {
            Machine::Starting { since, .. } if now.since(*since) >= clocks.boot => {
                let detail = format!("not started after {} s", clocks.boot.as_secs());
                self.failed_to_start("start_timeout", detail, true);
            }
            Machine::Booting { since, .. } if now.since(*since) >= clocks.boot => {
                let detail = format!("not ready after {} s", clocks.boot.as_secs());
                self.boot_failed("boot_timeout", detail);
            }
            Machine::Booting { link: Link::Down { since }, .. }
            | Machine::Ready { link: Link::Down { since }, .. }
                if now.since(*since) >= clocks.stale =>
            {
                self.lost("unreachable");
            }
            Machine::Ready { work: Work::Turn(Turn { stopping: Some(since), .. }), .. }
                if now.since(*since) >= clocks.stop =>
            {
                self.end_turn_with_machine(
                    TurnOutcome::Stopped,
                    "the stop was not confirmed",
                    "stopped",
                );
            }
            Machine::Ready { work: Work::Turn(turn), .. }
                if now.since(turn.since) >= clocks.turn =>
            {
                self.fence()
            }
            Machine::Ready { born, link: Link::Up, work: Work::Idle { .. }, .. }
                if now.since(*born) >= clocks.lifetime && !self.moment.busy =>
            {
                self.end_kept(SnapshotKind::Pause, None, "lifetime");
            }
            Machine::Ready { work: Work::Idle { still: Still::Thawing { since }, .. }, .. }
                if now.since(*since) >= clocks.stale =>
            {
                self.lost("frozen");
            }
            Machine::Ready { .. } => self.tick_idle(),
            _ => {}
        }
    }

    fn tick_idle(&mut self) {
        let (now, clocks) = (self.moment.now, self.moment.clocks);
        let Some(since) = self.state.idle_since(self.moment.busy) else { return };
        let idle = now.since(since);
        if idle >= clocks.idle_pause {
            self.rest("idle");
        } else if clocks.idle_freeze.is_some_and(|freeze| idle >= freeze)
            && matches!(
                self.state.machine,
                Machine::Ready { work: Work::Idle { still: Still::Awake, .. }, .. }
            )
        {
            self.freeze();
        }
    }

    pub(super) fn pick_up(&mut self) {
        let now = self.moment.now;
        match &mut self.state.machine {
            Machine::Absent | Machine::Held { .. } => {}
            // Nobody knows what it was started from any more, and nothing was done in it.
            Machine::Starting { .. } => self.discard("restart"),
            Machine::Booting { sandbox, link, since, .. } => {
                (*link, *since) = (Link::Down { since: now }, now);
                self.actions.push(Action::Find { sandbox: sandbox.clone() });
            }
            Machine::Ready { sandbox, link, work, .. } => {
                *link = Link::Down { since: now };
                if let Work::Turn(Turn { stopping: Some(since), .. }) | Work::Idle { since, .. } =
                    work
                {
                    *since = now;
                }
                if let Work::Idle { still: Still::Thawing { since }, .. } = work {
                    *since = now;
                }
                if let Work::Saving(save) = work {
                    save.later = true;
                }
                self.actions.push(Action::Find { sandbox: sandbox.clone() });
            }
            Machine::Ending { sandbox, how: Ending::Discard, .. } => {
                self.actions.push(Action::End { sandbox: sandbox.clone() });
            }
            Machine::Ending { sandbox, how: Ending::Keep(keep), .. } => {
                self.actions.push(Action::EndKept {
                    sandbox: sandbox.clone(),
                    snapshot: keep.snapshot.clone(),
                    kind: keep.kind,
                })
            }
        }
        self.actions.push(Action::Review);
    }
}
