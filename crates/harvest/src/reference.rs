//! Generates the pages below `docs/reference`, and `.env.example`, from the code. Test-only: the
//! tests fail when a page is out of date and print the command that regenerates it.

mod base_image;
mod environment;
mod events;

use std::path::PathBuf;

use clap::{Arg, Command};

use crate::{
    cli::help,
    config::{Key, VARIABLES, keys_by_table, named_tables},
};

const REGENERATE: &str = "HARVEST_REGENERATE=1 cargo nextest run -p harvest reference";

const EXIT_CODES: &str = "\
## Exit codes

| code | meaning |
|---|---|
| 0 | success; also after Ctrl-C detached from a session or a build, which goes on |
| 1 | failure: of the verb, or of the followed session's last turn or check |
| 2 | wrong usage |
| 3 | `run`, `attach`, `send -f`: the session waits for an answer, and there is no terminal to type it |
| 124 | `exec`: the command ran out of time |
| 125 | `exec`, `shell`: an error of Harvest itself |
| 126, 127 | `exec`, `shell`: the command is not executable, or not found |
| 128 + N | `exec`: signal N ended the command: 130 after Ctrl-C; 137 also when out of memory |
| other | `exec`, `shell`: the command's own exit code |
";

fn cli_page() -> String {
    let mut harvest = help::command();
    harvest.build();
    let mut page = format!(
        "# The command line\n\nGenerated from the code by `{REGENERATE}`.\n\n\
         A session is named by its id, an id prefix, its key, or `-` for the newest one. Results\n\
         go to stdout, everything else to stderr. On a terminal the last line shows what is going\n\
         on, states and diffs are coloured, and the agent's Markdown is rendered.\n\n{EXIT_CODES}\n\
         `harvest` without a verb prints the status and the next useful command.\n\n\
         ## Flags of every verb\n\n"
    );
    page += &arguments(&harvest, true);
    for (topic, verbs) in help::TOPICS {
        page += &format!("\n## {topic}\n");
        page.extend(verbs.iter().filter_map(|verb| harvest.find_subcommand(verb)).map(section));
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
    let examples = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (_, examples) = examples.split_once('\n').unwrap_or_default();
    let examples: String = examples.lines().map(|line| format!("    {}\n", line.trim())).collect();
    format!("\n### `{usage}`\n\n{about}.\n{gap}{arguments}\n{examples}")
}

fn arguments(command: &Command, global: bool) -> String {
    // The top of the page explains how to name a session.
    let is_explained = |arg: &Arg| {
        let id = arg.get_id().as_str();
        id == "help"
            || id == "version"
            || (id == "session" && arg.get_help().is_some_and(is_plain_session))
    };
    let shown =
        |arg: &&Arg| arg.is_global_set() == global && !arg.is_hide_set() && !is_explained(arg);
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

fn config_page() -> String {
    let mut page = format!(
        "# Configuration\n\nGenerated from the code by `{REGENERATE}`.\n\n\
         The configuration is one TOML file: `$XDG_CONFIG_HOME/harvest.toml`\n\
         (`~/.config/harvest.toml`), or the file named by `--config` or `HARVEST_CONFIG`. Each\n\
         key is also an environment variable: `HARVEST_` and its name in capitals; lists are\n\
         separated by commas. Flags override variables, variables override the file, the file\n\
         overrides the default. An unknown key is an error.\n"
    );
    for (table, purpose, keys) in keys_by_table() {
        if !table.is_empty() {
            page += &format!(
                "\n## `[{table}]`\n\n{purpose}. The variable is `HARVEST_{}_` and the key in \
                 capitals.\n",
                table.to_uppercase()
            );
        }
        page += &keys_table(keys);
    }
    for (table, purpose, keys) in named_tables() {
        page += &format!(
            "\n## `[{table}.NAME]`\n\n{purpose}. The variable is `HARVEST_{}_`, the name and the \
             key in capitals, with `_` for `-`.\n{}",
            table.to_uppercase(),
            keys_table(keys)
        );
    }
    page += "\n## Variables without a key\n\n| variable | meaning |\n|---|---|\n";
    for (name, what) in VARIABLES {
        page += &format!("| `{name}` | {what} |\n");
    }
    page
}

fn keys_table(keys: &[Key]) -> String {
    let mut table = "\n| key | type | default | meaning |\n|---|---|---|---|\n".to_owned();
    for Key { name, kind, default, meaning } in keys {
        table += &format!("| `{name}` | {kind} | {default} | {meaning} |\n");
    }
    table
}

/// Compares a page with its file in the repository; with `HARVEST_REGENERATE` set, writes the file
/// first.
fn check(path: &str, page: &str) {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var_os("HARVEST_REGENERATE").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, page).unwrap();
    }
    let current = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        current == page,
        "{path} is out of date; regenerate it with\n  {REGENERATE}\n{}",
        difference(&current, page)
    );
}

/// The lines between the common beginning and the common end of two texts, twenty of each.
fn difference(current: &str, page: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (current.lines().collect(), page.lines().collect());
    let begin = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    let (old_rest, new_rest) = (old[begin..].iter().rev(), new[begin..].iter().rev());
    let end = old_rest.zip(new_rest).take_while(|(old, new)| old == new).count();
    let lines = |sign: &str, all: &[&str]| -> String {
        let changed = all[begin..all.len() - end].iter().take(20);
        changed.map(|line| format!("{sign}{line}\n")).collect()
    };
    format!("@@ line {} @@\n{}{}", begin + 1, lines("-", &old), lines("+", &new))
}

#[test]
fn cli_reference_is_up_to_date() {
    check("docs/reference/cli.md", &cli_page());
}

#[test]
fn config_reference_is_up_to_date() {
    check("docs/reference/config.md", &config_page());
}

#[test]
fn openapi_document_is_up_to_date() {
    let document = serde_json::to_string_pretty(&harvest_server::document()).unwrap();
    check("docs/reference/openapi.json", &(document + "\n"));
}

#[test]
fn events_reference_is_up_to_date() {
    let document = serde_json::to_value(harvest_server::document()).unwrap();
    check("docs/reference/events.md", &events::page(&document));
}

#[test]
fn base_image_reference_is_up_to_date() {
    check("docs/reference/base-image.md", &base_image::page());
}

#[test]
fn environment_example_is_up_to_date() {
    check(".env.example", &environment::example());
}

#[test]
fn difference_shows_the_changed_lines_only() {
    assert_eq!(difference("a\nb\nc\n", "a\nx\ny\nc\n"), "@@ line 2 @@\n-b\n+x\n+y\n");
}
