//! Arguments and environment of Claude Code. Tested with 2.1.325.

use harvest_proto::bridge::AgentLaunch;

/// Additional variables. The key is a placeholder: the gateway holds the real one.
pub(crate) const ENV: [(&str, &str); 10] = [
    ("ANTHROPIC_BASE_URL", "http://model.harvest.internal"),
    ("ANTHROPIC_API_KEY", "held-by-the-gateway"),
    ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
    ("DISABLE_AUTOUPDATER", "1"),
    ("DISABLE_TELEMETRY", "1"),
    ("DISABLE_ERROR_REPORTING", "1"),
    // `session_state_changed` is the only reliable end of a turn.
    ("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", "1"),
    // Covers minutes in which the gateway rejects requests; while it restarts, requests wait.
    ("CLAUDE_CODE_MAX_RETRIES", "10"),
    // A turn must not end while background work is still running.
    ("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1"),
    // Required for the permission mode below as root.
    ("IS_SANDBOX", "1"),
];

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
        // Everything is allowed, but questions are sent to us as requests.
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
        "You work unattended in your own sandbox, in {cwd}. Every repository below /workspace is on \
         a branch created for this work. To deliver work, commit it and run a plain `git push` in \
         its folder: a pull request is then opened from the branch, one in each repository. You \
         need no credentials for git, for the model or for installing packages: never look for any \
         and never ask for one. Hosts that the network policy does not allow cannot be reached; \
         report that instead of working around it."
    )
}

#[cfg(test)]
mod tests {
    use harvest_proto::door::MODEL_NAME;

    use super::*;

    #[test]
    fn model_requests_go_through_the_gateway() {
        let base = ENV.iter().find(|(name, _)| *name == "ANTHROPIC_BASE_URL").unwrap().1;
        assert_eq!(base, format!("http://{MODEL_NAME}"));
    }

    #[test]
    fn conversation_is_created_then_resumed() {
        let launch = AgentLaunch {
            name: harvest_proto::AgentName::Claude,
            conversation: "c0ffee".into(),
            resume: false,
            model: Some("opus".into()),
            restarts: harvest_proto::bridge::RestartPolicy::default(),
        };
        let first = argv(&launch, "/workspace/shop", false).join(" ");
        assert!(first.contains("--session-id c0ffee --model opus") && !first.contains("--resume"));
        assert!(argv(&launch, "/workspace/shop", true).join(" ").contains("--resume c0ffee"));
    }
}
