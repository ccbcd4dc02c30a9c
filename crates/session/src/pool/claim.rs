//! A session takes a sandbox of the pool. The transaction that inserts the session deletes the
//! member's row, so a killed server leaves the one or the other. The session begins where its
//! driver would be after a restart in the middle of a boot: it adopts the sandbox, thaws it, opens
//! its door with its own policy, and sends the boot order that assigns the sandbox.

use std::sync::Arc;

use harvest_proto::{
    EventBody, SessionId, Timestamp,
    bridge::{BootStart, OutboxEvent},
    event::StartWay,
};
use harvest_store::{PoolMember, Write};

use super::{Pool, spec::EPOCH};
use crate::{
    agent_launch::agent_info,
    decide::{LinkState, SandboxState, State},
    sandboxes::Created,
    timeouts::millis,
    wall_clock::now,
};

/// A member that a session is about to take: it is in no list any more. Unless the session is
/// inserted, the sandbox ends.
pub(crate) struct ClaimedMember {
    pub(super) pool: Arc<Pool>,
    pub(super) member: PoolMember,
    pub(super) source_name: String,
    pub(super) events: Arc<[OutboxEvent]>,
    pub(super) warnings: Arc<[String]>,
    /// When the session asked for it, by the monotonic clock.
    pub(super) asked_at: Timestamp,
    pub(super) inserted: bool,
}

impl ClaimedMember {
    /// The id of the session that takes it.
    pub(crate) fn session(&self) -> &SessionId {
        &self.member.session
    }

    pub(crate) fn conversation(&self) -> String {
        self.member.conversation.clone()
    }

    /// The session's first state.
    pub(crate) fn state(&self) -> State {
        let since = self.pool.clock.now();
        let sandbox = SandboxState::Booting {
            sandbox: self.member.sandbox.clone(),
            start: BootStart::Image,
            link: LinkState::Down { since },
            since,
            booted: false,
        };
        State { epoch: EPOCH, sandbox, ..State::new(None, false) }
    }

    /// What the transaction that inserts the session writes besides.
    pub(crate) fn writes(&self) -> Vec<Write> {
        let at = now();
        let started = EventBody::SandboxStarted {
            sandbox: self.member.sandbox.clone(),
            epoch: EPOCH,
            from: self.source_name.clone(),
            way: StartWay::Pool,
            millis: millis(self.pool.clock.now().since(self.asked_at)),
        };
        let started = [started].into_iter().chain(Created::events(&self.warnings));
        let started = started.map(|body| Write::Event { at, turn: None, body: Box::new(body) });
        let mut writes = vec![Write::PoolClaim];
        writes.extend(started);
        for booted in self.events.iter() {
            // What went on in the pool took none of the session's time.
            if matches!(booted.body, EventBody::BootPhase { .. }) {
                writes.push(Write::OutboxSkip { epoch: EPOCH, number: booted.number });
                continue;
            }
            let info = agent_info(&booted.body);
            writes.extend(info.map(|info| Write::AgentInfo(Box::new(info))));
            let event = Box::new(OutboxEvent { at, ..booted.clone() });
            writes.push(Write::Outbox { epoch: EPOCH, event });
        }
        writes
    }

    /// The session is inserted: the sandbox is its own.
    pub(crate) fn inserted(mut self) {
        self.inserted = true;
        self.pool.state().claimed += 1;
    }
}

impl Drop for ClaimedMember {
    fn drop(&mut self) {
        if !self.inserted {
            let (pool, member) = (Arc::clone(&self.pool), self.member.clone());
            self.pool.context.tasks.spawn(async move { pool.remove(&member).await });
        }
    }
}
