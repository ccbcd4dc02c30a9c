//! Looks up users in `/etc/passwd`. A static program must not load the image's name services. The
//! file is untrusted.

use std::{io, path::Path};

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};

/// The user agents and most commands run as.
pub(crate) const AGENT_USER: &str = "harvest";

// The uid of `harvest` if the image does not define the user.
const AGENT_UID: u32 = 10001;

// The highest id mapped into a sandbox.
const LAST_ID: u32 = 65_535;

// Bounds memory: no real passwd file is larger.
const MAX_PASSWD_BYTES: u64 = 1024 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: String,
}

impl User {
    /// Runs `work` with this user's access: the kernel checks the user's permissions on every path,
    /// wherever a link leads, and new files belong to the user. Affects this thread only.
    pub(crate) fn access<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let _restored_after = FileIds { gid: setfsgid(gid), uid: setfsuid(uid) };
        // The calls report no errors; each returns the id before it.
        if (setfsgid(gid), setfsuid(uid)) != (gid, uid) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        work()
    }
}

/// The file system ids of a thread to restore.
struct FileIds {
    gid: Gid,
    uid: Uid,
}

impl Drop for FileIds {
    fn drop(&mut self) {
        setfsuid(self.uid);
        setfsgid(self.gid);
    }
}

/// Looks up a user by name, `uid` or `uid:gid`.
pub(crate) fn find(user: &str) -> Option<User> {
    let passwd = read_bounded(Path::new("/etc/passwd")).unwrap_or_default();
    find_in(&passwd, user)
}

fn read_bounded(path: &Path) -> io::Result<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    crate::resolve::open_regular(path)?.take(MAX_PASSWD_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn find_in(passwd: &str, user: &str) -> Option<User> {
    let (name, group) =
        user.split_once(':').map_or((user, None), |(name, group)| (name, Some(group)));
    let number = name.parse::<u32>().ok();
    let listed = passwd
        .lines()
        .filter_map(parse_line)
        .find(|listed| listed.name == name || number.is_some_and(|number| listed.uid == number));
    let mut found = match (listed, number, name) {
        (Some(listed), ..) => listed,
        (None, Some(uid), _) => unlisted(&uid.to_string(), uid, "/"),
        (None, None, "root") => unlisted("root", 0, "/root"),
        (None, None, AGENT_USER) => unlisted(AGENT_USER, AGENT_UID, "/home/harvest"),
        (None, None, _) => return None,
    };
    if let Some(group) = group {
        found.gid = group.parse().ok()?;
    }
    // Higher ids are not mapped, so no process or file can have them.
    (found.uid <= LAST_ID && found.gid <= LAST_ID).then_some(found)
}

fn unlisted(name: &str, uid: u32, home: &str) -> User {
    User { name: name.to_owned(), uid, gid: uid, home: home.to_owned() }
}

fn parse_line(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty() && !name.starts_with('#'))?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1).filter(|home| home.starts_with('/')).unwrap_or("/");
    Some(User { name: name.to_owned(), uid, gid, home: home.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\n# no\nbroken\nada:x:1000:100::/home/ada:/bin/sh\n";

    #[test]
    fn user_is_found_by_name_and_number() {
        let ada = User { name: "ada".into(), uid: 1000, gid: 100, home: "/home/ada".into() };
        assert_eq!(find_in(PASSWD, "ada"), Some(ada.clone()));
        assert_eq!(find_in(PASSWD, "1000"), Some(ada));
        assert_eq!(find_in(PASSWD, "1000:7").unwrap().gid, 7);
    }

    #[test]
    fn root_and_harvest_need_no_passwd_entry() {
        assert_eq!(find_in("", "root").unwrap().uid, 0);
        assert_eq!(find_in("", "harvest").unwrap().uid, 10001);
        assert_eq!(find_in("", "77").unwrap().gid, 77);
        assert_eq!(find_in("", "65535").unwrap().uid, 65535);
        for user in ["65536", "4294967295", "0:65536", "far"] {
            assert_eq!(find_in("far:x:70000:0::/:/bin/sh\n", user), None, "{user}");
        }
        assert_eq!(find_in(PASSWD, "eve"), None);
        assert_eq!(find_in(PASSWD, ""), None);
    }

    proptest! {
        #[test]
        fn malformed_passwd_never_panics(passwd in "[a-z:0-9\n/#-]{0,200}", user in ".{0,10}") {
            let _any = find_in(&passwd, &user);
        }
    }
}
