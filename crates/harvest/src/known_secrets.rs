//! The secrets that `harvest up` also takes from its environment, and a common mistake.

use std::collections::{BTreeMap, BTreeSet};

use harvest_proto::Secret;

use crate::config::{Config, process_env};

/// Names of secrets that Harvest knows by itself, besides those in the configuration.
const KNOWN: [&str; 8] = [
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "OPENAI_API_KEY",
    "GEMINI_API_KEY",
    "GITHUB_TOKEN",
    "SENTRY_AUTH_TOKEN",
    "LINEAR_API_KEY",
    "SLACK_BOT_TOKEN",
];

const WRONG: &str = "CLAUDE_API_KEY";
const RIGHT: &str = "ANTHROPIC_API_KEY";

/// The names, with those of the configured upstreams and MCP servers.
pub(crate) fn names(config: &Config) -> BTreeSet<String> {
    let upstreams = config.upstreams.iter().flat_map(|(_, upstream)| upstream.secret_names());
    let servers = config.mcp_servers.iter().filter_map(|(_, server)| server.secret.as_deref());
    KNOWN.into_iter().chain(upstreams).chain(servers).map(str::to_owned).collect()
}

/// Those that are in this process's environment.
pub(crate) fn in_environment(config: &Config) -> BTreeMap<String, Secret<String>> {
    let value = |name: String| process_env(&name).map(|value| (name, Secret::new(value)));
    names(config).into_iter().filter_map(value).collect()
}

/// What to do about a name that no program reads.
pub(crate) fn misnamed() -> Option<String> {
    let is_set = |name| process_env(name).is_some();
    (is_set(WRONG) && !is_set(RIGHT)).then(|| correction(WRONG)).flatten()
}

/// What to do about the name of a secret that no program reads.
pub(crate) fn correction(name: &str) -> Option<String> {
    (name == WRONG).then(|| format!("{WRONG} is not used; {RIGHT} is meant"))
}
