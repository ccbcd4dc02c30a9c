//! Who a command runs as. Reads `/etc/passwd` itself: a static program must not load the image's
//! name services. The file belongs to the sandbox, so nothing in it is trusted beyond the sandbox.

use std::path::Path;

/// The user agents and most commands run as.
pub(crate) const AGENT_USER: &str = "harvest";

// What `harvest` is where the image has no such line.
const AGENT_UID: u32 = 10001;

// The last id a sandbox has.
const LAST_ID: u32 = 65_535;

// A passwd file beyond this is not one; reading it whole must not fill the supervisor's memory.
const MAX_PASSWD_BYTES: u64 = 1024 * 1024;

/// A user, as far as starting a process needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: String,
}

/// Looks a user up by name, number or `number:number`.
pub(crate) fn find(user: &str) -> Option<User> {
    let passwd = read_bounded(Path::new("/etc/passwd")).unwrap_or_default();
    find_in(&passwd, user)
}

fn read_bounded(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    crate::files::open_regular(path)?.take(MAX_PASSWD_BYTES).read_to_end(&mut bytes)?;
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
    // A sandbox has no others: nobody can become them, nothing can belong to them.
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
    fn a_user_is_found_by_name_and_by_number() {
        let ada = User { name: "ada".into(), uid: 1000, gid: 100, home: "/home/ada".into() };
        assert_eq!(find_in(PASSWD, "ada"), Some(ada.clone()));
        assert_eq!(find_in(PASSWD, "1000"), Some(ada));
        assert_eq!(find_in(PASSWD, "1000:7").unwrap().gid, 7);
    }

    #[test]
    fn root_and_harvest_need_no_line_but_other_names_do() {
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
        fn a_garbled_passwd_never_panics(passwd in "[a-z:0-9\n/#-]{0,200}", user in ".{0,10}") {
            let _any = find_in(&passwd, &user);
        }
    }
}
