//! The newest commits of branches, read from files: the schedule looks at every repository and must
//! start no process. References are never packed here, so each branch is a file.

use std::{fs, io, path::Path};

use harvest_proto::BranchName;

use super::LocalForge;

// The longest are of SHA-256.
const MAX_REFERENCE_BYTES: usize = 64;

impl LocalForge {
    /// The commit of a branch of this repository, or of its default branch; `None` when it has no
    /// such branch.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn tip(&self, name: &str, branch: Option<&BranchName>) -> io::Result<Option<String>> {
        let folder = self.folder(name).map_err(io::Error::other)?.join("repository.git");
        match branch {
            Some(branch) => commit(&folder.join("refs/heads").join(branch.as_str())),
            None => {
                let head = read(&folder.join("HEAD"))?.unwrap_or_default();
                let branch = head.trim().strip_prefix("ref: refs/heads/");
                match branch.and_then(|branch| branch.parse::<BranchName>().ok()) {
                    Some(branch) => commit(&folder.join("refs/heads").join(branch.as_str())),
                    None => Ok(None),
                }
            }
        }
    }
}

fn commit(file: &Path) -> io::Result<Option<String>> {
    let Some(text) = read(file)? else { return Ok(None) };
    let id = text.trim();
    let is_id = (40..=MAX_REFERENCE_BYTES).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    Ok(is_id.then(|| id.to_owned()))
}

/// The text of a small regular file; `None` when there is none.
fn read(file: &Path) -> io::Result<Option<String>> {
    match fs::symlink_metadata(file) {
        Ok(about) if about.is_file() => fs::read_to_string(file).map(Some),
        Ok(_) => Ok(None),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_object_ids_are_tips() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("main");
        assert_eq!(commit(&file).unwrap(), None, "there is no such branch");
        let id = "0123456789abcdef0123456789abcdef01234567";
        fs::write(&file, format!("{id}\n")).unwrap();
        assert_eq!(commit(&file).unwrap().as_deref(), Some(id));
        for other in ["", "ref: refs/heads/x", "0123", &"g".repeat(40), &"a".repeat(65)] {
            fs::write(&file, other).unwrap();
            assert_eq!(commit(&file).unwrap(), None, "{other}");
        }
        assert_eq!(commit(folder.path()).unwrap(), None, "a folder is no branch");
        assert_eq!(commit(&file.join("below")).unwrap(), None);
    }
}
