//! The state of a checkout as a git tree, kept at the end of each turn so that any two turns can be
//! compared later. Its objects lie beside the repository, in the agent's home: nothing the agent does to
//! its repository can lose them, nothing of them is pushed, and the agent's own index is never touched.

use harvest_proto::{
    SessionId, SnapshotId, TurnId,
    api::{DiffStat, Snapshot, Turn},
    bridge::{Command, Exit},
};
use harvest_store::Write;

use crate::{
    bridge::{Bridge, BridgeError, ExecOutput},
    checkout::{self, git_command},
    wiring::{Shared, words},
};

// Git on a large checkout with a cold cache; beyond that the machine is in trouble.
const GIT_LIMIT_MILLIS: u64 = 60_000;

// What goes from one machine to another so that they can be compared.
const PACK_BYTES: usize = 64 << 20;

// Every script begins so: `$1` names the checkout.
const BEGIN: &str = r#"
objects=$(cd "$(git rev-parse --git-path objects)" && pwd -P) && cd "$(git rev-parse --show-toplevel)" || exit 1
kept=${HOME:-/home/harvest}/.local/state/harvest/turns/$1
mkdir -p "$kept" || exit 1
export LC_ALL=C GIT_OBJECT_DIRECTORY="$kept" GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects"
"#;

// Untracked files are part of the work, but what is larger than 8 MiB is no source and would be kept twice.
// `$2` is what the tree is compared with.
const KEEP: &str = r#"
find "$kept" -maxdepth 1 -name 'index.*' -mmin +10 -delete
index=$(mktemp "$kept/index.XXXXXX") && rm -f "$index" && trap 'rm -f "$index" "$index.lock"' EXIT || exit 1
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

// 3 tells that an object is not here. `$2` and `$3` are what is compared, the rest how.
const COMPARE: &str = r#"
for one in "$2" "$3"; do git cat-file -e "$one^{tree}" 2>/dev/null || exit 3; done
from=$2 to=$3; shift 3
git diff --no-color --no-ext-diff --no-textconv "$@" "$from" "$to" -- || exit 3
"#;

// The objects of the tree `$2` that are not in the commit `$3`, which the other side has, too.
const PACK: &str = r#"
{ echo "$2"; [ -z "$3" ] || echo "^$3"; } | git rev-list --objects --stdin | cut -d ' ' -f 1 | git pack-objects -q --stdout
"#;

const UNPACK: &str = "git unpack-objects -q";

/// A checkout's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) tree: String,
    pub(crate) stat: DiffStat,
}

/// How a comparison went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Compared {
    Told {
        text: Vec<u8>,
        cut: bool,
    },
    /// One of the two is not in this machine.
    Missing,
}

/// Why a checkout could not be compared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeError {
    #[error("git cannot be asked")]
    Bridge(#[from] BridgeError),
    #[error("git failed in {folder}: {tail}")]
    Git { folder: String, tail: String },
    #[error("what the two have not in common is larger than {} MiB", PACK_BYTES >> 20)]
    TooLarge,
}

fn script(body: &str, repository: &str, arguments: &[&str]) -> Command {
    let text = format!("{BEGIN}{body}");
    let argv = [&["sh", "-c", &text, "sh", repository], arguments].concat();
    git_command(&argv, &checkout::folder(repository), GIT_LIMIT_MILLIS)
}

/// Keeps the state of a checkout as it is now, and tells how it differs from another.
pub(crate) async fn keep(
    bridge: &Bridge,
    repository: &str,
    against: &str,
) -> Result<Kept, TreeError> {
    let output = bridge.run_command(script(KEEP, repository, &[against]), 4096).await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    kept(&text)
        .ok_or_else(|| TreeError::Git { folder: checkout::folder(repository), tail: output.tail() })
}

fn kept(text: &str) -> Option<Kept> {
    let mut lines = text.lines();
    let tree = lines.next()?.strip_prefix("tree ")?.to_owned();
    let is_hash = tree.len() >= 40 && tree.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| Kept { tree, stat: stat(lines.next().unwrap_or_default()) })
}

/// ` 2 files changed, 3 insertions(+), 1 deletion(-)`: what is none is not said.
fn stat(line: &str) -> DiffStat {
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

/// Compares two states, at most `limit` bytes of it. `how` is for `git diff`.
pub(crate) async fn compare(
    bridge: &Bridge,
    repository: &str,
    (from, to): (&str, &str),
    how: &[&str],
    limit: usize,
) -> Result<Compared, TreeError> {
    let order = script(COMPARE, repository, &[&[from, to], how].concat());
    let output = bridge.run_command(order, limit).await?;
    match output.exit {
        Exit::Code(0) => Ok(Compared::Told { text: output.stdout, cut: output.cut }),
        Exit::Code(3) => Ok(Compared::Missing),
        _ => Err(TreeError::Git { folder: checkout::folder(repository), tail: output.tail() }),
    }
}

/// Brings a state from one machine to another. Both have `base`.
pub(crate) async fn carry(
    from: &Bridge,
    to: &Bridge,
    repository: &str,
    tree: &str,
    base: Option<&str>,
) -> Result<(), TreeError> {
    let order = script(PACK, repository, &[tree, base.unwrap_or_default()]);
    let output = from.run_command(order, PACK_BYTES).await?;
    if output.cut {
        return Err(TreeError::TooLarge);
    }
    let failed = |tail: String| TreeError::Git { folder: checkout::folder(repository), tail };
    if !output.ok() {
        return Err(failed(output.tail()));
    }
    let mut unpacking = to.exec(script(UNPACK, repository, &[]), Some(output.stdout)).await?;
    while let Some(said) = unpacking.next().await {
        if let ExecOutput::Exited { exit, .. } = said {
            let fine = exit == Exit::Code(0);
            return if fine { Ok(()) } else { Err(failed("git took no objects".to_owned())) };
        }
    }
    Err(BridgeError::Lost.into())
}

/// What is written of a turn that has just ended. Nice to have: what goes wrong is logged and left out.
pub(crate) async fn of_turn(
    shared: &Shared,
    session: &SessionId,
    bridge: &Bridge,
    turn: &TurnId,
    began: Option<&SnapshotId>,
) -> Vec<Write> {
    let Ok(record) = shared.store.session_get(session).await else { return Vec::new() };
    let turns = shared.store.turn_list(session).await.unwrap_or_default();
    let trees = shared.store.tree_list(session).await.unwrap_or_default();
    let after =
        before(turn, began, &turns, shared.store.snapshot_list(session).await.unwrap_or_default());
    let mut writes = Vec::new();
    for repository in &record.repositories() {
        let left = trees.iter().find(|tree| tree.turn == after && tree.repository == *repository);
        let left = left.map(|tree| tree.tree.as_str()).or(record.base_commit(repository));
        match keep(bridge, repository, left.unwrap_or(checkout::EMPTY_TREE)).await {
            Ok(Kept { tree, stat }) => {
                let (turn, repository) = (turn.clone(), repository.clone());
                writes.push(Write::TurnTree { turn, after, repository, tree, stat });
            }
            Err(error) => {
                tracing::debug!(%session, repository, error = words(&error), "a turn's tree is not kept");
            }
        }
    }
    writes
}

/// The number of the turn that one went on from: whose snapshot the machine began as, or else, after a
/// pause, the one before; 0 for the session's beginning.
fn before(
    turn: &TurnId,
    began: Option<&SnapshotId>,
    turns: &[Turn],
    snapshots: Vec<Snapshot>,
) -> u32 {
    let Some(began) = began else { return 0 };
    if snapshots.iter().any(|one| one.id == *began && one.turn == Some(0)) {
        return 0;
    }
    let stood_on = turns.iter().find(|of| of.snapshot.as_ref() == Some(began)).map(|of| of.number);
    let own = turns.iter().find(|of| of.id == *turn).map_or(0, |of| of.number);
    stood_on.unwrap_or_else(|| own.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command};

    use super::*;
    use crate::checkout::tests::repository;

    /// Runs a script as the sandbox would, but here.
    fn run(folder: &Path, home: &Path, body: &str, arguments: &[&str]) -> (i32, Vec<u8>) {
        let output = Command::new("sh")
            .args(["-c", &format!("{BEGIN}{body}"), "sh", "demo"])
            .args(arguments)
            .current_dir(folder)
            .envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")])
            .env("HOME", home)
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!told.contains("fatal"), "{told}");
        (output.status.code().unwrap(), output.stdout)
    }

    fn sh(folder: &Path, script: &str) {
        assert_eq!(crate::checkout::tests::sh(folder, script, &[]).0, 0, "{script}");
    }

    fn keep(folder: &Path, home: &Path, against: &str) -> Kept {
        let (code, said) = run(folder, home, KEEP, &[against]);
        assert_eq!(code, 0);
        kept(&String::from_utf8(said).unwrap()).unwrap()
    }

    #[test]
    fn a_turns_state_has_commits_changes_and_new_files_and_touches_nothing_of_the_agents() {
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
        let first = keep(at, home.path(), &base);
        assert_eq!(first.stat, DiffStat { files: 4, insertions: 5, deletions: 0 });
        assert_eq!(
            crate::checkout::tests::sh(at, "git status --porcelain; find .git | sort", &[]).1,
            before
        );
        assert_eq!(
            keep(at, home.path(), &first.tree),
            Kept { tree: first.tree.clone(), stat: DiffStat::default() }
        );
        // The agent rewrites everything it has.
        sh(
            at,
            "rm -rf sub ./-odd; git commit -qam two; git checkout -q --orphan other; git commit -qm new",
        );
        sh(at, "git branch -D main; git reflog expire --expire=now --all; git gc -q --prune=now");
        let second = keep(at, home.path(), &first.tree);
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
    fn a_state_of_another_machine_can_be_brought_here() {
        let ((folder, base), homes) =
            (repository(), [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()]);
        let at = folder.path();
        sh(at, "echo one > a");
        let first = keep(at, homes[0].path(), &base);
        sh(at, "echo two > a");
        let second = keep(at, homes[1].path(), &base);
        let compare =
            || run(at, homes[1].path(), COMPARE, &[&first.tree, &second.tree, "--shortstat"]);
        assert_eq!(compare().0, 3, "it is not here");
        let (code, pack) = run(at, homes[0].path(), PACK, &[&first.tree, &base]);
        assert_eq!(code, 0);
        std::fs::write(homes[0].path().join("pack"), pack).unwrap();
        let unpack = format!("{UNPACK} < {}/pack", homes[0].path().display());
        assert_eq!(run(at, homes[1].path(), &unpack, &[]).0, 0);
        let (code, told) = compare();
        assert_eq!((code, stat(&String::from_utf8(told).unwrap()).files), (0, 1));
    }

    #[test]
    fn a_line_of_git_is_read_whatever_it_leaves_out() {
        let stat_of = |files, insertions, deletions| DiffStat { files, insertions, deletions };
        assert_eq!(stat(" 2 files changed, 3 insertions(+), 1 deletion(-)"), stat_of(2, 3, 1));
        assert_eq!(stat(" 1 file changed, 9 deletions(-)"), stat_of(1, 0, 9));
        assert_eq!(stat(""), DiffStat::default());
        assert_eq!(kept("tree \n"), None);
    }
}
