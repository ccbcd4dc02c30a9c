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
mod git;
mod page;
mod pulls;
mod routes;
mod take;

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use harvest_proto::{Secret, SessionId};
use ring::digest::{SHA256, digest};
use tokio::sync::Mutex;

pub use pulls::NewPull;
pub use take::{TakeError, Taken};

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
    #[error("`{name}` is not a repository's name: use letters, digits, `-`, `_` and `.`, at most 100")]
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
        let file = fs::File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
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
        let entries = fs::read_dir(&self.shared.root).map_err(file_error("list", &self.shared.root))?;
        let names = entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().into_string().ok());
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
        let same_host = public.host == url.host || (is_loopback(&public.host) && is_loopback(&url.host));
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
        let kept = self.existing(name).ok().and_then(|place| fs::read_to_string(place.join("token")).ok());
        let (kept, given) = (kept.unwrap_or_default(), hash(token));
        // Both are hashes, so how far they agree says nothing useful; still, no early end.
        let differing = kept.bytes().zip(given.bytes()).fold(0, |sum, (kept, given)| sum | (kept ^ given));
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

// Removes what a process that was killed left half done: drafts of ours, and git's half-received packs. Young ones may
// belong to somebody who is still at work.
fn sweep(root: &Path) {
    let mut folders = vec![root.to_owned()];
    for place in entries(root) {
        folders.extend([
            place.join("pulls"),
            place.join("repository.git/objects"),
            place.join("repository.git/objects/pack"),
        ]);
        folders.push(place);
    }
    let left_over = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ours =
            name.starts_with(".new-") || name.starts_with("tmp_objdir-") || name.starts_with("tmp_pack_");
        let age =
            fs::symlink_metadata(path).and_then(|data| data.modified()).ok().and_then(|at| at.elapsed().ok());
        ours && age.is_some_and(|age| age > LEFT_OVER)
    };
    for path in folders.iter().flat_map(|folder| entries(folder)).filter(left_over) {
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        if let Err(error) = removed {
            tracing::warn!(path = %path.display(), %error, "cannot remove a left-over file");
        }
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(Result::ok).map(|entry| entry.path()).collect()
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

fn hash(token: &str) -> String {
    digest(&SHA256, token.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn write_token(place: &Path, token: &Secret<String>) -> Result<(), ForgeError> {
    write_whole(&place.join("token"), hash(token.expose()).as_bytes())
}

// Under its name there is the old file or the new one, never half of either.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), ForgeError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let draft = folder.join(format!(".new-{}", SessionId::random().part()));
    let written = fs::File::create_new(&draft).and_then(|mut file| {
        io::Write::write_all(&mut file, bytes)?;
        file.sync_all()?;
        fs::rename(&draft, path)
    });
    if written.is_err() {
        // The disk may be full; the draft is of no use, and the next write makes another.
        let _ = fs::remove_file(&draft);
    }
    written.map_err(file_error("write", path))?;
    sync_folder(folder)
}

fn sync_folder(folder: &Path) -> Result<(), ForgeError> {
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("sync", folder))
}

fn file_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ForgeError {
    let path = path.display().to_string();
    move |source| ForgeError::File { doing, path, source }
}

#[derive(Debug, PartialEq, Eq)]
struct SplitUrl {
    scheme: String,
    host: String,
    port: u16,
    path: String,
}

fn split_url(url: &str) -> Option<SplitUrl> {
    let url: axum::http::Uri = url.parse().ok()?;
    let scheme = url.scheme_str()?.to_owned();
    let default_port = if scheme == "https" { 443 } else { 80 };
    Some(SplitUrl {
        host: url.host()?.trim_matches(['[', ']']).to_ascii_lowercase(),
        port: url.port_u16().unwrap_or(default_port),
        path: url.path().trim_end_matches('/').to_owned(),
        scheme,
    })
}

/// What follows in a URL that lies below another.
fn under<'a>(url: &'a str, above: &str) -> Option<&'a str> {
    url.strip_prefix(above).filter(|rest| rest.starts_with('/'))
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forge() -> (tempfile::TempDir, Forge) {
        let folder = tempfile::tempdir().unwrap();
        let forge = Forge::open(folder.path().join("forge"), "http://127.0.0.1:7077/forge/").unwrap();
        (folder, forge)
    }

    #[test]
    fn a_forge_knows_its_own_urls() {
        let (_folder, forge) = forge();
        for own in [
            "http://127.0.0.1:7077/forge/app.git",
            "http://localhost:7077/forge/app",
            "http://x-access-token:t@127.0.0.1:7077/forge/app.git/",
        ] {
            assert_eq!(forge.owns(own).as_deref(), Some("app"), "{own}");
        }
        for other in [
            "https://127.0.0.1:7077/forge/app.git",
            "http://127.0.0.1:7078/forge/app.git",
            "http://127.0.0.1:7077/forge/../app.git",
            "http://127.0.0.1:7077/forge/a/b.git",
            "http://127.0.0.1:7077/forge/.git",
            "http://127.0.0.1:7077/forgery/app.git",
            "http://127.0.0.1.evil.org:7077/forge/app.git",
            "git@127.0.0.1:app.git",
            "/srv/app.git",
        ] {
            assert_eq!(forge.owns(other), None, "{other}");
        }
    }

    #[test]
    fn a_remembered_url_leads_to_wherever_the_forge_is_now() {
        let (folder, forge) = forge();
        for path in ["/app.git", "/app/pulls/1"] {
            let kept = forge.lasting(&format!("http://127.0.0.1:7077/forge{path}"));
            assert!(!kept.contains("7077"), "{kept}");
            let moved = Forge::open(folder.path().join("forge"), "http://127.0.0.1:9/forge").unwrap();
            assert_eq!(moved.current(&kept), format!("http://127.0.0.1:9/forge{path}"));
        }
        assert_eq!(forge.owns(&forge.lasting(&forge.url("app"))).as_deref(), Some("app"));
        // Or who removes a repository by one of its names would remove it from under another.
        for other in ["http://localhost:7077/forge/app", "http://127.0.0.1:7077/forge/app.git/"] {
            assert_eq!(forge.lasting(other), forge.lasting(&forge.url("app")), "{other}");
        }
        for other in ["http://127.0.0.1:7077/forgery/app.git", "https://example.org/app.git"] {
            assert_eq!((forge.lasting(other), forge.current(other)), (other.to_owned(), other.to_owned()));
        }
    }

    #[tokio::test]
    async fn a_repository_is_made_once_and_opened_by_its_token_only() {
        let (_folder, forge) = forge();
        let token = Secret::new("t0ken".to_owned());
        assert_eq!(forge.create("app", &token).await.unwrap(), "http://127.0.0.1:7077/forge/app.git");
        assert!(matches!(forge.create("app", &token).await, Err(ForgeError::Exists { .. })));
        assert!(forge.opens("app", "t0ken") && !forge.opens("app", "t0ke") && !forge.opens("app", ""));
        assert!(!forge.opens("other", "t0ken"));
        forge.set_token("app", &Secret::new("new".to_owned())).unwrap();
        assert!(forge.opens("app", "new") && !forge.opens("app", "t0ken"));
        assert_eq!(forge.names().unwrap(), ["app"]);
        assert!(!fs::read_to_string(forge.existing("app").unwrap().join("token")).unwrap().contains("new"));
    }

    #[test]
    fn one_at_a_time_holds_the_forge() {
        let (_folder, forge) = forge();
        let held = forge.hold().unwrap();
        assert!(held.is_some() && forge.hold().unwrap().is_none());
        drop(held);
        assert!(forge.hold().unwrap().is_some());
        assert_eq!(forge.names().unwrap(), [] as [String; 0]);
    }

    #[tokio::test]
    async fn what_a_killed_process_left_long_ago_is_removed_when_the_forge_opens() {
        let (folder, forge) = forge();
        forge.create("app", &Secret::new("t".to_owned())).await.unwrap();
        let objects = forge.repository("app").unwrap().join("objects");
        let long_ago = std::time::SystemTime::now() - LEFT_OVER * 2;
        let draft = |path: &Path, old: bool| {
            fs::create_dir(path).unwrap();
            if old {
                fs::File::open(path).unwrap().set_modified(long_ago).unwrap();
            }
        };
        let (old, young) = (objects.join("tmp_objdir-incoming-a"), objects.join("tmp_objdir-incoming-b"));
        draft(&old, true);
        draft(&young, false);
        draft(&folder.path().join("forge/.new-x"), true);
        Forge::open(folder.path().join("forge"), "http://127.0.0.1:1/forge").unwrap();
        assert!(!old.exists() && young.exists() && !folder.path().join("forge/.new-x").exists());
        assert!(forge.repository("app").unwrap().join("HEAD").is_file());
    }

    #[tokio::test]
    async fn names_that_could_lead_elsewhere_are_refused() {
        let (_folder, forge) = forge();
        for name in
            ["", ".", "..", "../x", "a/b", ".hidden", "-option", "a\0b", "ä", "x.git", &"a".repeat(101)]
        {
            let made = forge.create(name, &Secret::new("t".to_owned())).await;
            assert!(matches!(made, Err(ForgeError::BadName { .. })), "{name}");
        }
    }
}
