//! Names of branches and MCP servers, and the text of a prompt: each with one rule.

use crate::text::{MAX_PLAIN_NAME, checked_text, is_plain_name, quoted};

/// Maximum length of a branch name.
pub const MAX_BRANCH_NAME: usize = 200;

/// Maximum number of characters in a prompt: fits a control frame of the bridge even if every
/// character is escaped.
pub const MAX_PROMPT_CHARACTERS: usize = 64_000;

checked_text!(
    /// Name of a git branch: a subset of the names that git accepts, without options, ranges,
    /// forced refspecs and characters that need escaping.
    BranchName, InvalidBranchName, check_branch
);

/// The text is not a branch name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid branch name `{0}`: use 1 to {MAX_BRANCH_NAME} letters, digits, `-`, `_`, `.`, `/`, `@`, \
     `+`, `#` or `=`, as in `release/1.0`"
)]
pub struct InvalidBranchName(String);

fn check_branch(name: &str) -> Result<(), InvalidBranchName> {
    // git: no part may be empty, start with a dot or end in `.lock`.
    let valid_part =
        |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock");
    let valid = (1..=MAX_BRANCH_NAME).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./@+#=".contains(&byte))
        && name.split('/').all(valid_part)
        && !name.starts_with(['-', '+'])
        // Both mean the checked-out commit.
        && !["@", "HEAD"].contains(&name)
        && !name.ends_with('.')
        && !name.contains("..");
    valid.then_some(()).ok_or_else(|| InvalidBranchName(quoted(name)))
}

checked_text!(
    /// Name of an MCP server that agents reach through the gateway, built in or configured.
    McpServerName, InvalidMcpServerName, check_server
);

/// The text is not the name of an MCP server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid MCP server `{0}`: use 1 to {MAX_PLAIN_NAME} small letters, digits and `-`, and \
     neither `harvest` nor `mcp`"
)]
pub struct InvalidMcpServerName(String);

fn check_server(name: &str) -> Result<(), InvalidMcpServerName> {
    // The name and the path of Harvest's own tools.
    let valid = is_plain_name(name) && !["harvest", "mcp"].contains(&name);
    valid.then_some(()).ok_or_else(|| InvalidMcpServerName(quoted(name)))
}

checked_text!(
    /// The text of a prompt: not blank, at most [`MAX_PROMPT_CHARACTERS`].
    PromptText, InvalidPrompt, check_prompt
);

/// The text cannot be a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPrompt {
    /// The text is blank.
    #[error("prompt is empty")]
    Empty,
    /// The text is too long.
    #[error("prompt is longer than {MAX_PROMPT_CHARACTERS} characters")]
    TooLong,
}

fn check_prompt(text: &str) -> Result<(), InvalidPrompt> {
    if text.trim().is_empty() {
        return Err(InvalidPrompt::Empty);
    }
    match text.chars().nth(MAX_PROMPT_CHARACTERS) {
        Some(_) => Err(InvalidPrompt::TooLong),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::tests::round_trip;

    proptest! {
        #[test]
        fn branch_names_round_trip(
            name in "[a-z0-9_][a-z0-9_@+#=-]{0,20}(/[a-z0-9_@+#=-]{1,20}){0,4}",
        ) {
            round_trip::<BranchName>(&name);
        }

        #[test]
        fn unsafe_branch_names_are_refused(
            before in "[a-z]{0,3}",
            bad in r"\.\.|//|[ ~^:?*\[\\{]|@\{|/\.|\.lock/|[äλ漢]",
            after in "[a-z]{0,3}",
        ) {
            let name = format!("{before}{bad}{after}");
            prop_assert!(name.parse::<BranchName>().is_err());
        }

        #[test]
        fn prompts_round_trip(text in "\\s{0,3}\\S\\PC{0,100}") {
            round_trip::<PromptText>(&text);
        }
    }

    proptest! {
        // Each case starts git.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn git_accepts_every_valid_branch(name in "[aH.@/#+=-]{1,6}|HEAD(/a)?|(a|a/)[.]lock(/a)?") {
            if name.parse::<BranchName>().is_ok() {
                let mut git = std::process::Command::new("git");
                let output = git.args(["check-ref-format", "--branch", &name]).output().unwrap();
                prop_assert!(output.status.success(), "{}", name);
                let branch = String::from_utf8(output.stdout).unwrap();
                prop_assert_eq!(branch.trim_end(), name);
            }
        }
    }

    #[test]
    fn branch_cannot_be_an_option_or_range() {
        for bad in [
            "",
            "-x",
            "+x",
            "@",
            "HEAD",
            "a..b",
            "a@{1}",
            "/a",
            "a/",
            "x.lock",
            "a b",
            "a~1",
            "a.",
            &"x".repeat(201),
        ] {
            assert!(bad.parse::<BranchName>().is_err(), "{bad}");
        }
        for good in ["release/1.0", "fix-#12", "c++", "dependabot/npm_and_yarn/@types/node-20"] {
            round_trip::<BranchName>(good);
        }
    }

    #[test]
    fn server_names_leave_the_own_tools_alone() {
        for bad in ["", "harvest", "mcp", "-a", "A", "a/b", "..", "a b", &"x".repeat(33)] {
            assert!(bad.parse::<McpServerName>().is_err(), "{bad}");
        }
        round_trip::<McpServerName>("git-hub2");
    }

    #[test]
    fn empty_and_overlong_prompts_are_refused() {
        assert_eq!(" \n".parse::<PromptText>(), Err(InvalidPrompt::Empty));
        round_trip::<PromptText>(&"ü".repeat(MAX_PROMPT_CHARACTERS));
        let long = "ü".repeat(MAX_PROMPT_CHARACTERS + 1);
        assert_eq!(long.parse::<PromptText>(), Err(InvalidPrompt::TooLong));
    }
}
