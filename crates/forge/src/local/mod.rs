//! The local forge: bare repositories on this machine behind git's smart HTTP protocol, a record of
//! the pull requests between their branches, and the part of GitHub's REST API that clients of pull
//! requests use. The owner of every repository is `local`: the forge's functions take the name
//! alone, and URLs contain both.
//!
//! ```text
//! {root}/{name}/repository.git   the bare repository
//! {root}/{name}/token            SHA-256 of the token that grants access
//! {root}/{name}/pr/1.json        a pull request
//! {root}/{name}/comments/7.json  a comment on a pull request
//! {root}/{name}/statuses/{sha}.json  the statuses of a commit
//! {root}/{name}/hooks/9.json     a webhook that the forge sends
//! {root}/{name}/source           path of the imported folder, if the repository is an import
//! {root}/{name}/import.lock      held during an import
//! {root}/.apps/3.json            an App with its installation
//! {root}/.tokens/{hash}.json     rights and expiry of an installation token
//! {root}/.next-id                the next number of an App, comment, status or webhook
//! {root}/.lock                   held while a repository is registered, see `try_lock`
//! {root}/.gitconfig              configuration of git while it reads imported folders
//! ```

mod apps;
mod clock;
mod comments;
mod credentials;
mod disk;
mod git;
mod history;
mod hooks;
mod http_backend;
mod import;
mod jwt;
mod kept;
mod merge;
mod page;
mod permissions;
mod pull_request_api;
mod pull_requests;
mod rest;
mod routes;
mod statuses;
mod storage;
mod tips;
mod url;

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use harvest_proto::{
    BranchName, RepositoryName, Secret, SessionId,
    repository_name::{InvalidRepositoryName, LOCAL_OWNER},
};
use tokio::sync::Mutex;

use crate::pem::InvalidKey;

pub use apps::{App, NewApp};
pub use clock::Clock;
pub use import::{FolderSummary, ImportError, ImportedFolder};
pub use permissions::{PermissionLevel, Permissions};
use storage::{
    file_error, hash, remove_abandoned_drafts, sync_folder, write_atomically, write_token,
};
use url::{is_loopback, split_url, strip_base};

// Stored URLs of the forge start with this placeholder, because the server's address may change.
// The name is never resolved.
const STABLE_BASE: &str = "http://forge.harvest.internal";
// Drafts older than this are abandoned: no push takes that long.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, thiserror::Error)]
pub enum ForgeError {
    #[error(transparent)]
    InvalidName(#[from] InvalidRepositoryName),
    #[error("the forge has no repository `{name}`")]
    NoRepository { name: String },
    #[error("the forge already has a repository `{name}`")]
    Exists { name: String },
    #[error("repository `{name}` has no branch `{branch}`")]
    NoBranch { name: String, branch: BranchName },
    #[error("branch `{branch}` has no commits that `{base}` lacks")]
    NoNewCommits { branch: BranchName, base: BranchName },
    #[error("repository `{name}` has no pull request {number}")]
    NoPullRequest { name: String, number: u64 },
    #[error("branch `{branch}` already has an open pull request")]
    PullRequestExists { branch: BranchName },
    #[error("the forge has no App {id}")]
    NoApp { id: u64 },
    #[error("the forge has no permission `{name}`")]
    UnknownPermission { name: String },
    #[error("cannot use the App's key")]
    Key(#[from] InvalidKey),
    #[error("the system has no random numbers")]
    NoRandomness,
    #[error("git could not {doing}: {message}")]
    Git { doing: &'static str, message: String },
    #[error("cannot {doing} `{path}`")]
    File { doing: &'static str, path: String, source: io::Error },
}

/// Creates the forge's folder for this user alone. The home around it may be readable for others.
fn create_private(root: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
    match fs::metadata(root)?.permissions().mode() & 0o077 {
        0 => Ok(()),
        _ => fs::set_permissions(root, fs::Permissions::from_mode(0o700)),
    }
}

/// The local forge. Cheap to clone; all clones share one state.
#[derive(Debug, Clone)]
pub struct LocalForge {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    public: String,
    http_backend: PathBuf,
    clock: Clock,
    // Serialises the numbering of pull requests and changes to their records.
    writing: Mutex<()>,
}

impl LocalForge {
    /// Opens the forge stored in `root`, creating the folder if needed. `public` is the URL at
    /// which its router is reachable, such as `http://127.0.0.1:7077/forge`.
    ///
    /// # Errors
    /// When the folder cannot be created or the host has no git with `http-backend`.
    pub fn open(root: PathBuf, public: &str) -> Result<Self, ForgeError> {
        Self::open_with(root, public, Clock::system())
    }

    /// Opens the forge with a clock of the caller's, which decides when tokens expire.
    ///
    /// # Errors
    /// As [`LocalForge::open`].
    pub fn open_with(root: PathBuf, public: &str, clock: Clock) -> Result<Self, ForgeError> {
        create_private(&root).map_err(file_error("create", &root))?;
        let root = fs::canonicalize(&root).map_err(file_error("find", &root))?;
        let http_backend = git::http_backend()?;
        let public = public.trim_end_matches('/').to_owned();
        remove_abandoned_drafts(&root);
        let shared = Shared { root, public, http_backend, clock, writing: Mutex::new(()) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Creates an empty repository with this access token and returns its URL.
    ///
    /// # Errors
    /// When the name is taken or invalid, or the disk or git fails.
    pub async fn create(&self, name: &str, token: &Secret<String>) -> Result<String, ForgeError> {
        let folder = self.folder(name)?;
        if folder.exists() {
            return Err(ForgeError::Exists { name: name.to_owned() });
        }
        let draft = self.draft();
        let created = async {
            fs::create_dir_all(draft.join("pr")).map_err(file_error("create", &draft))?;
            write_token(&draft, token)?;
            git::init(&draft.join("repository.git")).await?;
            match fs::rename(&draft, &folder) {
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    Err(ForgeError::Exists { name: name.to_owned() })
                }
                other => other.map_err(file_error("create", &folder)),
            }
        }
        .await;
        if created.is_err() && draft.exists() {
            // A draft that cannot be removed is never listed, and a later `open` retries.
            let _ = fs::remove_dir_all(&draft);
        }
        created?;
        sync_folder(&self.shared.root)?;
        Ok(self.url(name))
    }

    /// Locks the registration of repositories (names and tokens) until the returned file is
    /// dropped; `None` while another process holds the lock. Pushes and pull requests are not
    /// blocked.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn try_lock(&self) -> Result<Option<fs::File>, ForgeError> {
        // Repository names never start with a dot.
        let path = self.shared.root.join(".lock");
        let file =
            fs::File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = file.map_err(file_error("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(file_error("lock", &path)(error)),
        }
    }

    /// Removes a repository with its branches and pull requests. Idempotent.
    ///
    /// # Errors
    /// When the name is invalid or the disk fails.
    pub fn remove(&self, name: &str) -> Result<(), ForgeError> {
        let folder = self.folder(name)?;
        // The rename hides it at once; after a crash the next `open` removes the rest.
        let trash = self.shared.root.join(format!(".new-{}", SessionId::random().part()));
        match fs::rename(&folder, &trash) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(file_error("remove", &folder))?,
        }
        fs::remove_dir_all(&trash).map_err(file_error("remove", &trash))
    }

    /// Replaces the repository's access token.
    ///
    /// # Errors
    /// When there is no such repository or the disk fails.
    pub fn set_token(&self, name: &str, token: &Secret<String>) -> Result<(), ForgeError> {
        write_token(&self.existing_folder(name)?, token)
    }

    /// The repository's clone URL.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        format!("{}/{LOCAL_OWNER}/{name}.git", self.shared.public)
    }

    /// The bare repository's folder.
    ///
    /// # Errors
    /// When there is no such repository.
    pub fn repository_path(&self, name: &str) -> Result<PathBuf, ForgeError> {
        Ok(self.existing_folder(name)?.join("repository.git"))
    }

    /// The names of all repositories, sorted.
    ///
    /// # Errors
    /// When the forge's folder cannot be read.
    pub fn names(&self) -> Result<Vec<RepositoryName>, ForgeError> {
        let entries =
            fs::read_dir(&self.shared.root).map_err(file_error("list", &self.shared.root))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<_> =
            names.filter_map(|name| RepositoryName::local(&name).ok()).collect();
        names.sort();
        Ok(names)
    }

    /// The form of a URL to store: independent of the forge's address, and one for all spellings of
    /// a repository's URL. URLs elsewhere are returned unchanged.
    #[must_use]
    pub fn stable_url(&self, url: &str) -> String {
        if let Some(name) = self.repository_name(url) {
            return format!("{STABLE_BASE}/{name}.git");
        }
        match strip_base(url, &self.shared.public) {
            Some(rest) => format!("{STABLE_BASE}{rest}"),
            None => url.to_owned(),
        }
    }

    /// The reverse of [`stable_url`](Self::stable_url), at the forge's current address.
    #[must_use]
    pub fn current_url(&self, url: &str) -> String {
        match strip_base(url, STABLE_BASE) {
            Some(rest) => format!("{}{rest}", self.shared.public),
            None => url.to_owned(),
        }
    }

    /// The repository's name if this URL points to the local forge, whether or not it exists.
    #[must_use]
    pub fn repository_name(&self, url: &str) -> Option<RepositoryName> {
        let url = self.current_url(url);
        let (public, url) = (split_url(&self.shared.public)?, split_url(&url)?);
        let same_host =
            public.host == url.host || (is_loopback(&public.host) && is_loopback(&url.host));
        if !same_host || public.scheme != url.scheme || public.port != url.port {
            return None;
        }
        let name = url.path.strip_prefix(&public.path)?.strip_prefix('/')?.trim_end_matches('/');
        let name = name.strip_suffix(".git").unwrap_or(name);
        name.parse().ok().filter(|name: &RepositoryName| name.owner() == LOCAL_OWNER)
    }

    /// The routes, to be nested at the path of the public URL.
    pub fn router(&self) -> axum::Router {
        routes::router(self.clone())
    }

    /// Whether the token grants access to the repository, compared in constant time.
    #[must_use]
    pub fn accepts_token(&self, name: &str, token: &str) -> bool {
        let stored = self
            .existing_folder(name)
            .ok()
            .and_then(|folder| fs::read_to_string(folder.join("token")).ok());
        let (stored, given) = (stored.unwrap_or_default(), hash(token));
        let difference = stored
            .bytes()
            .zip(given.bytes())
            .fold(0, |sum, (stored, given)| sum | (stored ^ given));
        stored.len() == given.len() && difference == 0
    }

    fn folder(&self, name: &str) -> Result<PathBuf, ForgeError> {
        let name = RepositoryName::local(name)?;
        Ok(self.shared.root.join(name.name()))
    }

    /// Where an incomplete repository is created. Names of repositories never start with a dot, so
    /// it is never listed.
    fn draft(&self) -> PathBuf {
        self.shared.root.join(format!(".new-{}", SessionId::random().part()))
    }

    fn existing_folder(&self, name: &str) -> Result<PathBuf, ForgeError> {
        let folder = self.folder(name)?;
        if !folder.is_dir() {
            return Err(ForgeError::NoRepository { name: name.to_owned() });
        }
        Ok(folder)
    }
}

#[cfg(test)]
mod tests;
