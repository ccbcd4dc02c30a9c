//! Describes the keys and variables of the configuration for the reference page.

/// Key, type, default and meaning of every key, in the order of `ConfigFile`.
pub(crate) const KEYS: &[(&str, &str, &str, &str)] = &[
    (
        "home",
        "path",
        "`$XDG_STATE_HOME/harvest` (`~/.local/state/harvest`)",
        "State of this installation: database, sandboxes, snapshots, local forge, encrypted secrets; \
        also `--home`",
    ),
    (
        "cache",
        "path",
        "`$XDG_CACHE_HOME/harvest` (`~/.cache/harvest`)",
        "Image layers, shared by all installations of this user",
    ),
    ("url", "text", "the server that runs from `home`", "The server to talk to; also `--url`"),
    ("token", "text", "the one in `home`", "The access token for the server"),
    (
        "listen",
        "address and port",
        "`127.0.0.1:7070`",
        "The address `harvest up` listens on; also `--listen`. Port 0 picks a free port",
    ),
    (
        "hosts",
        "list of names",
        "none",
        "Host names the server accepts besides loopback; also `--host`",
    ),
    (
        "rate_limit",
        "number",
        "`500`",
        "Requests per second of one token, with bursts of four times as many; a tenth of it for an \
        address without a token. Further requests get status 429. 0 is no limit",
    ),
    (
        "max_connections",
        "number",
        "`1000`",
        "Concurrent connections to the server; further ones wait",
    ),
    (
        "log",
        "filter",
        "`warn`",
        "The filter of the log on stderr, such as `info` or `harvest_session=debug`",
    ),
    (
        "log_format",
        "`text` or `json`",
        "`text`",
        "The format of the log; `json` is one object per line",
    ),
    (
        "trusted",
        "list of names",
        "this host's package registries",
        "Host names a sandbox with the network policy `trusted` may reach",
    ),
    ("image", "name", "`claude`", "The image sandboxes start from"),
    (
        "author_name",
        "text",
        "git's own `user.name`, else `You`",
        "The name of the commit author, followed by ` (Harvest)`; read when the first token is created",
    ),
    (
        "author_email",
        "text",
        "git's own `user.email`, else `you@localhost`",
        "The e-mail address of the commit author",
    ),
    (
        "budget_tokens",
        "number",
        "no limit",
        "Model calls are refused once a session has used this many tokens",
    ),
    ("anthropic_url", "URL", "the Anthropic API", "The URL of the model upstream `anthropic`"),
    (
        "store_driver",
        "`auto`, `dir` or `btrfs`",
        "`dir`",
        "The disk driver of a new `home`: plain folders, or btrfs, which snapshots and forks in \
        milliseconds; an existing home keeps its driver",
    ),
    (
        "database",
        "`sqlite:PATH` or `postgres://USER:PASSWORD@HOST/NAME`",
        "`harvest.db` in `home`",
        "The database of sessions, prompts and events. PostgreSQL must be version 13 or newer, and the \
        database belongs to one home. `?sslmode=verify-full` verifies the server's certificate",
    ),
    ("clocks", "table", "below", "Timeouts and intervals"),
    ("limits", "table", "below", "Concurrency limits"),
    ("retention", "table", "below", "Retention of snapshots and archived sessions"),
];

/// Variables without a key, for the reference page.
#[cfg(test)]
pub(crate) const VARIABLES: [(&str, &str); 4] = [
    ("HARVEST_CONFIG", "The configuration file; also `--config`"),
    (
        "HARVEST_SUPERVISOR",
        "The supervisor to use instead of the embedded one; for development of Harvest",
    ),
    (
        "ANTHROPIC_API_KEY",
        "In the environment of `harvest up`: used if no secret of that name is stored",
    ),
    ("NO_COLOR", "Disables colours when set"),
];
