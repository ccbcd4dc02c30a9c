//! Runs a repository's `.harvest/check.sh` as the agent's user.

use std::time::Duration;

use harvest_proto::{
    RepositoryName,
    api::{CheckOutcome, Evidence},
    bridge::{Command, Exit},
};

use crate::{
    bridge::{Bridge, BridgeError},
    checkout,
    ephemeral::EphemeralError,
    timeouts::millis,
    wall_clock::now,
};

pub(crate) const CHECK: &str = ".harvest/check.sh";
pub(super) const CONFIG: &str = ".harvest/config.toml";

/// How evidence names the command of `.harvest/config.toml`.
const DECLARED: &str = "`check` in .harvest/config.toml";

const RUN: &str = "if [ -x .harvest/check.sh ]; then exec ./.harvest/check.sh; else exec sh .harvest/check.sh; fi";

// The shell's exit code for a missing command.
const NOT_FOUND: Exit = Exit::Code(127);

/// Prints the command that runs the tests in the current folder: the check, what
/// `.harvest/config.toml` declares, or what the files suggest.
const FIND: &str = r#"
if [ -x .harvest/check.sh ]; then set -- ./.harvest/check.sh
elif [ -f .harvest/check.sh ]; then set -- sh .harvest/check.sh
elif [ -s "$HOME/.local/state/harvest/repositories/${PWD##*/}.test" ]; then
  cat "$HOME/.local/state/harvest/repositories/${PWD##*/}.test"; exit 0
elif [ -f package.json ] && grep -Eq '"test"[[:space:]]*:' package.json; then set -- npm test --silent
elif [ -f Cargo.toml ]; then set -- cargo test
elif [ -f uv.lock ]; then set -- uv run pytest -q
elif [ -f poetry.lock ]; then set -- poetry run pytest -q
elif [ -f pytest.ini ] || [ -f conftest.py ] || [ -f tox.ini ] || grep -qs pytest pyproject.toml setup.cfg; then
  set -- python3 -m pytest -q
elif [ -n "$(find . -maxdepth 2 -name 'test*.py' -not -path './.*' -print -quit)" ]; then
  set -- python3 -m unittest
elif grep -Eqs '^(test|check):' Makefile makefile GNUmakefile; then
  set -- make "$(sed -nE 's/^(test|check):.*/\1/p' Makefile makefile GNUmakefile 2>/dev/null | sort -r | head -n 1)"
else echo none; exit 0
fi
echo "$*"
"#;

/// Copies the script to a folder that only root can change, and prints the copy's path; nothing if
/// there is no script. A copy, because a process that has the file open could still write to it.
const KEEP: &str = r#"set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /
script=$1/.harvest/check.sh
[ -f "$script" ] || exit 0
kept=$(mktemp -d -p /tmp)
chmod 755 "$kept"
cat "$script" > "$kept/check.sh"
if [ -x "$script" ]; then chmod 555 "$kept/check.sh"; else chmod 444 "$kept/check.sh"; fi
echo "$kept/check.sh"
"#;

/// Puts the kept copy in the place of the script, in folders where the sticky bit keeps the user
/// from renaming it or a folder above it. What the branch has there instead is removed. Prints
/// `sealed` and the first line of an executable script.
const SEAL: &str = r#"set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /
for folder in "$(dirname "$1")" "$1"; do
  chown -h 0 "$folder"
  if [ -L "$folder" ]; then echo "$folder is a symbolic link"; exit 1; fi
  chmod g+rwx,+t "$folder"
done
folder=$1/.harvest
chown -h 0 "$folder" 2> /dev/null || true
if [ -L "$folder" ] || [ ! -d "$folder" ]; then
  rm -f "$folder"
  mkdir "$folder"
  chgrp "$(stat -c %g "$1")" "$folder"
fi
chmod g+rwx,+t "$folder"
script=$folder/check.sh
if [ -d "$script" ] && [ ! -L "$script" ]; then rm -rf "$script"; fi
copy=$(mktemp "$script.XXXXXX")
cat "$2" > "$copy"
if [ -x "$2" ]; then chmod 555 "$copy"; else chmod 444 "$copy"; fi
mv -fT "$copy" "$script"
echo sealed
[ ! -x "$script" ] || head -c 255 "$script" | head -n 1
"#;

/// The command that runs the tests of a checkout; `None` if none are found.
pub(crate) async fn find_tests(
    bridge: &Bridge,
    folder: &str,
    with_agent: bool,
) -> Result<Option<String>, BridgeError> {
    let command = checkout::command(&["/bin/sh", "-c", FIND], folder, 60_000);
    let found = bridge.run_command(Command { with_agent, ..command }).await?.tail();
    Ok(Some(found).filter(|found| !found.is_empty() && found != "none"))
}

/// A script that the code it runs cannot change.
pub(crate) struct KeptScript {
    /// Of a copy that belongs to root.
    path: String,
}

/// Keeps the script that is checked out, before another commit is.
pub(crate) async fn keep_script(
    bridge: &Bridge,
    repository: &RepositoryName,
) -> Result<Option<KeptScript>, EphemeralError> {
    let path = run_as_root(bridge, KEEP, &[&repository.folder().path()]).await?;
    let path = path.lines().next().map(str::to_owned);
    Ok(path.map(|path| KeptScript { path }))
}

/// Puts the kept script in its place. Returns the arguments that start it.
async fn seal(
    bridge: &Bridge,
    repository: &RepositoryName,
    kept: &KeptScript,
) -> Result<Vec<String>, EphemeralError> {
    let printed = run_as_root(bridge, SEAL, &[&repository.folder().path(), &kept.path]).await?;
    Ok(arguments(printed.lines().nth(1).unwrap_or_default()))
}

async fn run_as_root(
    bridge: &Bridge,
    script: &str,
    arguments: &[&str],
) -> Result<String, EphemeralError> {
    let argv = [&["/bin/sh", "-c", script, "sh"], arguments].concat();
    let command = checkout::command(&argv, "/", 60_000);
    let ran = bridge.run_command(Command { user: Some("root".to_owned()), ..command }).await?;
    let printed = ran.tail();
    match ran.ok() {
        true => Ok(printed),
        false => Err(EphemeralError::Other(format!("cannot protect {CHECK}: {printed}"))),
    }
}

/// The arguments that start a script with this first line in one exec: its process is protected by
/// an exec, and one more, such as that of `env`, would end it.
fn arguments(first_line: &str) -> Vec<String> {
    let script = format!("./{CHECK}");
    let Some(interpreter) = first_line.strip_prefix("#!").map(str::trim) else {
        return vec!["/bin/sh".to_owned(), script];
    };
    let mut words = interpreter.split_whitespace();
    let is_env = words.next().is_some_and(|program| program.rsplit('/').next() == Some("env"));
    let words: Vec<&str> = words.skip_while(|word| *word == "-S").collect();
    let is_plain = |word: &&str| !word.contains(['\\', '"', '\'', '$', '=']);
    match words.first() {
        Some(program) if is_env && !program.starts_with('-') && words.iter().all(is_plain) => {
            words.into_iter().map(str::to_owned).chain([script]).collect()
        }
        _ => vec![script],
    }
}

/// What the base declares.
pub(super) enum Declared {
    Script(KeptScript),
    Command(String),
}

impl Declared {
    /// How evidence names it, and the command.
    pub(super) fn describe(&self) -> (&'static str, &str) {
        match self {
            Self::Script(_) => (CHECK, CHECK),
            Self::Command(command) => (DECLARED, command),
        }
    }
}

/// Runs what the base declares on the only checkout of a sandbox, so that the code it runs can
/// change neither the script nor the memory of the script's process, and so the verdict.
pub(super) async fn run_sealed(
    bridge: &Bridge,
    declared: Option<&Declared>,
    limit: Duration,
    none: Evidence,
) -> Result<Evidence, EphemeralError> {
    let kept = match declared {
        None => return Ok(none),
        Some(Declared::Command(command)) => {
            return Ok(run_declared(bridge, command, limit, true, none).await?);
        }
        Some(Declared::Script(kept)) => kept,
    };
    let argv = seal(bridge, &none.repository, kept).await?;
    let command = checkout::command(&[], &none.repository.folder().path(), millis(limit));
    let safe = [("COUNT", "1"), ("KEY_0", "safe.directory"), ("VALUE_0", "*")];
    // Git refuses a checkout that belongs to another user.
    let env = safe.map(|(name, value)| (format!("GIT_CONFIG_{name}"), value.to_owned())).into();
    let none = Evidence { command: CHECK.to_owned(), ..none };
    match run_script(bridge, Command { argv, env, undumpable: true, ..command }, none.clone()).await
    {
        // As from a shell, for example if the interpreter is not installed.
        Err(BridgeError::Fault(fault)) => {
            let outcome = CheckOutcome::Failed;
            Ok(Evidence { outcome, exit: NOT_FOUND, tail: fault.message, at: now(), ..none })
        }
        ran => Ok(ran?),
    }
}

/// Runs the check on the only checkout of a sandbox, and calls `started` with its name before: the
/// script, or else the declared command. Without either, the evidence says so.
pub(crate) async fn run(
    bridge: &Bridge,
    repository: &RepositoryName,
    commit: String,
    (declared, limit): (Option<&str>, Duration),
    started: impl FnOnce(&str),
) -> Result<Evidence, BridgeError> {
    let folder = &repository.folder().path();
    let none = none_declared(repository, commit);
    if !has_script(bridge, repository).await? {
        let Some(declared) = declared else { return Ok(none) };
        started(DECLARED);
        return run_declared(bridge, declared, limit, false, none).await;
    }
    started(CHECK);
    let command = checkout::command(&["sh", "-c", RUN], folder, millis(limit));
    let none = Evidence { command: CHECK.to_owned(), ..none };
    run_script(bridge, command, none).await
}

/// Whether the checkout has a script.
async fn has_script(bridge: &Bridge, repository: &RepositoryName) -> Result<bool, BridgeError> {
    let folder = &repository.folder().path();
    let found = bridge.run_command(checkout::command(&["test", "-f", CHECK], folder, 60_000));
    Ok(found.await?.ok())
}

async fn run_declared(
    bridge: &Bridge,
    declared: &str,
    limit: Duration,
    undumpable: bool,
    none: Evidence,
) -> Result<Evidence, BridgeError> {
    // The last line keeps the shell from replacing itself by the command, which would end the
    // protection of its process.
    let script = format!("{declared}\nexit $?");
    let folder = &none.repository.folder().path();
    let spec = checkout::command(&["/bin/sh", "-c", &script], folder, millis(limit));
    let (check, command) = (DECLARED.to_owned(), declared.to_owned());
    let none = Evidence { check, command, ..none };
    run_script(bridge, Command { undumpable, ..spec }, none).await
}

async fn run_script(
    bridge: &Bridge,
    command: Command,
    none: Evidence,
) -> Result<Evidence, BridgeError> {
    let output = bridge.run_command(command).await?;
    let outcome = if output.ok() { CheckOutcome::Passed } else { CheckOutcome::Failed };
    let (tail, millis) = (output.tail(), output.millis);
    Ok(Evidence { outcome, exit: output.exit, millis, tail, at: now(), ..none })
}

pub(super) fn none_declared(repository: &RepositoryName, commit: String) -> Evidence {
    Evidence {
        repository: repository.clone(),
        commit,
        check: CHECK.to_owned(),
        command: String::new(),
        base: None,
        base_commit: None,
        changed: Vec::new(),
        changed_count: 0,
        snapshot_id: None,
        outcome: CheckOutcome::NoneDeclared,
        exit: NOT_FOUND,
        millis: 0,
        tail: format!("no {CHECK} in the repository"),
        at: now(),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// The command that the script chooses in a folder with these files.
    fn chosen(files: &[(&str, &str)]) -> String {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
            fs::write(path, content).unwrap();
        }
        let mut command = std::process::Command::new("/bin/sh");
        let printed = command
            .args(["-c", FIND])
            .env("HOME", folder.path())
            .current_dir(folder.path())
            .output()
            .unwrap();
        String::from_utf8(printed.stdout).unwrap().trim_end().to_owned()
    }

    #[test]
    fn tests_are_found_by_their_files() {
        let package = ("package.json", r#"{"scripts": {"test": "node --test"}}"#);
        assert_eq!(chosen(&[package, (".harvest/check.sh", "")]), "sh .harvest/check.sh");
        assert_eq!(chosen(&[package, ("Makefile", "test:\n")]), "npm test --silent");
        assert_eq!(chosen(&[("Cargo.toml", "")]), "cargo test");
        assert_eq!(chosen(&[("pyproject.toml", "[tool.pytest]")]), "python3 -m pytest -q");
        assert_eq!(chosen(&[("uv.lock", ""), ("tests/test_a.py", "")]), "uv run pytest -q");
        assert_eq!(chosen(&[("tests/test_a.py", "")]), "python3 -m unittest");
        assert_eq!(chosen(&[("Makefile", "all:\ncheck: all\n")]), "make check");
        assert_eq!(chosen(&[("Makefile", "test:\ncheck: all\n")]), "make test");
        assert_eq!(chosen(&[("package.json", "{}"), ("README.md", "")]), "none");
    }

    #[test]
    fn interpreter_is_started_in_one_exec() {
        for (first_line, started) in [
            ("", "/bin/sh ./.harvest/check.sh"),
            ("echo no interpreter", "/bin/sh ./.harvest/check.sh"),
            ("#!/bin/sh -e", "./.harvest/check.sh"),
            ("#! /bin/bash", "./.harvest/check.sh"),
            ("#!/usr/bin/env bash", "bash ./.harvest/check.sh"),
            ("#!/usr/bin/env -S bash -eu", "bash -eu ./.harvest/check.sh"),
            ("#!/usr/bin/env -i sh", "./.harvest/check.sh"),
            ("#!/usr/bin/env -S A=1 sh", "./.harvest/check.sh"),
            ("#!/usr/bin/env", "./.harvest/check.sh"),
        ] {
            assert_eq!(arguments(first_line).join(" "), started, "{first_line}");
        }
    }
}
