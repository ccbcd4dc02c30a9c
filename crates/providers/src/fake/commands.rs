//! The few programs a fake sandbox has, and its files.

use harvest_proto::{
    Timestamp,
    bridge::{Exit, Fault, FaultCode, FileKind, FileStat},
};

use super::machine::Machine;

/// What became of a command.
pub(crate) enum Ran {
    Ended {
        stdout: Vec<u8>,
        exit: Exit,
    },
    /// Until it is killed.
    Sleeps,
}

/// Runs `echo`, `cat`, `test -f`, `true`, `false`, `sleep`, and a git and a shell that agree with everything.
pub(crate) fn run(argv: &[String], machine: &Machine) -> Result<Ran, Fault> {
    let words: Vec<&str> = argv.iter().map(String::as_str).collect();
    let ended = |stdout: Vec<u8>, code| Ok(Ran::Ended { stdout, exit: Exit::Code(code) });
    match words[..] {
        ["echo", ..] => ended(format!("{}\n", words[1..].join(" ")).into_bytes(), 0),
        ["cat", path] => match machine.files().remove(path) {
            Some(bytes) => ended(bytes, 0),
            None => ended(Vec::new(), 1),
        },
        ["test", "-f", path] => {
            let found = machine.files().keys().any(|file| file.ends_with(path));
            ended(Vec::new(), i32::from(!found))
        }
        ["git", "rev-parse", ..] => {
            ended(b"0123456789abcdef0123456789abcdef01234567\n".to_vec(), 0)
        }
        ["git", ..] | ["sh", ..] | ["true"] => ended(Vec::new(), 0),
        ["false"] => ended(Vec::new(), 1),
        ["sleep", ..] => Ok(Ran::Sleeps),
        _ => Err(Fault::new(FaultCode::NotFound, format!("no such program: {}", words.join(" ")))),
    }
}

pub(crate) fn missing(path: &str) -> Fault {
    Fault::new(FaultCode::NotFound, format!("no such file: {path}"))
}

pub(crate) fn stat(machine: &Machine, path: &str) -> Result<FileStat, Fault> {
    machine.files().get(path).map(|bytes| entry(path, bytes)).ok_or_else(|| missing(path))
}

pub(crate) fn list(machine: &Machine, folder: &str) -> Vec<FileStat> {
    let folder = format!("{}/", folder.trim_end_matches('/'));
    let inside = |path: &str| path.strip_prefix(&folder).is_some_and(|rest| !rest.contains('/'));
    let files = machine.files();
    files.iter().filter(|(path, _)| inside(path)).map(|(path, bytes)| entry(path, bytes)).collect()
}

fn entry(path: &str, bytes: &[u8]) -> FileStat {
    FileStat {
        name: path.rsplit('/').next().unwrap_or_default().to_owned(),
        kind: FileKind::File,
        size: bytes.len() as u64,
        mode: 0o644,
        uid: 0,
        modified: Timestamp::from_millis(0),
        target: None,
    }
}
