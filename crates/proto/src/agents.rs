//! Names of the supported agents: one list for the CLI, the API and the supervisor.

use crate::{UpstreamKind, UpstreamName, bridge::ModelProtocol, text::word_enum};

word_enum!(
    /// A supported agent.
    #[derive(Default)]
    AgentName, "agent" {
        /// Claude Code.
        #[default]
        Claude = "claude",
        /// OpenCode, by the Agent Client Protocol.
        Opencode = "opencode",
        /// Codex, by its app-server.
        Codex = "codex",
        /// Plays the script in a prompt; needs no model and only a shell in the image.
        Scripted = "scripted",
    }
);

impl AgentName {
    /// The upstream of a model that is given by its name alone, or not at all.
    #[must_use]
    pub fn default_upstream(self) -> UpstreamName {
        match self {
            Self::Claude | Self::Opencode | Self::Scripted => UpstreamName::anthropic(),
            Self::Codex => UpstreamName::openai(),
        }
    }

    /// The protocol in which the agent speaks to such an upstream.
    #[must_use]
    pub const fn protocol(self, kind: UpstreamKind) -> ModelProtocol {
        match (self, kind) {
            (Self::Codex, _) | (Self::Opencode, UpstreamKind::Openai) => ModelProtocol::Responses,
            (Self::Opencode, UpstreamKind::OpenaiChat) => ModelProtocol::Chat,
            (Self::Claude | Self::Opencode | Self::Scripted, _) => ModelProtocol::Messages,
        }
    }

    /// Whether the agent speaks a protocol of such an upstream.
    #[must_use]
    pub const fn can_use(self, kind: UpstreamKind) -> bool {
        match self {
            Self::Claude => matches!(kind, UpstreamKind::Anthropic | UpstreamKind::Scripted),
            Self::Codex => matches!(kind, UpstreamKind::Openai | UpstreamKind::Scripted),
            // OpenCode speaks all protocols, the scripted agent calls no model.
            Self::Opencode | Self::Scripted => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!(agent.can_use(kind), "{agent} {kind}");
            assert_eq!(agent.protocol(kind), protocol, "{agent} {kind}");
        }
        assert!(!AgentName::Codex.can_use(OpenaiChat) && !AgentName::Claude.can_use(Openai));
    }

    #[test]
    fn agents_parse_by_name_and_others_are_refused() {
        for (agent, name) in AgentName::ALL.iter().zip(AgentName::WORDS) {
            assert_eq!((name.parse(), agent.to_string().as_str()), (Ok(*agent), *name));
        }
        let unknown = "gpt".parse::<AgentName>().unwrap_err().to_string();
        assert_eq!(unknown, "unknown agent `gpt`; use `claude`, `opencode`, `codex` or `scripted`");
    }
}
