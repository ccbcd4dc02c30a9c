//! Prevents root and an unprivileged user from using the same store: file owners and overlay
//! attributes would differ. A marker file named `rootless` records that an unprivileged user
//! created it.

use std::{fs, io, path::Path};

use super::is_active;

const MARKER: &str = "rootless";

/// Why a store cannot be used by this user.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
enum StoreOwnerError {
    #[error("root created it; choose another folder with {0}, or run as root")]
    CreatedByRoot(&'static str),
    #[error("an unprivileged user created it; choose another folder with {0}, or run as that user")]
    CreatedByUser(&'static str),
}

/// Marks a folder without layers as this user's, and refuses one created by the other kind of user.
/// `variable` is the environment variable that selects another folder.
pub(crate) fn check_store_owner(folder: &Path, variable: &'static str) -> io::Result<()> {
    let marker = folder.join(MARKER);
    let marked = marker.try_exists()?;
    // The layers may be on a disk that is not mounted now; its record still exists.
    let used = folder.join("layers").try_exists()? || folder.join("store.json").try_exists()?;
    match (is_active(), marked) {
        (true, false) if used => Err(io::Error::other(StoreOwnerError::CreatedByRoot(variable))),
        (true, false) => fs::File::create(&marker)?.sync_all(),
        (false, true) => Err(io::Error::other(StoreOwnerError::CreatedByUser(variable))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_refuses_store_of_unprivileged_user() {
        let folder = tempfile::tempdir().unwrap();
        check_store_owner(folder.path(), "HARVEST_HOME").unwrap();
        fs::create_dir(folder.path().join("layers")).unwrap();
        check_store_owner(folder.path(), "HARVEST_HOME").unwrap();
        fs::write(folder.path().join(MARKER), "").unwrap();
        let error = check_store_owner(folder.path(), "HARVEST_HOME").unwrap_err();
        assert!(error.to_string().contains("HARVEST_HOME"), "{error}");
    }
}
