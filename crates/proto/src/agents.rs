//! Names of agents: the built-in ones, and those that a server's configuration adds.

use crate::{
    UpstreamKind, UpstreamName,
    bridge::ModelProtocol,
    text::{MAX_PLAIN_NAME, checked_text, is_plain_name, quoted, string_conversions},
};

/// An agent.
#[derive(
    Debug,
    Clone,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub enum AgentName {
    /// Claude Code.
    #[default]
    Claude,
    /// OpenCode, by the Agent Client Protocol.
    Opencode,
    /// Codex, by its app-server.
    Codex,
    /// Plays the script in a prompt; needs no model and only a shell in the image.
    Scripted,
    /// Another program that speaks the Agent Client Protocol, by the server's configuration.
    Configured(ConfiguredName),
}

checked_text!(
    /// Name of an agent that is not built in.
    ConfiguredName, InvalidAgentName, check_configured
);

/// The text is not the name of an agent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid agent `{0}`: use 1 to {MAX_PLAIN_NAME} small letters, digits and `-`")]
pub struct InvalidAgentName(String);

fn check_configured(name: &str) -> Result<(), InvalidAgentName> {
    let valid = is_plain_name(name) && !AgentName::WORDS.contains(&name);
    valid.then_some(()).ok_or_else(|| InvalidAgentName(quoted(name)))
}

impl AgentName {
    /// The built-in agents.
    pub const BUILT_IN: [Self; 4] = [Self::Claude, Self::Opencode, Self::Codex, Self::Scripted];

    /// Their names.
    pub const WORDS: [&str; 4] = ["claude", "opencode", "codex", "scripted"];

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Claude => "claude",
            Self::Opencode => "opencode",
            Self::Codex => "codex",
            Self::Scripted => "scripted",
            Self::Configured(name) => name,
        }
    }

    /// The upstream of a model that is given by its name alone, or not at all; none for a
    /// configured agent, whose configuration names it.
    #[must_use]
    pub fn built_in_upstream(&self) -> Option<UpstreamName> {
        match self {
            Self::Claude | Self::Opencode | Self::Scripted => Some(UpstreamName::anthropic()),
            Self::Codex => Some(UpstreamName::openai()),
            Self::Configured(_) => None,
        }
    }

    /// The protocol in which the agent speaks to such an upstream, for agents that are told.
    #[must_use]
    pub const fn protocol(&self, kind: UpstreamKind) -> ModelProtocol {
        match (self, kind) {
            (Self::Codex, _) | (Self::Opencode, UpstreamKind::Openai) => ModelProtocol::Responses,
            (Self::Opencode, UpstreamKind::OpenaiChat) => ModelProtocol::Chat,
            _ => ModelProtocol::Messages,
        }
    }

    /// Whether the agent speaks a protocol of such an upstream; `usual` is the kind of the
    /// agent's own upstream.
    #[must_use]
    pub fn can_use(&self, kind: UpstreamKind, usual: UpstreamKind) -> bool {
        match self {
            Self::Claude => matches!(kind, UpstreamKind::Anthropic | UpstreamKind::Scripted),
            Self::Codex => matches!(kind, UpstreamKind::Openai | UpstreamKind::Scripted),
            Self::Opencode => kind != UpstreamKind::Gemini,
            // It calls no model.
            Self::Scripted => true,
            // Its settings are made for one protocol; the scripted model speaks all of them.
            Self::Configured(_) => kind == usual || [kind, usual].contains(&UpstreamKind::Scripted),
        }
    }
}

impl std::fmt::Display for AgentName {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.pad(self.as_str())
    }
}

impl std::str::FromStr for AgentName {
    type Err = InvalidAgentName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let built_in = Self::BUILT_IN.into_iter().find(|agent| agent.as_str() == text);
        built_in.map_or_else(|| text.parse().map(Self::Configured), Ok)
    }
}

string_conversions!(AgentName, InvalidAgentName);

#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for AgentName {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        ConfiguredName::schema()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for AgentName {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tests::round_trip;

    #[test]
    fn protocol_follows_agent_and_upstream() {
        use UpstreamKind::{Anthropic, Openai, OpenaiChat, Scripted};
        for (agent, kind, protocol) in [
            (AgentName::Claude, Scripted, ModelProtocol::Messages),
            (AgentName::Codex, Scripted, ModelProtocol::Responses),
            (AgentName::Opencode, Anthropic, ModelProtocol::Messages),
            (AgentName::Opencode, Openai, ModelProtocol::Responses),
            (AgentName::Opencode, OpenaiChat, ModelProtocol::Chat),
        ] {
            assert!(agent.can_use(kind, Anthropic), "{agent} {kind}");
            assert_eq!(agent.protocol(kind), protocol, "{agent} {kind}");
        }
        assert!(!AgentName::Codex.can_use(OpenaiChat, Openai));
        assert!(!AgentName::Claude.can_use(Openai, Anthropic));
        assert!(!AgentName::Opencode.can_use(UpstreamKind::Gemini, Anthropic));
    }

    #[test]
    fn configured_agent_uses_its_own_protocol() {
        use UpstreamKind::{Anthropic, Openai, Scripted};
        let agent: AgentName = "own".parse().unwrap();
        assert!(agent.can_use(Openai, Openai) && agent.can_use(Scripted, Openai));
        assert!(!agent.can_use(Anthropic, Openai));
        assert!(agent.can_use(Anthropic, Scripted));
    }

    #[test]
    fn agents_parse_by_name_and_others_are_refused() {
        for (agent, name) in AgentName::BUILT_IN.iter().zip(AgentName::WORDS) {
            assert_eq!(round_trip::<AgentName>(name), *agent);
            assert!(name.parse::<ConfiguredName>().is_err());
        }
        let other: AgentName = round_trip("my-agent-2");
        assert!(matches!(other, AgentName::Configured(_)));
        for bad in ["", "Claude", "a b", "-a", "a/b", "a.b", &"a".repeat(33)] {
            assert!(bad.parse::<AgentName>().is_err(), "{bad}");
        }
    }
}
