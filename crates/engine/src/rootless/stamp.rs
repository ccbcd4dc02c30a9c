//! Keeps a store from being used both by root and by an ordinary user: its files belong to other ids
//! then, and what overlay notes in them has other names. A file called `rootless` says whose it is.

use std::{fs, io, path::Path};

use super::is_here;

const STAMP: &str = "rootless";

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
enum StampError {
    #[error("root made it; name another folder with {0}, or run as root")]
    RootMadeIt(&'static str),
    #[error("an ordinary user made it; name another folder with {0}, or run as that user")]
    UserMadeIt(&'static str),
}

/// Stamps a folder that holds no layers yet, and refuses one of the other kind. `variable` names
/// another folder.
pub(crate) fn check_store(folder: &Path, variable: &'static str) -> io::Result<()> {
    let stamp = folder.join(STAMP);
    let stamped = stamp.try_exists()?;
    // Layers may be on a disk of their own, which is not there now; its record is.
    let used = folder.join("layers").try_exists()? || folder.join("store.json").try_exists()?;
    match (is_here(), stamped) {
        (true, false) if used => Err(io::Error::other(StampError::RootMadeIt(variable))),
        (true, false) => fs::File::create(&stamp)?.sync_all(),
        (false, true) => Err(io::Error::other(StampError::UserMadeIt(variable))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_refuses_what_an_ordinary_user_made() {
        let folder = tempfile::tempdir().unwrap();
        check_store(folder.path(), "HARVEST_HOME").unwrap();
        fs::create_dir(folder.path().join("layers")).unwrap();
        check_store(folder.path(), "HARVEST_HOME").unwrap();
        fs::write(folder.path().join(STAMP), "").unwrap();
        let error = check_store(folder.path(), "HARVEST_HOME").unwrap_err();
        assert!(error.to_string().contains("HARVEST_HOME"), "{error}");
    }
}
