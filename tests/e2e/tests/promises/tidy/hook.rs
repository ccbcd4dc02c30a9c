//! The pre-commit hook that `make hooks` installs, with a stand-in for cargo.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
};

use super::source::root;

/// Notes its arguments. `cargo fmt` fails where a file says so.
const CARGO: &str = "#!/bin/sh\necho \"$@\" >> calls\n\
                     if [ \"$1\" = fmt ] && grep -q unformatted crates/x/src/lib.rs; then exit 1; fi\n";

fn script(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn run(folder: &Path, program: &str, arguments: &[&str]) -> Output {
    let path = format!("{}:{}", folder.join("programs").display(), std::env::var("PATH").unwrap());
    let identity = ["user.name=T", "user.email=t@example.org"];
    let mut command = Command::new(program);
    if program == "git" {
        command.args(identity.iter().flat_map(|setting| ["-c", *setting]));
    }
    command.args(arguments).current_dir(folder).env("PATH", path).output().unwrap()
}

/// A repository with the hook and an empty crate.
fn repository() -> tempfile::TempDir {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path();
    assert!(run(folder, "git", &["init", "-q"]).status.success());
    let hook = fs::read_to_string(root().join(".ci/pre-commit")).unwrap();
    script(&folder.join(".ci/pre-commit"), &hook);
    script(&folder.join("programs/cargo"), CARGO);
    fs::create_dir_all(folder.join("crates/x/src")).unwrap();
    fs::write(folder.join("crates/x/Cargo.toml"), "name = \"harvest-x\"\n").unwrap();
    let makefile = root().join("Makefile");
    let installed = run(folder, "make", &["-f", makefile.to_str().unwrap(), "hooks"]);
    assert!(installed.status.success(), "{installed:?}");
    repository
}

#[test]
fn hook_refuses_unformatted_commits() {
    let folder = repository();
    let folder = folder.path();
    let source = folder.join("crates/x/src/lib.rs");
    fs::write(&source, "unformatted").unwrap();
    assert!(run(folder, "git", &["add", "crates"]).status.success());
    let refused = run(folder, "git", &["commit", "-qm", "One"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("hint: cargo fmt --all"), "{refused:?}");

    fs::write(&source, "formatted").unwrap();
    assert!(run(folder, "git", &["add", "crates"]).status.success());
    let committed = run(folder, "git", &["commit", "-qm", "One"]);
    assert!(committed.status.success(), "{committed:?}");
    let calls = fs::read_to_string(folder.join("calls")).unwrap();
    assert!(calls.contains("\nclippy --quiet -p harvest-x "), "{calls}");
    assert!(calls.ends_with(" --all-targets -- -D warnings\n"), "{calls}");
}

#[test]
fn hook_lints_only_the_workspace() {
    let folder = repository();
    let folder = folder.path();
    let peer = folder.join("crates/forge/tests/peers/octocrab");
    fs::create_dir_all(peer.join("src")).unwrap();
    fs::write(peer.join("Cargo.toml"), "name = \"octocrab-peer\"\n").unwrap();
    fs::write(peer.join("src/main.rs"), "fn main() {}").unwrap();
    fs::write(folder.join("crates/x/src/lib.rs"), "formatted").unwrap();
    assert!(run(folder, "git", &["add", "crates"]).status.success());
    let committed = run(folder, "git", &["commit", "-qm", "One"]);
    assert!(committed.status.success(), "{committed:?}");
    let calls = fs::read_to_string(folder.join("calls")).unwrap();
    assert!(calls.contains("-p harvest-x ") && !calls.contains("octocrab"), "{calls}");
}
