//! Reads the workspace's source files for the tidy tests.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The workspace's root folder.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Every Rust file below a folder, in a stable order.
pub(super) fn rust_files(below: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(below).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(rust_files(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
    found.sort();
    found
}

/// The names of the folders in `crates/`.
pub(super) fn crates() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A file's text without its trailing unit tests.
pub(super) fn production(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap()
}

/// What follows `pub` or `pub(…)` on a line that declares something visible outside its module.
pub(super) fn visible_item(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(") ").map(|(_, item)| item),
        None => rest.strip_prefix(' '),
    }
}

/// The identifier at the start of a text.
pub(super) fn identifier(text: &str) -> &str {
    let end = text.find(|character: char| !character.is_alphanumeric() && character != '_');
    &text[..end.unwrap_or(text.len())]
}
