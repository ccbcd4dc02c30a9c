//! Writes files atomically: a reader sees the old or the new content, also after a crash.

use std::{fs, io, io::Write, os::unix::fs::OpenOptionsExt, path::Path};

use anyhow::{Context, Result};

/// Writes a file that only its owner can read.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes, 0o600).with_context(|| format!("cannot write {}", path.display()))
}

pub(crate) fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temporary, path)
}

/// Removes temporary files of processes that were killed before they renamed them.
pub(crate) fn remove_unfinished(folder: &Path) {
    let writer = |name: &str| name.strip_suffix(".tmp")?.rsplit_once('.')?.1.parse::<u32>().ok();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(writer);
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_files_of_dead_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let own = format!("server.{}.tmp", std::process::id());
        for name in ["server.4294967295.tmp", &own, "notes.tmp", "server.json", "x.1y.tmp"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_unfinished(folder.path());
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 4);
        assert!(!folder.path().join("server.4294967295.tmp").exists());
    }
}
