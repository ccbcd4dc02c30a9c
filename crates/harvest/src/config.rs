//! The configuration: one TOML file; each key is also a variable, some are also a flag. Flags
//! override variables, variables the file, the file the default. Only reads; creates nothing.

mod agents;
mod github;
mod keys;
mod mcp_servers;
pub(crate) mod origin;
pub(crate) mod prices;
mod retention;
mod tables;
mod upstreams;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow};
use harvest_engine::Driver;
use harvest_gateway::{McpServers, Upstreams, normalize_entry};
use harvest_proto::{Secret, api::PullRequestMode, suggest::closest};
use harvest_session::{ConfiguredAgents, Limits, Retention, timeouts::Timeouts};
use harvest_store::DatabaseUrl;
use serde::Deserialize;

use crate::{cli::GlobalFlags, printer::Advice};
pub(crate) use github::GitHubConfig;
#[cfg(test)]
use keys::every_key;
use keys::{ConfigFile, HAS_DEFAULT, key_names};
#[cfg(test)]
pub(crate) use keys::{Key, VARIABLES, named_tables, tables as keys_by_table};

/// The effective settings of this run.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// State of this installation.
    pub(crate) home: PathBuf,
    /// Image layers, shared by all installations of this user.
    pub(crate) cache: PathBuf,
    /// The server to talk to; found through the home when absent.
    pub(crate) url: Option<String>,
    /// The access token; read from the home when absent.
    pub(crate) token: Option<Secret<String>>,
    pub(crate) listen: SocketAddr,
    /// Host names the server accepts besides loopback.
    pub(crate) hosts: Vec<String>,
    /// Requests per second of one token; 0 is no limit.
    pub(crate) rate_limit: u32,
    pub(crate) max_connections: u32,
    /// The log filter, in `tracing` syntax.
    pub(crate) log: String,
    pub(crate) log_format: LogFormat,
    /// Host names that `trusted` sandboxes may reach besides package registries.
    pub(crate) git_hosts: Vec<String>,
    pub(crate) trusted: Vec<String>,
    /// Hosts with private addresses that git remotes and trusted names may be at.
    pub(crate) private_hosts: Vec<String>,
    /// The image of sessions; without it, the server chooses.
    pub(crate) image: Option<String>,
    /// The name of the first token's user, who authors commits.
    pub(crate) author_name: Option<String>,
    pub(crate) author_email: Option<String>,
    /// Model calls are refused once a session, with those that its agent created, has used this
    /// many tokens.
    pub(crate) budget_tokens: Option<u64>,
    /// Whether repositories that have moved are rebuilt every half hour.
    pub(crate) schedule: bool,
    /// What is opened for branches that sessions push.
    pub(crate) pr_mode: PullRequestMode,
    /// Where GitHub is, and how the server signs in.
    pub(crate) github: GitHubConfig,
    /// The number of sandboxes in the warm pool per repository in use.
    pub(crate) pool: u32,
    /// A file with prices of models that come before the shipped ones.
    pub(crate) prices: Option<PathBuf>,
    /// The services for model calls.
    pub(crate) upstreams: Upstreams,
    /// The agents besides the built-in ones.
    pub(crate) agents: ConfiguredAgents,
    /// The MCP servers to which the gateway adds a key.
    pub(crate) mcp_servers: McpServers,
    /// The disk driver of a new home.
    pub(crate) store_driver: Driver,
    /// The maximum size of a new `/mnt/state` volume.
    pub(crate) state_bytes: u64,
    /// The database of sessions; a file in the home when absent.
    pub(crate) database: Option<DatabaseUrl>,
    pub(crate) clocks: Timeouts,
    pub(crate) limits: Limits,
    /// The limits of a sandbox whose creator gives none.
    pub(crate) sandbox_limits: harvest_engine::Limits,
    pub(crate) retention: Retention,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err("must be `text` or `json`"),
        }
    }
}

/// Names, separated by commas in a variable.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(transparent)]
struct List(Vec<String>);

impl std::str::FromStr for List {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        Ok(Self(parts.map(str::to_owned).collect()))
    }
}

/// Looks up a variable; an empty one counts as absent.
pub(crate) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

pub(crate) fn process_env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Config {
    /// Reads the settings from flags, environment and file.
    pub(crate) fn load(flags: &GlobalFlags, env: Env) -> Result<Self> {
        let text = read(flags, env)?;
        let file = parse(&text)
            .with_context(|| format!("cannot use {}", path_of(flags, env).0.display()))?;
        Self::merge(flags, env, file)
    }

    fn merge(flags: &GlobalFlags, env: Env, file: ConfigFile) -> Result<Self> {
        let file = file.resolve("", env)?;
        let private_hosts = file.private_hosts.unwrap_or_default().0;
        let upstreams = upstreams::upstreams(file.upstreams, &private_hosts, env)?;
        let agents = agents::agents(file.agents, &upstreams, env)?;
        let mcp_servers = mcp_servers::mcp_servers(file.mcp, &private_hosts, env)?;
        let github = github::github(file.github, &private_hosts, env)?;
        let database = database(file.database, env("HARVEST_DATABASE").is_some())?;
        Ok(Self {
            home: flags
                .home
                .clone()
                .or(file.home)
                .unwrap_or_else(|| xdg(env, "XDG_STATE_HOME", ".local/state").join("harvest")),
            cache: file
                .cache
                .unwrap_or_else(|| xdg(env, "XDG_CACHE_HOME", ".cache").join("harvest")),
            url: flags.url.clone().or(file.url),
            token: file.token,
            listen: file.listen.expect(HAS_DEFAULT),
            hosts: file.hosts.unwrap_or_default().0,
            rate_limit: file.rate_limit.expect(HAS_DEFAULT),
            max_connections: file.max_connections.expect(HAS_DEFAULT),
            log: file.log.expect(HAS_DEFAULT),
            log_format: file.log_format.expect(HAS_DEFAULT),
            git_hosts: git_hosts(file.git_hosts.expect(HAS_DEFAULT))?,
            trusted: file.trusted.unwrap_or_default().0,
            private_hosts,
            image: file.image,
            author_name: file.author_name,
            author_email: file.author_email,
            budget_tokens: file.budget_tokens,
            schedule: file.schedule.expect(HAS_DEFAULT),
            pr_mode: file.pr.expect(HAS_DEFAULT),
            github,
            pool: file.pool.expect(HAS_DEFAULT),
            prices: file.prices,
            upstreams,
            agents,
            mcp_servers,
            store_driver: file.store_driver.expect(HAS_DEFAULT),
            state_bytes: file.state_size.expect(HAS_DEFAULT).0,
            database,
            clocks: file.clocks.timeouts()?,
            sandbox_limits: file.limits.sandbox_limits(),
            limits: file.limits.limits()?,
            retention: file.retention.rules()?,
        })
    }

    /// The file in which a running server writes its URL and pid.
    pub(crate) fn server_file(&self) -> PathBuf {
        self.home.join("server.json")
    }

    /// The file with the first token, readable only by the owner of the home.
    pub(crate) fn token_file(&self) -> PathBuf {
        self.home.join("token")
    }

    /// The same settings for another home, without the URL and token of this one.
    pub(crate) fn at(&self, home: &Path) -> Self {
        Self { home: home.to_owned(), url: None, token: None, ..self.clone() }
    }
}

/// Host names of public git repositories, normalized.
fn git_hosts(List(names): List) -> Result<Vec<String>> {
    let host = |name: String| match normalize_entry(&name).filter(|host| !host.starts_with('*')) {
        Some(host) => Ok(host),
        None => Err(anyhow!(Advice::new(
            format!("`{name}` in the key `git_hosts` is not a host name"),
            "give names such as `github.com`",
        ))),
    };
    names.into_iter().map(host).collect()
}

/// The path of the file, and whether a flag or variable names it.
fn path_of(flags: &GlobalFlags, env: Env) -> (PathBuf, bool) {
    match flags.config.clone().or_else(|| env("HARVEST_CONFIG").map(PathBuf::from)) {
        Some(named) => (named, true),
        None => (xdg(env, "XDG_CONFIG_HOME", ".config").join("harvest.toml"), false),
    }
}

/// The file that [`Config::load`] reads, if it exists.
pub(crate) fn existing_file(flags: &GlobalFlags, env: Env) -> Option<PathBuf> {
    Some(path_of(flags, env).0).filter(|path| path.is_file())
}

fn read(flags: &GlobalFlags, env: Env) -> Result<String> {
    let (path, named) = path_of(flags, env);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text),
        // The file at the default path is optional.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !named => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Parses the file. Errors name the line and, for an unknown key, the nearest known one.
fn parse(text: &str) -> Result<ConfigFile> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or("");
        let unknown =
            error.message().strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        let message = match unknown {
            Some(key) => format!("unknown field `{key}`"),
            None => error.message().to_owned(),
        };
        let meant = unknown.and_then(|key| closest(key, key_names()));
        let hint = match (meant, unknown) {
            (Some(key), _) => format!("did you mean `{key}`?"),
            (None, Some(_)) => "`harvest config` lists all keys".to_owned(),
            _ => "fix the line, or name another file with HARVEST_CONFIG".to_owned(),
        };
        Advice::new(format!("line {}: {message}", before.matches('\n').count() + 1), hint).into()
    })
}

/// Errors do not repeat the URL: it may contain a password.
fn database(text: Option<Secret<String>>, variable: bool) -> Result<Option<DatabaseUrl>> {
    let Some(text) = text else { return Ok(None) };
    let name = if variable { "HARVEST_DATABASE" } else { "the key `database`" };
    let hint =
        "such as `sqlite:/var/lib/harvest.db` or `postgres://harvest:PASSWORD@localhost/harvest`";
    let url = text.expose().parse();
    url.map(Some).map_err(|error| {
        anyhow::Error::new(error).context(Advice::new(format!("{name} is not valid"), hint))
    })
}

fn xdg(env: Env, name: &str, below_home: &str) -> PathBuf {
    // The XDG base directory specification says to ignore relative paths.
    env(name).map(PathBuf::from).filter(|path| path.is_absolute()).unwrap_or_else(|| {
        PathBuf::from(env("HOME").unwrap_or_else(|| "/root".into())).join(below_home)
    })
}

#[cfg(test)]
mod tests;
