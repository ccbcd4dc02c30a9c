//! The identity of the person at this machine: what the configuration names, else what git's own
//! configuration does. A name or an address is never made up.

use std::process::Command;

use harvest_proto::bridge::Author;

use crate::config::Config;

/// The identity of the configuration and git, if both name and address are known.
pub(crate) fn configured(config: &Config) -> Option<Author> {
    let setting = |configured: &Option<String>, key| {
        configured.clone().filter(|text| !text.trim().is_empty()).or_else(|| git_setting(key))
    };
    let name = setting(&config.author_name, "user.name")?;
    Some(Author { name, email: setting(&config.author_email, "user.email")? })
}

/// The identity of git's user-wide configuration.
pub(crate) fn of_git() -> Option<Author> {
    Some(Author { name: git_setting("user.name")?, email: git_setting("user.email")? })
}

/// A value of the user-wide configuration: a repository around the current folder is not read.
fn git_setting(key: &str) -> Option<String> {
    let output = Command::new("git").args(["config", "--global", key]).output().ok()?;
    let value = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !value.is_empty()).then_some(value)
}
