//! Takes what a folder holds into a repository of the forge. The folder is only read, and nothing in it is
//! obeyed: every git here runs on the forge's own repository and configuration, so that no hook, filter,
//! monitor or alias of the folder is a program of ours. The one exception is git's own `upload-pack`, made
//! to be run on strangers' repositories, which gets no way to fetch and a list of protocols with one entry.

mod files;
mod index;

use std::{
    io,
    path::{Path, PathBuf},
    process::Output,
    time::Duration,
};

use super::{Forge, ForgeError, file_error, git, write_whole};

// A large history on a slow disk. A folder can make git wait for ever, with a pipe where a file should be.
const LIMIT: Duration = Duration::from_secs(15 * 60);

// The first line, so that whoever reads the file knows what it is.
const PROTECTED: &str = "# Written by Harvest: holds for git where it reads folders of other people.\n\
    [safe]\n\tdirectory = *\n[protocol]\n\tallow = never\n[protocol \"file\"]\n\tallow = always\n";

/// What was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// The branch it is on.
    pub branch: String,
    /// Its newest commit.
    pub commit: String,
    /// What a person should know was left behind.
    pub notes: Vec<String>,
}

/// Why a folder could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// A file or folder cannot be read.
    #[error("cannot read `{}`", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A git repository without a commit.
    #[error("`{}` has no commit yet", folder.display())]
    NoCommit {
        /// Which.
        folder: PathBuf,
    },
    /// A git repository with a commit checked out instead of a branch.
    #[error("`{}` has no branch checked out", folder.display())]
    NoBranch {
        /// Which.
        folder: PathBuf,
    },
    /// A branch whose name is more than work can be started from.
    #[error("`{branch}` is not a name that work can be started from")]
    BranchName {
        /// Which.
        branch: String,
    },
    /// The forge's branch of this name has commits that the folder's lacks.
    #[error("the branch `{branch}` has commits of a session that `{}` lacks", folder.display())]
    Behind {
        /// The branch.
        branch: String,
        /// The folder.
        folder: PathBuf,
    },
    /// A folder without a file in it.
    #[error("there is no file in `{}`", folder.display())]
    Empty {
        /// Which.
        folder: PathBuf,
    },
    /// More files than a copy is good for.
    #[error("`{}` holds {what}", folder.display())]
    TooLarge {
        /// Which.
        folder: PathBuf,
        /// How much, and how much there may be.
        what: String,
    },
    /// The forge failed.
    #[error("the folder cannot be copied to the local forge")]
    Forge(#[from] ForgeError),
}

impl TakeError {
    /// What to do next.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => {
                "make it readable for the user who runs this, or move it away"
            }
            Self::NoCommit { .. } => "make a first commit: `git add -A && git commit`",
            Self::NoBranch { .. } => "make a branch of what is checked out: `git switch -c NAME`",
            Self::BranchName { .. } => {
                "switch to a branch named with letters, digits, `-`, `_`, `.` and `/`"
            }
            Self::Behind { .. } => "bring it up to date, or switch to a branch of your own",
            Self::Empty { .. } => "put something into it, or start without -r in an empty folder",
            Self::TooLarge { .. } => {
                "name what is not needed in a .gitignore, or make it a git repository"
            }
            Self::Forge(_) => "`harvest doctor` says what this host lacks",
        }
    }
}

impl Forge {
    /// Brings the repository up to what the folder holds: the branch checked out in a git repository, or
    /// else its files as a commit on `main`. The folder must be named by its whole path.
    ///
    /// # Errors
    /// When there is nothing to take, it cannot be read, or the disk or git fails.
    pub async fn take(&self, name: &str, folder: &Path) -> Result<Taken, TakeError> {
        let place = self.existing(name)?;
        let bare = place.join("repository.git");
        let _alone = alone(&place).await?;
        let taken = match repository_of(folder) {
            Some(source) => self.take_branch(&bare, folder, &source).await?,
            None => files::take(&bare, folder).await?,
        };
        write_whole(&place.join("source"), folder.as_os_str().as_encoded_bytes())?;
        Ok(taken)
    }

    /// The folder a repository was last taken from.
    #[must_use]
    pub fn source(&self, name: &str) -> Option<PathBuf> {
        use std::os::unix::ffi::OsStringExt as _;
        let bytes = std::fs::read(self.existing(name).ok()?.join("source")).ok()?;
        Some(std::ffi::OsString::from_vec(bytes).into())
    }

    async fn take_branch(
        &self,
        bare: &Path,
        folder: &Path,
        source: &Path,
    ) -> Result<Taken, TakeError> {
        let branch = self.branch_of(bare, folder, source).await?;
        // A session's own branch goes forward only: the folder may be behind what was pushed.
        let force = if branch.starts_with("harvest/") { "" } else { "+" };
        let refspec = format!("{force}refs/heads/{branch}:refs/heads/{branch}");
        let arguments = [
            "fetch",
            "--no-tags",
            "--no-recurse-submodules",
            "--no-auto-gc",
            "--no-write-fetch-head",
            "--update-shallow",
            "--",
        ];
        let mut command = self.protected(bare)?;
        command.args(arguments).arg(source).arg(refspec);
        let doing = "read the folder";
        if let Err(error) = good(doing, run(command).await) {
            let behind = matches!(&error, ForgeError::Git { message, .. } if message.contains("non-fast-forward"));
            return Err(match behind {
                true => TakeError::Behind { branch, folder: folder.to_owned() },
                false => error.into(),
            });
        }
        let commit = git::head(bare, &branch).await?.ok_or_else(|| no_commit(folder))?;
        settle(bare, &branch).await?;
        let notes = match source == folder {
            // A bare one has no files beside its commits.
            true => Vec::new(),
            false => index::uncommitted(bare, folder, source, &branch).await,
        };
        Ok(Taken { branch, commit, notes })
    }

    async fn branch_of(
        &self,
        bare: &Path,
        folder: &Path,
        source: &Path,
    ) -> Result<String, TakeError> {
        let mut command = self.protected(bare)?;
        command.args(["ls-remote", "--symref", "--"]).arg(source).arg("HEAD");
        let listed = good("read the folder", run(command).await)?;
        let Some(first) = listed.lines().next() else { return Err(no_commit(folder)) };
        let branch =
            first.strip_prefix("ref: refs/heads/").and_then(|rest| rest.strip_suffix("\tHEAD"));
        let Some(branch) = branch else {
            return Err(TakeError::NoBranch { folder: folder.to_owned() });
        };
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./".contains(letter);
        if !branch.chars().all(plain) || branch.starts_with(['-', '.']) || branch.len() > 200 {
            return Err(TakeError::BranchName { branch: branch.chars().take(200).collect() });
        }
        Ok(branch.to_owned())
    }

    /// git on the forge's repository, about to read another one.
    fn protected(&self, bare: &Path) -> Result<tokio::process::Command, ForgeError> {
        let file = self.shared.root.join(".gitconfig");
        if std::fs::read_to_string(&file).ok().as_deref() != Some(PROTECTED) {
            write_whole(&file, PROTECTED.as_bytes())?;
        }
        let mut command = on(bare);
        // Only a file holds for the git that reads the folder: it hears nothing of `-c`.
        command.env("GIT_CONFIG_GLOBAL", file);
        Ok(command)
    }
}

/// What a clone checks out, and what the folder's files are compared with.
async fn settle(bare: &Path, branch: &str) -> Result<(), ForgeError> {
    let head = format!("refs/heads/{branch}");
    git::run(bare, "choose the default branch", &["symbolic-ref", "HEAD", &head]).await.map(drop)
}

/// Others, in this process and in any other, wait until what this gives is dropped.
async fn alone(place: &Path) -> Result<std::fs::File, TakeError> {
    let path = place.join("taking");
    let ours = path.clone();
    let waited = tokio::task::spawn_blocking(move || {
        let file = std::fs::File::create(ours)?;
        file.lock()?;
        Ok(file)
    });
    waited.await.unwrap_or_else(|panicked| Err(panicked.into())).map_err(disk("lock", &path))
}

/// git on the forge's repository, which obeys nothing but that.
fn on(bare: &Path) -> tokio::process::Command {
    let mut command = git::bare("git");
    command.envs([
        ("GIT_ALLOW_PROTOCOL", "file"),
        ("GIT_NO_LAZY_FETCH", "1"),
        ("GIT_OPTIONAL_LOCKS", "0"),
        ("GIT_ATTR_NOSYSTEM", "1"),
    ]);
    command.arg("--git-dir").arg(bare);
    // A terminal's interrupt is for whoever waits for us.
    command.process_group(0);
    command
}

/// The same, with the folder for its files and this file for its index.
fn beside(bare: &Path, folder: &Path, index: &Path) -> tokio::process::Command {
    let mut command = on(bare);
    command.env("GIT_INDEX_FILE", index).arg("--work-tree").arg(folder);
    for setting in ["core.bare=false", "core.fsmonitor=false", "core.untrackedCache=false"] {
        command.args(["-c", setting]);
    }
    command
}

async fn run(mut command: tokio::process::Command) -> io::Result<Output> {
    match tokio::time::timeout(LIMIT, command.output()).await {
        Ok(output) => output,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn good(doing: &'static str, output: io::Result<Output>) -> Result<String, ForgeError> {
    git::good(doing, output)
}

fn no_commit(folder: &Path) -> TakeError {
    TakeError::NoCommit { folder: folder.to_owned() }
}

/// Where the folder keeps its repository: in itself when it is a bare one; `None` when it has none.
fn repository_of(folder: &Path) -> Option<PathBuf> {
    let inside = folder.join(".git");
    if inside.exists() {
        return Some(inside);
    }
    let bare = folder.join("HEAD").is_file()
        && folder.join("objects").is_dir()
        && folder.join("refs").is_dir();
    bare.then(|| folder.to_owned())
}

/// A name to show: what a terminal would obey is replaced.
fn shown(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).take(200).collect()
}

/// The first few of many names.
fn few(names: &[String]) -> String {
    let first = names.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0..=3 => first,
        many => format!("{first} and {} more", many - 3),
    }
}

/// A file of ours that goes with this value.
struct Draft(PathBuf);

impl Draft {
    fn new(bare: &Path) -> Self {
        // Beside the repository, under a name the sweeper knows.
        Self(bare.with_file_name(format!(".new-{}", harvest_proto::SessionId::random().part())))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // git keeps a lock beside it while it writes.
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("lock"));
    }
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> TakeError {
    let path = path.to_owned();
    move |source| TakeError::Unreadable { path, source }
}

/// The disk said no.
fn disk(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TakeError {
    let error = file_error(doing, path);
    move |source| error(source).into()
}
