//! The keys of the configuration. Each is declared once: its name, type, default and meaning. The
//! file, the variables, `harvest config` and the reference page follow from the declaration.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, str::FromStr};

use anyhow::{Context, Error, Result};
use harvest_engine::Driver;
use harvest_proto::{Secret, UpstreamKind, UpstreamName, api::PullRequestMode};
use serde::Deserialize;

use super::{Env, List, LogFormat, agents::Variables, tables::Span};
use crate::cli::units::Size;

/// A key as `harvest config` and the reference page show it.
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    /// The default in backticks, or a description of it.
    pub(crate) default: &'static str,
    #[cfg(test)]
    pub(crate) meaning: &'static str,
}

/// Why a key with a default in backticks has a value after `resolve`.
pub(super) const HAS_DEFAULT: &str = "the default of this key is in its declaration";

/// Declares a table of the file: `key: Type, "type", "default", "meaning";`. A default in backticks
/// is a value, other defaults are found elsewhere.
macro_rules! table {
    (
        $name:ident { $($key:ident: $type:ty, $kind:literal, $default:literal, $meaning:literal;)* }
        $(tables { $($table:ident: $inner:ident, $purpose:literal;)* })?
        $(named { $($named:ident: $each:ident, $named_purpose:literal;)* })?
    ) => {
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct $name {
            $(pub(super) $key: Option<$type>,)*
            $($(#[serde(default)] pub(super) $table: $inner,)*)?
            $($(#[serde(default)] pub(super) $named: BTreeMap<String, $each>,)*)?
        }

        impl $name {
            pub(super) const KEYS: &[Key] = &[$(Key {
                name: stringify!($key),
                kind: $kind,
                default: $default,
                #[cfg(test)]
                meaning: $meaning,
            }),*];

            $(pub(super) const TABLES: &[(&str, &str, &[Key])] =
                &[$((stringify!($table), $purpose, $inner::KEYS)),*];)?

            $(/// Tables of which the file may have any number, each with a name.
            pub(super) const NAMED: &[(&str, &str, &[Key])] =
                &[$((stringify!($named), $named_purpose, $each::KEYS)),*];)?

            /// Variables override the file, the file overrides the default.
            pub(super) fn resolve(self, table: &str, env: Env) -> Result<Self> {
                Ok(Self {
                    $($key: {
                        let variable = variable_of(table, stringify!($key));
                        value(&variable, self.$key, $default, env)?
                    },)*
                    $($($table: self.$table.resolve(stringify!($table), env)?,)*)?
                    $($($named: self.$named,)*)?
                })
            }
        }
    };
}

table! {
    ConfigFile {
        home: PathBuf, "path", "`$XDG_STATE_HOME/harvest` (`~/.local/state/harvest`)",
            "State of this installation: database, sandboxes, snapshots, local forge, encrypted \
             secrets; also `--home`";
        cache: PathBuf, "path", "`$XDG_CACHE_HOME/harvest` (`~/.cache/harvest`)",
            "Image layers, shared by all installations of this user";
        url: String, "text", "the server that runs from `home`",
            "The server to talk to; also `--url`";
        token: Secret<String>, "text", "the one in `home`",
            "The access token for the server";
        listen: SocketAddr, "address and port", "`127.0.0.1:7070`",
            "The address `harvest up` listens on; also `--listen`. Port 0 picks a free port";
        hosts: List, "list of names", "none",
            "Host names the server accepts besides loopback; also `--host`";
        rate_limit: u32, "number", "`500`",
            "Requests per second of one token, with bursts of four times as many; a tenth of it \
             for an address without a token. Further requests get status 429. 0 is no limit";
        max_connections: u32, "number", "`1000`",
            "Concurrent connections to the server; a further one replaces one without a token, or waits";
        log: String, "filter", "`warn`",
            "The filter of the log on stderr, such as `info` or `harvest_session=debug`";
        log_format: LogFormat, "`text` or `json`", "`text`",
            "The format of the log; `json` is one object per line";
        trusted: List, "list of names", "none",
            "Host names that sandboxes with the network policy `trusted` may reach besides package \
             registries; `*.example.org` is every name below `example.org`. `harvest net ls` prints \
             the whole list";
        private_hosts: List, "list of names and addresses", "none",
            "Hosts on private networks that git remotes and trusted names may be at, such as \
             `git.corp.example`, `*.corp.example` or `10.0.0.5`; everything else with a private \
             address is refused";
        git_hosts: List, "list of names", "`github.com,gitlab.com,bitbucket.org,codeberg.org`",
            "Hosts of public git repositories that sandboxes may fetch from (not push to), unless \
             their network policy is `none`";
        image: String, "name", "the image `agents` if it is built, else the smallest one with the session's agent",
            "The image that sessions start from";
        author_name: String, "text", "git's own `user.name`",
            "The name of the commit author, followed by ` (Harvest)`: the user of the server's first token";
        author_email: String, "text", "git's own `user.email`",
            "The e-mail address of the commit author. Without one, `harvest` sends the identity of git \
             on its own machine, and a request that names no author is refused";
        budget_tokens: u64, "number", "no limit",
            "Model calls are refused once a session, with those that its agent created, has used \
             this many tokens. `harvest budget` sets limits in money";
        prices: PathBuf, "path", "the prices that come with Harvest",
            "A file with prices of models in US dollars per million tokens: `[[price]]` with \
             `models = [\"NAME\", \"PREFIX*\"]`, `input`, `output` and, if they differ from `input`, \
             `cache_read` and `cache_write`; optional are `upstream`, `context` and `max_output`, the \
             most tokens of a prompt and a response. Its entries come before those of Harvest";
        schedule: bool, "`true` or `false`", "`true`",
            "Whether the server looks at every repository each half hour and rebuilds those that \
             have moved";
        pr: PullRequestMode, "`none`, `draft` or `ready`", "`ready`",
            "What is opened for a branch that a session pushes: nothing, a draft, or a pull \
             request; also `--pr` of `harvest run`";
        pool: u32, "number", "`1`",
            "How many sandboxes wait with a started agent for the next session of each repository \
             that has a build and was used in the last 24 hours, within a quarter of the machine's \
             memory; 0 switches the pool off";
        store_driver: Driver, "`auto`, `dir` or `btrfs`", "`dir`",
            "The disk driver of a new `home`: plain folders, or btrfs, which snapshots and forks \
             in milliseconds but takes two to five times as long for large and random writes; an \
             existing home keeps its driver";
        state_size: Size, "size", "`2g`",
            "The maximum size of a new `/mnt/state` volume; it takes space only as it is used";
        database: Secret<String>, "`sqlite:PATH` or `postgres://USER:PASSWORD@HOST/NAME`",
            "`harvest.db` in `home`",
            "The database of sessions, prompts and events. PostgreSQL must be version 13 or newer, \
             and the database belongs to one home. `?sslmode=verify-full` verifies the server's \
             certificate";
    }
    tables {
        clocks: ClocksTable, "Timeouts and intervals";
        limits: LimitsTable, "Concurrency limits";
        retention: RetentionTable, "Retention of history, snapshots and archived sessions";
        github: GithubTable, "GitHub: where it is. `harvest up` signs in with the variables \
            `GITHUB_APP_ID` and `GITHUB_APP_PRIVATE_KEY`, or with `shared_token`";
    }
    named {
        upstreams: UpstreamTable, "A service for model calls. `NAME/MODEL` is a model of it. \
            `anthropic`, `openai`, `gemini` and `scripted` are built in";
        agents: AgentTable, "A program in the image that speaks the Agent Client Protocol, for \
            `-a NAME`. In the values, `{model_url}` is the URL of the model service inside the \
            sandbox and `{model}` the name of the session's model; an argument or a variable with \
            `{model}` is left out when the session names none";
        mcp: McpTable, "An MCP server for every agent. The gateway adds its key as a bearer token; \
            inside is only a URL without it. `gemini`, `github`, `linear` and `sentry` are built \
            in, and offered once their keys are stored";
    }
}

table! {
    UpstreamTable {
        kind: UpstreamKind, "`anthropic`, `openai`, `openai_chat` or `gemini`", "that of the built-in one",
            "The protocols it speaks: Anthropic Messages; OpenAI Responses and Chat Completions; \
             Chat Completions only, as most compatible servers; Google Gemini";
        url: String, "URL", "that of the built-in one",
            "Its base URL as in the SDKs, such as `https://api.anthropic.com` or \
             `http://localhost:11434/v1`. Plain http is only for this machine, private addresses \
             and `private_hosts`";
        secret: String, "name", "that of the built-in one, else none",
            "The secret with its API key";
    }
}

table! {
    AgentTable {
        command: List, "list of texts", "none: required",
            "The program and its arguments, such as `[\"gemini\", \"--acp\"]`";
        env: Variables, "table of texts", "none",
            "Environment variables of the agent, readable for everything in the sandbox and kept in \
             its snapshots. A key is a placeholder such as `none`: the real one is the secret of \
             the upstream, which never enters a sandbox";
        upstream: UpstreamName, "name", "`scripted`",
            "The upstream of its models, if a model does not name another one of the same kind";
    }
}

table! {
    McpTable {
        url: String, "URL", "that of the built-in one",
            "Its endpoint (streamable HTTP), such as `https://mcp.example.org/mcp`; of `gemini` the \
             model. Plain http is only for this machine, private addresses and `private_hosts`";
        secret: String, "name", "that of the built-in one, else none",
            "The secret with its key. The server is offered only if the secret is there";
        enabled: bool, "`true` or `false`", "`true`",
            "`false` offers it to no session, even if its secret is there";
    }
}

table! {
    GithubTable {
        url: String, "URL", "`https://github.com`",
            "GitHub.com, or the base URL of an Enterprise server. Plain http is only for this \
             machine, private addresses and `private_hosts`";
        shared_token: bool, "`true` or `false`", "`false`",
            "Whether the token `GITHUB_TOKEN` in the environment of `harvest up` signs in for the \
             repositories of all users, without an App. Otherwise it opens none: users and \
             repositories have tokens of their own";
    }
}

table! {
    ClocksTable {
        heartbeat: Span, "duration", "`30s`",
            "Interval of the supervisor's heartbeats";
        stale: Span, "duration", "`90s`",
            "Reconnect to a supervisor that is silent for this long; a sandbox that cannot be \
             reached for this long counts as lost";
        idle_freeze: Span, "duration", "`2m`",
            "The processes of an idle session's sandbox are frozen after this time";
        idle_pause: Span, "duration", "`10m`",
            "An idle session is paused after this time";
        boot: Span, "duration", "`30m`",
            "Time from a sandbox's start until it accepts prompts";
        turn: Span, "duration", "`2h`",
            "A turn that runs longer is stopped";
        silence: Span, "duration", "`10m`",
            "A turn fails when neither its agent nor its model writes anything for this long";
        stop: Span, "duration", "`1m`",
            "If a stop is not confirmed after this time, the sandbox is killed; its disk is saved";
        save: Span, "duration", "`5m`",
            "The outcome of a save that takes longer is unknown";
        exec: Span, "duration", "`30m`",
            "A command that runs longer is killed, unless it sets another timeout";
        lifetime: Span, "duration", "`24h`",
            "An older sandbox gets no further turn: the session continues in a new one";
        build: Span, "duration", "`30m`",
            "Timeout of a repository build";
        warm: Span, "duration", "`5m`",
            "Timeout of the repository's check during a build";
        check: Span, "duration", "`30m`",
            "Timeout of the repository's check of a pushed commit";
        breaker: Span, "duration", "`5m`",
            "Time during which failed starts are counted; a session that met a full disk tries \
             again after it";
        breaker_failures: usize, "number", "`3`",
            "After this many failed starts the session waits for a user";
    }
}

table! {
    LimitsTable {
        sandboxes: usize, "number", "4 per core, at most 1 per GiB of memory",
            "Slots: sandboxes running at once, of sessions and standalone ones. Sessions queue for \
             a free slot, standalone sandboxes are refused after 30 s";
        sandboxes_per_user: usize, "number", "no limit",
            "Slots of one user";
        member_sandboxes: u32, "number", "`2`",
            "Standalone sandboxes of one member, stopped ones included; `harvest user set` sets \
             another number for one. 0: members run commands in their sessions only";
        checks: usize, "number", "the number of cores, at least 3",
            "Builds and checks of pushed commits running at once, in addition to the slots. Users \
             take turns, and one user never holds all of them";
        processes: u32, "number", "`4096`, less if all slots would exceed half of the host's pids",
            "Processes and threads of one sandbox";
        disk: Size, "size", "`10g`",
            "What one sandbox may write to its own disk; also the size of its largest file";
    }
}

table! {
    RetentionTable {
        archived: Span, "duration", "never",
            "Archived sessions are removed after this time, such as `30d`, unless one of their \
             snapshots is pinned";
        snapshots_per_session: usize, "number", "`100`",
            "Snapshots kept per open session; the oldest are removed first";
        snapshots_bytes: Size, "size", "no limit",
            "Total size of all sessions' snapshots, such as `50g`; the oldest are removed first";
        history_per_turn: Size, "size", "`64m`",
            "Events stored of one turn; its further output is not stored, which a warning says";
        history_per_session: Size, "size", "`512m`",
            "Events stored of one session; further output is not stored, which a warning says";
    }
}

/// The name, the purpose and the keys of each table; the first has no name.
pub(crate) fn tables() -> impl Iterator<Item = (&'static str, &'static str, &'static [Key])> {
    std::iter::once(("", "", ConfigFile::KEYS)).chain(ConfigFile::TABLES.iter().copied())
}

/// The same of the tables of which the file may have any number.
pub(crate) fn named_tables() -> impl Iterator<Item = (&'static str, &'static str, &'static [Key])> {
    ConfigFile::NAMED.iter().copied()
}

/// The names of all keys.
pub(super) fn key_names() -> impl Iterator<Item = &'static str> {
    tables().chain(named_tables()).flat_map(|(.., keys)| keys).map(|key| key.name)
}

/// Every key with its table.
pub(super) fn every_key() -> impl Iterator<Item = (&'static str, &'static Key)> {
    tables().flat_map(|(table, _, keys)| keys.iter().map(move |key| (table, key)))
}

/// The environment variable of a key.
pub(super) fn variable_of(table: &str, key: &str) -> String {
    let table = if table.is_empty() { String::new() } else { format!("{table}_") };
    format!("HARVEST_{table}{key}").to_uppercase().replace(['.', '-'], "_")
}

fn value<T: FromStr<Err: ToString>>(
    variable: &str,
    file: Option<T>,
    default: &str,
    env: Env,
) -> Result<Option<T>> {
    let parse = |text: &str| {
        text.parse::<T>()
            .map_err(|error| Error::msg(error.to_string()))
            .with_context(|| format!("{variable} is `{text}`, which is not valid"))
    };
    if let Some(text) = env(variable) {
        return parse(&text).map(Some);
    }
    let quoted = default.strip_prefix('`').and_then(|text| text.strip_suffix('`'));
    let default = quoted.filter(|text| !text.contains('`'));
    file.map_or_else(|| default.map(parse).transpose(), |value| Ok(Some(value)))
}

/// Variables without a key, for the reference page.
#[cfg(test)]
pub(crate) const VARIABLES: [(&str, &str); 9] = [
    ("HARVEST_CONFIG", "The configuration file; also `--config`"),
    (
        "HARVEST_SUPERVISOR",
        "The supervisor to use instead of the embedded one; for development of Harvest",
    ),
    (
        "ANTHROPIC_API_KEY, CLAUDE_CODE_OAUTH_TOKEN, OPENAI_API_KEY, GEMINI_API_KEY, GITHUB_TOKEN, \
         SENTRY_AUTH_TOKEN, LINEAR_API_KEY, SLACK_BOT_TOKEN",
        "In the environment of `harvest up`, as the secrets of all upstreams and MCP servers: used \
         if no secret of that name is stored. Without an API key, `anthropic` uses the token of a subscription",
    ),
    (
        "GITHUB_APP_ID, GITHUB_APP_PRIVATE_KEY",
        "In the environment of `harvest up`: the App that signs in to GitHub, and its private key \
         (PEM, PKCS#1 or PKCS#8) or the path of a file with it",
    ),
    (
        "GITHUB_APP_INSTALLATION_ID",
        "The installation of the App; looked up for each repository when absent",
    ),
    (
        "GITHUB_WEBHOOK_SECRET",
        "The secret of the webhooks that `POST /hooks/github` takes; without it they are refused",
    ),
    ("HARVEST_PAGER", "The pager of `harvest diff` on a terminal; then `PAGER`, then `less`"),
    ("NO_COLOR", "Disables colours when set"),
    ("TERM", "With `dumb`, or without a value, there are no colours and no live line"),
];
