//! One TOML file, each key also a variable, some also a flag: flag before variable before file before
//! default. Reads; makes nothing.

mod keys;
pub(crate) mod origin;
mod retention;
mod tables;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use harvest_engine::Driver;
use harvest_proto::{Secret, nearest::nearest};
use harvest_session::{Limits, Retention, clocks::Clocks};
use harvest_store::DatabaseUrl;
use serde::Deserialize;

use crate::{cli::Global, printer::Advice};
pub(crate) use keys::KEYS;
#[cfg(test)]
pub(crate) use keys::VARIABLES;
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
        let file = parse(&text)
            .with_context(|| format!("cannot use {}", path_of(flags, env).0.display()))?;
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
            log_format: parsed("LOG_FORMAT", var("LOG_FORMAT"))?
                .or(file.log_format)
                .unwrap_or_default(),
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
    plain
        .map(|(key, _, default, _)| ("", *key, *default))
        .chain(clocks)
        .chain(limits)
        .chain(retention)
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
        let unknown =
            error.message().strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        let message = match unknown {
            Some(key) => format!("unknown field `{key}`"),
            None => error.message().to_owned(),
        };
        let meant = unknown.and_then(|key| nearest(key, every_key().map(|key| key.1)));
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
    let hint =
        "such as `sqlite:/var/lib/harvest.db` or `postgres://harvest:PASSWORD@localhost/harvest`";
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
    env(name).map(PathBuf::from).filter(|path| path.is_absolute()).unwrap_or_else(|| {
        PathBuf::from(env("HOME").unwrap_or_else(|| "/root".into())).join(below_home)
    })
}

#[cfg(test)]
mod tests;
