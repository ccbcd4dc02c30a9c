//! What the supervisor is told about the session's agent.

use harvest_proto::{
    AgentName, McpServerName, ModelRef, UpstreamKind,
    api::{KeySource, Prompt},
    bridge::{AgentLaunch, RestartPolicy},
};

use super::Driver;
use crate::{agents::UnknownAgent, doors::Doors, timeouts::millis};

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

/// The MCP servers whose keys are there now.
pub(super) async fn mcp_servers(doors: &dyn Doors) -> Vec<McpServerName> {
    let services = doors.mcp_services().await;
    let usable = services.into_iter().filter(|service| service.key != KeySource::Missing);
    usable.map(|service| service.name).collect()
}

/// The model that the agent requests. The scripted model has no name of its own; Codex offers the
/// tools that scripts use only for models that it does not know.
fn model_name(agent: &AgentName, model: &ModelRef) -> Option<String> {
    match model.name() {
        Some(name) => Some(name.to_owned()),
        None => (*agent != AgentName::Claude).then(|| model.to_string()),
    }
}
