//! What the supervisor is told about the session's agent.

use harvest_proto::{
    AgentName, ModelRef, UpstreamKind,
    api::Prompt,
    bridge::{AgentLaunch, RestartPolicy},
};

use super::Driver;
use crate::{agents::UnknownAgent, timeouts::millis};

impl Driver {
    /// With `resume` the disk holds the agent's conversation. A prompt may have a model and an
    /// effort of its own.
    pub(super) fn launch(
        &self,
        resume: bool,
        prompt: Option<&Prompt>,
    ) -> Result<AgentLaunch, UnknownAgent> {
        let session = &self.record.session;
        let own = prompt.and_then(|prompt| prompt.model.as_ref());
        let model = own.or(session.model.as_ref());
        let agents = &self.shared.sandboxes.agents;
        let upstream = agents.upstream_of(&session.agent, model)?;
        let model = model.and_then(|model| model_name(&session.agent, model));
        // A service that is no longer configured is refused at the door.
        let kind = self.shared.sandboxes.doors.upstream_kind(&upstream);
        let kind = kind.unwrap_or(UpstreamKind::Scripted);
        Ok(AgentLaunch {
            name: session.agent.clone(),
            program: agents.program(&session.agent, &upstream, model.as_deref()),
            conversation: self.record.conversation.clone(),
            resume,
            model,
            effort: prompt.and_then(|prompt| prompt.effort).or(session.effort),
            protocol: session.agent.protocol(kind),
            upstream,
            questions: !self.record.no_questions,
            silence_millis: millis(self.shared.timeouts.silence),
            restarts: RestartPolicy::default(),
        })
    }
}

/// The model that the agent requests. The scripted model has no name of its own; Codex offers the
/// tools that scripts use only for models that it does not know.
fn model_name(agent: &AgentName, model: &ModelRef) -> Option<String> {
    match model.name() {
        Some(name) => Some(name.to_owned()),
        None => (*agent != AgentName::Claude).then(|| model.to_string()),
    }
}
