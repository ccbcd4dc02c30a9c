//! How the agent of a session is started.

use harvest_proto::{api::Prompt, bridge::AgentLaunch};
use harvest_store::AgentChoice;

use super::Driver;
use crate::{agent_launch::agent_launch, agents::UnknownAgent};

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
        let choice = AgentChoice {
            agent: agent.clone(),
            model: model.cloned(),
            effort,
            no_questions: self.record.no_questions,
        };
        agent_launch(&self.shared.sandboxes, &choice, self.record.conversation.clone(), resume)
    }
}
