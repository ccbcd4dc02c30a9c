//! Saves each checkout as a git tree at the end of a turn, so that any two turns can be compared
//! later. The objects are stored in the agent's home, outside the repository: no git command of the
//! agent can delete them, they are never pushed, and the agent's index is not touched.

use harvest_proto::{
    SessionId, SnapshotId, TurnId,
    api::{DiffStat, Snapshot, Turn},
    bridge::{Command, Exit},
};
use harvest_store::Write;

use crate::{
    bridge::{Bridge, BridgeError, ExecOutput},
    checkout::{self, git_command},
    context::Shared,
    error_chain::error_chain,
};

// Enough for git on a large checkout with a cold cache.
const GIT_LIMIT_MILLIS: u64 = 60_000;

// The largest pack copied between two sandboxes for a comparison.
const MAX_PACK_BYTES: usize = 64 << 20;

// Prefix of every script: `$1` names the checkout.
const PRELUDE: &str = r#"
objects=$(cd "$(git rev-parse --git-path objects)" && pwd -P) && cd "$(git rev-parse --show-toplevel)" || exit 1
store=${HOME:-/home/harvest}/.local/state/harvest/turns/$1
mkdir -p "$store" || exit 1
export LC_ALL=C GIT_OBJECT_DIRECTORY="$store" GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects"
"#;

// Saves the checkout as a tree and prints its diffstat against `$2`. Untracked files are included,
// except those over 8 MiB: they are rarely source code and would be stored twice.
const SAVE: &str = r#"
find "$store" -maxdepth 1 -name 'index.*' -mmin +10 -delete
index=$(mktemp "$store/index.XXXXXX") && rm -f "$index" && trap 'rm -f "$index" "$index.lock"' EXIT || exit 1
cp "$(git rev-parse --git-path index)" "$index" 2>/dev/null
export GIT_INDEX_FILE="$index"
git='git -c core.untrackedCache=false -c core.splitIndex=false'
$git add -u --ignore-errors -- . 2>/dev/null
$git ls-files -z -o --exclude-standard | sed -z 's|^|./|' \
  | xargs -0 -r sh -c 'find "$@" -maxdepth 0 \( -type l -o -type f -size -16385b \) -print0' sh \
  | $git update-index -z --add --stdin
tree=$($git write-tree) && echo "tree $tree" || exit 1
[ -z "$2" ] || $git diff --no-color --no-ext-diff --no-textconv --shortstat "$2" "$tree" --
"#;

// Compares `$2` with `$3`; further arguments go to `git diff`. Exit code 3: an object is missing
// here.
const COMPARE: &str = r#"
for tree in "$2" "$3"; do git cat-file -e "$tree^{tree}" 2>/dev/null || exit 3; done
from=$2 to=$3; shift 3
git diff --no-color --no-ext-diff --no-textconv "$@" "$from" "$to" -- || exit 3
"#;

// Packs the objects of tree `$2` that are not in commit `$3`, which the other sandbox also has.
const PACK: &str = r#"
{ echo "$2"; [ -z "$3" ] || echo "^$3"; } | git rev-list --objects --stdin | cut -d ' ' -f 1 | git pack-objects -q --stdout
"#;

const UNPACK: &str = "git unpack-objects -q";

/// A checkout saved as a git tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedTree {
    pub(crate) tree: String,
    pub(crate) stat: DiffStat,
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TreeComparison {
    Diff {
        text: Vec<u8>,
        truncated: bool,
    },
    /// One of the two trees is not in this sandbox.
    Missing,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeError {
    #[error("cannot run git in the sandbox")]
    Bridge(#[from] BridgeError),
    #[error("git failed in {folder}: {tail}")]
    Git { folder: String, tail: String },
    #[error("the differences exceed {} MiB", MAX_PACK_BYTES >> 20)]
    TooLarge,
}

fn script(body: &str, repository: &str, arguments: &[&str]) -> Command {
    let text = format!("{PRELUDE}{body}");
    let argv = [&["sh", "-c", &text, "sh", repository], arguments].concat();
    git_command(&argv, &checkout::folder(repository), GIT_LIMIT_MILLIS)
}

/// Saves the current state of a checkout, with its diffstat against the tree or commit `against`.
pub(crate) async fn save(
    bridge: &Bridge,
    repository: &str,
    against: &str,
) -> Result<SavedTree, TreeError> {
    let output = bridge.run_command(script(SAVE, repository, &[against]), 4096).await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    parse_saved(&text)
        .ok_or_else(|| TreeError::Git { folder: checkout::folder(repository), tail: output.tail() })
}

fn parse_saved(text: &str) -> Option<SavedTree> {
    let mut lines = text.lines();
    let tree = lines.next()?.strip_prefix("tree ")?.to_owned();
    let is_hash = tree.len() >= 40 && tree.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| SavedTree { tree, stat: parse_shortstat(lines.next().unwrap_or_default()) })
}

/// Parses ` 2 files changed, 3 insertions(+), 1 deletion(-)`; git leaves out zero counts.
fn parse_shortstat(line: &str) -> DiffStat {
    let mut stat = DiffStat::default();
    for part in line.split(',') {
        let mut part = part.split_whitespace();
        let Some(number) = part.next().and_then(|number| number.parse().ok()) else { continue };
        match part.next() {
            Some("file" | "files") => stat.files = number,
            Some(word) if word.starts_with("insertion") => stat.insertions = number,
            Some(word) if word.starts_with("deletion") => stat.deletions = number,
            _ => {}
        }
    }
    stat
}

/// Compares two trees with the `git diff` options in `options`; the output is cut at `limit` bytes.
pub(crate) async fn compare(
    bridge: &Bridge,
    repository: &str,
    (from, to): (&str, &str),
    options: &[&str],
    limit: usize,
) -> Result<TreeComparison, TreeError> {
    let order = script(COMPARE, repository, &[&[from, to], options].concat());
    let output = bridge.run_command(order, limit).await?;
    match output.exit {
        Exit::Code(0) => {
            Ok(TreeComparison::Diff { text: output.stdout, truncated: output.truncated })
        }
        Exit::Code(3) => Ok(TreeComparison::Missing),
        _ => Err(TreeError::Git { folder: checkout::folder(repository), tail: output.tail() }),
    }
}

/// Copies a tree from one sandbox to another. Both have `base`.
pub(crate) async fn copy_tree(
    from: &Bridge,
    to: &Bridge,
    repository: &str,
    tree: &str,
    base: Option<&str>,
) -> Result<(), TreeError> {
    let order = script(PACK, repository, &[tree, base.unwrap_or_default()]);
    let output = from.run_command(order, MAX_PACK_BYTES).await?;
    if output.truncated {
        return Err(TreeError::TooLarge);
    }
    let failed = |tail: String| TreeError::Git { folder: checkout::folder(repository), tail };
    if !output.ok() {
        return Err(failed(output.tail()));
    }
    let mut unpacking = to.exec(script(UNPACK, repository, &[]), Some(output.stdout)).await?;
    while let Some(output) = unpacking.next().await {
        if let ExecOutput::Exited { exit, .. } = output {
            let ok = exit == Exit::Code(0);
            return if ok { Ok(()) } else { Err(failed("git unpack-objects failed".to_owned())) };
        }
    }
    Err(BridgeError::Lost.into())
}

/// The writes that save the trees of a turn that has just ended. Best effort: failures are only
/// logged.
pub(crate) async fn turn_tree_writes(
    shared: &Shared,
    session: &SessionId,
    bridge: &Bridge,
    turn: &TurnId,
    started_from: Option<&SnapshotId>,
) -> Vec<Write> {
    let Ok(record) = shared.store.session_get(session).await else { return Vec::new() };
    let turns = shared.store.turn_list(session).await.unwrap_or_default();
    let trees = shared.store.tree_list(session).await.unwrap_or_default();
    let after = previous_turn(
        turn,
        started_from,
        &turns,
        shared.store.snapshot_list(session).await.unwrap_or_default(),
    );
    let mut writes = Vec::new();
    for repository in record.repositories() {
        let previous =
            trees.iter().find(|tree| tree.turn == after && repository == tree.repository.as_str());
        let previous = previous.map(|tree| tree.tree.as_str()).or(record.base_commit(&repository));
        match save(bridge, &repository, previous.unwrap_or(checkout::EMPTY_TREE)).await {
            Ok(SavedTree { tree, stat }) => {
                let (turn, repository) = (turn.clone(), repository.to_string());
                writes.push(Write::TurnTree { turn, after, repository, tree, stat });
            }
            Err(error) => {
                tracing::debug!(%session, %repository, error = error_chain(&error), "cannot save the tree of a turn");
            }
        }
    }
    writes
}

/// The number of the turn this one continues: the turn whose snapshot the sandbox started from,
/// else (after a pause) the preceding turn; 0 is the start of the session.
fn previous_turn(
    turn: &TurnId,
    started_from: Option<&SnapshotId>,
    turns: &[Turn],
    snapshots: Vec<Snapshot>,
) -> u32 {
    let Some(started_from) = started_from else { return 0 };
    if snapshots.iter().any(|one| one.id == *started_from && one.turn == Some(0)) {
        return 0;
    }
    let source = turns.iter().find(|other| other.snapshot.as_ref() == Some(started_from));
    let own = turns.iter().find(|other| other.id == *turn).map_or(0, |own| own.number);
    source.map_or_else(|| own.saturating_sub(1), |source| source.number)
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command};

    use super::*;
    use crate::checkout::tests::repository;

    /// Runs a script on the host.
    fn run(folder: &Path, home: &Path, body: &str, arguments: &[&str]) -> (i32, Vec<u8>) {
        let output = Command::new("sh")
            .args(["-c", &format!("{PRELUDE}{body}"), "sh", "demo"])
            .args(arguments)
            .current_dir(folder)
            .envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")])
            .env("HOME", home)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!stderr.contains("fatal"), "{stderr}");
        (output.status.code().unwrap(), output.stdout)
    }

    fn sh(folder: &Path, script: &str) {
        assert_eq!(crate::checkout::tests::sh(folder, script, &[]).0, 0, "{script}");
    }

    fn save(folder: &Path, home: &Path, against: &str) -> SavedTree {
        let (code, stdout) = run(folder, home, SAVE, &[against]);
        assert_eq!(code, 0);
        parse_saved(&String::from_utf8(stdout).unwrap()).unwrap()
    }

    #[test]
    fn saved_tree_has_all_changes_and_leaves_index() {
        let ((folder, base), home) = (repository(), tempfile::tempdir().unwrap());
        let at = folder.path();
        sh(
            at,
            "echo x >> file; echo new > -odd; printf 'a\\nb\\n' > \"$(printf 'caf\\303\\251 \\t')\"; mkdir sub; ln -s nowhere sub/link",
        );
        sh(
            at,
            "echo ignored > .git/info/exclude; echo i > ignored; git add -N sub; truncate -s 9M large",
        );
        let before =
            crate::checkout::tests::sh(at, "git status --porcelain; find .git | sort", &[]).1;
        let first = save(at, home.path(), &base);
        assert_eq!(first.stat, DiffStat { files: 4, insertions: 5, deletions: 0 });
        assert_eq!(
            crate::checkout::tests::sh(at, "git status --porcelain; find .git | sort", &[]).1,
            before
        );
        assert_eq!(
            save(at, home.path(), &first.tree),
            SavedTree { tree: first.tree.clone(), stat: DiffStat::default() }
        );
        // The agent rewrites its whole history.
        sh(
            at,
            "rm -rf sub ./-odd; git commit -qam two; git checkout -q --orphan other; git commit -qm new",
        );
        sh(at, "git branch -D main; git reflog expire --expire=now --all; git gc -q --prune=now");
        let second = save(at, home.path(), &first.tree);
        assert_eq!(second.stat, DiffStat { files: 2, insertions: 0, deletions: 2 });
        let (code, diff) =
            run(at, home.path(), COMPARE, &[&first.tree, &second.tree, "--numstat", "-z"]);
        assert_eq!((code, diff.as_slice()), (0, &b"0\t1\t-odd\x000\t1\tsub/link\x00"[..]));
        let left: Vec<_> = std::fs::read_dir(home.path().join(".local/state/harvest/turns/demo"))
            .unwrap()
            .collect();
        assert!(
            left.iter().all(|entry| entry.as_ref().unwrap().file_name().len() == 2),
            "only objects: {left:?}"
        );
    }

    #[test]
    fn tree_is_copied_between_sandboxes() {
        let ((folder, base), homes) =
            (repository(), [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()]);
        let at = folder.path();
        sh(at, "echo one > a");
        let first = save(at, homes[0].path(), &base);
        sh(at, "echo two > a");
        let second = save(at, homes[1].path(), &base);
        let compare =
            || run(at, homes[1].path(), COMPARE, &[&first.tree, &second.tree, "--shortstat"]);
        assert_eq!(compare().0, 3, "the tree is missing");
        let (code, pack) = run(at, homes[0].path(), PACK, &[&first.tree, &base]);
        assert_eq!(code, 0);
        std::fs::write(homes[0].path().join("pack"), pack).unwrap();
        let unpack = format!("{UNPACK} < {}/pack", homes[0].path().display());
        assert_eq!(run(at, homes[1].path(), &unpack, &[]).0, 0);
        let (code, stdout) = compare();
        assert_eq!((code, parse_shortstat(&String::from_utf8(stdout).unwrap()).files), (0, 1));
    }

    #[test]
    fn shortstat_with_missing_counts_is_parsed() {
        let stat_of = |files, insertions, deletions| DiffStat { files, insertions, deletions };
        assert_eq!(
            parse_shortstat(" 2 files changed, 3 insertions(+), 1 deletion(-)"),
            stat_of(2, 3, 1)
        );
        assert_eq!(parse_shortstat(" 1 file changed, 9 deletions(-)"), stat_of(1, 0, 9));
        assert_eq!(parse_shortstat(""), DiffStat::default());
        assert_eq!(parse_saved("tree \n"), None);
    }
}
