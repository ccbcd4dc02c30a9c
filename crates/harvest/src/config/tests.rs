//! Precedence of flag, variable, file and default, and the errors of invalid values.

use super::*;

fn with(flags: &GlobalFlags, vars: &[(&str, &str)], text: &str) -> Result<Config> {
    let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
    Config::merge(flags, &env, parse(text)?)
}

#[test]
fn flags_override_variables_file_and_default() {
    let none = GlobalFlags::default();
    let file = "home = \"/file\"\nlisten = \"127.0.0.1:1\"";
    let home = |flags: &GlobalFlags, vars: &[(&str, &str)], text: &str| {
        with(flags, vars, text).unwrap().home
    };
    assert_eq!(home(&none, &[("HOME", "/h")], ""), Path::new("/h/.local/state/harvest"));
    assert_eq!(home(&none, &[("XDG_STATE_HOME", "/s")], ""), Path::new("/s/harvest"));
    assert_eq!(home(&none, &[], file), Path::new("/file"));
    assert_eq!(home(&none, &[("HARVEST_HOME", "/env")], file), Path::new("/env"));
    let flag = GlobalFlags { home: Some("/flag".into()), ..GlobalFlags::default() };
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
    ("private_hosts", "[\"file\"]", "env"),
    ("git_hosts", "[\"file.org\"]", "env.org"),
    ("image", "\"file\"", "env"),
    ("author_name", "\"file\"", "env"),
    ("author_email", "\"file\"", "env"),
    ("budget_tokens", "1", "2"),
    ("prices", "\"/file\"", "/env"),
    ("schedule", "false", "true"),
    ("pr", "\"none\"", "draft"),
    ("pool", "0", "1"),
    ("store_driver", "\"btrfs\"", "auto"),
    ("state_size", "\"3g\"", "4g"),
    ("database", "\"sqlite:/file\"", "sqlite:/env"),
];

#[test]
fn every_variable_overrides_file_and_default() {
    let keys: Vec<&str> = SAMPLES.iter().map(|sample| sample.0).collect();
    let plain: Vec<&str> =
        every_key().filter(|key| key.0.is_empty()).map(|key| key.1.name).collect();
    assert_eq!(keys, plain, "a key has no sample");
    for (table, key) in every_key().map(|(table, key)| (table, key.name)) {
        let sample = SAMPLES.iter().find(|sample| table.is_empty() && sample.0 == key);
        let (in_file, in_variable) = match (sample, table, key) {
            (Some((_, in_file, in_variable)), ..) => (*in_file, *in_variable),
            (None, "limits", "disk") => ("\"71g\"", "72g"),
            (None, "limits", _) | (None, _, "breaker_failures" | "snapshots_per_session") => {
                ("71", "72")
            }
            (None, _, "snapshots_bytes" | "history_per_turn" | "history_per_session") => {
                ("\"71g\"", "72g")
            }
            (None, "github", "url") => ("\"https://file.example\"", "https://env.example"),
            (None, "github", _) => ("true", "false"),
            (None, _, "heartbeat") => ("\"1s\"", "2s"),
            _ => ("\"711s\"", "712s"),
        };
        let name = keys::variable_of(table, key);
        let heading = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
        let (text, vars) = (format!("{heading}{key} = {in_file}"), [(name.as_str(), in_variable)]);
        let shown = |vars: &[(&str, &str)], text: &str| {
            let config = with(&GlobalFlags::default(), vars, text).unwrap();
            // The only value whose `Debug` is redacted.
            format!("{config:?} {:?}", config.token.as_ref().map(|token| token.expose().clone()))
        };
        let (default, file, variable) = (shown(&[], ""), shown(&[], &text), shown(&vars, ""));
        assert_ne!(file, default, "{key} in the file changes nothing");
        assert_eq!(shown(&vars, &text), variable, "{name} does not override the file");
        assert_ne!(variable, file, "{name} changes nothing");
    }
}

#[test]
fn errors_name_the_line_or_variable() {
    let error = parse("log = \"warn\"\n\nlisten = 7").unwrap_err().to_string();
    assert!(error.starts_with("line 3: "), "{error}");
    let error =
        with(&GlobalFlags::default(), &[("HARVEST_LISTEN", "x")], "").unwrap_err().to_string();
    assert!(error.starts_with("HARVEST_LISTEN is `x`"), "{error}");
}

#[test]
fn misspelt_key_is_refused_with_suggestion() {
    let error = with(&GlobalFlags::default(), &[], "lisen = \"127.0.0.1:1\"").unwrap_err();
    assert!(format!("{error:#}").contains("unknown field `lisen`"), "{error:#}");
    assert_eq!(crate::printer::hint_of(&error).as_deref(), Some("did you mean `listen`?"));
}

#[test]
fn database_password_is_never_shown() {
    let none = GlobalFlags::default();
    let good = with(&none, &[], "database = \"postgres://ada:s3cret@db/harvest\"").unwrap();
    assert_eq!(good.database.clone().unwrap().to_string(), "postgres://ada@db/harvest");
    assert!(!format!("{good:?}").contains("s3cret"));
    for url in ["postgres:ada:s3cret@db", "postgres://ada:s3cret@db:x/y"] {
        let error = format!("{:#}", with(&none, &[("HARVEST_DATABASE", url)], "").unwrap_err());
        assert!(error.starts_with("HARVEST_DATABASE is not valid: "), "{error}");
        assert!(!error.contains("s3cret"), "{error}");
    }
}

#[test]
fn token_is_redacted_in_debug() {
    let config = with(&GlobalFlags::default(), &[("HARVEST_TOKEN", "hv_123")], "").unwrap();
    assert!(!format!("{config:?}").contains("hv_123"));
}
