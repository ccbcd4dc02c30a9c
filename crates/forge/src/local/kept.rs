//! Commits that were taken off a branch: references below `refs/harvest/kept/`, because evidence
//! and pull requests refer to them. They are kept for 90 days. Their number has no limit here: one
//! session could otherwise remove what others replaced. Each session replaces a limited number.

use std::{
    fs, io,
    path::Path,
    time::{Duration, SystemTime},
};

pub(super) const KEPT: &str = "refs/harvest/kept";

// As long as git keeps what only a log of references names.
const KEPT_FOR: Duration = Duration::from_secs(90 * 24 * 3600);

/// Removes what is older. References are never packed here, so each one is a file, which is as old
/// as the reference.
pub(super) fn remove_expired(repository: &Path, now: SystemTime) -> io::Result<()> {
    let folder = repository.join(KEPT);
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let at = entry.metadata()?.modified()?;
        if now.duration_since(at).is_ok_and(|age| age > KEPT_FOR) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_commits_expire_by_age_alone() {
        const YOUNG: usize = 1500;
        let repository = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        remove_expired(repository.path(), now).unwrap();
        let folder = repository.path().join(KEPT);
        fs::create_dir_all(&folder).unwrap();
        for number in 0..YOUNG {
            fs::write(folder.join(number.to_string()), "").unwrap();
        }
        let old = fs::File::create(folder.join("old")).unwrap();
        old.set_modified(now - KEPT_FOR - Duration::from_secs(1)).unwrap();
        remove_expired(repository.path(), now).unwrap();
        assert!(!folder.join("old").exists());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), YOUNG);
        remove_expired(repository.path(), now + KEPT_FOR * 2).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }
}
