//! What a folder has changed and not committed. It is seen by a copy of its index, and named; never taken.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{Draft, beside, few, on, run, shown};

// A folder of a million files has an index of 100 MB.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// One note about what is not committed, or none.
pub(super) async fn uncommitted(
    bare: &Path,
    folder: &Path,
    source: &Path,
    branch: &str,
) -> Vec<String> {
    let changed = match with_its_index(bare, folder, source).await {
        Some(changed) => Some(changed),
        // An index git kept in several files, say. A fresh one only costs a look into every file.
        None => with_a_fresh_one(bare, folder, source, branch).await,
    };
    match changed {
        Some(changed) if changed.is_empty() => Vec::new(),
        Some(changed) => {
            vec![format!(
                "what is not committed stays behind: {} (commit it to have it taken)",
                few(&changed)
            )]
        }
        None => {
            vec![
                "it cannot be seen whether something is not committed; only commits are taken"
                    .to_owned(),
            ]
        }
    }
}

/// With the stamps of its own index no file has to be read, nor passed through a filter to be compared.
async fn with_its_index(bare: &Path, folder: &Path, source: &Path) -> Option<Vec<String>> {
    let index = git_folder(folder, source)?.join("index");
    let draft = Draft::new(bare);
    let about = fs::metadata(&index).ok()?;
    if !about.is_file() || about.len() > MAX_INDEX_BYTES {
        return None;
    }
    fs::copy(&index, &draft.0).ok()?;
    status(bare, folder, source, &draft).await
}

async fn with_a_fresh_one(
    bare: &Path,
    folder: &Path,
    source: &Path,
    branch: &str,
) -> Option<Vec<String>> {
    let draft = Draft::new(bare);
    let mut command = on(bare);
    command.env("GIT_INDEX_FILE", &draft.0).args(["read-tree", &format!("refs/heads/{branch}")]);
    run(command).await.ok().filter(|output| output.status.success())?;
    status(bare, folder, source, &draft).await
}

/// The names git would list as changed, staged or new.
async fn status(bare: &Path, folder: &Path, source: &Path, index: &Draft) -> Option<Vec<String>> {
    let mut command = beside(bare, folder, &index.0);
    let excludes = git_folder(folder, source)?.join("info/exclude");
    let mut setting = std::ffi::OsString::from("core.excludesFile=");
    setting.push(excludes);
    command.arg("-c").arg(setting);
    // What is in a submodule is asked of the submodule, with its configuration: not here.
    let arguments = ["status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal"];
    command.args(arguments).arg("--ignore-submodules=all");
    let output = run(command).await.ok().filter(|output| output.status.success())?;
    let names = output.stdout.split(|byte| *byte == 0).filter_map(|line| line.get(3..));
    Some(names.map(shown).collect())
}

/// `.git`, or the folder that a file of this name leads to.
fn git_folder(folder: &Path, source: &Path) -> Option<PathBuf> {
    if source.is_dir() {
        return Some(source.to_owned());
    }
    let text = fs::read_to_string(source).ok()?;
    Some(folder.join(text.strip_prefix("gitdir: ")?.trim_end()))
}
