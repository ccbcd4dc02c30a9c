//! Commits that were taken off a branch: references below `refs/harvest/kept/`, because evidence
//! and pull requests refer to them. They are kept for 90 days, and a repository has a limited
//! number.

use std::{
    fs, io,
    path::Path,
    time::{Duration, SystemTime},
};

pub(super) const KEPT: &str = "refs/harvest/kept";

// As long as git keeps what only a log of references names.
const KEPT_FOR: Duration = Duration::from_secs(90 * 24 * 3600);
const MAX_KEPT: usize = 1000;

/// Removes what is older, and the oldest ones beyond the limit. References are never packed here,
/// so each one is a file, which is as old as the reference.
pub(super) fn remove_expired(repository: &Path, now: SystemTime) -> io::Result<()> {
    let folder = repository.join(KEPT);
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry?;
        all.push((entry.metadata()?.modified()?, entry.path()));
    }
    all.sort_unstable();
    let beyond = all.len().saturating_sub(MAX_KEPT);
    for (index, (at, path)) in all.into_iter().enumerate() {
        let expired = now.duration_since(at).is_ok_and(|age| age > KEPT_FOR);
        if expired || index < beyond {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_commits_expire_by_age_and_number() {
        let repository = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        remove_expired(repository.path(), now).unwrap();
        let folder = repository.path().join(KEPT);
        fs::create_dir_all(&folder).unwrap();
        for number in 0..MAX_KEPT + 3 {
            let file = fs::File::create(folder.join(format!("{number:04}"))).unwrap();
            let age = Duration::from_secs(u64::try_from(MAX_KEPT + 3 - number).unwrap());
            file.set_modified(now - age).unwrap();
        }
        remove_expired(repository.path(), now).unwrap();
        assert!(!folder.join("0002").exists() && folder.join("0003").exists());
        remove_expired(repository.path(), now + KEPT_FOR).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }
}
