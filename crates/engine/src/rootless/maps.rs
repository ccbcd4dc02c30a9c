//! The id maps of an unprivileged user's namespace. Reads `/etc/subuid` and `/etc/subgid` like
//! `newuidmap` and `newgidmap`, which check everything again.

use std::{ffi::CStr, fs, ptr};

use super::{RootlessError, run};
use crate::spec::IDS_PER_SANDBOX;

/// The host ids that 0 (the user) and 1 and up map to, each for uid and gid.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Maps {
    own: (u32, u32),
    first: (u32, u32),
}

/// The maps of this process's user.
pub(super) fn of_this_user() -> Result<Maps, RootlessError> {
    let uid = rustix::process::getuid().as_raw();
    let name = user_name(uid);
    let find = |file: &'static str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        first_of(&text, name.as_deref(), uid).ok_or_else(|| RootlessError::NoIds {
            user: name.clone().unwrap_or_else(|| uid.to_string()),
            file,
        })
    };
    let first = (find("/etc/subuid")?, find("/etc/subgid")?);
    Ok(Maps { own: (uid, rustix::process::getgid().as_raw()), first })
}

impl Maps {
    /// Applies the maps to another process's namespace; the error is a message.
    pub(super) fn apply(&self, pid: u32) -> Result<(), String> {
        let lines = |own: u32, first: u32| {
            [pid, 0, own, 1, 1, first, IDS_PER_SANDBOX - 1]
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
        };
        run("newuidmap", &lines(self.own.0, self.first.0))?;
        run("newgidmap", &lines(self.own.1, self.first.1))
    }
}

/// The first id of the first range that is long enough; lines are `user:first:count`.
fn first_of(text: &str, name: Option<&str>, uid: u32) -> Option<u32> {
    let number = uid.to_string();
    text.lines().find_map(|line| {
        let mut parts = line.split(':');
        let owner = parts.next()?;
        let first = parts.next()?.trim().parse().ok()?;
        let count: u32 = parts.next()?.trim().parse().ok()?;
        ((Some(owner) == name || owner == number) && count >= IDS_PER_SANDBOX - 1).then_some(first)
    })
}

/// The identity map for a namespace below one with this map, limited to a sandbox's ids. Line by
/// line: the kernel accepts no range that spans two ranges of the parent.
pub(crate) fn identity_map(map: &str) -> String {
    let lines = map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u32>().ok());
        let (first, _, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let count = count.min(IDS_PER_SANDBOX.saturating_sub(first));
        (count > 0).then(|| format!("{first} {first} {count}\n"))
    });
    lines.collect()
}

/// Whether a map is the host's initial one.
pub(super) fn is_initial(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The user's name from the host's name service, which need not be a file.
fn user_name(uid: u32) -> Option<String> {
    // SAFETY: consists of integers and pointers, for which zero is a valid value.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let (mut text, mut found) = (vec![0; 1 << 14], ptr::null_mut());
    // SAFETY: the length is the buffer's, and all four arguments outlive the call.
    unsafe { libc::getpwuid_r(uid, &raw mut entry, text.as_mut_ptr(), text.len(), &raw mut found) };
    if found.is_null() {
        return None;
    }
    // SAFETY: the call has succeeded, so the name is a null-terminated text inside `text`.
    let name = unsafe { CStr::from_ptr(entry.pw_name) };
    name.to_str().ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_long_enough_range_is_used() {
        let text = "other:1000:65536\nme:2000:10\n1234:3000:65535\nme:4000:65536\n";
        assert_eq!(first_of(text, Some("me"), 1234), Some(3000));
        assert_eq!(first_of(text, Some("me"), 1), Some(4000));
        assert_eq!(first_of(text, None, 7), None);
        assert_eq!(first_of("me:x:y\nme\n:::", Some("me"), 7), None);
    }

    #[test]
    fn identity_map_keeps_parent_ranges_within_sandbox_ids() {
        assert_eq!(identity_map("  0   1000    1\n  1 100000 65535\n"), "0 0 1\n1 1 65535\n");
        assert_eq!(identity_map("0 5 100000\n200000 7 5\n"), "0 0 65536\n");
    }

    #[test]
    fn only_the_full_identity_map_is_initial() {
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial(
            "         0       1000          1\n         1     100000      65535\n"
        ));
        assert!(!is_initial("         0          0      65536\n"));
    }
}
