//! One TOML file, each key also a variable, some also a flag: flag before variable before file before
//! default. Reads; makes nothing.

mod nearest;
pub(crate) mod origin;
mod retention;
mod tables;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use harvest_engine::Driver;
use harvest_proto::Secret;
use harvest_session::{Limits, Retention, clocks::Clocks};
use harvest_store::DatabaseUrl;
use serde::Deserialize;

use crate::{cli::Global, printer::Advice};
pub(crate) use retention::RETENTION;
use retention::RetentionTable;
pub(crate) use tables::{CLOCKS, LIMITS};
use tables::{ClocksTable, LimitsTable};

/// Where `harvest up` listens unless told otherwise.
pub(crate) const DEFAULT_PORT: u16 = 7070;

/// What holds for this run.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// State of this installation.
    pub(crate) home: PathBuf,
    /// Image layers, shared by all installations of this user.
    pub(crate) cache: PathBuf,
    /// The server to talk to; found through the home when absent.
    pub(crate) url: Option<String>,
    /// The token to show it; found through the home when absent.
    pub(crate) token: Option<Secret<String>>,
    /// Where to listen.
    pub(crate) listen: SocketAddr,
    /// Names the server answers to, loopback apart.
    pub(crate) hosts: Vec<String>,
    /// Requests of one token in a second; 0 is no limit.
    pub(crate) rate_limit: u32,
    /// Connections at once.
    pub(crate) max_connections: u32,
    /// What to log, as `tracing` filters spell it.
    pub(crate) log: String,
    /// How log lines look.
    pub(crate) log_format: LogFormat,
    /// Names that `trusted` sandboxes may reach; this host's package sources when absent.
    pub(crate) trusted: Option<Vec<String>>,
    /// The image sandboxes start from.
    pub(crate) image: String,
    /// Whose name commits get when a prompt brings none.
    pub(crate) author_name: Option<String>,
    /// And their address.
    pub(crate) author_email: Option<String>,
    /// A session that has used so many tokens gets no more model calls.
    pub(crate) budget_tokens: Option<u64>,
    /// Where the Anthropic API is; its own address when absent.
    pub(crate) anthropic_url: Option<String>,
    /// How a new home keeps disks.
    pub(crate) store_driver: Driver,
    /// Where sessions are remembered; a file in the home when absent.
    pub(crate) database: Option<DatabaseUrl>,
    /// How long things may take.
    pub(crate) clocks: Clocks,
    /// How much may run at once.
    pub(crate) limits: Limits,
    /// What is kept of sessions.
    pub(crate) retention: Retention,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs: one JSON object per line.
    Json,
}

/// Neither of the two.
#[derive(Debug, thiserror::Error)]
#[error("it is `text` or `json`")]
pub(crate) struct LogFormatError;

impl std::str::FromStr for LogFormat {
    type Err = LogFormatError;

    fn from_str(text: &str) -> Result<Self, LogFormatError> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(LogFormatError),
        }
    }
}

/// The file as written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    home: Option<PathBuf>,
    cache: Option<PathBuf>,
    url: Option<String>,
    token: Option<Secret<String>>,
    listen: Option<SocketAddr>,
    hosts: Option<Vec<String>>,
    rate_limit: Option<u32>,
    max_connections: Option<u32>,
    log: Option<String>,
    log_format: Option<LogFormat>,
    trusted: Option<Vec<String>>,
    image: Option<String>,
    author_name: Option<String>,
    author_email: Option<String>,
    budget_tokens: Option<u64>,
    anthropic_url: Option<String>,
    store_driver: Option<Driver>,
    database: Option<Secret<String>>,
    #[serde(default)]
    clocks: ClocksTable,
    #[serde(default)]
    limits: LimitsTable,
    #[serde(default)]
    retention: RetentionTable,
}

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
    ("hosts", "list of names", "none", "Names the server answers to besides loopback; also `--host`"),
    (
        "rate_limit",
        "number",
        "`500`",
        "Requests of one token in a second, four times as many at once; a tenth of it for each address that \
         shows no token. More are answered 429. 0 is no limit",
    ),
    ("max_connections", "number", "`1000`", "Connections to the server at once; more wait"),
    ("log", "filter", "`warn`", "What goes to the log on stderr, such as `info` or `harvest_session=debug`"),
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
    ("HARVEST_SUPERVISOR", "Another supervisor than the one in the binary; for work on Harvest itself"),
    ("ANTHROPIC_API_KEY", "In the environment of `harvest up`: used when no secret of that name is stored"),
    ("NO_COLOR", "Prints without colours when it is set"),
];

/// Looks a variable up; empty counts as absent.
pub(crate) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The process's own variables.
pub(crate) fn process_env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Config {
    /// What holds for these flags, this environment and the file they name.
    pub(crate) fn load(flags: &Global, env: Env) -> Result<Self> {
        let text = read(flags, env)?;
        let file = parse(&text).with_context(|| format!("cannot use {}", path_of(flags, env).0.display()))?;
        Self::merge(flags, env, file)
    }

    fn merge(flags: &Global, env: Env, file: File) -> Result<Self> {
        let var = |name: &str| env(&format!("HARVEST_{name}"));
        let path = |name: &str| var(name).map(PathBuf::from);
        let list = |name: &str| var(name).map(|text| split(&text));
        let number = |name: &str| parsed::<u64>(name, var(name));
        let listen = parsed::<SocketAddr>("LISTEN", var("LISTEN"))?;
        Ok(Self {
            home: flags
                .home
                .clone()
                .or_else(|| path("HOME"))
                .or(file.home)
                .unwrap_or_else(|| xdg(env, "XDG_STATE_HOME", ".local/state").join("harvest")),
            cache: path("CACHE")
                .or(file.cache)
                .unwrap_or_else(|| xdg(env, "XDG_CACHE_HOME", ".cache").join("harvest")),
            url: flags.url.clone().or_else(|| var("URL")).or(file.url),
            token: var("TOKEN").map(Secret::new).or(file.token),
            listen: listen
                .or(file.listen)
                .unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT))),
            hosts: list("HOSTS").or(file.hosts).unwrap_or_default(),
            rate_limit: parsed("RATE_LIMIT", var("RATE_LIMIT"))?.or(file.rate_limit).unwrap_or(500),
            max_connections: parsed("MAX_CONNECTIONS", var("MAX_CONNECTIONS"))?
                .or(file.max_connections)
                .unwrap_or(1000),
            log: var("LOG").or(file.log).unwrap_or_else(|| "warn".into()),
            log_format: parsed("LOG_FORMAT", var("LOG_FORMAT"))?.or(file.log_format).unwrap_or_default(),
            trusted: list("TRUSTED").or(file.trusted),
            image: var("IMAGE").or(file.image).unwrap_or_else(|| "claude".into()),
            author_name: var("AUTHOR_NAME").or(file.author_name),
            author_email: var("AUTHOR_EMAIL").or(file.author_email),
            budget_tokens: number("BUDGET_TOKENS")?.or(file.budget_tokens),
            anthropic_url: var("ANTHROPIC_URL").or(file.anthropic_url),
            store_driver: parsed("STORE_DRIVER", var("STORE_DRIVER"))?
                .or(file.store_driver)
                .unwrap_or(Driver::Dir),
            database: database(var("DATABASE"), file.database)?,
            clocks: file.clocks.merge(env)?,
            limits: file.limits.merge(env)?,
            retention: file.retention.merge(env)?,
        })
    }

    /// The file by which the CLI finds a server on this machine.
    pub(crate) fn server_file(&self) -> PathBuf {
        self.home.join("server.json")
    }

    /// The file by which it finds the token: only for who may read the home anyway.
    pub(crate) fn token_file(&self) -> PathBuf {
        self.home.join("token")
    }

    /// The same, with its state in another folder.
    pub(crate) fn at(&self, home: &Path) -> Self {
        Self { home: home.to_owned(), url: None, token: None, ..self.clone() }
    }
}

/// Table, key and default of everything; the table is empty for what is in none.
fn every_key() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let clocks = CLOCKS.iter().map(|(key, default, _)| ("clocks", *key, *default));
    let limits = LIMITS.iter().map(|(key, default, _)| ("limits", *key, *default));
    let retention = RETENTION.iter().map(|(key, default, _)| ("retention", *key, *default));
    let plain = KEYS.iter().filter(|(_, kind, ..)| *kind != "table");
    plain.map(|(key, _, default, _)| ("", *key, *default)).chain(clocks).chain(limits).chain(retention)
}

/// The variable that is the same as a key.
fn variable_of(table: &str, key: &str) -> String {
    let table = if table.is_empty() { String::new() } else { format!("{table}_") };
    format!("HARVEST_{table}{key}").to_uppercase()
}

/// Who decided a setting, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Flag,
    Variable,
    File,
    Default,
}

/// The file, and whether somebody named it.
fn path_of(flags: &Global, env: Env) -> (PathBuf, bool) {
    match flags.config.clone().or_else(|| env("HARVEST_CONFIG").map(PathBuf::from)) {
        Some(named) => (named, true),
        None => (xdg(env, "XDG_CONFIG_HOME", ".config").join("harvest.toml"), false),
    }
}

fn read(flags: &Global, env: Env) -> Result<String> {
    let (path, named) = path_of(flags, env);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text),
        // A file nobody named need not be there.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !named => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Says in which line it is wrong, and what was meant.
fn parse(text: &str) -> Result<File> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or("");
        let unknown = error.message().strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        let message = match unknown {
            Some(key) => format!("unknown field `{key}`"),
            None => error.message().to_owned(),
        };
        let meant = unknown.and_then(|key| nearest::nearest(key, every_key().map(|key| key.1)));
        let hint = match (meant, unknown) {
            (Some(key), _) => format!("did you mean `{key}`?"),
            (None, Some(_)) => "`harvest config` lists all keys".to_owned(),
            _ => "correct it, or name another file with HARVEST_CONFIG".to_owned(),
        };
        Advice::new(format!("line {}: {message}", before.matches('\n').count() + 1), hint).into()
    })
}

fn parsed<T>(name: &str, text: Option<String>) -> Result<Option<T>>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    let parse = |text: String| {
        text.parse().with_context(|| format!("HARVEST_{name} is `{text}`, which cannot be used"))
    };
    text.map(parse).transpose()
}

/// Unlike other values it is not repeated when it is wrong: there may be a password in it.
fn database(variable: Option<String>, file: Option<Secret<String>>) -> Result<Option<DatabaseUrl>> {
    let (name, text) = match (variable, file) {
        (Some(text), _) => ("HARVEST_DATABASE", Secret::new(text)),
        (None, Some(text)) => ("the key `database`", text),
        (None, None) => return Ok(None),
    };
    let hint = "such as `sqlite:/var/lib/harvest.db` or `postgres://harvest:PASSWORD@localhost/harvest`";
    let url = text.expose().parse();
    url.map(Some).map_err(|error| {
        anyhow::Error::new(error).context(Advice::new(format!("{name} cannot be used"), hint))
    })
}

fn split(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

fn xdg(env: Env, name: &str, below_home: &str) -> PathBuf {
    // A relative path there is invalid and to be ignored, says the base directory specification.
    env(name)
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .unwrap_or_else(|| PathBuf::from(env("HOME").unwrap_or_else(|| "/root".into())).join(below_home))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(flags: &Global, vars: &[(&str, &str)], text: &str) -> Result<Config> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        Config::merge(flags, &env, parse(text)?)
    }

    #[test]
    fn a_flag_goes_before_a_variable_before_the_file_before_the_default() {
        let none = Global::default();
        let file = "home = \"/file\"\nlisten = \"127.0.0.1:1\"";
        let home = |flags: &Global, vars: &[(&str, &str)], text: &str| with(flags, vars, text).unwrap().home;
        assert_eq!(home(&none, &[("HOME", "/h")], ""), Path::new("/h/.local/state/harvest"));
        assert_eq!(home(&none, &[("XDG_STATE_HOME", "/s")], ""), Path::new("/s/harvest"));
        assert_eq!(home(&none, &[], file), Path::new("/file"));
        assert_eq!(home(&none, &[("HARVEST_HOME", "/env")], file), Path::new("/env"));
        let flag = Global { home: Some("/flag".into()), ..Global::default() };
        assert_eq!(home(&flag, &[("HARVEST_HOME", "/env")], file), Path::new("/flag"));
        assert_eq!(with(&none, &[], file).unwrap().listen.port(), 1);
        assert_eq!(with(&none, &[("HARVEST_LISTEN", "127.0.0.1:2")], file).unwrap().listen.port(), 2);
        assert_eq!(with(&none, &[], "").unwrap().listen.to_string(), "127.0.0.1:7070");
    }

    /// Every key with a value for the file and another for the variable.
    const SAMPLES: &[(&str, &str, &str)] = &[
        ("home", "\"/file\"", "/env"),
        ("cache", "\"/file\"", "/env"),
        ("url", "\"http://file\"", "http://env"),
        ("token", "\"file\"", "env"),
        ("listen", "\"127.0.0.1:1\"", "127.0.0.1:2"),
        ("hosts", "[\"file\"]", "env,more"),
        ("rate_limit", "1", "2"),
        ("max_connections", "1", "2"),
        ("log", "\"info\"", "debug"),
        ("log_format", "\"json\"", "text"),
        ("trusted", "[\"file\"]", "env"),
        ("image", "\"file\"", "env"),
        ("author_name", "\"file\"", "env"),
        ("author_email", "\"file\"", "env"),
        ("budget_tokens", "1", "2"),
        ("anthropic_url", "\"file\"", "env"),
        ("store_driver", "\"btrfs\"", "auto"),
        ("database", "\"sqlite:/file\"", "sqlite:/env"),
    ];

    #[test]
    fn for_every_key_a_variable_goes_before_the_file_before_the_default() {
        let keys: Vec<&str> = SAMPLES.iter().map(|sample| sample.0).collect();
        let plain: Vec<&str> = every_key().filter(|key| key.0.is_empty()).map(|key| key.1).collect();
        assert_eq!(keys, plain, "a key has no sample");
        for (table, key, _) in every_key() {
            let sample = SAMPLES.iter().find(|sample| table.is_empty() && sample.0 == key);
            let (in_file, in_variable) = match (sample, table, key) {
                (Some((_, in_file, in_variable)), ..) => (*in_file, *in_variable),
                (None, "limits", _) | (None, _, "breaker_failures" | "snapshots_per_session") => ("71", "72"),
                (None, _, "snapshots_bytes") => ("\"71g\"", "72g"),
                (None, _, "heartbeat") => ("\"1s\"", "2s"),
                _ => ("\"711s\"", "712s"),
            };
            let name = variable_of(table, key);
            let heading = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
            let (text, vars) = (format!("{heading}{key} = {in_file}"), [(name.as_str(), in_variable)]);
            let shown = |vars: &[(&str, &str)], text: &str| {
                let config = with(&Global::default(), vars, text).unwrap();
                // The one value that does not show itself.
                format!("{config:?} {:?}", config.token.as_ref().map(|token| token.expose().clone()))
            };
            let (default, file, variable) = (shown(&[], ""), shown(&[], &text), shown(&vars, ""));
            assert_ne!(file, default, "{key} in the file changes nothing");
            assert_eq!(shown(&vars, &text), variable, "{name} does not go before the file");
            assert_ne!(variable, file, "{name} changes nothing");
        }
    }

    #[test]
    fn the_reference_has_every_key_in_its_order() {
        let error = toml::from_str::<File>("no_such_key = 1").unwrap_err().message().to_owned();
        let keys: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
        let documented: Vec<&str> = KEYS.iter().map(|key| key.0).collect();
        assert_eq!(keys, documented, "{error}");
    }

    #[test]
    fn a_wrong_value_is_named_with_its_line_and_a_variable_by_its_name() {
        let error = parse("log = \"warn\"\n\nlisten = 7").unwrap_err().to_string();
        assert!(error.starts_with("line 3: "), "{error}");
        let error = with(&Global::default(), &[("HARVEST_LISTEN", "x")], "").unwrap_err().to_string();
        assert!(error.starts_with("HARVEST_LISTEN is `x`"), "{error}");
    }

    #[test]
    fn a_misspelt_key_is_refused_rather_than_ignored() {
        let error = with(&Global::default(), &[], "lisen = \"127.0.0.1:1\"").unwrap_err();
        assert!(format!("{error:#}").contains("unknown field `lisen`"), "{error:#}");
        assert_eq!(crate::printer::hint_of(&error).as_deref(), Some("did you mean `listen`?"));
    }

    #[test]
    fn a_databases_password_is_shown_neither_by_a_good_address_nor_by_a_wrong_one() {
        let none = Global::default();
        let good = with(&none, &[], "database = \"postgres://ada:s3cret@db/harvest\"").unwrap();
        assert_eq!(good.database.clone().unwrap().to_string(), "postgres://ada@db/harvest");
        assert!(!format!("{good:?}").contains("s3cret"));
        for url in ["postgres:ada:s3cret@db", "postgres://ada:s3cret@db:x/y"] {
            let error = format!("{:#}", with(&none, &[("HARVEST_DATABASE", url)], "").unwrap_err());
            assert!(error.starts_with("HARVEST_DATABASE cannot be used: "), "{error}");
            assert!(!error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn the_token_does_not_show_itself() {
        let config = with(&Global::default(), &[("HARVEST_TOKEN", "hv_123")], "").unwrap();
        assert!(!format!("{config:?}").contains("hv_123"));
    }
}
