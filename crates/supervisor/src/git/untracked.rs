//! Adds the untracked files of a checkout to an index, except those that are rarely work.

use std::{
    ffi::OsStr,
    fs,
    io::{self, BufRead, BufReader, BufWriter, Write},
    os::unix::ffi::OsStrExt,
    path::Path,
    process::{Command, Stdio},
};

use rustix::fs::Access;

use super::trees::JobError;

/// Lists untracked files that are not ignored.
pub(super) const LIST: [&str; 4] = ["ls-files", "-z", "-o", "--exclude-standard"];

/// Adds the files on stdin. With `--remove` a file that disappears meanwhile is no error.
pub(super) const ADD: [&str; 5] = ["update-index", "-z", "--add", "--remove", "--stdin"];

// Larger untracked files are rarely source code and would be stored twice.
const MAX_UNTRACKED_BYTES: u64 = 8 << 20;

/// Runs both commands, and passes the names of files from the first to the second; each name that
/// is left out goes to `left_out`. `top` is the top folder of the working tree.
pub(super) fn add(
    top: &Path,
    mut list: Command,
    mut add: Command,
    left_out: impl FnMut(&[u8]),
) -> Result<(), JobError> {
    let failed = |error| JobError::io("list untracked files", error);
    let mut list = list.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut add = add.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().map_err(failed)?;
    if let (Some(names), Some(paths)) = (list.stdout.take(), add.stdin.take()) {
        // Best effort: a filter of the repository may fail, and the rest is still worth a tree.
        let _adding_failed = pass_names(top, names, paths, left_out);
    }
    list.wait().and_then(|_| add.wait()).map_err(failed)?;
    Ok(())
}

// Ended by NUL, as a name may contain anything else.
fn pass_names(
    top: &Path,
    from: impl io::Read,
    to: impl Write,
    mut left_out: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut to = BufWriter::new(to);
    for name in BufReader::new(from).split(0) {
        let mut name = name?;
        if is_saved(&top.join(OsStr::from_bytes(&name))) {
            name.push(0);
            to.write_all(&name)?;
        } else {
            left_out(&name);
        }
    }
    to.flush()
}

// One unreadable file would make `git update-index` drop all others.
fn is_saved(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|about| {
        let is_readable = || rustix::fs::access(path, Access::READ_OK).is_ok();
        about.is_symlink() || about.is_file() && about.len() <= MAX_UNTRACKED_BYTES && is_readable()
    })
}
