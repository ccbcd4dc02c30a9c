//! What the supervisor is told about the session's agent.

use harvest_proto::{
    AgentName, McpServerName, ModelRef, SecretOwner, UpstreamKind,
    api::{KeySource, Prompt},
    bridge::{AgentLaunch, RestartPolicy},
};

use super::Driver;
use crate::{agents::UnknownAgent, doors::Doors, timeouts::millis};

impl Driver {
    /// With `resume` the disk holds the agent's conversation. A prompt may have an agent, a
    /// model and an effort of its own.
    pub(super) fn launch(
        &self,
        resume: bool,
        prompt: Option<&Prompt>,
    ) -> Result<AgentLaunch, UnknownAgent> {
        let session = &self.record.session;
        let (own_model, own_effort) =
            prompt.map_or((None, None), |prompt| (prompt.model.as_ref(), prompt.effort));
        // The session's model and effort may have changed with its agent.
        let (agent, model, effort) = match prompt.and_then(|prompt| prompt.agent.as_ref()) {
            Some(agent) => (agent, own_model, own_effort),
            None => {
                let model = own_model.or(session.model.as_ref());
                (&session.agent, model, own_effort.or(session.effort))
            }
        };
        let agents = &self.shared.sandboxes.agents;
        let upstream = agents.upstream_of(agent, model)?;
        let model = model.and_then(|model| model_name(agent, model));
        // A service that is no longer configured is refused at the door.
        let kind = self.shared.sandboxes.doors.upstream_kind(&upstream);
        let kind = kind.unwrap_or(UpstreamKind::Scripted);
        Ok(AgentLaunch {
            name: agent.clone(),
            program: agents.program(agent, &upstream, model.as_deref()),
            conversation: self.record.conversation.clone(),
            resume,
            model,
            effort,
            protocol: agent.protocol(kind),
            upstream,
            questions: !self.record.no_questions,
            silence_millis: millis(self.shared.timeouts.silence),
            restarts: RestartPolicy::default(),
        })
    }
}

/// The MCP servers whose keys are there now.
pub(super) async fn mcp_servers(doors: &dyn Doors, owners: &[SecretOwner]) -> Vec<McpServerName> {
    let services = doors.mcp_services(owners).await;
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
