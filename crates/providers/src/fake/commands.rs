//! The programs and files of a fake sandbox.

use harvest_proto::{
    Timestamp,
    bridge::{DiffStat, Exit, Fault, FaultCode, FileKind, FileStat, GitRequest, Reply},
};

use super::{UPDATES_FILE, sandbox::FakeSandbox};

/// The result of a command.
pub(crate) enum CommandResult {
    Exited {
        stdout: Vec<u8>,
        exit: Exit,
    },
    /// Runs until it is killed.
    Sleeping,
}

/// Runs `echo`, `cat`, `test -f`, `true`, `false`, `sleep`; `sh` succeeds and prints
/// nothing, unless it runs apt.
pub(crate) fn run(argv: &[String], sandbox: &FakeSandbox) -> Result<CommandResult, Fault> {
    sandbox.use_cpu(1000);
    let argv_words: Vec<&str> = argv.iter().map(String::as_str).collect();
    let exited =
        |stdout: Vec<u8>, code| Ok(CommandResult::Exited { stdout, exit: Exit::Code(code) });
    match argv_words[..] {
        ["echo", ..] => exited(format!("{}\n", argv_words[1..].join(" ")).into_bytes(), 0),
        ["cat", path] => match sandbox.files().remove(path) {
            Some(bytes) => exited(bytes, 0),
            None => exited(Vec::new(), 1),
        },
        ["test", "-f", path] => {
            let found = sandbox.files().keys().any(|file| file.ends_with(path));
            exited(Vec::new(), i32::from(!found))
        }
        ["/bin/sh", "-c", script] if script.contains("apt-get") => {
            exited(sandbox.files().remove(UPDATES_FILE).unwrap_or_default(), 0)
        }
        ["sh" | "/bin/sh", ..] | ["true"] => exited(Vec::new(), 0),
        ["false"] => exited(Vec::new(), 1),
        ["sleep", ..] => Ok(CommandResult::Sleeping),
        _ => Err(Fault::new(
            FaultCode::NotFound,
            format!("no such program: {}", argv_words.join(" ")),
        )),
    }
}

/// Answers a git request: every checkout has one commit and nothing ever changes.
pub(crate) fn git(request: &GitRequest) -> Result<Reply, Fault> {
    let object = || "0123456789abcdef0123456789abcdef01234567".to_owned();
    match request {
        GitRequest::Head { .. } => {
            Ok(Reply::Head { commit: Some(object()), default_branch: None, has_setup: false })
        }
        GitRequest::SetBranch { .. } => Ok(Reply::Done),
        // The base of these commits declares a check.
        GitRequest::CheckOut { commit, .. } => Ok(Reply::CheckedOut {
            base: Some(object()),
            declared: commit.starts_with("cafe").then(|| "make check".to_owned()),
            changed: Vec::new(),
            changed_count: 0,
        }),
        GitRequest::SaveTree { .. } => {
            Ok(Reply::SavedTree { tree: object(), stat: DiffStat::default() })
        }
        GitRequest::Query { .. } => Ok(Reply::Queried { truncated: None }),
        GitRequest::UnpackTree { .. } => {
            Err(Fault::new(FaultCode::Invalid, "the fake has no git objects"))
        }
    }
}

pub(crate) fn missing(path: &str) -> Fault {
    Fault::new(FaultCode::NotFound, format!("no such file: {path}"))
}

pub(crate) fn stat(sandbox: &FakeSandbox, path: &str) -> Result<FileStat, Fault> {
    sandbox.files().get(path).map(|bytes| entry(path, bytes)).ok_or_else(|| missing(path))
}

pub(crate) fn list(sandbox: &FakeSandbox, folder: &str) -> Vec<FileStat> {
    let folder = format!("{}/", folder.trim_end_matches('/'));
    let inside = |path: &str| path.strip_prefix(&folder).is_some_and(|rest| !rest.contains('/'));
    let files = sandbox.files();
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
