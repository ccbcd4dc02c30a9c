//! Environment for git commands that Harvest itself runs in a checkout.

/// Disables hooks and the file-system monitor: the checkout may configure ones that hang, which
/// would block a boot or make a diff time out.
pub const NO_HOOKS_ENV: [(&str, &str); 5] = [
    ("GIT_CONFIG_COUNT", "2"),
    ("GIT_CONFIG_KEY_0", "core.fsmonitor"),
    ("GIT_CONFIG_VALUE_0", "false"),
    ("GIT_CONFIG_KEY_1", "core.hooksPath"),
    ("GIT_CONFIG_VALUE_1", "/dev/null"),
];
