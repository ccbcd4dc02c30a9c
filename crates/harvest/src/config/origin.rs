//! Where each setting comes from, for who wonders why something is as it is. Shows no secret.

use anyhow::{Context, Result};
use harvest_proto::redact;
use serde::Serialize;

use super::{Config, Env, Level, every_key, path_of, read, variable_of};
use crate::cli::Global;

/// One key as it holds for this run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Setting {
    /// Its name in the file.
    pub(crate) key: String,
    /// What holds, secrets covered.
    pub(crate) value: String,
    /// Who said so: a flag, a variable, the file or nobody.
    pub(crate) from: String,
}

/// Every key, in the order of the reference.
pub(crate) fn settings(config: &Config, flags: &Global, env: Env) -> Result<Vec<Setting>> {
    let path = path_of(flags, env).0;
    let text = read(flags, env)?;
    let file: toml::Table =
        toml::from_str(&text).with_context(|| format!("cannot use {}", path.display()))?;
    let one = |(table, key, default): (&str, &'static str, &str)| {
        let (variable, name) = (variable_of(table, key), dotted(table, key));
        let written = if table.is_empty() {
            file.get(key)
        } else {
            file.get(table).and_then(|table| table.get(key))
        };
        let (level, text) = match (flag(flags, &name), env(&variable), written) {
            (Some(text), _, _) => (Level::Flag, text),
            (None, Some(text), _) => (Level::Variable, text),
            (None, None, Some(value)) => (Level::File, plain(value)),
            (None, None, None) => (Level::Default, default_of(config, &name, default)),
        };
        let from = match level {
            Level::Flag => format!("--{key}"),
            Level::Variable => variable,
            Level::File => path.display().to_string(),
            Level::Default => "default".to_owned(),
        };
        let secret = name == "token" && level != Level::Default;
        let value = if secret { "***".to_owned() } else { redact::cover(&text) };
        Setting { key: name, value, from }
    };
    Ok(every_key().map(one).collect())
}

fn dotted(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

fn flag(flags: &Global, key: &str) -> Option<String> {
    match key {
        "home" => flags.home.as_ref().map(|home| home.display().to_string()),
        "url" => flags.url.clone(),
        _ => None,
    }
}

/// A text without the quotes that only the file needs.
fn plain(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        other => serde_json::to_string(other).unwrap_or_default(),
    }
}

/// Where the reference says how a default is found, what was found.
fn default_of(config: &Config, key: &str, documented: &str) -> String {
    match key {
        "home" => config.home.display().to_string(),
        "cache" => config.cache.display().to_string(),
        _ => documented.replace('`', ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_says_what_holds_and_who_said_so_and_shows_no_secret() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            "log = \"info\"\ntoken = \"hvt_planted\"\nhosts = [\"a\", \"b\"]\ndatabase = \"postgres://u:planted@h/d\"\n[clocks]\nturn = \"3h\"\n",
        )
        .unwrap();
        let flags = Global {
            home: Some("/flag".into()),
            config: Some(file.path().into()),
            ..Global::default()
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
        assert_eq!(shown("image"), ("claude", "default"));
        assert!(!format!("{settings:?}").contains("planted"), "{settings:?}");
        assert_eq!(settings.len(), every_key().count());
        assert_eq!(shown("clocks.turn"), ("3h", path.as_str()));
        assert_eq!(shown("limits.sandboxes"), ("7", "HARVEST_LIMITS_SANDBOXES"));
    }
}
