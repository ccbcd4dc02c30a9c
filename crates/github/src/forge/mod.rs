//! The local forge: bare repositories on this machine behind git's own HTTP, and a record of the pull
//! requests between their branches. For people without an account anywhere; it reviews and merges nothing.
//!
//! ```text
//! {root}/{name}/repository.git   the bare repository
//! {root}/{name}/token            what opens it, as a hash
//! {root}/{name}/pulls/1.json     its pull requests
//! {root}/{name}/source           the folder it was taken from, if it was
//! {root}/.lock                   held while one is registered, see `hold`
//! ```

mod cgi;
mod files;
mod git;
mod page;
mod pulls;
mod routes;
mod take;
mod url;

use std::{fs, io, os::unix::fs::OpenOptionsExt, path::PathBuf, sync::Arc, time::Duration};

use harvest_proto::{Secret, SessionId};
use tokio::sync::Mutex;

use files::{file_error, hash, sweep, sync_folder, write_token, write_whole};
pub use pulls::NewPull;
pub use take::{TakeError, Taken};
use url::{is_loopback, split_url, under};

// What the forge's URLs begin with where they are remembered: the server's own address may be another one
// tomorrow. Nothing answers under this name.
const LASTING: &str = "http://forge.harvest.internal";
// As long as GitHub's names may be.
const MAX_NAME_BYTES: usize = 100;
// Longer than any push takes.
const LEFT_OVER: Duration = Duration::from_secs(24 * 3600);

/// Why the forge could not do something.
#[derive(Debug, thiserror::Error)]
pub enum ForgeError {
    /// Names become folders, so few characters are allowed.
    #[error(
        "`{name}` is not a repository's name: use letters, digits, `-`, `_` and `.`, at most 100"
    )]
    BadName {
        /// What was given.
        name: String,
    },
    /// Nothing of that name is there.
    #[error("the forge has no repository `{name}`")]
    NoRepository {
        /// What was asked for.
        name: String,
    },
    /// The name is taken.
    #[error("the forge already has a repository `{name}`")]
    Exists {
        /// Which.
        name: String,
    },
    /// The repository has no such branch.
    #[error("repository `{name}` has no branch `{branch}`")]
    NoBranch {
        /// Which repository.
        name: String,
        /// Which branch.
        branch: String,
    },
    /// The branch has nothing its base lacks.
    #[error("branch `{branch}` has no commit that `{base}` lacks")]
    NothingToPull {
        /// The branch proposed.
        branch: String,
        /// The branch it is for.
        base: String,
    },
    /// No pull request has this number.
    #[error("repository `{name}` has no pull request {number}")]
    NoPull {
        /// Which repository.
        name: String,
        /// Which number.
        number: u64,
    },
    /// git failed.
    #[error("git could not {doing}: {message}")]
    Git {
        /// What it was to do.
        doing: &'static str,
        /// What it said.
        message: String,
    },
    /// A file could not be read or written.
    #[error("cannot {doing} `{path}`")]
    File {
        /// What was tried.
        doing: &'static str,
        /// Which file.
        path: String,
        /// Why not.
        source: io::Error,
    },
}

/// The local forge. Cheap to clone; all clones are one forge.
#[derive(Debug, Clone)]
pub struct Forge {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    public: String,
    backend: PathBuf,
    // Numbers are given out and records changed by one at a time.
    writing: Mutex<()>,
}

impl Forge {
    /// Opens the forge kept in this folder, making the folder when there is none. `public` is the URL its
    /// router answers at from outside, such as `http://127.0.0.1:7077/forge`.
    ///
    /// # Errors
    /// When the folder cannot be made or the host has no git with `http-backend`.
    pub fn open(root: PathBuf, public: &str) -> Result<Self, ForgeError> {
        fs::create_dir_all(&root).map_err(file_error("make", &root))?;
        let root = fs::canonicalize(&root).map_err(file_error("find", &root))?;
        let backend = git::backend()?;
        let public = public.trim_end_matches('/').to_owned();
        sweep(&root);
        Ok(Self { shared: Arc::new(Shared { root, public, backend, writing: Mutex::new(()) }) })
    }

    /// Makes an empty repository that this token opens, and gives its URL.
    ///
    /// # Errors
    /// When the name is taken or not a name, or the disk or git fails.
    pub async fn create(&self, name: &str, token: &Secret<String>) -> Result<String, ForgeError> {
        let place = self.place(name)?;
        if place.exists() {
            return Err(ForgeError::Exists { name: name.to_owned() });
        }
        // Names never begin with a dot, so a half-made repository is never found under one.
        let draft = self.shared.root.join(format!(".new-{}", SessionId::random().part()));
        let made = async {
            fs::create_dir_all(draft.join("pulls")).map_err(file_error("make", &draft))?;
            write_token(&draft, token)?;
            git::init(&draft.join("repository.git")).await?;
            match fs::rename(&draft, &place) {
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    Err(ForgeError::Exists { name: name.to_owned() })
                }
                other => other.map_err(file_error("make", &place)),
            }
        }
        .await;
        if made.is_err() && draft.exists() {
            // What cannot be removed is in nobody's way: see the name above.
            let _ = fs::remove_dir_all(&draft);
        }
        made?;
        sync_folder(&self.shared.root)?;
        Ok(self.url(name))
    }

    /// Holds the forge for whoever gives repositories names and tokens, for as long as the answer is kept;
    /// `None` while another process does. Pushes and pull requests go on.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn hold(&self) -> Result<Option<fs::File>, ForgeError> {
        // No repository's name begins with a dot.
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

    /// Removes a repository with its branches and its pull requests; one that is not there is removed already.
    ///
    /// # Errors
    /// When the name is none or the disk fails.
    pub fn remove(&self, name: &str) -> Result<(), ForgeError> {
        let place = self.place(name)?;
        // Out of sight at once; what a crash leaves of it is swept.
        let gone = self.shared.root.join(format!(".new-{}", SessionId::random().part()));
        match fs::rename(&place, &gone) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(file_error("remove", &place))?,
        }
        fs::remove_dir_all(&gone).map_err(file_error("remove", &gone))
    }

    /// Has another token open the repository from now on.
    ///
    /// # Errors
    /// When there is no such repository or the disk fails.
    pub fn set_token(&self, name: &str, token: &Secret<String>) -> Result<(), ForgeError> {
        write_token(&self.existing(name)?, token)
    }

    /// Where git finds the repository.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        format!("{}/{name}.git", self.shared.public)
    }

    /// The bare repository's folder.
    ///
    /// # Errors
    /// When there is no such repository.
    pub fn repository(&self, name: &str) -> Result<PathBuf, ForgeError> {
        Ok(self.existing(name)?.join("repository.git"))
    }

    /// The names of all repositories, sorted.
    ///
    /// # Errors
    /// When the forge's folder cannot be read.
    pub fn names(&self) -> Result<Vec<String>, ForgeError> {
        let entries =
            fs::read_dir(&self.shared.root).map_err(file_error("list", &self.shared.root))?;
        let names =
            entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| is_name(name)).collect();
        names.sort();
        Ok(names)
    }

    /// A URL of this forge as it can be remembered, the same for all ways to write a repository's; any other as it is.
    #[must_use]
    pub fn lasting(&self, url: &str) -> String {
        if let Some(name) = self.owns(url) {
            return format!("{LASTING}/{name}.git");
        }
        match under(url, &self.shared.public) {
            Some(rest) => format!("{LASTING}{rest}"),
            None => url.to_owned(),
        }
    }

    /// Where a remembered URL of this forge leads now; any other as it is.
    #[must_use]
    pub fn current(&self, url: &str) -> String {
        match under(url, LASTING) {
            Some(rest) => format!("{}{rest}", self.shared.public),
            None => url.to_owned(),
        }
    }

    /// The repository's name, if this URL leads to the local forge. Says nothing about whether it exists.
    #[must_use]
    pub fn owns(&self, url: &str) -> Option<String> {
        let url = self.current(url);
        let (public, url) = (split_url(&self.shared.public)?, split_url(&url)?);
        let same_host =
            public.host == url.host || (is_loopback(&public.host) && is_loopback(&url.host));
        if !same_host || public.scheme != url.scheme || public.port != url.port {
            return None;
        }
        let name = url.path.strip_prefix(&public.path)?.strip_prefix('/')?.trim_end_matches('/');
        let name = name.strip_suffix(".git").unwrap_or(name);
        is_name(name).then(|| name.to_owned())
    }

    /// The routes to be nested at the path of the public URL.
    pub fn router(&self) -> axum::Router {
        routes::router(self.clone())
    }

    /// Whether the token opens the repository. As slow for a wrong one as for a right one.
    #[must_use]
    pub fn opens(&self, name: &str, token: &str) -> bool {
        let kept =
            self.existing(name).ok().and_then(|place| fs::read_to_string(place.join("token")).ok());
        let (kept, given) = (kept.unwrap_or_default(), hash(token));
        // Both are hashes, so how far they agree says nothing useful; still, no early end.
        let differing =
            kept.bytes().zip(given.bytes()).fold(0, |sum, (kept, given)| sum | (kept ^ given));
        kept.len() == given.len() && differing == 0
    }

    fn place(&self, name: &str) -> Result<PathBuf, ForgeError> {
        if !is_name(name) {
            return Err(ForgeError::BadName { name: name.chars().take(MAX_NAME_BYTES).collect() });
        }
        Ok(self.shared.root.join(name))
    }

    fn existing(&self, name: &str) -> Result<PathBuf, ForgeError> {
        let place = self.place(name)?;
        if !place.is_dir() {
            return Err(ForgeError::NoRepository { name: name.to_owned() });
        }
        Ok(place)
    }
}

// A name is one folder and one part of a URL: no dot in front, nothing that needs escaping. `.git` at the
// end would be taken for the suffix.
fn is_name(name: &str) -> bool {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(sound)
        && !name.starts_with(['.', '-'])
        && !name.ends_with(".git")
}

#[cfg(test)]
mod tests;
