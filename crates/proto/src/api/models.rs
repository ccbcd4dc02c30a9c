//! Model services and their keys.

use serde::{Deserialize, Serialize};

use crate::{AgentName, ModelRef, Upstream, text::word_enum};

/// A model service that agents can call through the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelService {
    /// Model service: `anthropic` or `scripted`.
    pub name: Upstream,
    /// Name of the secret with its API key; absent when it needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Where the key comes from.
    pub key: KeySource,
}

impl ModelService {
    /// Whether a session with this agent and model would call this service without a key.
    #[must_use]
    pub fn lacks_key_for(&self, agent: AgentName, model: Option<&ModelRef>) -> bool {
        let upstream = model.map_or(Upstream::Anthropic, ModelRef::upstream);
        agent != AgentName::Scripted && self.name == upstream && self.key == KeySource::Missing
    }
}

word_enum!(
    /// Where the API key of a model service comes from.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_agents_of_the_service_need_its_key() {
        let service = |key| ModelService { name: Upstream::Anthropic, secret: None, key };
        let (missing, scripted) = (service(KeySource::Missing), ModelRef::scripted());
        assert!(missing.lacks_key_for(AgentName::Claude, None));
        assert!(!missing.lacks_key_for(AgentName::Scripted, None));
        assert!(!missing.lacks_key_for(AgentName::Claude, Some(&scripted)));
        assert!(!service(KeySource::Environment).lacks_key_for(AgentName::Claude, None));
    }
}
