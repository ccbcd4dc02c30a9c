//! Imports a folder without git: its files become a commit on `main`, without those that
//! `.gitignore` and `.ignore` name. Symlinks are stored as links and never followed. Special files,
//! nested repositories, installed packages and files that usually hold secrets are left out and
//! reported.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::Stdio,
};

use harvest_proto::bridge::Author;
use tokio::io::AsyncWriteExt;

use super::{
    FolderSummary, ImportError, ImportedFolder, TempIndex, disk, first_few, git, git_on,
    git_with_work_tree, run, sanitize, set_default_branch, unreadable,
};

const BRANCH: &str = "main";

// A larger folder is hardly source code, and copying it would take long.
const MAX_FILES: usize = 100_000;
const MAX_BYTES: u64 = 2 << 30;

// Bounds the search for special files: ignored folders may hold a whole disk.
const MAX_ENTRIES_SCANNED: usize = 1_000_000;

// Never copied, whatever the ignore files say: secrets, and packages that setup installs again.
const NEVER: [&str; 5] = [".env*", "node_modules/", "__pycache__/", "venv/", ".venv/"];

// Marks a Python environment, whatever its folder is called.
const ENVIRONMENT_MARK: &[u8] = b"pyvenv.cfg";

/// What an import would copy.
pub(super) struct Listing {
    files: Vec<Vec<u8>>,
    pub(super) summary: FolderSummary,
}

/// Lists what an import of the folder would copy.
pub(super) async fn list(bare: &Path, folder: &Path) -> Result<Listing, ImportError> {
    let scanned = folder.to_owned();
    let special = tokio::task::spawn_blocking(move || special_files(&scanned)).await;
    let special = special.map_err(|panicked| disk("scan", folder)(panicked.into()))??;
    let never = NEVER.map(|pattern| format!("--exclude={pattern}"));
    let ignored = names(bare, folder, &["--ignored", "--exclude-per-directory=.ignore"], &[]);
    let standard = names(bare, folder, &["--exclude-standard"], &never);
    let excluded = names(bare, folder, &["--ignored", "--directory"], &never);
    let (ignored, standard, excluded) = tokio::try_join!(ignored, standard, excluded)?;
    let (nested, files): (Vec<_>, Vec<_>) =
        standard.into_iter().partition(|name| name.ends_with(b"/"));
    let (files, environments) = without_environments(files);
    let ignored: BTreeSet<_> = ignored.into_iter().collect();
    let files: Vec<_> = files.into_iter().filter(|name| !ignored.contains(name)).collect();
    if files.is_empty() {
        return Err(ImportError::Empty { folder: folder.to_owned() });
    }
    let mut notes = Vec::new();
    let mut note = |what: &str, names: &[Vec<u8>]| {
        let names: Vec<_> = names.iter().map(|name| sanitize(name)).collect();
        if !names.is_empty() {
            notes.push(format!("left out {what}: {}", first_few(&names)));
        }
    };
    note("special files", &special);
    note("nested git repositories", &nested);
    note("secrets and installed packages", &[innermost(excluded), environments].concat());
    let summary = FolderSummary { files: files.len(), bytes: check_size(folder, &files)?, notes };
    Ok(Listing { files, summary })
}

/// Commits the folder's files, unless they equal the last commit.
pub(super) async fn import(
    bare: &Path,
    folder: &Path,
    author: &Author,
) -> Result<ImportedFolder, ImportError> {
    let Listing { files, summary } = list(bare, folder).await?;
    let notes = summary.notes;
    let index = TempIndex::new(bare);
    add(bare, folder, &index, &files).await?;
    let commit = commit(bare, &index, author).await?;
    set_default_branch(bare, BRANCH).await?;
    Ok(ImportedFolder { branch: BRANCH.parse()?, commit, notes })
}

/// Sockets, FIFOs and devices. An unreadable folder is an error, because its files would be
/// missing.
fn special_files(folder: &Path) -> Result<Vec<Vec<u8>>, ImportError> {
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
                special.push(name.as_os_str().as_encoded_bytes().to_vec());
            } else if kind.is_dir() && entry.file_name() != ".git" {
                folders.push(path);
            }
        }
    }
    special.sort();
    Ok(special)
}

/// The names that git lists with these options; those of nested repositories end with `/`.
async fn names(
    bare: &Path,
    folder: &Path,
    options: &[&str],
    patterns: &[String],
) -> Result<Vec<Vec<u8>>, ImportError> {
    let index = TempIndex::new(bare);
    let mut command = git_with_work_tree(bare, folder, &index.0);
    command.args(["ls-files", "-z", "--others"]).args(options).args(patterns);
    let output = run(command).await.map_err(disk("list", folder))?;
    if !output.status.success() {
        git::stdout_of("list the folder's files", Ok(output))?;
        return Ok(Vec::new());
    }
    let names = output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(<[u8]>::to_vec).collect())
}

/// Git also lists a folder that holds nothing but excluded files, before them.
fn innermost(mut names: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut next: Vec<u8> = Vec::new();
    names.reverse();
    names.retain(|name| {
        let holds_next = name.ends_with(b"/") && next.starts_with(name);
        next.clone_from(name);
        !holds_next
    });
    names.reverse();
    names
}

/// Separates the folders of Python environments from the files outside of them.
fn without_environments(files: Vec<Vec<u8>>) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let folder_of_mark = |name: &Vec<u8>| {
        let folder = name.strip_suffix(ENVIRONMENT_MARK)?;
        folder.ends_with(b"/").then(|| folder.to_vec())
    };
    let environments: Vec<_> = files.iter().filter_map(folder_of_mark).collect();
    let outside = |name: &Vec<u8>| !environments.iter().any(|folder| name.starts_with(folder));
    (files.into_iter().filter(outside).collect(), environments)
}

/// The bytes of the files, unless they are too many.
fn check_size(folder: &Path, files: &[Vec<u8>]) -> Result<u64, ImportError> {
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
        false => Ok(bytes),
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

async fn commit(bare: &Path, index: &TempIndex, author: &Author) -> Result<String, ImportError> {
    let doing = "commit the folder's files";
    let mut command = git_on(bare);
    command.env("GIT_INDEX_FILE", &index.0).arg("write-tree");
    let tree = git::stdout_of(doing, run(command).await)?.trim().to_owned();
    let before = git::head(bare, BRANCH).await?;
    let mut command = git_on(bare);
    for who in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{who}_NAME"), &author.name);
        command.env(format!("GIT_{who}_EMAIL"), &author.email);
    }
    command.args(["commit-tree", &tree, "-m", "Import folder"]);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_of_excluded_files_is_not_named_itself() {
        let names = |names: &[&str]| -> Vec<Vec<u8>> {
            names.iter().map(|name| name.as_bytes().to_vec()).collect()
        };
        let listed = names(&[".env", "a/", "a/b/", "a/b/venv/", "c/", "c/.env", "c/x/", "d/venv/"]);
        assert_eq!(innermost(listed), names(&[".env", "a/b/venv/", "c/.env", "c/x/", "d/venv/"]));
    }

    #[test]
    fn python_environments_are_found_by_their_mark() {
        let names = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect();
        let files = names(&["a.py", "py3/bin/python", "py3/pyvenv.cfg", "py30/b.py", "pyvenv.cfg"]);
        let (outside, environments) = without_environments(files);
        assert_eq!(outside, names(&["a.py", "py30/b.py", "pyvenv.cfg"]) as Vec<_>);
        assert_eq!(environments, names(&["py3/"]) as Vec<_>);
    }
}
