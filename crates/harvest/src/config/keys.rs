//! What may stand in the file and in the environment, in words: the reference page is made of this.

/// Key, type, default and meaning of everything in the file, in the order of `File`.
pub(crate) const KEYS: &[(&str, &str, &str, &str)] = &[
    (
        "home",
        "path",
        "`$XDG_STATE_HOME/harvest` (`~/.local/state/harvest`)",
        "State of this installation: store, sandboxes, snapshots, local forge, sealed secrets; also `--home`",
    ),
    (
        "cache",
        "path",
        "`$XDG_CACHE_HOME/harvest` (`~/.cache/harvest`)",
        "Image layers, shared by all installations of this user",
    ),
    ("url", "text", "the server that runs from `home`", "The server to talk to; also `--url`"),
    ("token", "text", "the one in `home`", "The token to show it"),
    (
        "listen",
        "address and port",
        "`127.0.0.1:7070`",
        "Where `harvest up` listens; also `--listen`. Port 0 is any free one",
    ),
    (
        "hosts",
        "list of names",
        "none",
        "Names the server answers to besides loopback; also `--host`",
    ),
    (
        "rate_limit",
        "number",
        "`500`",
        "Requests of one token in a second, four times as many at once; a tenth of it for each address that \
         shows no token. More are answered 429. 0 is no limit",
    ),
    ("max_connections", "number", "`1000`", "Connections to the server at once; more wait"),
    (
        "log",
        "filter",
        "`warn`",
        "What goes to the log on stderr, such as `info` or `harvest_session=debug`",
    ),
    (
        "log_format",
        "`text` or `json`",
        "`text`",
        "How the lines of the log look; `json` is one object per line",
    ),
    (
        "trusted",
        "list of names",
        "this host's package sources",
        "What a sandbox with the network policy `trusted` may reach",
    ),
    ("image", "name", "`claude`", "The image sandboxes start from"),
    (
        "author_name",
        "text",
        "git's own `user.name`, else `You`",
        "Whose name commits get, followed by ` (Harvest)`; read when the first token is made",
    ),
    ("author_email", "text", "git's own `user.email`, else `you@localhost`", "And their address"),
    (
        "budget_tokens",
        "number",
        "no limit",
        "A session that has used so many tokens gets no more model calls",
    ),
    ("anthropic_url", "URL", "the Anthropic API", "Where the model upstream `anthropic` is"),
    (
        "store_driver",
        "`auto`, `dir` or `btrfs`",
        "`dir`",
        "How a new `home` keeps disks: in plain folders, or on btrfs, which captures and forks in milliseconds; \
         of no effect on a home that exists",
    ),
    (
        "database",
        "`sqlite:PATH` or `postgres://USER:PASSWORD@HOST/NAME`",
        "`harvest.db` in `home`",
        "Where sessions, prompts and events are remembered; a PostgreSQL of version 13 or newer, used by this \
         home alone. `?sslmode=verify-full` insists on a server that proves who it is",
    ),
    ("clocks", "table", "below", "How long things may take"),
    ("limits", "table", "below", "How much may run at once"),
    ("retention", "table", "below", "What is kept of sessions"),
];

/// Variables that are no key, for the reference page.
#[cfg(test)]
pub(crate) const VARIABLES: [(&str, &str); 4] = [
    ("HARVEST_CONFIG", "The configuration file; also `--config`"),
    (
        "HARVEST_SUPERVISOR",
        "Another supervisor than the one in the binary; for work on Harvest itself",
    ),
    (
        "ANTHROPIC_API_KEY",
        "In the environment of `harvest up`: used when no secret of that name is stored",
    ),
    ("NO_COLOR", "Prints without colours when it is set"),
];
