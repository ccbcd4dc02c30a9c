//! How the platform itself calls git in a checkout that somebody else may have set up.

/// Variables for every such call: a monitor or a hook that hangs would hold a boot, or hide work behind a time limit.
pub const UNHINDERED: [(&str, &str); 5] = [
    ("GIT_CONFIG_COUNT", "2"),
    ("GIT_CONFIG_KEY_0", "core.fsmonitor"),
    ("GIT_CONFIG_VALUE_0", "false"),
    ("GIT_CONFIG_KEY_1", "core.hooksPath"),
    ("GIT_CONFIG_VALUE_1", "/dev/null"),
];
