//! Imports a folder without git: its files become a commit on `main`. Symlinks are stored as links
//! and never followed; sockets, FIFOs and devices are left out and reported.

use std::{
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::Stdio,
};

use tokio::io::AsyncWriteExt;

use super::{
    ImportError, ImportedFolder, TempIndex, disk, first_few, git, git_on, git_with_work_tree, run,
    sanitize, set_default_branch, unreadable,
};

const BRANCH: &str = "main";

// A larger folder is hardly source code, and copying it would take long.
const MAX_FILES: usize = 100_000;
const MAX_BYTES: u64 = 2 << 30;

// Bounds the search for special files: ignored folders may hold a whole disk.
const MAX_ENTRIES_SCANNED: usize = 1_000_000;

const AUTHOR: [(&str, &str); 4] = [
    ("GIT_AUTHOR_NAME", "Harvest"),
    ("GIT_AUTHOR_EMAIL", "harvest@localhost"),
    ("GIT_COMMITTER_NAME", "Harvest"),
    ("GIT_COMMITTER_EMAIL", "harvest@localhost"),
];

/// Commits the folder's files, unless they equal the last commit.
pub(super) async fn import(bare: &Path, folder: &Path) -> Result<ImportedFolder, ImportError> {
    let scanned = folder.to_owned();
    let special = tokio::task::spawn_blocking(move || special_files(&scanned)).await;
    let special = special.map_err(|panicked| disk("scan", folder)(panicked.into()))??;
    let index = TempIndex::new(bare);
    let (files, nested) = list(bare, folder, &index).await?;
    let mut notes = Vec::new();
    if !special.is_empty() {
        notes.push(format!("left out special files: {}", first_few(&special)));
    }
    if !nested.is_empty() {
        notes.push(format!("left out nested git repositories: {}", first_few(&nested)));
    }
    if files.is_empty() {
        return Err(ImportError::Empty { folder: folder.to_owned() });
    }
    check_size(folder, &files)?;
    add(bare, folder, &index, &files).await?;
    let commit = commit(bare, &index).await?;
    set_default_branch(bare, BRANCH).await?;
    Ok(ImportedFolder { branch: BRANCH.parse()?, commit, notes })
}

/// Sockets, FIFOs and devices. An unreadable folder is an error, because its files would be
/// missing.
fn special_files(folder: &Path) -> Result<Vec<String>, ImportError> {
    let (mut special, mut seen, mut folders) = (Vec::new(), 0, vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).map_err(unreadable(&next))? {
            let entry = entry.map_err(unreadable(&next))?;
            seen += 1;
            if seen > MAX_ENTRIES_SCANNED {
                return Ok(special);
            }
            let (path, kind) = (entry.path(), entry.file_type().map_err(unreadable(&next))?);
            let is_special = kind.is_socket()
                || kind.is_fifo()
                || kind.is_block_device()
                || kind.is_char_device();
            if is_special {
                let name = path.strip_prefix(folder).unwrap_or(&path);
                special.push(sanitize(name.as_os_str().as_encoded_bytes()));
            } else if kind.is_dir() && entry.file_name() != ".git" {
                folders.push(path);
            }
        }
    }
    special.sort();
    Ok(special)
}

/// The files git would add, and nested git repositories.
async fn list(
    bare: &Path,
    folder: &Path,
    index: &TempIndex,
) -> Result<(Vec<Vec<u8>>, Vec<String>), ImportError> {
    let mut command = git_with_work_tree(bare, folder, &index.0);
    command.args(["ls-files", "-z", "--others", "--exclude-standard"]);
    let output = run(command).await.map_err(disk("list", folder))?;
    if !output.status.success() {
        git::stdout_of("list the folder's files", Ok(output))?;
        return Ok((Vec::new(), Vec::new()));
    }
    let names = output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let (nested, files): (Vec<_>, Vec<_>) =
        names.map(<[u8]>::to_vec).partition(|name| name.ends_with(b"/"));
    Ok((files, nested.iter().map(|name| sanitize(name)).collect()))
}

fn check_size(folder: &Path, files: &[Vec<u8>]) -> Result<(), ImportError> {
    let too_large = |what: String| ImportError::TooLarge { folder: folder.to_owned(), what };
    if files.len() > MAX_FILES {
        return Err(too_large(format!("{} files; the limit is {MAX_FILES}", files.len())));
    }
    let mut bytes = 0;
    for name in files {
        let path = folder.join(path_of(name));
        bytes += fs::symlink_metadata(&path).map_err(unreadable(&path))?.len();
    }
    match bytes > MAX_BYTES {
        true => {
            Err(too_large(format!("{} MiB; the limit is {} MiB", bytes >> 20, MAX_BYTES >> 20)))
        }
        false => Ok(()),
    }
}

fn path_of(name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt as _;
    std::ffi::OsStr::from_bytes(name).into()
}

/// Adds exactly the listed files: a repository that appears meanwhile must not become a submodule.
async fn add(
    bare: &Path,
    folder: &Path,
    index: &TempIndex,
    files: &[Vec<u8>],
) -> Result<(), ImportError> {
    let mut command = git_with_work_tree(bare, folder, &index.0);
    command.args(["update-index", "--add", "-z", "--stdin"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let doing = "add the folder's files";
    let mut child = command.spawn().map_err(disk("read", folder))?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let list = files.join(&b'\0');
    let feed = async move {
        // A write fails only when git has exited; its own error is reported below.
        let _ = stdin.write_all(&list).await;
        let _ = stdin.write_all(b"\0").await;
    };
    let both = async { tokio::join!(feed, child.wait_with_output()).1 };
    let output = tokio::time::timeout(super::TIMEOUT, both)
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    git::stdout_of(doing, output)?;
    Ok(())
}

async fn commit(bare: &Path, index: &TempIndex) -> Result<String, ImportError> {
    let doing = "commit the folder's files";
    let mut command = git_on(bare);
    command.env("GIT_INDEX_FILE", &index.0).arg("write-tree");
    let tree = git::stdout_of(doing, run(command).await)?.trim().to_owned();
    let before = git::head(bare, BRANCH).await?;
    let mut command = git_on(bare);
    command.envs(AUTHOR).args(["commit-tree", &tree, "-m", "Import folder"]);
    if let Some(before) = &before {
        let last_tree =
            git::run(bare, doing, &["rev-parse", &format!("{before}^{{tree}}")]).await?;
        if last_tree.trim() == tree {
            return Ok(before.clone());
        }
        command.args(["-p", before]);
    }
    let commit = git::stdout_of(doing, run(command).await)?.trim().to_owned();
    git::run(bare, doing, &["update-ref", &format!("refs/heads/{BRANCH}"), &commit]).await?;
    Ok(commit)
}
