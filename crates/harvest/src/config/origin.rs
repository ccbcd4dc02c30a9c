//! The value of each setting and where it comes from. Secrets are redacted.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use harvest_proto::redact;
use serde::Serialize;
use serde_json::Value;

use super::{
    Config, Env, agents,
    keys::{AgentTable, Key, McpTable, UpstreamTable, every_key, variable_of},
    mcp_servers, path_of, read,
    upstreams::{named, table_of},
};
use crate::cli::GlobalFlags;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Setting {
    pub(crate) key: String,
    #[serde(skip)]
    pub(crate) value: String,
    /// The value for programs; null where the default is only described.
    #[serde(rename = "value")]
    typed: Value,
    /// A flag, a variable, the path of the file, or `default`.
    pub(crate) from: String,
}

const DEFAULT: &str = "default";

/// Every key, in the order of the reference.
pub(crate) fn settings(config: &Config, flags: &GlobalFlags, env: Env) -> Result<Vec<Setting>> {
    let path = path_of(flags, env).0;
    let text = read(flags, env)?;
    let file: toml::Table =
        toml::from_str(&text).with_context(|| format!("cannot use {}", path.display()))?;
    let one = |(table, Key { name: key, kind, default, .. }): (&str, &Key)| {
        let (variable, name) = (variable_of(table, key), dotted(table, key));
        let written = written(&file, &name);
        let (from, text) = match (flag(flags, &name), env(&variable), written) {
            (Some(text), _, _) => (format!("--{key}"), text),
            (None, Some(text), _) => (variable, text),
            (None, None, Some(value)) => (path.display().to_string(), unquoted(value)),
            (None, None, None) => (DEFAULT.to_owned(), default_of(config, &name, default)),
        };
        let secret = name == "token" && from != DEFAULT;
        let value = if secret { "***".to_owned() } else { redact::redact(&text) };
        let described = from == DEFAULT && !default.starts_with('`');
        let typed = if described { Value::Null } else { typed(kind, &value) };
        Setting { key: name, value, typed, from }
    };
    let upstreams =
        named(&tables(&file, "upstreams")).map(|name| (table_of(&name), UpstreamTable::KEYS));
    let servers = mcp_servers::named(&tables(&file, "mcp"));
    let servers = servers.map(|name| (mcp_servers::table_of(&name), McpTable::KEYS));
    let mut settings: Vec<Setting> = every_key().map(&one).collect();
    for (table, keys) in upstreams.chain(servers) {
        settings.extend(keys.iter().map(|key| one((&table, key))));
    }
    for table in config.agents.keys().map(agents::table_of) {
        settings.extend(AgentTable::KEYS.iter().map(|key| one((&table, key))));
    }
    Ok(settings)
}

/// The tables below this name in the file.
fn tables<'a>(file: &'a toml::Table, name: &str) -> BTreeMap<String, &'a toml::Value> {
    let tables = file.get(name).and_then(toml::Value::as_table);
    tables.into_iter().flatten().map(|(name, table)| (name.clone(), table)).collect()
}

fn written<'a>(file: &'a toml::Table, name: &str) -> Option<&'a toml::Value> {
    let (first, rest) = name.split_once('.').map_or((name, None), |(a, b)| (a, Some(b)));
    rest.into_iter()
        .flat_map(|rest| rest.split('.'))
        .try_fold(file.get(first)?, |at, key| at.get(key))
}

/// A number or a list where the key's type says so, otherwise a text.
fn typed(kind: &str, value: &str) -> Value {
    match kind {
        "number" => value.parse::<u64>().map_or_else(|_| value.into(), Value::from),
        "`true` or `false`" => value.parse::<bool>().map_or_else(|_| value.into(), Value::from),
        "list of names" | "list of texts" => {
            value.split(',').filter(|name| !name.is_empty()).collect()
        }
        _ => value.into(),
    }
}

fn dotted(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

fn flag(flags: &GlobalFlags, key: &str) -> Option<String> {
    match key {
        "home" => flags.home.as_ref().map(|home| home.display().to_string()),
        "url" => flags.url.clone(),
        _ => None,
    }
}

/// The value without TOML quotes.
fn unquoted(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(items) => items.iter().map(unquoted).collect::<Vec<_>>().join(","),
        other => serde_json::to_string(other).unwrap_or_default(),
    }
}

/// The effective default, where the reference page only describes how it is found.
fn default_of(config: &Config, key: &str, documented: &str) -> String {
    match key {
        "home" => config.home.display().to_string(),
        "cache" => config.cache.display().to_string(),
        _ => upstream_default(config, key)
            .or_else(|| server_default(config, key))
            .unwrap_or_else(|| documented.replace('`', "")),
    }
}

fn upstream_default(config: &Config, key: &str) -> Option<String> {
    let (name, key) = key.strip_prefix("upstreams.")?.split_once('.')?;
    let upstream = config.upstreams.get(&name.parse().ok()?)?;
    match key {
        "kind" => Some(upstream.kind.to_string()),
        "url" => Some(upstream.url.clone()),
        _ => Some(upstream.secret.clone().unwrap_or_else(|| "none".to_owned())),
    }
}

fn server_default(config: &Config, key: &str) -> Option<String> {
    let (name, key) = key.strip_prefix("mcp.")?.split_once('.')?;
    let server = config.mcp_servers.get(&name.parse().ok()?)?;
    match key {
        "url" => Some(server.url.clone()),
        "secret" => Some(server.secret.clone().unwrap_or_else(|| "none".to_owned())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_show_value_and_source_without_secrets() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            "log = \"info\"\ntoken = \"hvt_planted\"\nhosts = [\"a\", \"b\"]\ndatabase = \"postgres://u:planted@h/d\"\n[clocks]\nturn = \"3h\"\n[upstreams.own]\nkind = \"openai\"\nurl = \"https://own.example\"\n[agents.own]\ncommand = [\"own\", \"--acp\"]\nenv = { KEY = \"none\" }\n",
        )
        .unwrap();
        let flags = GlobalFlags {
            home: Some("/flag".into()),
            config: Some(file.path().into()),
            ..GlobalFlags::default()
        };
        let vars = [
            ("HARVEST_LIMITS_SANDBOXES", "7"),
            ("HARVEST_HOME", "/env"),
            ("HARVEST_LISTEN", "127.0.0.1:9"),
            ("HARVEST_URL", "http://u:planted@h"),
        ];
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        let config = Config::load(&flags, &env).unwrap();
        let settings = settings(&config, &flags, &env).unwrap();
        let shown = |key: &str| {
            let setting = settings.iter().find(|setting| setting.key == key).unwrap();
            (setting.value.as_str(), setting.from.as_str())
        };
        let path = file.path().display().to_string();
        assert_eq!(shown("home"), ("/flag", "--home"));
        assert_eq!(shown("listen"), ("127.0.0.1:9", "HARVEST_LISTEN"));
        assert_eq!(shown("log"), ("info", path.as_str()));
        assert_eq!(shown("hosts"), ("a,b", path.as_str()));
        assert_eq!(shown("token"), ("***", path.as_str()));
        assert_eq!(shown("store_driver"), ("dir", "default"));
        assert!(!format!("{settings:?}").contains("planted"), "{settings:?}");
        assert_eq!(shown("upstreams.own.url"), ("https://own.example", path.as_str()));
        assert_eq!(shown("upstreams.openai.url"), ("https://api.openai.com/v1", "default"));
        assert_eq!(shown("upstreams.own.secret"), ("none", "default"));
        assert_eq!(shown("agents.own.command"), ("own,--acp", path.as_str()));
        assert_eq!(shown("agents.own.env"), ("{\"KEY\":\"none\"}", path.as_str()));
        assert_eq!(shown("agents.own.upstream"), ("scripted", "default"));
        assert_eq!(shown("mcp.github.secret"), ("GITHUB_TOKEN", "default"));
        // `anthropic`, `openai`, `gemini` and `own`; the agent `own`; four built-in MCP servers.
        let (upstreams, servers) = (4 * UpstreamTable::KEYS.len(), 4 * McpTable::KEYS.len());
        let named = upstreams + AgentTable::KEYS.len() + servers;
        assert_eq!(settings.len(), every_key().count() + named);
        let json = serde_json::to_value(&settings).unwrap();
        let typed = |key: &str| {
            let all = json.as_array().unwrap();
            all.iter().find(|setting| setting["key"] == key).unwrap()["value"].clone()
        };
        assert_eq!(typed("hosts"), serde_json::json!(["a", "b"]));
        assert_eq!((typed("limits.sandboxes"), typed("budget_tokens")), (7.into(), Value::Null));
        assert_eq!(shown("clocks.turn"), ("3h", path.as_str()));
        assert_eq!(shown("limits.sandboxes"), ("7", "HARVEST_LIMITS_SANDBOXES"));
    }
}
