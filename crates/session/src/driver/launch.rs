//! What the supervisor is told about the session's agent.

use harvest_proto::{
    UpstreamKind,
    bridge::{AgentLaunch, RestartPolicy},
    upstreams::upstream_of,
};

use super::Driver;
use crate::timeouts::millis;

impl Driver {
    /// With `resume` the disk holds the agent's conversation.
    pub(super) fn launch(&self, resume: bool) -> AgentLaunch {
        let session = &self.record.session;
        let upstream = upstream_of(session.agent, session.model.as_ref());
        // A service that is no longer configured is refused at the door.
        let kind = self.shared.sandboxes.doors.upstream_kind(&upstream);
        let kind = kind.unwrap_or(UpstreamKind::Scripted);
        AgentLaunch {
            name: session.agent,
            conversation: self.record.conversation.clone(),
            resume,
            model: session.model.as_ref().and_then(|model| model.name()).map(str::to_owned),
            protocol: session.agent.protocol(kind),
            upstream,
            questions: !self.record.no_questions,
            silence_millis: millis(self.shared.timeouts.silence),
            restarts: RestartPolicy::default(),
        }
    }
}
