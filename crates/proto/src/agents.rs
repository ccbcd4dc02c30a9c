//! Names of the supported agents: one list for the CLI, the API and the supervisor.

use crate::text::word_enum;

word_enum!(
    /// A supported agent.
    #[derive(Default)]
    AgentName, "agent" {
        /// Claude Code.
        #[default]
        Claude = "claude",
        /// OpenCode.
        Opencode = "opencode",
        /// Codex.
        Codex = "codex",
        /// Plays the script in a prompt; needs no model and only a shell in the image.
        Scripted = "scripted",
    }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_parse_by_name_and_others_are_refused() {
        for (agent, name) in AgentName::ALL.iter().zip(AgentName::WORDS) {
            assert_eq!((name.parse(), agent.to_string().as_str()), (Ok(*agent), *name));
        }
        let unknown = "gpt".parse::<AgentName>().unwrap_err().to_string();
        assert_eq!(unknown, "unknown agent `gpt`; use `claude`, `opencode`, `codex` or `scripted`");
    }
}
