//! Refuses `git pull` and `git stash` in the session's checkouts, see
//! `docs/decisions/0048-git-rules.md`, and makes a plain `git push` replace what the session
//! pushed before, as after a restore: the gateway refuses to replace anything else. Files of the
//! checkout do it, so the rules hold for every git program, alias and environment; other
//! repositories in the sandbox are left alone.

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

use crate::{files, users::User};

const PULL: &str = "git pull is refused in this checkout: it merges into work that is not saved. \
                    Commit your work, then run git fetch and git rebase origin/BRANCH";
const STASH: &str = "git stash is refused in this checkout: a stash is on no branch and is \
                     forgotten. Commit your work instead: git commit -am wip";

const ORIGIN: &str = "[remote \"origin\"]";
const PUSH: &str = "\tpush = +HEAD:refs/heads/";

/// Git calls it before it changes references.
const HOOK: &str = "hooks/reference-transaction";

const HOOK_SCRIPT: &str = include_str!("rules.sh");

/// What the hook begins with, in every version.
const HOOK_MARK: &str = "#!/bin/sh\n# Harvest writes this hook";

/// In the way of the stash's log: git saves no stash without one, also if hooks are switched off.
/// Commands that walk over the logs pass over a name with this first character.
const STASH_LOG: &str = "logs/refs/stash";
const STASH_LOG_BLOCK: &str = ".refused-by-harvest";

/// Makes git refuse in the checkout in this folder. Repeated calls change nothing.
pub(super) fn enforce(folder: &Path, branch: Option<&str>, user: &User) -> io::Result<()> {
    let git = folder.join(".git");
    if !user.access(|| fs::symlink_metadata(&git)).is_ok_and(|about| about.is_dir()) {
        return Ok(());
    }
    write_hook(&git, user)?;
    block_stash_log(&git, user)?;
    let path = git.join("config");
    let config = files::read_small(&path, user)?.unwrap_or_default();
    match with_rules(&config, branch) {
        rules if rules == config => Ok(()),
        rules => files::write_small(&path, user, &rules),
    }
}

fn write_hook(git: &Path, user: &User) -> io::Result<()> {
    let path = git.join(HOOK);
    let script = HOOK_SCRIPT.replace("@PULL@", PULL).replace("@STASH@", STASH);
    let existing = files::read_small(&path, user)?;
    if existing.as_ref() == Some(&script) {
        return Ok(());
    }
    user.access(|| {
        fs::create_dir_all(git.join("hooks"))?;
        if existing.is_some_and(|text| !text.starts_with(HOOK_MARK)) {
            fs::rename(&path, path.with_extension("own"))?;
        }
        let part = path.with_extension("part");
        let _left_by_a_killed_boot = fs::remove_file(&part);
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o700).open(&part)?;
        file.write_all(script.as_bytes())?;
        file.set_permissions(fs::Permissions::from_mode(0o755))?;
        fs::rename(&part, &path)
    })
}

fn block_stash_log(git: &Path, user: &User) -> io::Result<()> {
    let log = git.join(STASH_LOG);
    user.access(|| {
        // A disk from elsewhere may hold stashes: they stay readable.
        if fs::symlink_metadata(&log).is_ok_and(|about| !about.is_dir()) {
            return Ok(());
        }
        fs::create_dir_all(&log)?;
        let block =
            fs::OpenOptions::new().write(true).create_new(true).open(log.join(STASH_LOG_BLOCK));
        match block {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.map(drop),
        }
    })
}

/// A checkout's configuration with the rules at its end. Git says of the values for a pull that
/// they are invalid, and prints them: they refuse a pull before it begins, also if hooks are
/// switched off.
fn with_rules(config: &str, branch: Option<&str>) -> String {
    let pull = format!("[pull]\n\tff = \"{PULL}\"\n\trebase = \"{PULL}\"\n");
    let rest = without_push(&config.replace(&pull, ""));
    let push = branch.map_or_else(String::new, |branch| format!("{ORIGIN}\n{PUSH}{branch}\n"));
    let newline = if rest.is_empty() || rest.ends_with('\n') { "" } else { "\n" };
    rest + newline + &push + &pull
}

/// Leaves out what an earlier boot wrote, perhaps for the branch of another session.
fn without_push(config: &str) -> String {
    let mut lines = config.split_inclusive('\n').peekable();
    let mut rest = String::new();
    while let Some(line) = lines.next() {
        let is_rule =
            line.trim_end() == ORIGIN && lines.next_if(|next| next.starts_with(PUSH)).is_some();
        if !is_rule {
            rest.push_str(line);
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rules_are_last_and_written_once(config in "(\\[core\\]\n|\tbare = false\n|x){0,4}") {
            let once = with_rules(&config, Some("mine"));
            prop_assert!(once.starts_with(&config));
            prop_assert_eq!(&with_rules(&once, Some("mine")), &once);
            let again = with_rules(&format!("{once}[pull]\n\trebase = true\n"), Some("other"));
            prop_assert_eq!(again.matches("ff = ").count(), 1);
            prop_assert_eq!(again.matches("push = ").count(), 1);
            prop_assert!(again.contains("push = +HEAD:refs/heads/other\n"));
            prop_assert_eq!(&with_rules(&again, Some("other")), &again);
            prop_assert!(!with_rules(&again, None).contains("push = "));
        }
    }

    #[test]
    fn messages_fit_into_shell_and_configuration() {
        for message in [PULL, STASH] {
            assert!(!message.contains(['\'', '"', '\\', '\n', '@']), "{message}");
        }
    }
}
