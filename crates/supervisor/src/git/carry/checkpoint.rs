//! Checkpoints: local branches that keep the commits of a checkout before an operation that moves
//! its branch. A file beside the repository records each of them, so that only branches that
//! Harvest made, and that are still where Harvest put them, are removed after their time.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use super::repo::{Repo, RepoError};

const PREFIX: &str = "checkpoint-";

/// How long a checkpoint is kept.
const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

// A file name of the repository has at most 255 bytes.
const MAX_BRANCH_CHARACTERS: usize = 100;

/// Below git's own folder.
const RECORDS: &str = "checkpoints";

/// Creates a checkpoint of a commit of this branch; returns its name.
pub(super) fn create(repo: &Repo, branch: &str, commit: &str) -> Result<String, RepoError> {
    let records = repo.own_folder().join(RECORDS);
    fs::create_dir_all(&records).map_err(|error| RepoError::io(&records, &error))?;
    let mut epoch = seconds(SystemTime::now());
    loop {
        let name = checkpoint_name(branch, epoch);
        let reference = format!("refs/heads/{name}");
        match repo.commit_of(&reference) {
            Some(same) if same == commit => return Ok(name),
            Some(_) => epoch += 1,
            None => {
                // First the record: a branch without one would stay for ever.
                let record = records.join(&name);
                fs::write(&record, commit).map_err(|error| RepoError::io(&record, &error))?;
                repo.run(&["update-ref", &reference, commit, ""])?;
                return Ok(name);
            }
        }
    }
}

/// Removes the checkpoints whose time is over. Best effort: the next call tries again.
pub(super) fn remove_old(repo: &Repo) {
    let Ok(records) = fs::read_dir(repo.own_folder().join(RECORDS)) else { return };
    let now = seconds(SystemTime::now());
    let current = repo.branch();
    for record in records.flatten() {
        let name = record.file_name().to_string_lossy().into_owned();
        let is_old = epoch_of(&name).is_some_and(|epoch| is_over(epoch, now));
        if is_old && current.as_deref() != Some(&*name) {
            remove(repo, &name, record.path());
        }
    }
}

// A branch that was moved since is the agent's now: only its record goes.
fn remove(repo: &Repo, name: &str, record: PathBuf) {
    let Ok(commit) = fs::read_to_string(&record) else { return };
    let reference = format!("refs/heads/{name}");
    if repo.commit_of(&reference).as_deref() == Some(commit.trim())
        && repo.run(&["update-ref", "-d", &reference, commit.trim()]).is_err()
    {
        return;
    }
    let _tried_again = fs::remove_file(record);
}

/// `checkpoint-<branch>-<epoch>`, which git accepts as the name of a branch.
fn checkpoint_name(branch: &str, epoch: u64) -> String {
    let mut safe = String::new();
    for character in branch.chars().take(MAX_BRANCH_CHARACTERS) {
        let plain = character.is_ascii_alphanumeric() || character == '_';
        let dot = character == '.' && !safe.ends_with(['.', '-']);
        safe.push(if plain || dot { character } else { '-' });
    }
    format!("{PREFIX}{safe}-{epoch}")
}

fn epoch_of(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.rsplit_once('-')?.1.parse().ok()
}

fn is_over(epoch: u64, now: u64) -> bool {
    now.saturating_sub(epoch) >= KEPT.as_secs()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn checkpoint_names_branch_and_time() {
        assert_eq!(checkpoint_name("harvest/fix.it", 17), "checkpoint-harvest-fix.it-17");
        assert_eq!(epoch_of("checkpoint-harvest-fix-17"), Some(17));
        for other in ["checkpoint-x", "main-17", "checkpoint-x-y"] {
            assert_eq!(epoch_of(other), None, "{other}");
        }
    }

    #[test]
    fn checkpoint_is_over_after_seven_days() {
        let week = 7 * 24 * 60 * 60;
        assert!(!is_over(100, 100 + week - 1) && is_over(100, 100 + week));
        assert!(!is_over(100, 0), "the clock went back");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn git_accepts_every_checkpoint_name(branch in "[^\\x00]{0,120}") {
            let name = checkpoint_name(&branch, 1_790_000_000);
            let mut git = Command::new("git");
            let checked = git.args(["check-ref-format", "--branch", &name]).output().unwrap();
            prop_assert!(checked.status.success(), "{name}");
            prop_assert_eq!(epoch_of(&name), Some(1_790_000_000));
        }
    }
}
