//! The dependency policy of `deny.toml`, checked on what cargo resolves for this workspace.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use serde_json::Value;

use super::source::root;

const MOST_PACKAGES: usize = 330;

fn policy() -> toml::Table {
    fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap()
}

fn texts(list: &toml::Value) -> BTreeSet<String> {
    let text = |value: &toml::Value| {
        value.as_str().or_else(|| value.get("crate")?.as_str()).map(str::to_owned)
    };
    list.as_array().unwrap().iter().filter_map(text).collect()
}

/// The packages built for the supported target: name, version and licence.
fn packages() -> Vec<(String, String, String)> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--locked", "--offline"])
        .arg("--filter-platform=x86_64-unknown-linux-gnu")
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let resolved: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = metadata["packages"].as_array().unwrap().iter();
    all.filter(|package| resolved.contains(package["id"].as_str().unwrap()))
        .map(|package| {
            (text(&package["name"]), text(&package["version"]), text(&package["license"]))
        })
        .collect()
}

#[test]
fn lock_file_stays_small() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let packages = lock.matches("[[package]]").count();
    assert!(packages <= MOST_PACKAGES, "the lock file has {packages} packages");
}

#[test]
fn duplicate_versions_have_a_reason() {
    let known = texts(&policy()["bans"]["skip"]);
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, version, _) in packages() {
        versions.entry(name).or_default().insert(version);
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        assert!(known.contains(name), "{name} is there in {versions:?}: say why in deny.toml");
    }
    for name in known {
        let count = versions.get(&name).map_or(0, BTreeSet::len);
        assert!(count > 1, "{name} has one version now: remove it from deny.toml");
    }
}

#[test]
fn licences_and_crates_are_allowed() {
    let policy = policy();
    let (allowed, banned) = (texts(&policy["licenses"]["allow"]), texts(&policy["bans"]["deny"]));
    for (name, _, licence) in packages() {
        assert!(!banned.contains(&name), "{name} is banned by deny.toml");
        assert!(permits(&allowed, &licence), "{name} has the licence `{licence}`");
    }
}

/// Whether an SPDX expression can be met with these licences. Parentheses occur around `OR` only.
fn permits(allowed: &BTreeSet<String>, expression: &str) -> bool {
    let one = |licence: &str| allowed.contains(licence.trim_matches(['(', ')', ' ']));
    let any = |part: &str| part.replace('/', " OR ").split(" OR ").any(one);
    expression.split(" AND ").all(any)
}

#[test]
fn licence_expressions_are_read() {
    let allowed = BTreeSet::from(["MIT", "ISC"].map(str::to_owned));
    for good in ["MIT", "GPL-3.0 OR MIT", "(MIT OR X) AND ISC", "X/MIT"] {
        assert!(permits(&allowed, good), "{good}");
    }
    for bad in ["", "X", "MIT AND X", "(MIT OR ISC) AND X"] {
        assert!(!permits(&allowed, bad), "{bad}");
    }
}
