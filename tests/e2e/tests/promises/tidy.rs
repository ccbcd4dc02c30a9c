//! Rules about the source tree that no compiler checks: which crate may depend on which, where
//! unsafe code lives, what stays pure, how large module cycles get, and the language.

mod dependencies;
mod downloads;
mod hook;
mod language;
mod modules;
mod requirements;
mod source;

use std::{fs, path::PathBuf};

use source::{crates, root, rust_files};

/// The crates of this workspace that a crate's manifest names as run-time dependencies.
fn dependencies(name: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join(format!("crates/{name}/Cargo.toml"))).unwrap();
    let runtime = manifest.split("[dev-dependencies]").next().unwrap();
    runtime
        .lines()
        .filter_map(|line| line.strip_prefix("harvest-"))
        .map(|line| line.split(['.', ' ', '=']).next().unwrap().to_owned())
        .collect()
}

#[test]
fn crate_dependencies_follow_the_allowed_table() {
    let allowed: &[(&str, &[&str])] = &[
        ("proto", &[]),
        ("store", &["proto"]),
        ("engine", &["proto"]),
        ("images", &["proto", "engine"]),
        ("gateway", &["proto"]),
        ("forge", &["proto"]),
        ("supervisor", &["proto"]),
        ("session", &["proto", "store", "gateway", "forge"]),
        ("providers", &["proto", "engine", "images", "session"]),
        ("server", &["proto", "session", "forge"]),
        (
            "harvest",
            &[
                "proto",
                "engine",
                "images",
                "gateway",
                "forge",
                "providers",
                "server",
                "session",
                "store",
            ],
        ),
    ];
    assert_eq!(crates().len(), allowed.len(), "a new crate is a review topic: add it here");
    for (name, allowed) in allowed {
        for dependency in dependencies(name) {
            assert!(
                allowed.contains(&dependency.as_str()),
                "`{name}` must not depend on `{dependency}`"
            );
        }
    }
}

#[test]
fn unsafe_code_lives_only_in_engine() {
    for name in crates().iter().filter(|name| *name != "engine") {
        let source = root().join(format!("crates/{name}/src"));
        let main = [source.join("lib.rs"), source.join("main.rs")]
            .into_iter()
            .find(|path| path.exists())
            .expect("every crate has a root file");
        assert!(
            fs::read_to_string(&main).unwrap().contains("#![forbid(unsafe_code)]"),
            "{} does not forbid unsafe code",
            main.display()
        );
    }
}

#[test]
fn decide_is_pure() {
    let source = root().join("crates/session/src");
    let files: Vec<PathBuf> = rust_files(&source)
        .into_iter()
        .filter(|path| path.strip_prefix(&source).unwrap().starts_with("decide"))
        .collect();
    assert!(!files.is_empty(), "decide has moved");
    let banned =
        ["tokio", ".await", "async fn", "SystemTime", "Instant::now", "harvest_store", "std::fs"];
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for word in banned {
            assert!(!text.contains(word), "{} must not use `{word}`", file.display());
        }
    }
}

#[test]
fn every_file_has_a_module_doc() {
    for folder in ["crates", "tests", "bench"] {
        for file in rust_files(&root().join(folder)) {
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.starts_with("//!"), "{} has no module doc", file.display());
        }
    }
}

#[test]
fn no_file_exceeds_800_lines() {
    for file in rust_files(&root().join("crates")) {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap().lines().count();
        assert!(code <= 800, "{} has {code} lines; split it", file.display());
    }
}

#[test]
fn documented_paths_exist() {
    let mut documents: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]
            .map(|name| root().join(name))
            .to_vec();
    for folder in ["docs", "docs/decisions"] {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        documents.extend(entries.filter(|path| path.extension().is_some_and(|end| end == "md")));
    }
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for word in text.split(['`', '(', ')', ' ', '\n', '|', '"']) {
            let path = word.trim_end_matches(['.', ',', ':', ';']);
            let ours = ["crates/", "docs/", "tests/", "images/", "bench/"];
            if ours.iter().any(|prefix| path.starts_with(prefix))
                && !path.contains(['*', '{', '<', '…', '$'])
            {
                let found = root().join(path).exists();
                assert!(found, "{} names `{path}`, which does not exist", document.display());
            }
        }
    }
}
