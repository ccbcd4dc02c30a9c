//! What the supervisor is told about an agent that it starts.

use harvest_proto::{
    AgentName, EventBody, McpServerName, ModelRef, SecretOwner, UpstreamKind,
    api::{AgentInfo, KeySource},
    bridge::{AgentLaunch, RestartPolicy},
};
use harvest_store::AgentChoice;

use crate::{
    agents::UnknownAgent, doors::Doors, sandbox_context::SandboxContext, timeouts::millis,
};

/// How the chosen agent is started in a conversation.
pub(crate) fn agent_launch(
    context: &SandboxContext,
    choice: &AgentChoice,
    conversation: String,
    resume: bool,
) -> Result<AgentLaunch, UnknownAgent> {
    let AgentChoice { agent, model, effort, no_questions } = choice;
    let upstream = context.agents.upstream_of(agent, model.as_ref())?;
    let model = model.as_ref().and_then(|model| model_name(agent, model));
    // A service that is no longer configured is refused at the door.
    let kind = context.doors.upstream_kind(&upstream).unwrap_or(UpstreamKind::Scripted);
    Ok(AgentLaunch {
        name: agent.clone(),
        program: context.agents.program(agent, &upstream, model.as_deref()),
        conversation,
        resume,
        model,
        effort: *effort,
        protocol: agent.protocol(kind),
        upstream,
        questions: !no_questions,
        silence_millis: millis(context.timeouts.silence),
        restarts: RestartPolicy::default(),
    })
}

/// The MCP servers whose keys are there now.
pub(crate) async fn mcp_servers(doors: &dyn Doors, owners: &[SecretOwner]) -> Vec<McpServerName> {
    let services = doors.mcp_services(owners).await;
    let usable = services.into_iter().filter(|service| service.key != KeySource::Missing);
    usable.map(|service| service.name).collect()
}

/// What the agent says of itself, to be kept with the session.
pub(crate) fn agent_info(body: &EventBody) -> Option<AgentInfo> {
    let EventBody::AgentReady { version, model, mcp } = body else { return None };
    Some(AgentInfo { version: version.clone(), model: model.clone(), mcp: mcp.clone() })
}

/// The model that the agent requests. The scripted model has no name of its own; Codex offers the
/// tools that scripts use only for models that it does not know.
fn model_name(agent: &AgentName, model: &ModelRef) -> Option<String> {
    match model.name() {
        Some(name) => Some(name.to_owned()),
        None => (*agent != AgentName::Claude).then(|| model.to_string()),
    }
}
