//! What the supervisor is told about the session's agent.

use harvest_proto::{
    AgentName,
    bridge::{AgentLaunch, ModelProtocol, RestartPolicy},
};

use super::Driver;
use crate::timeouts::millis;

impl Driver {
    /// With `resume` the disk holds the agent's conversation.
    pub(super) fn launch(&self, resume: bool) -> AgentLaunch {
        let session = &self.record.session;
        AgentLaunch {
            name: session.agent,
            conversation: self.record.conversation.clone(),
            resume,
            model: session.model.as_ref().and_then(|model| model.name()).map(str::to_owned),
            protocol: protocol(session.agent),
            questions: !self.record.no_questions,
            silence_millis: millis(self.shared.timeouts.silence),
            restarts: RestartPolicy::default(),
        }
    }
}

/// The protocol in which an agent speaks to its model service.
fn protocol(agent: AgentName) -> ModelProtocol {
    match agent {
        AgentName::Claude | AgentName::Opencode | AgentName::Scripted => ModelProtocol::Messages,
        AgentName::Codex => ModelProtocol::Responses,
    }
}
