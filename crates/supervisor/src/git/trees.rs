//! Saves a checkout as git trees and compares them. Works on copies of the agent's index, and
//! writes objects to a store outside the repository.

use std::{
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Write},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use harvest_proto::bridge::{DiffFormat, DiffStat};
use rustix::fs::{Mode, OFlags};

use super::untracked;

// A job takes at most a minute: an older copy of the index belongs to a killed one.
const STALE_INDEX_AGE: Duration = Duration::from_secs(10 * 60);

const INDEX_PREFIX: &str = "index.";

// External diff programs and text conversions of the repository are not run.
const DIFF: [&str; 4] = ["diff", "--no-color", "--no-ext-diff", "--no-textconv"];

#[derive(Debug, thiserror::Error)]
pub(super) enum JobError {
    #[error("objects of a tree are missing")]
    ObjectsMissing,
    #[error("`{command}` failed")]
    Git { command: String },
    #[error("{folder} is not the top folder of a repository, but part of {top}")]
    NotTop { folder: String, top: String },
    #[error("cannot {doing}: {source}")]
    Io { doing: String, source: io::Error },
}

impl JobError {
    pub(super) fn io(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { doing: doing.into(), source: source.into() }
    }
}

/// A checkout and the store of its saved trees.
pub(super) struct CheckoutTrees {
    /// The top folder of the working tree.
    top: PathBuf,
    /// The agent's index.
    index: PathBuf,
    /// The repository's objects, which are read but never written.
    objects: PathBuf,
    store: PathBuf,
}

impl CheckoutTrees {
    pub(super) fn open(folder: &Path, store: PathBuf) -> Result<Self, JobError> {
        let mut find = Command::new("git");
        find.args(["rev-parse", "--git-path", "objects", "--git-path", "index", "--show-toplevel"])
            .current_dir(folder);
        let output = stdout_of(&mut find)?;
        let mut paths =
            output.split(|byte| *byte == b'\n').map(|path| folder.join(OsStr::from_bytes(path)));
        let mut next = || paths.next().unwrap_or_default();
        let (objects, index, top) = (next(), next(), next());
        // `core.worktree` may name any other folder.
        if top.canonicalize().ok() != folder.canonicalize().ok() {
            let [folder, top] = [folder, &top].map(|path| path.display().to_string());
            return Err(JobError::NotTop { folder, top });
        }
        let objects = objects
            .canonicalize()
            .map_err(|error| JobError::io(format!("find {}", objects.display()), error))?;
        fs::create_dir_all(&store)
            .map_err(|error| JobError::io(format!("create {}", store.display()), error))?;
        Ok(Self { top, index, objects, store })
    }

    /// Saves the files of the checkout as a tree; returns its id and its changes since `against`.
    pub(super) fn save(&self, against: Option<&str>) -> Result<(String, DiffStat), JobError> {
        self.remove_stale_indexes();
        let index = PrivateIndex::copy(&self.index, &self.store)?;
        // Best effort: a file that cannot be read keeps its old content.
        let mut update = self.git_with(&index, &["add", "-u", "--ignore-errors", "--", "."]);
        let _some_unreadable = succeed(update.stdout(Stdio::null()).stderr(Stdio::null()));
        self.add_untracked(&index)?;
        let tree = stdout_of(&mut self.git_with(&index, &["write-tree"]))?;
        let tree = String::from_utf8_lossy(&tree).trim_end().to_owned();
        let stat = against.map(|against| self.stat(against, &tree)).unwrap_or_default();
        Ok((tree, stat))
    }

    fn add_untracked(&self, index: &PrivateIndex) -> Result<(), JobError> {
        let [list, add] = [&untracked::LIST[..], &untracked::ADD].map(|a| self.git_with(index, a));
        untracked::add(&self.top, list, add, |_| {})
    }

    // Zero when `against` is gone.
    fn stat(&self, against: &str, tree: &str) -> DiffStat {
        let mut diff = self.git(&DIFF);
        diff.args(["--shortstat", against, tree, "--"]);
        let output = stdout_of(&mut diff).unwrap_or_default();
        parse_shortstat(&String::from_utf8_lossy(&output))
    }

    /// Prints the patch from `base` to the files of the checkout, untracked ones included.
    pub(super) fn diff(&self, base: &str, prefix: &str) -> Result<(), JobError> {
        self.remove_stale_indexes();
        let index = PrivateIndex::copy(&self.index, &self.store)?;
        let mut add = self.git_with(&index, &["add", "-A", "-N", "--ignore-errors", "."]);
        // A file that cannot be added, such as a repository without a commit, is left out.
        let _ = succeed(add.stdout(Stdio::null()).stderr(Stdio::null()));
        succeed(self.git_with(&index, &DIFF).args(prefixes(prefix)).args([base, "--"]))
    }

    /// Prints the differences between two trees.
    pub(super) fn compare(
        &self,
        [from, to]: [&str; 2],
        format: DiffFormat,
        prefix: &str,
    ) -> Result<(), JobError> {
        for tree in [from, to] {
            let tree = format!("{tree}^{{tree}}");
            succeed(self.git(&["cat-file", "-e", &tree]).stderr(Stdio::null()))
                .map_err(|_| JobError::ObjectsMissing)?;
        }
        let format: &[&str] = match format {
            DiffFormat::Patch => &["--patch"],
            DiffFormat::Numstat => &["--numstat", "-z", "--no-renames"],
        };
        let mut diff = self.git(&DIFF);
        diff.args(format).args(prefixes(prefix)).args([from, to, "--"]);
        // The repository may have lost some of the blobs.
        succeed(&mut diff).map_err(|_| JobError::ObjectsMissing)
    }

    /// Prints a pack with the objects of a tree that are not in the commit `base`.
    pub(super) fn pack(&self, tree: &str, base: Option<&str>) -> Result<(), JobError> {
        // Its tree by name: git would exclude the commit, but none of its files.
        let without = base.map(|base| format!("^{base}^{{tree}}\n")).unwrap_or_default();
        let failed = |error| JobError::io("run git pack-objects", error);
        let mut command = self.git(&["pack-objects", "-q", "--revs", "--stdout"]);
        let mut packing = command.stdin(Stdio::piped()).spawn().map_err(failed)?;
        if let Some(mut revisions) = packing.stdin.take() {
            revisions.write_all(format!("{tree}\n{without}").as_bytes()).map_err(failed)?;
        }
        check(&command, packing.wait())
    }

    /// Prints a bundle of the commits of a branch that the remote's base lacks, if there are any.
    pub(super) fn bundle(&self, branch: &str, base: Option<&str>) -> Result<(), JobError> {
        let branch = format!("refs/heads/{branch}");
        let exists = |reference: &str| {
            let commit = format!("{reference}^{{commit}}");
            succeed(self.git(&["cat-file", "-e", &commit]).stderr(Stdio::null())).is_ok()
        };
        if !exists(&branch) {
            return Err(JobError::ObjectsMissing);
        }
        let base = base.map(|base| format!("refs/remotes/origin/{base}"));
        let base = base.filter(|base| exists(base)).map(|base| format!("^{base}"));
        let range: Vec<&str> = [branch.as_str()].into_iter().chain(base.as_deref()).collect();
        let mut first = self.git(&["rev-list", "--max-count=1"]);
        if stdout_of(first.args(&range))?.is_empty() {
            return Ok(());
        }
        succeed(self.git(&["bundle", "create", "--quiet", "-"]).args(&range))
    }

    /// Adds the objects of the pack on stdin to the store.
    pub(super) fn unpack(&self) -> Result<(), JobError> {
        succeed(self.git(&["unpack-objects", "-q"]).stdin(Stdio::inherit()))
    }

    fn git(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("git");
        command
            .args(arguments)
            .current_dir(&self.top)
            .env("LC_ALL", "C")
            .env("GIT_OBJECT_DIRECTORY", &self.store)
            .env("GIT_ALTERNATE_OBJECT_DIRECTORIES", &self.objects)
            .stdin(Stdio::null());
        command
    }

    fn git_with(&self, index: &PrivateIndex, arguments: &[&str]) -> Command {
        // A split index would leave a second file in the repository.
        let settings = ["-c", "core.untrackedCache=false", "-c", "core.splitIndex=false"];
        let mut command = self.git(&settings);
        command.args(arguments).env("GIT_INDEX_FILE", &index.path);
        command
    }

    fn remove_stale_indexes(&self) {
        let Ok(entries) = fs::read_dir(&self.store) else { return };
        for entry in entries.flatten() {
            let is_index = entry.file_name().as_bytes().starts_with(INDEX_PREFIX.as_bytes());
            if is_index && entry.metadata().is_ok_and(|about| is_stale(&about)) {
                let _already_gone = fs::remove_file(entry.path());
            }
        }
    }
}

/// A copy of the agent's index; removed on drop.
struct PrivateIndex {
    path: PathBuf,
}

impl PrivateIndex {
    fn copy(index: &Path, store: &Path) -> Result<Self, JobError> {
        // An id is random enough.
        let name = format!("{INDEX_PREFIX}{}", harvest_proto::SandboxId::random().part());
        let copy = Self { path: store.join(name) };
        match copy.fill(index) {
            // Git takes a missing index for an empty one.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(JobError::io(format!("copy {}", index.display()), error))
            }
            _ => Ok(copy),
        }
    }

    fn fill(&self, index: &Path) -> io::Result<()> {
        // A FIFO or a device in its place would never end.
        let flags = OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut from = File::from(rustix::fs::open(index, flags, Mode::empty())?);
        if !from.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let mut to = File::create_new(&self.path)?;
        io::copy(&mut from, &mut to)?;
        // Git compares the time with those of the files, to find changes right after the index was
        // written.
        to.set_modified(from.metadata()?.modified()?)
    }
}

impl Drop for PrivateIndex {
    fn drop(&mut self) {
        let _never_filled = fs::remove_file(&self.path);
        let mut lock = self.path.clone().into_os_string();
        lock.push(".lock");
        let _no_lock = fs::remove_file(lock);
    }
}

// By the time of the last change to the inode: a copy has the modification time of the original.
fn is_stale(about: &Metadata) -> bool {
    let changed = u64::try_from(about.ctime()).map(Duration::from_secs).unwrap_or_default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(changed) > STALE_INDEX_AGE
}

// Always given, as the repository may configure others.
fn prefixes(prefix: &str) -> [String; 2] {
    [format!("--src-prefix=a/{prefix}"), format!("--dst-prefix=b/{prefix}")]
}

fn stdout_of(command: &mut Command) -> Result<Vec<u8>, JobError> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| JobError::io("run git", error))?;
    check(command, Ok(output.status)).map(|()| output.stdout)
}

fn succeed(command: &mut Command) -> Result<(), JobError> {
    let status = command.status();
    check(command, status)
}

fn check(command: &Command, status: io::Result<ExitStatus>) -> Result<(), JobError> {
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => {
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
            Err(JobError::Git { command: words.join(" ") })
        }
        Err(error) => Err(JobError::io("run git", error)),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortstat_with_missing_counts_is_parsed() {
        let stat_of = |files, insertions, deletions| DiffStat { files, insertions, deletions };
        assert_eq!(
            parse_shortstat(" 2 files changed, 3 insertions(+), 1 deletion(-)"),
            stat_of(2, 3, 1)
        );
        assert_eq!(parse_shortstat(" 1 file changed, 9 deletions(-)"), stat_of(1, 0, 9));
        assert_eq!(parse_shortstat(""), DiffStat::default());
    }
}
