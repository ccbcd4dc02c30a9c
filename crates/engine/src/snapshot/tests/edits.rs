//! Random edits that a sandbox makes to its disk between two captures.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::Path,
    thread,
    time::{Duration, SystemTime},
};

use proptest::prelude::*;
use rustix::fs::Mode;

#[derive(Debug, Clone)]
pub(super) enum Edit {
    Write(String, u8),
    Append(String),
    Folder(String),
    Remove(String),
    Rename(String, String),
    Link(String, String),
    Symlink(String),
    Mode(String, u32),
    Owner(String, u32),
    Pipe(String),
    Socket(String),
    /// Waits until the kernel's clock has moved on, so that ctimes can be trusted.
    WaitForClock,
}

pub(super) fn edit(root: &Path, edit: &Edit) {
    let at = |path: &String| root.join(path);
    // Opening a pipe would block, and links must not be followed.
    if let Edit::Write(path, _) | Edit::Append(path) | Edit::Mode(path, _) | Edit::Owner(path, _) =
        edit
        && fs::symlink_metadata(at(path)).is_ok_and(|meta| !meta.is_file() && !meta.is_dir())
    {
        return;
    }
    // Many edits are impossible on the current tree; they fail and leave it unchanged.
    let _ = match edit {
        Edit::Write(path, byte) => fs::write(at(path), vec![*byte; usize::from(*byte) * 40]),
        Edit::Append(path) => {
            fs::read(at(path)).and_then(|old| fs::write(at(path), [old, vec![1]].concat()))
        }
        Edit::Folder(path) => fs::create_dir(at(path)),
        Edit::Remove(path) => fs::remove_file(at(path)).or_else(|_| fs::remove_dir_all(at(path))),
        Edit::Rename(from, to) => fs::rename(at(from), at(to)),
        Edit::Link(from, to) => fs::hard_link(at(from), at(to)),
        Edit::Symlink(path) => symlink("f", at(path)),
        Edit::Mode(path, mode) => fs::set_permissions(at(path), fs::Permissions::from_mode(*mode)),
        Edit::Owner(path, id) => chown(at(path), Some(*id), Some(*id)),
        Edit::Pipe(path) => {
            rustix::fs::mkfifoat(rustix::fs::CWD, at(path), Mode::RUSR).map_err(Into::into)
        }
        Edit::Socket(path) => std::os::unix::net::UnixListener::bind(at(path)).map(drop),
        Edit::WaitForClock => {
            let until = SystemTime::now() + Duration::from_millis(25);
            while SystemTime::now() < until {
                thread::yield_now();
            }
            Ok(())
        }
    };
}

pub(super) fn any_path() -> impl Strategy<Value = String> {
    proptest::collection::vec(prop_oneof![Just("a"), Just("b"), Just("d"), Just("f")], 1..4)
        .prop_map(|parts| parts.join("/"))
}

pub(super) fn any_edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        4 => (any_path(), any::<u8>()).prop_map(|(path, byte)| Edit::Write(path, byte)),
        1 => any_path().prop_map(Edit::Append),
        4 => any_path().prop_map(Edit::Folder),
        5 => any_path().prop_map(Edit::Remove),
        5 => (any_path(), any_path()).prop_map(|(from, to)| Edit::Rename(from, to)),
        2 => (any_path(), any_path()).prop_map(|(from, to)| Edit::Link(from, to)),
        1 => any_path().prop_map(Edit::Symlink),
        1 => (any_path(), 0u32..0o7777).prop_map(|(path, mode)| Edit::Mode(path, mode)),
        1 => (any_path(), 0u32..3).prop_map(|(path, id)| Edit::Owner(path, id)),
        1 => any_path().prop_map(Edit::Pipe),
        1 => any_path().prop_map(Edit::Socket),
        2 => Just(Edit::WaitForClock),
    ]
}
