//! The agents of a server: the built-in ones, and those that its configuration adds.

use std::collections::BTreeMap;

use harvest_proto::{
    AgentName, ModelRef, UpstreamName, api::ModelService, bridge::AgentProgram, door::model_url,
};

/// A program that speaks the Agent Client Protocol, as the configuration describes it.
///
/// In its command and its environment, `{model_url}` is the URL of the model door and `{model}` the
/// name of the session's model. An argument or variable with `{model}` is left out when the session
/// names no model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredAgent {
    pub program: AgentProgram,
    /// The upstream of a model that is given by its name alone, or not at all.
    pub upstream: UpstreamName,
}

/// The agents that the configuration adds.
pub type ConfiguredAgents = BTreeMap<AgentName, ConfiguredAgent>;

/// The session's agent is neither built in nor configured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "agent `{0}` is not configured on this server: add `[agents.{0}]` to harvest.toml and restart \
     the server, or continue with another agent by `harvest send -a`"
)]
pub(crate) struct UnknownAgent(AgentName);

/// The agents of this server.
#[derive(Debug, Default)]
pub(crate) struct Agents(ConfiguredAgents);

impl Agents {
    pub(crate) fn new(configured: ConfiguredAgents) -> Self {
        Self(configured)
    }

    /// The upstream that serves an agent's model.
    pub(crate) fn upstream_of(
        &self,
        agent: &AgentName,
        model: Option<&ModelRef>,
    ) -> Result<UpstreamName, UnknownAgent> {
        let usual = self.usual_upstream(agent).ok_or_else(|| UnknownAgent(agent.clone()))?;
        Ok(model.and_then(ModelRef::upstream).unwrap_or(usual))
    }

    fn usual_upstream(&self, agent: &AgentName) -> Option<UpstreamName> {
        let configured = || self.0.get(agent).map(|agent| agent.upstream.clone());
        agent.built_in_upstream().or_else(configured)
    }

    /// The program of a configured agent, with the placeholders replaced.
    pub(crate) fn program(
        &self,
        agent: &AgentName,
        upstream: &UpstreamName,
        model: Option<&str>,
    ) -> Option<AgentProgram> {
        let AgentProgram { command, env } = &self.0.get(agent)?.program;
        let url = model_url(upstream);
        let fill = |text: &String| fill(text, &url, model);
        Some(AgentProgram {
            command: command.iter().filter_map(fill).collect(),
            env: env.iter().filter_map(|(name, text)| Some((name.clone(), fill(text)?))).collect(),
        })
    }

    /// Adds to each model service the agents that use it unless told otherwise.
    pub(crate) fn assign<'a>(&self, services: impl Iterator<Item = &'a mut ModelService>) {
        let all = || AgentName::BUILT_IN.into_iter().chain(self.0.keys().cloned());
        for service in services {
            let uses =
                |agent: &AgentName| self.usual_upstream(agent).as_ref() == Some(&service.name);
            service.agents = all().filter(uses).collect();
        }
    }
}

/// Replaces the placeholders; `None` when the text needs a model and there is none.
fn fill(text: &str, url: &str, model: Option<&str>) -> Option<String> {
    let text = text.replace("{model_url}", url);
    match model {
        Some(model) => Some(text.replace("{model}", model)),
        None => (!text.contains("{model}")).then_some(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Agents {
        let strings = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
        let env = [("URL", "{model_url}/v1"), ("MODEL", "{model}"), ("KEY", "none")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let command = strings(&["own", "--acp", "--model={model}"]);
        let upstream = UpstreamName::openai();
        let agent = ConfiguredAgent { program: AgentProgram { command, env }, upstream };
        Agents::new([("own".parse().unwrap(), agent)].into())
    }

    #[test]
    fn placeholders_become_the_sessions_model() {
        let (agents, agent) = (own(), "own".parse().unwrap());
        let program = |model| agents.program(&agent, &UpstreamName::openai(), model).unwrap();
        let named = program(Some("gpt"));
        assert_eq!(named.command, ["own", "--acp", "--model=gpt"]);
        assert_eq!(named.env["MODEL"], "gpt");
        assert_eq!(named.env["URL"], format!("{}/v1", model_url(&UpstreamName::openai())));
        let unnamed = program(None);
        assert_eq!(unnamed.command, ["own", "--acp"]);
        assert_eq!(unnamed.env.keys().collect::<Vec<_>>(), ["KEY", "URL"]);
        assert_eq!(agents.program(&AgentName::Claude, &UpstreamName::openai(), None), None);
    }

    #[test]
    fn unknown_agent_names_its_configuration_key() {
        let (agents, unknown) = (own(), "gone".parse().unwrap());
        let error = agents.upstream_of(&unknown, None).unwrap_err().to_string();
        assert!(error.contains("`[agents.gone]`"), "{error}");
        let own = "own".parse().unwrap();
        assert_eq!(agents.upstream_of(&own, None), Ok(UpstreamName::openai()));
        let scripted = ModelRef::scripted();
        assert_eq!(agents.upstream_of(&own, Some(&scripted)), Ok(UpstreamName::scripted()));
    }

    #[test]
    fn every_agent_belongs_to_one_service() {
        let mut services = ModelService::built_in();
        own().assign(services.iter_mut());
        let agents = |index: usize| services[index].agents.iter().map(AgentName::as_str);
        assert_eq!(agents(0).collect::<Vec<_>>(), ["claude", "opencode", "scripted"]);
        assert_eq!(agents(1).collect::<Vec<_>>(), ["codex", "own"]);
    }
}
