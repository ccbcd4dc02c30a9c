//! A folder without git: its files become a commit of the forge's own. Links are taken as links and never
//! followed; what is no file, folder or link stays behind and is named.

use std::{
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::Stdio,
};

use tokio::io::AsyncWriteExt;

use super::{
    Draft, TakeError, Taken, beside, disk, few, git, good, on, run, settle, shown, unreadable,
};

const BRANCH: &str = "main";

// What a checkout is copied in without anybody wondering; more is no source code.
const MOST_FILES: usize = 100_000;
const MOST_BYTES: u64 = 2 << 30;

// Looking for sockets ends here: there may be a whole disk below what .gitignore leaves out.
const MOST_SEEN: usize = 1_000_000;

const WHO: [(&str, &str); 4] = [
    ("GIT_AUTHOR_NAME", "Harvest"),
    ("GIT_AUTHOR_EMAIL", "harvest@localhost"),
    ("GIT_COMMITTER_NAME", "Harvest"),
    ("GIT_COMMITTER_EMAIL", "harvest@localhost"),
];

/// Commits what the folder holds, unless that is what the last commit holds.
pub(super) async fn take(bare: &Path, folder: &Path) -> Result<Taken, TakeError> {
    let looked_at = folder.to_owned();
    let strange = tokio::task::spawn_blocking(move || strange(&looked_at)).await;
    let strange = strange.map_err(|panicked| disk("look through", folder)(panicked.into()))??;
    let index = Draft::new(bare);
    let (files, nested) = list(bare, folder, &index).await?;
    let mut notes = Vec::new();
    if !strange.is_empty() {
        notes.push(format!("left out, being neither file, folder nor link: {}", few(&strange)));
    }
    if !nested.is_empty() {
        notes.push(format!("left out, being git repositories of their own: {}", few(&nested)));
    }
    if files.is_empty() {
        return Err(TakeError::Empty { folder: folder.to_owned() });
    }
    measure(folder, &files)?;
    add(bare, folder, &index, &files).await?;
    let commit = commit(bare, &index).await?;
    settle(bare, BRANCH).await?;
    Ok(Taken { branch: BRANCH.to_owned(), commit, notes })
}

/// What is there and cannot be taken. An unreadable folder is an error: what is in it would be missed.
fn strange(folder: &Path) -> Result<Vec<String>, TakeError> {
    let (mut strange, mut seen, mut folders) = (Vec::new(), 0, vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).map_err(unreadable(&next))? {
            let entry = entry.map_err(unreadable(&next))?;
            seen += 1;
            if seen > MOST_SEEN {
                return Ok(strange);
            }
            let (path, kind) = (entry.path(), entry.file_type().map_err(unreadable(&next))?);
            let other = kind.is_socket()
                || kind.is_fifo()
                || kind.is_block_device()
                || kind.is_char_device();
            if other {
                let name = path.strip_prefix(folder).unwrap_or(&path);
                strange.push(shown(name.as_os_str().as_encoded_bytes()));
            } else if kind.is_dir() && entry.file_name() != ".git" {
                folders.push(path);
            }
        }
    }
    strange.sort();
    Ok(strange)
}

/// The files git would take, and the folders that are repositories of their own.
async fn list(
    bare: &Path,
    folder: &Path,
    index: &Draft,
) -> Result<(Vec<Vec<u8>>, Vec<String>), TakeError> {
    let mut command = beside(bare, folder, &index.0);
    command.args(["ls-files", "-z", "--others", "--exclude-standard"]);
    let output = run(command).await.map_err(disk("list", folder))?;
    if !output.status.success() {
        good("list the folder's files", Ok(output))?;
        return Ok((Vec::new(), Vec::new()));
    }
    let names = output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let (nested, files): (Vec<_>, Vec<_>) =
        names.map(<[u8]>::to_vec).partition(|name| name.ends_with(b"/"));
    Ok((files, nested.iter().map(|name| shown(name)).collect()))
}

fn measure(folder: &Path, files: &[Vec<u8>]) -> Result<(), TakeError> {
    let too_large = |what: String| TakeError::TooLarge { folder: folder.to_owned(), what };
    if files.len() > MOST_FILES {
        return Err(too_large(format!("{} files; at most {MOST_FILES} are taken", files.len())));
    }
    let mut bytes = 0;
    for name in files {
        let path = folder.join(path_of(name));
        bytes += fs::symlink_metadata(&path).map_err(unreadable(&path))?.len();
    }
    match bytes > MOST_BYTES {
        true => Err(too_large(format!(
            "{} MiB; at most {} MiB are taken",
            bytes >> 20,
            MOST_BYTES >> 20
        ))),
        false => Ok(()),
    }
}

fn path_of(name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt as _;
    std::ffi::OsStr::from_bytes(name).into()
}

/// Exactly these, so that nothing that appears meanwhile is taken for a submodule.
async fn add(
    bare: &Path,
    folder: &Path,
    index: &Draft,
    files: &[Vec<u8>],
) -> Result<(), TakeError> {
    let mut command = beside(bare, folder, &index.0);
    command.args(["update-index", "--add", "-z", "--stdin"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let doing = "take the folder's files";
    let mut child = command.spawn().map_err(disk("read", folder))?;
    let mut stdin = child.stdin.take().expect("it was asked for as a pipe");
    let list = files.join(&b'\0');
    let feed = async move {
        // git that has gone says why itself.
        let _ = stdin.write_all(&list).await;
        let _ = stdin.write_all(b"\0").await;
    };
    let both = async { tokio::join!(feed, child.wait_with_output()).1 };
    let output = tokio::time::timeout(super::LIMIT, both)
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    good(doing, output)?;
    Ok(())
}

async fn commit(bare: &Path, index: &Draft) -> Result<String, TakeError> {
    let doing = "commit the folder's files";
    let mut command = on(bare);
    command.env("GIT_INDEX_FILE", &index.0).arg("write-tree");
    let tree = good(doing, run(command).await)?.trim().to_owned();
    let before = git::head(bare, BRANCH).await?;
    let mut command = on(bare);
    command.envs(WHO).args(["commit-tree", &tree, "-m", "The folder's files"]);
    if let Some(before) = &before {
        let held = git::run(bare, doing, &["rev-parse", &format!("{before}^{{tree}}")]).await?;
        if held.trim() == tree {
            return Ok(before.clone());
        }
        command.args(["-p", before]);
    }
    let commit = good(doing, run(command).await)?.trim().to_owned();
    git::run(bare, doing, &["update-ref", &format!("refs/heads/{BRANCH}"), &commit]).await?;
    Ok(commit)
}
