//! `.env.example`: every variable that Harvest reads.

use crate::config::{Key, VARIABLES, keys_by_table};

const HEAD: &str = "\
# Every variable that Harvest reads, with its default. Generated from the code; the file for
# systemd's `EnvironmentFile=`, or for a shell:
#
#     cp .env.example .env && chmod 600 .env
#     set -a && . ./.env && set +a && harvest up
#
# The same settings can be in `~/.config/harvest.toml` (docs/reference/config.md). Secrets are better
# stored with `harvest secret set`: encrypted, and used by the gateway only.
";

const WIDTH: usize = 98;

pub(super) fn example() -> String {
    let mut text = HEAD.to_owned();
    for (names, meaning) in VARIABLES {
        // Several secrets share one meaning.
        text += &comment(meaning);
        for name in names.split(", ") {
            text += &format!("# {name}=\n");
        }
    }
    for (table, purpose, keys) in keys_by_table() {
        if !table.is_empty() {
            text += &format!("\n#### {purpose}\n");
        }
        for Key { name, kind, default, meaning } in keys {
            text += &comment(&format!("{meaning}. {kind}; default: {default}"));
            let variable = format!("harvest_{table}_{name}").replace("__", "_").to_uppercase();
            text += &format!("# {variable}={}\n", value(default));
        }
    }
    text
}

/// A default that can be written down.
fn value(default: &str) -> &str {
    let value = default.strip_prefix('`').and_then(|text| text.strip_suffix('`'));
    value.filter(|text| !text.contains(['`', '$'])).unwrap_or_default()
}

/// A paragraph of comment lines.
fn comment(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("one is there");
        if last.len() + 1 + word.len() > WIDTH {
            lines.push(word.to_owned());
        } else {
            *last = format!("{last} {word}").trim_start().to_owned();
        }
    }
    lines.iter().fold("\n".to_owned(), |all, line| format!("{all}## {line}\n"))
}
