//! How Claude Code is started: its arguments and variables. Tried with 2.1.325.

use harvest_proto::bridge::AgentLaunch;

/// What it gets on top of everybody's variables. The key is none: the gateway holds the real one.
pub(crate) const ENV: [(&str, &str); 10] = [
    ("ANTHROPIC_BASE_URL", "http://model.harvest.internal"),
    ("ANTHROPIC_API_KEY", "held-by-the-gateway"),
    ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
    ("DISABLE_AUTOUPDATER", "1"),
    ("DISABLE_TELEMETRY", "1"),
    ("DISABLE_ERROR_REPORTING", "1"),
    // `session_state_changed` is the only honest end of a turn.
    ("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", "1"),
    // A parked gateway holds requests open; this covers the minutes in which it refuses them.
    ("CLAUDE_CODE_MAX_RETRIES", "10"),
    // A turn ends when its work has ended: nothing goes on behind it.
    ("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1"),
    // Without it the permission mode below is refused to root.
    ("IS_SANDBOX", "1"),
];

/// The command line.
pub(crate) fn argv(launch: &AgentLaunch, cwd: &str, resume: bool) -> Vec<String> {
    let fixed = [
        "claude",
        "-p",
        "--input-format",
        "stream-json",
        "--output-format",
        "stream-json",
        "--verbose",
        "--include-partial-messages",
        // Everything is allowed but questions, which come to us as requests.
        "--permission-mode",
        "bypassPermissions",
        "--permission-prompt-tool",
        "stdio",
        "--strict-mcp-config",
        "--append-system-prompt",
    ];
    let mut argv: Vec<String> = fixed.map(str::to_owned).into();
    argv.push(instructions(cwd));
    argv.push(if resume { "--resume" } else { "--session-id" }.to_owned());
    argv.push(launch.conversation.clone());
    if let Some(model) = &launch.model {
        argv.extend(["--model".to_owned(), model.clone()]);
    }
    argv
}

fn instructions(cwd: &str) -> String {
    format!(
        "You work unattended in a sandbox of your own, in {cwd}. Every repository below /workspace is on a branch \
         made for this work. Hand work in by committing it and running a plain `git push` in its folder: pushing the \
         current branch is all there is to do, a pull request is opened from it, one in each repository. You need no \
         credentials for git, for the model or for installing packages: never look for any and never ask for one. \
         What the network policy does not allow cannot be reached; say so instead of working around it."
    )
}

#[cfg(test)]
mod tests {
    use harvest_proto::door::MODEL_NAME;

    use super::*;

    #[test]
    fn the_model_is_asked_through_the_gateway_only() {
        let base = ENV.iter().find(|(name, _)| *name == "ANTHROPIC_BASE_URL").unwrap().1;
        assert_eq!(base, format!("http://{MODEL_NAME}"));
    }

    #[test]
    fn a_conversation_is_opened_once_and_resumed_after_that() {
        let launch = AgentLaunch {
            name: "claude".into(),
            conversation: "c0ffee".into(),
            resume: false,
            model: Some("opus".into()),
            restarts: harvest_proto::bridge::Restarts::default(),
        };
        let first = argv(&launch, "/workspace/shop", false).join(" ");
        assert!(first.contains("--session-id c0ffee --model opus") && !first.contains("--resume"));
        assert!(argv(&launch, "/workspace/shop", true).join(" ").contains("--resume c0ffee"));
    }
}
