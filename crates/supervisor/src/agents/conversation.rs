//! The id of a conversation that the agent itself has chosen, in a file beside the agent's state on
//! the sandbox's disk: a snapshot, and so a restore or a fork, brings the id that belongs to it.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use harvest_proto::AgentName;

use crate::{
    resolve::{self, ResolvedPath},
    users::User,
};

// Real ids have less than 50 characters.
const MAX_ID_BYTES: u64 = 256;

/// The folder of Harvest's own files in the agent's home.
pub(super) fn state_folder(home: &str) -> PathBuf {
    Path::new(home).join(".harvest")
}

/// The saved id, unless the file is missing or holds something else.
pub(super) fn load(user: &User, folder: &Path, agent: &AgentName) -> Option<String> {
    let read = || {
        let mut text = String::new();
        let file = resolve::open_regular(&folder.join(name(agent)))?;
        file.take(MAX_ID_BYTES + 1).read_to_string(&mut text)?;
        Ok(text)
    };
    // The agent's user may have replaced the file by a link.
    let text = user.access(read).ok()?;
    let id = text.trim_end();
    is_id(id).then(|| id.to_owned())
}

/// Saves the id, atomically.
pub(super) fn save(user: &User, folder: &Path, agent: &AgentName, id: &str) -> io::Result<()> {
    write(user, folder, &name(agent), &format!("{id}\n"))
}

/// Writes a file of the agent's user into an own folder, atomically. The user controls the links on
/// the way.
pub(super) fn write(user: &User, folder: &Path, name: &str, text: &str) -> io::Result<()> {
    user.access(|| {
        match fs::create_dir(ResolvedPath::of(folder)?.path()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let target = ResolvedPath::of(&folder.join(name))?;
        let partial = target.sibling(&format!("{name}.partial"));
        let _from_a_crash = fs::remove_file(&partial);
        let mut file = File::options().write(true).create_new(true).open(&partial)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&partial, target.path())
    })
}

fn name(agent: &AgentName) -> String {
    format!("{agent}-conversation")
}

/// Whether a text of an agent may be kept as an id.
pub(super) fn is_id(text: &str) -> bool {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.:".contains(letter);
    !text.is_empty() && text.len() as u64 <= MAX_ID_BYTES && text.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> User {
        let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
        User { name: "me".into(), uid: uid.as_raw(), gid: gid.as_raw(), home: "/".into() }
    }

    #[test]
    fn saved_id_is_loaded_again() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("state");
        let (user, agent) = (me(), &AgentName::Scripted);
        assert_eq!(load(&user, &folder, agent), None);
        save(&user, &folder, agent, "ses_1").unwrap();
        save(&user, &folder, agent, "ses_2").unwrap();
        assert_eq!(load(&user, &folder, agent).as_deref(), Some("ses_2"));
        assert_eq!(load(&user, &folder, &AgentName::Claude), None, "one file per agent");
    }

    #[test]
    fn anything_but_an_id_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let (user, agent) = (me(), &AgentName::Scripted);
        for text in ["", "\n", "a b", "a\nb", "../x", &"x".repeat(257)] {
            fs::write(folder.path().join(name(agent)), text).unwrap();
            assert_eq!(load(&user, folder.path(), agent), None, "{text:?}");
        }
        fs::remove_file(folder.path().join(name(agent))).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            folder.path().join(name(agent)),
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert_eq!(load(&user, folder.path(), agent), None, "a FIFO without a writer");
    }
}
