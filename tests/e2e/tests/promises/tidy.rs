//! The shape of the tree, kept by a test: who may know whom, where unsafe lives, what stays pure.

use std::{
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn rust_files(below: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(below).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(rust_files(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
    found
}

fn crates() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The crates of ours that a crate's manifest names.
fn knows(name: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join(format!("crates/{name}/Cargo.toml"))).unwrap();
    let runtime = manifest.split("[dev-dependencies]").next().unwrap();
    runtime
        .lines()
        .filter_map(|line| line.strip_prefix("harvest-"))
        .map(|line| line.split(['.', ' ', '=']).next().unwrap().to_owned())
        .collect()
}

#[test]
fn no_arrow_points_up() {
    let may_know: &[(&str, &[&str])] = &[
        ("proto", &[]),
        ("store", &["proto"]),
        ("engine", &["proto"]),
        ("gateway", &["proto"]),
        ("github", &["proto"]),
        ("supervisor", &["proto"]),
        ("session", &["proto", "store", "gateway", "github"]),
        ("providers", &["proto", "engine", "session"]),
        ("server", &["proto", "session", "github"]),
        (
            "harvest",
            &["proto", "engine", "gateway", "github", "providers", "server", "session", "store"],
        ),
    ];
    assert_eq!(crates().len(), may_know.len(), "a new crate is a review topic: add it here");
    for (name, allowed) in may_know {
        for known in knows(name) {
            assert!(allowed.contains(&known.as_str()), "`{name}` must not know `{known}`");
        }
    }
}

#[test]
fn only_the_engine_has_unsafe_code() {
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
        .filter(|path| path.strip_prefix(&source).unwrap().to_string_lossy().starts_with("decide"))
        .collect();
    assert!(!files.is_empty(), "decide has moved");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for word in [
            "tokio",
            ".await",
            "async fn",
            "SystemTime",
            "Instant::now",
            "harvest_store",
            "std::fs",
        ] {
            assert!(!text.contains(word), "{} must not use `{word}`", file.display());
        }
    }
}

#[test]
fn every_file_opens_with_what_it_is_for() {
    for folder in ["crates", "tests"] {
        for file in rust_files(&root().join(folder)) {
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.starts_with("//!"), "{} has no module doc", file.display());
        }
    }
}

#[test]
fn no_file_grows_beyond_800_lines() {
    for file in rust_files(&root().join("crates")) {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap().lines().count();
        assert!(code <= 800, "{} has {code} lines; split it", file.display());
    }
}

#[test]
fn every_path_named_in_the_documents_exists() {
    for document in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"] {
        let text = fs::read_to_string(root().join(document)).unwrap();
        for word in text.split(['`', '(', ')', ' ', '\n', '|']) {
            let path = word.trim_end_matches(['.', ',', ':', ';']);
            let ours = ["crates/", "docs/", "tests/", "images/", "bench/"];
            if ours.iter().any(|prefix| path.starts_with(prefix))
                && !path.contains(['*', '{', '<', '…'])
            {
                assert!(
                    root().join(path).exists(),
                    "{document} names `{path}`, which is not there"
                );
            }
        }
    }
}
