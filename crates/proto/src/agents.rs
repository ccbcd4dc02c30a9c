//! Names of the supported agents: one list for the CLI, the API and the supervisor.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A supported agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(rename_all = "snake_case"))]
pub enum AgentName {
    /// Claude Code.
    #[default]
    Claude,
    /// Plays the script in a prompt; needs no model and only a shell in the image.
    Scripted,
}

/// All names, the default first.
pub const NAMES: [&str; 2] = [AgentName::Claude.as_str(), AgentName::Scripted.as_str()];

/// The name is not one of [`NAMES`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown agent `{name}`; use {}", NAMES.map(|name| format!("`{name}`")).join(" or "))]
pub struct UnknownAgent {
    name: String,
}

impl AgentName {
    /// All agents, the default first.
    pub const ALL: [Self; 2] = [Self::Claude, Self::Scripted];

    /// The name users type.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Claude => "claude",
            Self::Scripted => "scripted",
        }
    }
}

impl fmt::Display for AgentName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

impl FromStr for AgentName {
    type Err = UnknownAgent;

    fn from_str(text: &str) -> Result<Self, UnknownAgent> {
        let known = Self::ALL.into_iter().find(|agent| agent.as_str() == text);
        known.ok_or_else(|| UnknownAgent { name: text.chars().take(100).collect() })
    }
}

impl TryFrom<String> for AgentName {
    type Error = UnknownAgent;

    fn try_from(text: String) -> Result<Self, UnknownAgent> {
        text.parse()
    }
}

impl From<AgentName> for String {
    fn from(agent: AgentName) -> Self {
        agent.as_str().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_parse_by_name_and_others_are_refused() {
        for (agent, name) in AgentName::ALL.into_iter().zip(NAMES) {
            assert_eq!((name.parse(), agent.to_string().as_str()), (Ok(agent), name));
        }
        let unknown = "gpt".parse::<AgentName>().unwrap_err().to_string();
        assert_eq!(unknown, "unknown agent `gpt`; use `claude` or `scripted`");
    }
}
