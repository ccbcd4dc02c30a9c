//! The pages under `docs/reference`, made from the code. Only tests use this: they fail when a page is out
//! of date and say how to make it again.

use std::path::PathBuf;

use clap::{Arg, Command, CommandFactory};

use crate::{
    cli::Cli,
    config::{CLOCKS, KEYS, LIMITS, RETENTION, VARIABLES},
};

const AGAIN: &str = "HARVEST_REGENERATE=1 cargo nextest run -p harvest reference";

/// Every verb with its arguments.
fn cli_page() -> String {
    let mut harvest = Cli::command();
    harvest.build();
    let mut page = format!(
        "# The command line\n\nMade from the code; `{AGAIN}` makes it again.\n\n\
         A session is named by its id, the beginning of it, or `-` for the newest one. Results go to stdout, \
         everything else\nto stderr. Exit codes: 0 done, 1 the work failed, 2 wrong usage; `exec` passes the \
         command's own (124 out of time,\n126 not executable, 127 not found, 137 out of memory or killed, \
         125 a failure of ours).\n\n`harvest` alone says what is going on and what to do next.\n\n## Flags of \
         every verb\n\n"
    );
    page += &arguments(&harvest, true);
    page += "\n## Verbs\n";
    for verb in harvest.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        page += &section(verb);
    }
    page
}

fn section(verb: &Command) -> String {
    let inner: Vec<&Command> = verb.get_subcommands().collect();
    if !inner.is_empty() {
        return inner.into_iter().map(section).collect();
    }
    let usage = verb.clone().render_usage().to_string();
    let usage = usage.trim().trim_start_matches("Usage: ").replace(" [OPTIONS]", "");
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    let arguments = arguments(verb, false);
    let gap = if arguments.is_empty() { "" } else { "\n" };
    format!("\n### `{usage}`\n\n{about}.\n{gap}{arguments}")
}

fn arguments(command: &Command, global: bool) -> String {
    // How a session is named is at the top of the page.
    let known = |arg: &Arg| {
        let id = arg.get_id().as_str();
        id == "help"
            || id == "version"
            || (id == "session" && arg.get_help().is_some_and(is_plain_session))
    };
    let shown = |arg: &&Arg| arg.is_global_set() == global && !known(arg);
    command.get_arguments().filter(shown).map(argument).collect()
}

fn is_plain_session(help: &clap::builder::StyledStr) -> bool {
    let help = help.to_string();
    help == "The session" || help.starts_with("The session: ")
}

fn argument(arg: &Arg) -> String {
    let value = arg.get_num_args().is_none_or(|count| count.takes_values());
    let names = arg.get_value_names().unwrap_or_default().iter().map(|name| format!("<{name}>"));
    let names: String = if value { names.collect::<Vec<_>>().join(" ") } else { String::new() };
    let short = arg.get_short().map(|short| format!("-{short}"));
    let long = arg.get_long().map(|long| format!("--{long}"));
    let flags: Vec<String> = [short, long].into_iter().flatten().collect();
    let spelled = format!("{} {names}", flags.join(", "));
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let default: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match arg.get_id() == "after" || default.is_empty() || !value {
        true => String::new(),
        false => format!(" [default: {}]", default.join(" ")),
    };
    format!("- `{}`: {help}{default}\n", spelled.trim())
}

/// Every key of the configuration.
fn config_page() -> String {
    let mut page = format!(
        "# Configuration\n\nMade from the code; `{AGAIN}` makes it again.\n\n\
         One TOML file: `$XDG_CONFIG_HOME/harvest.toml` (`~/.config/harvest.toml`), or the one that `--config` \
         or\n`HARVEST_CONFIG` names. Each key is also a variable, its name in capitals behind `HARVEST_`; lists \
         are separated\nby commas there. A flag goes before a variable before the file before the default. A \
         key that is not in this\ntable is an error.\n\n| key | type | default | what it is |\n|---|---|---|---|\n"
    );
    for (key, kind, default, what) in KEYS {
        page += &format!("| `{key}` | {kind} | {default} | {what} |\n");
    }
    for (table, keys) in
        [("clocks", &CLOCKS[..]), ("limits", &LIMITS[..]), ("retention", &RETENTION[..])]
    {
        let variable = table.to_uppercase();
        page += &format!(
            "\nKeys of `[{table}]`; the variable of each is its name in capitals behind `HARVEST_{variable}_`:\n\n\
             | key | default | what it is |\n|---|---|---|\n"
        );
        for (key, default, what) in keys {
            page += &format!("| `{key}` | {default} | {what} |\n");
        }
    }
    page += "\nVariables without a key:\n\n| variable | what it is |\n|---|---|\n";
    for (name, what) in VARIABLES {
        page += &format!("| `{name}` | {what} |\n");
    }
    page
}

/// Compares a page with its file, or writes it when asked to.
fn check(name: &str, page: &str) {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name);
    if std::env::var_os("HARVEST_REGENERATE").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, page).unwrap();
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(there == page, "docs/reference/{name} is out of date; make it again with\n  {AGAIN}");
}

#[test]
fn the_reference_of_the_command_line_is_up_to_date() {
    check("cli.md", &cli_page());
}

#[test]
fn the_reference_of_the_configuration_is_up_to_date() {
    check("config.md", &config_page());
}
