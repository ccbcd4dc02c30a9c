//! Reports uncommitted changes of an imported folder, which are never imported. Works on a copy of
//! the folder's index.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{TempIndex, first_few, git_on, git_with_work_tree, run, sanitize};

// The index of a million files takes about 100 MB.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// At most one note about uncommitted changes.
pub(super) async fn note(bare: &Path, folder: &Path, source: &Path, branch: &str) -> Vec<String> {
    let changed = match with_copied_index(bare, folder, source).await {
        Some(changed) => Some(changed),
        // For example a split index. With a fresh one git reads every file.
        None => with_fresh_index(bare, folder, source, branch).await,
    };
    match changed {
        Some(changed) if changed.is_empty() => Vec::new(),
        Some(changed) => {
            let names = first_few(&changed);
            vec![format!("uncommitted changes are left out: {names} (commit them to include them)")]
        }
        None => vec!["cannot check for uncommitted changes; only commits are copied".to_owned()],
    }
}

/// The timestamps in the folder's index save git from reading, and filtering, unchanged files.
async fn with_copied_index(bare: &Path, folder: &Path, source: &Path) -> Option<Vec<String>> {
    let index = git_folder(folder, source)?.join("index");
    let copy = TempIndex::new(bare);
    let metadata = fs::metadata(&index).ok()?;
    if !metadata.is_file() || metadata.len() > MAX_INDEX_BYTES {
        return None;
    }
    fs::copy(&index, &copy.0).ok()?;
    status(bare, folder, source, &copy).await
}

async fn with_fresh_index(
    bare: &Path,
    folder: &Path,
    source: &Path,
    branch: &str,
) -> Option<Vec<String>> {
    let copy = TempIndex::new(bare);
    let mut command = git_on(bare);
    command.env("GIT_INDEX_FILE", &copy.0).args(["read-tree", &format!("refs/heads/{branch}")]);
    run(command).await.ok().filter(|output| output.status.success())?;
    status(bare, folder, source, &copy).await
}

/// The names of changed, staged and untracked files.
async fn status(
    bare: &Path,
    folder: &Path,
    source: &Path,
    index: &TempIndex,
) -> Option<Vec<String>> {
    let mut command = git_with_work_tree(bare, folder, &index.0);
    let excludes = git_folder(folder, source)?.join("info/exclude");
    let mut setting = std::ffi::OsString::from("core.excludesFile=");
    setting.push(excludes);
    command.arg("-c").arg(setting);
    // Status of a submodule would run git with the submodule's own, untrusted configuration.
    let arguments = ["status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal"];
    command.args(arguments).arg("--ignore-submodules=all");
    let output = run(command).await.ok().filter(|output| output.status.success())?;
    let names = output.stdout.split(|byte| *byte == 0).filter_map(|line| line.get(3..));
    Some(names.map(sanitize).collect())
}

/// `.git`, or the folder that a `.git` file points to.
fn git_folder(folder: &Path, source: &Path) -> Option<PathBuf> {
    if source.is_dir() {
        return Some(source.to_owned());
    }
    let text = fs::read_to_string(source).ok()?;
    Some(folder.join(text.strip_prefix("gitdir: ")?.trim_end()))
}
