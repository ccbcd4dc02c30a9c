//! Imports a folder into a repository of the forge. The folder is only read and its configuration
//! is untrusted: git runs on the forge's repository and configuration, so that no hook, filter,
//! monitor or alias of the folder is executed. The one exception is `git upload-pack`, which is
//! designed for untrusted repositories; it cannot fetch lazily, and only the `file` protocol is
//! allowed.

mod files;
mod uncommitted;

use std::{
    borrow::Cow,
    io,
    path::{Path, PathBuf},
    process::Output,
    time::Duration,
};

use harvest_proto::{BranchName, Hint, bridge::Author, names::InvalidBranchName};

use super::{ForgeError, LocalForge, file_error, git, write_atomically};

// Enough for a large history on a slow disk. Without a limit, a FIFO in place of a file could block
// git forever.
const TIMEOUT: Duration = Duration::from_secs(15 * 60);

const UNTRUSTED_CONFIG: &str = "# Written by Harvest: applies to git while it imports a folder.\n\
    [safe]\n\tdirectory = *\n[protocol]\n\tallow = never\n[protocol \"file\"]\n\tallow = always\n";

/// The result of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedFolder {
    pub branch: BranchName,
    /// The branch's newest commit.
    pub commit: String,
    /// Warnings for the user about files that were left out.
    pub notes: Vec<String>,
}

/// What an import of a folder without git copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderSummary {
    pub files: usize,
    pub bytes: u64,
    /// Warnings for the user about files that are left out.
    pub notes: Vec<String>,
}

/// Why a folder could not be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot read `{}`", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("`{}` has no commits", folder.display())]
    NoCommit { folder: PathBuf },
    /// A detached HEAD.
    #[error("`{}` has no branch checked out", folder.display())]
    NoBranch { folder: PathBuf },
    #[error(transparent)]
    BranchName(#[from] InvalidBranchName),
    /// The forge's branch has commits that the folder's branch lacks.
    #[error("branch `{branch}` has commits of a session that `{}` lacks", folder.display())]
    Behind { branch: BranchName, folder: PathBuf },
    #[error("there are no files in `{}`", folder.display())]
    Empty { folder: PathBuf },
    #[error("`{}` is too large: {what}", folder.display())]
    TooLarge {
        folder: PathBuf,
        /// The size and the limit.
        what: String,
    },
    /// Its files become a commit, and neither the caller nor git named an author.
    #[error("`{}` is not a git repository, and its first commit needs an author", folder.display())]
    NoAuthor { folder: PathBuf },
    #[error("cannot copy the folder to the local forge")]
    Forge(#[from] ForgeError),
}

impl Hint for ImportError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        let hint = match self {
            Self::Unreadable { .. } => "make it readable for your user, or move it elsewhere",
            Self::NoCommit { .. } => "create a first commit: `git add -A && git commit`",
            Self::NoBranch { .. } => "create a branch: `git switch -c NAME`",
            Self::BranchName(_) => {
                "switch to a branch named with letters, digits, `-`, `_`, `.` and `/`"
            }
            Self::Behind { .. } => "pull the session's commits, or switch to another branch",
            Self::Empty { .. } => "add a file, or start without -r in an empty folder",
            Self::TooLarge { .. } => {
                "exclude files with a .gitignore, or make the folder a git repository"
            }
            Self::NoAuthor { .. } => {
                "`git config --global user.name NAME` and `git config --global user.email EMAIL`"
            }
            Self::Forge(_) => {
                "`harvest doctor` lists missing prerequisites; on a full disk `harvest gc` frees \
                 space"
            }
        };
        Some(hint.into())
    }
}

impl LocalForge {
    /// Updates the repository to the folder's content: the checked-out branch of a git repository,
    /// otherwise the files as a commit of `author` on `main`. `folder` must be an absolute path.
    ///
    /// # Errors
    /// When the folder is empty, too large or unreadable, or the disk or git fails.
    pub async fn import_folder(
        &self,
        name: &str,
        folder: &Path,
        author: Option<&Author>,
    ) -> Result<ImportedFolder, ImportError> {
        let home = self.existing_folder(name)?;
        let bare = home.join("repository.git");
        let _lock = lock_imports(&home).await?;
        let imported = match git_dir(folder) {
            Some(source) => self.import_branch(&bare, folder, &source).await?,
            None => {
                let no_author = || ImportError::NoAuthor { folder: folder.to_owned() };
                files::import(&bare, folder, author.ok_or_else(no_author)?).await?
            }
        };
        write_atomically(&home.join("source"), folder.as_os_str().as_encoded_bytes())?;
        Ok(imported)
    }

    /// What [`LocalForge::import_folder`] would copy; `None` for a git repository, whose commits
    /// were chosen by its user.
    ///
    /// # Errors
    /// As [`LocalForge::import_folder`].
    pub async fn folder_summary(
        &self,
        folder: &Path,
    ) -> Result<Option<FolderSummary>, ImportError> {
        if git_dir(folder).is_some() {
            return Ok(None);
        }
        // Git lists the files of a folder only for a repository.
        let draft = self.draft();
        let listed = async {
            git::init(&draft).await?;
            files::list(&draft, folder).await
        }
        .await;
        // A draft that cannot be removed is never listed, and a later `open` retries.
        let _ = std::fs::remove_dir_all(&draft);
        Ok(Some(listed?.summary))
    }

    /// The folder a repository was last imported from.
    #[must_use]
    pub fn source_folder(&self, name: &str) -> Option<PathBuf> {
        use std::os::unix::ffi::OsStringExt as _;
        let bytes = std::fs::read(self.existing_folder(name).ok()?.join("source")).ok()?;
        Some(std::ffi::OsString::from_vec(bytes).into())
    }

    async fn import_branch(
        &self,
        bare: &Path,
        folder: &Path,
        source: &Path,
    ) -> Result<ImportedFolder, ImportError> {
        let branch = self.checked_out_branch(bare, folder, source).await?;
        // A session's branch is only fast-forwarded: the folder may lack commits the session
        // pushed.
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
        let mut command = self.git_for_untrusted(bare)?;
        command.args(arguments).arg(source).arg(refspec);
        let doing = "read the folder";
        if let Err(error) = git::stdout_of(doing, run(command).await) {
            let behind = matches!(&error, ForgeError::Git { message, .. } if message.contains("non-fast-forward"));
            return Err(match behind {
                true => ImportError::Behind { branch, folder: folder.to_owned() },
                false => error.into(),
            });
        }
        let commit = git::head(bare, &branch).await?.ok_or_else(|| no_commit(folder))?;
        set_default_branch(bare, &branch).await?;
        let notes = match source == folder {
            // A bare repository has no working tree.
            true => Vec::new(),
            false => uncommitted::note(bare, folder, source, &branch).await,
        };
        Ok(ImportedFolder { branch, commit, notes })
    }

    async fn checked_out_branch(
        &self,
        bare: &Path,
        folder: &Path,
        source: &Path,
    ) -> Result<BranchName, ImportError> {
        let mut command = self.git_for_untrusted(bare)?;
        command.args(["ls-remote", "--symref", "--"]).arg(source).arg("HEAD");
        let listed = git::stdout_of("read the folder", run(command).await)?;
        let Some(first) = listed.lines().next() else { return Err(no_commit(folder)) };
        let branch =
            first.strip_prefix("ref: refs/heads/").and_then(|rest| rest.strip_suffix("\tHEAD"));
        let Some(branch) = branch else {
            return Err(ImportError::NoBranch { folder: folder.to_owned() });
        };
        Ok(branch.parse()?)
    }

    /// A git command on the forge's repository that reads an untrusted one.
    fn git_for_untrusted(&self, bare: &Path) -> Result<tokio::process::Command, ForgeError> {
        let file = self.shared.root.join(".gitconfig");
        if std::fs::read_to_string(&file).ok().as_deref() != Some(UNTRUSTED_CONFIG) {
            write_atomically(&file, UNTRUSTED_CONFIG.as_bytes())?;
        }
        let mut command = git_on(bare);
        // The `upload-pack` child reads configuration files only: `-c` does not reach it.
        command.env("GIT_CONFIG_GLOBAL", file);
        Ok(command)
    }
}

/// Points `HEAD` at the branch: clones check it out, and `status` compares with it.
async fn set_default_branch(bare: &Path, branch: &str) -> Result<(), ForgeError> {
    let head = format!("refs/heads/{branch}");
    git::run(bare, "choose the default branch", &["symbolic-ref", "HEAD", &head]).await.map(drop)
}

/// Serialises imports into one repository, also between processes, until the file is dropped.
async fn lock_imports(home: &Path) -> Result<std::fs::File, ImportError> {
    let path = home.join("import.lock");
    let lock_file = path.clone();
    let locked = tokio::task::spawn_blocking(move || {
        let file = std::fs::File::create(lock_file)?;
        file.lock()?;
        Ok(file)
    });
    locked.await.unwrap_or_else(|panicked| Err(panicked.into())).map_err(disk("lock", &path))
}

/// A git command on the forge's repository that uses no other configuration.
fn git_on(bare: &Path) -> tokio::process::Command {
    let mut command = git::isolated("git");
    command.envs([
        ("GIT_ALLOW_PROTOCOL", "file"),
        ("GIT_NO_LAZY_FETCH", "1"),
        ("GIT_OPTIONAL_LOCKS", "0"),
        ("GIT_ATTR_NOSYSTEM", "1"),
    ]);
    command.arg("--git-dir").arg(bare);
    // Ctrl-C in a terminal must reach the CLI only, not git.
    command.process_group(0);
    command
}

/// The same with the folder as working tree and with this index file.
fn git_with_work_tree(bare: &Path, folder: &Path, index: &Path) -> tokio::process::Command {
    let mut command = git_on(bare);
    command.env("GIT_INDEX_FILE", index).arg("--work-tree").arg(folder);
    for setting in ["core.bare=false", "core.fsmonitor=false", "core.untrackedCache=false"] {
        command.args(["-c", setting]);
    }
    command
}

async fn run(mut command: tokio::process::Command) -> io::Result<Output> {
    match tokio::time::timeout(TIMEOUT, command.output()).await {
        Ok(output) => output,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn no_commit(folder: &Path) -> ImportError {
    ImportError::NoCommit { folder: folder.to_owned() }
}

/// The folder's `.git`, or the folder itself if it is a bare repository; `None` without git.
fn git_dir(folder: &Path) -> Option<PathBuf> {
    let inside = folder.join(".git");
    if inside.exists() {
        return Some(inside);
    }
    let bare = folder.join("HEAD").is_file()
        && folder.join("objects").is_dir()
        && folder.join("refs").is_dir();
    bare.then(|| folder.to_owned())
}

/// A file name for display, with control characters replaced.
fn sanitize(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).take(200).collect()
}

fn first_few(names: &[String]) -> String {
    let first = names.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0..=3 => first,
        many => format!("{first} and {} more", many - 3),
    }
}

/// A temporary index file, removed on drop.
struct TempIndex(PathBuf);

impl TempIndex {
    fn new(bare: &Path) -> Self {
        // The prefix marks it for `remove_abandoned_drafts`.
        Self(bare.with_file_name(format!(".new-{}", harvest_proto::SessionId::random().part())))
    }
}

impl Drop for TempIndex {
    fn drop(&mut self) {
        // A killed git leaves its lock file.
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("lock"));
    }
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> ImportError {
    let path = path.to_owned();
    move |source| ImportError::Unreadable { path, source }
}

fn disk(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImportError {
    let error = file_error(doing, path);
    move |source| error(source).into()
}
