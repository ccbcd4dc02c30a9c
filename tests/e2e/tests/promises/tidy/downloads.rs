//! Whatever images and tests download from npm, PyPI and crates.io has a hash.

use std::{fs, path::PathBuf};

use super::source::root;

/// The recipes and the scripts of CI.
fn scripts() -> Vec<PathBuf> {
    let files = ["images", ".ci"].map(|folder| fs::read_dir(root().join(folder)).unwrap());
    files
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect()
}

#[test]
fn downloads_have_hashes() {
    let mut checked = 0;
    for path in scripts() {
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().starts_with('#')).collect();
        for (at, line) in lines.iter().enumerate() {
            // A command may continue on the next line.
            let command = format!("{line} {}", lines.get(at + 1).unwrap_or(&""));
            let unlocked = (line.contains("pip\" install") || line.contains("pip install"))
                && !command.contains("--require-hashes")
                || line.contains("npm install")
                    && !command.contains("--offline")
                    && !command.contains("--package-lock-only")
                || line.contains("--manifest-path")
                    && line.contains("cargo build")
                    && !line.contains("--locked")
                || line.contains("npm pack") && !command.contains("sha512sum --check")
                || ["npm = [", "pip = ["].iter().any(|step| line.starts_with(step));
            assert!(!unlocked, "{}: `{line}` downloads without a hash", path.display());
            checked += usize::from(
                ["npm ci", "--require-hashes", "npm pack", "--locked"]
                    .iter()
                    .any(|word| line.contains(word)),
            );
        }
    }
    assert!(checked >= 9, "only {checked} downloads were found");
    for lock in ["images/mcp-servers", "images/opencode-plugin", "crates/gateway/tests/sdks"] {
        let text = fs::read_to_string(root().join(lock).join("package-lock.json")).unwrap();
        let lock: serde_json::Value = serde_json::from_str(&text).unwrap();
        let packages = lock["packages"].as_object().unwrap();
        let hashed = |(name, package): (&String, &serde_json::Value)| {
            name.is_empty()
                || package["integrity"].as_str().is_some_and(|hash| hash.starts_with("sha512-"))
        };
        assert!(packages.len() > 1 && packages.iter().all(hashed), "{text}");
    }
}
