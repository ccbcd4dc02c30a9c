//! Model services, MCP servers behind the gateway, and their keys.

use std::{borrow::Cow, collections::BTreeMap};

use serde::{Deserialize, Serialize};

use crate::{
    AgentName, Hint, McpServerName, ModelRef, Secret, UpstreamKind, UpstreamName, text::word_enum,
    upstreams::BUILT_IN_UPSTREAMS,
};

/// A model service that agents can call through the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelService {
    /// Its name in model references: `NAME/MODEL`.
    pub name: UpstreamName,
    /// The protocols it speaks.
    pub kind: UpstreamKind,
    /// Name of the secret with its API key; absent when it needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Where the key comes from.
    pub key: KeySource,
    /// The agents that use it for a model without the name of a service.
    #[serde(default)]
    pub agents: Vec<AgentName>,
}

/// A model service and the models it lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceModels {
    /// The service.
    pub service: ModelService,
    /// Names of its models; empty without a key.
    pub models: Vec<String>,
    /// Why the service listed none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// An MCP server that agents reach through the gateway, which adds its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpService {
    /// Its name for agents.
    pub name: McpServerName,
    /// Name of the secret with its key; absent when it needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Where the key comes from; agents are not offered a server whose key is missing.
    pub key: KeySource,
}

impl ModelService {
    /// The built-in services, all usable: for tests without a gateway.
    #[must_use]
    pub fn built_in() -> Vec<Self> {
        let key = KeySource::NotNeeded;
        BUILT_IN_UPSTREAMS
            .iter()
            .map(|(name, kind)| (name.parse().expect("a built-in name is valid"), *kind))
            .map(|(name, kind)| Self {
                agents: built_in_agents(&name),
                name,
                kind,
                secret: None,
                key,
            })
            .collect()
    }
}

impl ModelService {
    /// Its key may be among the secrets that a new session gets.
    pub fn accept_key_of(&mut self, secrets: &BTreeMap<String, Secret<String>>) {
        let names = [self.secret.as_deref(), self.kind.subscription_secret()];
        if self.key == KeySource::Missing
            && names.into_iter().flatten().any(|name| secrets.contains_key(name))
        {
            self.key = KeySource::Stored;
        }
    }
}

fn built_in_agents(service: &UpstreamName) -> Vec<AgentName> {
    let uses = |agent: &AgentName| agent.built_in_upstream().as_ref() == Some(service);
    AgentName::BUILT_IN.into_iter().filter(uses).collect()
}

word_enum!(
    /// Where the key of a model service or an MCP server comes from.
    KeySource, "source of a key" {
        /// A stored secret.
        Stored = "stored",
        /// The environment of the server.
        Environment = "environment",
        /// There is no key.
        Missing = "missing",
        /// The service needs no key.
        NotNeeded = "not_needed",
    }
);

/// Why a session with some agent and model could not call its model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnusableModel {
    /// There is no such agent.
    #[error("there is no agent `{name}`")]
    NoAgent {
        /// The name that was asked for.
        name: AgentName,
        /// The agents there are.
        known: Vec<String>,
    },
    /// The service has no key.
    #[error("no API key is stored for the model service `{service}`")]
    NoKey {
        /// The service.
        service: UpstreamName,
        /// Name of the secret to store.
        secret: String,
    },
    /// There is no such service.
    #[error("there is no model service `{name}`")]
    NoService {
        /// The name that was asked for.
        name: UpstreamName,
        /// The services there are.
        known: Vec<String>,
    },
    /// The agent does not speak the service's protocols.
    #[error(
        "the agent `{agent}` cannot use the model service `{service}`, which is of the kind `{kind}`"
    )]
    WrongKind {
        /// The agent.
        agent: AgentName,
        /// The service.
        service: UpstreamName,
        /// Its kind.
        kind: UpstreamKind,
        /// The services that the agent can use.
        usable: Vec<String>,
    },
}

impl UnusableModel {
    /// Checks agent and model of a session before it is created. The scripted agent calls no model.
    ///
    /// # Errors
    /// When its first model call would fail.
    pub fn check(
        services: &[ModelService],
        agent: &AgentName,
        model: Option<&ModelRef>,
    ) -> Result<(), Self> {
        let Some(usual) = services.iter().find(|service| service.agents.contains(agent)) else {
            let agents = services.iter().flat_map(|service| &service.agents);
            let known = agents.map(|agent| format!("`{agent}`")).collect();
            return Err(Self::NoAgent { name: agent.clone(), known });
        };
        let name = model.and_then(ModelRef::upstream).unwrap_or_else(|| usual.name.clone());
        let names = |usable: &dyn Fn(&ModelService) -> bool| {
            services.iter().filter(|one| usable(one)).map(|one| format!("`{}`", one.name)).collect()
        };
        let Some(service) = services.iter().find(|service| service.name == name) else {
            return Err(Self::NoService { name, known: names(&|_| true) });
        };
        if !agent.can_use(service.kind, usual.kind) {
            let usable = names(&|one| agent.can_use(one.kind, usual.kind));
            let agent = agent.clone();
            return Err(Self::WrongKind { agent, service: name, kind: service.kind, usable });
        }
        if *agent != AgentName::Scripted && service.key == KeySource::Missing {
            let secret = service.secret.clone().unwrap_or_default();
            return Err(Self::NoKey { service: name, secret });
        }
        Ok(())
    }

    /// A stable code for programs.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NoAgent { .. } => "no_agent",
            Self::NoKey { .. } => "no_key",
            Self::NoService { .. } => "no_model_service",
            Self::WrongKind { .. } => "wrong_model_service",
        }
    }
}

impl Hint for UnusableModel {
    fn hint(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Owned(match self {
            Self::NoAgent { name, known } => format!(
                "use {}, or add `[agents.{name}]` to harvest.toml and restart the server",
                known.join(", ")
            ),
            Self::NoKey { secret, .. } => format!(
                "store it with `harvest secret set {secret}`, or choose a model that needs no key \
                 with `-m scripted`"
            ),
            Self::NoService { name, known } => format!(
                "use {}, or add `[upstreams.{name}]` to harvest.toml and restart the server",
                known.join(", ")
            ),
            Self::WrongKind { usable, .. } => format!("use a model of {}", usable.join(", ")),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(services: &[ModelService], agent: AgentName, model: &str) -> Option<&'static str> {
        let model = (!model.is_empty()).then(|| model.parse::<ModelRef>().unwrap());
        UnusableModel::check(services, &agent, model.as_ref()).err().map(|error| error.code())
    }

    #[test]
    fn only_agents_of_the_service_need_its_key() {
        let mut services = ModelService::built_in();
        assert_eq!(check(&services, AgentName::Claude, ""), None);
        services[0].key = KeySource::Missing;
        for (agent, model, expected) in [
            (AgentName::Claude, "", Some("no_key")),
            (AgentName::Claude, "claude-x", Some("no_key")),
            (AgentName::Claude, "anthropic/claude-x", Some("no_key")),
            (AgentName::Claude, "scripted", None),
            (AgentName::Scripted, "", None),
            (AgentName::Scripted, "anthropic/x", None),
        ] {
            assert_eq!(check(&services, agent, model), expected, "{model}");
        }
    }

    #[test]
    fn unknown_or_unspeakable_service_is_refused_with_alternatives() {
        let services = ModelService::built_in();
        assert_eq!(check(&services, AgentName::Claude, "nope/x"), Some("no_model_service"));
        assert_eq!(check(&services, AgentName::Claude, "openai/x"), Some("wrong_model_service"));
        let model = "openai/x".parse().ok();
        let error =
            UnusableModel::check(&services, &AgentName::Claude, model.as_ref()).unwrap_err();
        assert_eq!(error.hint().unwrap(), "use a model of `anthropic`, `scripted`");
    }
    #[test]
    fn unknown_agent_is_refused_with_known_ones() {
        let mut services = ModelService::built_in();
        let own: AgentName = "own".parse().unwrap();
        assert_eq!(check(&services, own.clone(), "scripted"), Some("no_agent"));
        let error = UnusableModel::check(&services, &own, None).unwrap_err();
        let hint = error.hint().unwrap();
        assert!(hint.starts_with("use `claude`, `opencode`, `scripted`, `codex`, or"), "{hint}");
        assert!(hint.contains("`[agents.own]`"), "{hint}");
        services[1].agents.push(own.clone());
        assert_eq!(check(&services, own.clone(), ""), None);
        assert_eq!(check(&services, own, "anthropic/x"), Some("wrong_model_service"));
    }
}
