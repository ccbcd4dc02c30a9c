//! Clones and updates checkouts, always as the agent's user and never interactively.

mod author;
mod beside;
pub(crate) mod carry;
pub(crate) mod checks;
pub(crate) mod large_files;
pub(crate) mod program;
pub(crate) mod public;
mod queries;
mod requests;
mod rules;
pub(crate) mod submodules;
mod trees;
mod untracked;

pub(crate) use self::requests::start;

use std::{path::Path, time::Duration};

use harvest_proto::{
    bridge::{Author, BootStart, Checkout},
    door::GIT_NAME,
};

use crate::{
    capture,
    files::{self, blocking_io},
    install::CONFIG_FILE,
    processes::ProcessSpec,
    sandbox::Sandbox,
    users::User,
};

// Enough for the first clone of a large repository while the gateway restarts.
const NETWORK_TIMEOUT: Duration = Duration::from_secs(30 * 60);

const LOCAL_TIMEOUT: Duration = Duration::from_secs(60);

/// Variables that make git fail instead of prompting.
pub(crate) const NON_INTERACTIVE: [(&str, &str); 2] =
    [("GIT_TERMINAL_PROMPT", "0"), ("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")];

/// Disables hooks, the file-system monitor and Git LFS: the checkout may configure ones that hang,
/// which would block a boot or make a diff time out, and LFS would ask a server for each file. A
/// folder that looks like a bare repository is no checkout.
const OVERRIDES: [(&str, &str); 15] = [
    ("GIT_CONFIG_COUNT", "7"),
    ("GIT_CONFIG_KEY_0", "core.fsmonitor"),
    ("GIT_CONFIG_VALUE_0", "false"),
    ("GIT_CONFIG_KEY_1", "core.hooksPath"),
    ("GIT_CONFIG_VALUE_1", "/dev/null"),
    ("GIT_CONFIG_KEY_2", "safe.bareRepository"),
    ("GIT_CONFIG_VALUE_2", "explicit"),
    ("GIT_CONFIG_KEY_3", "filter.lfs.smudge"),
    ("GIT_CONFIG_VALUE_3", ""),
    ("GIT_CONFIG_KEY_4", "filter.lfs.clean"),
    ("GIT_CONFIG_VALUE_4", ""),
    ("GIT_CONFIG_KEY_5", "filter.lfs.process"),
    ("GIT_CONFIG_VALUE_5", ""),
    ("GIT_CONFIG_KEY_6", "filter.lfs.required"),
    ("GIT_CONFIG_VALUE_6", "false"),
];

const ALL_BRANCHES: &str = "+refs/heads/*:refs/remotes/origin/*";

/// Why a boot failed is read from git's messages.
const ENGLISH: [(&str, &str); 1] = [("LC_ALL", "C.UTF-8")];

/// Global settings of the user, written once per boot.
const SETTINGS: [(&str, &str); 4] = [
    ("safe.directory", "*"),
    ("push.autoSetupRemote", "true"),
    ("init.defaultBranch", "main"),
    // Git would make up an address from the names of user and sandbox.
    ("user.useConfigOnly", "true"),
];

/// A checkout after a sync.
pub(crate) struct SyncResult {
    pub(crate) what: Synced,
    /// The commit that was checked out before.
    pub(crate) before: Option<String>,
    /// The commit that is checked out now.
    pub(crate) after: Option<String>,
    /// Where commits are kept that the sync took off the session's branch.
    pub(crate) kept: Option<String>,
}

/// What a sync has done.
pub(crate) enum Synced {
    UpToDate,
    /// Left unchanged, for this reason.
    Stale(String),
    Cloned,
}

pub(crate) struct Git<'a> {
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) user: &'a User,
}

impl Git<'_> {
    /// Runs git; returns the last lines of its output in both cases.
    async fn run(&self, folder: &str, arguments: &[&str]) -> Result<String, String> {
        self.run_for(LOCAL_TIMEOUT, folder, arguments).await
    }

    async fn run_for(
        &self,
        timeout: Duration,
        folder: &str,
        arguments: &[&str],
    ) -> Result<String, String> {
        let argv = std::iter::once("git").chain(arguments.iter().copied()).map(str::to_owned);
        let spec = self.process_spec(argv.collect(), folder);
        let captured =
            capture::run(self.sandbox, spec, timeout).await.map_err(|fault| fault.message)?;
        captured.ok().map_err(|tail| format!("git {}\n{tail}", arguments.join(" ")))
    }

    /// Runs another program as git is run; returns the last lines of its output.
    async fn capture(&self, argv: Vec<String>, folder: &str) -> Result<String, String> {
        let spec = self.process_spec(argv, folder);
        let captured = capture::run(self.sandbox, spec, LOCAL_TIMEOUT).await;
        captured.map_err(|fault| fault.message)?.ok()
    }

    fn process_spec(&self, argv: Vec<String>, folder: &str) -> ProcessSpec {
        let mut spec = self.sandbox.process_spec(argv, self.user, folder);
        spec.env.extend(
            NON_INTERACTIVE
                .iter()
                .chain(&OVERRIDES)
                .chain(&ENGLISH)
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
        );
        // In a checkout that lost its `.git` no repository around it is found.
        let parent = Path::new(folder).canonicalize().ok();
        if let Some(parent) = parent.as_deref().and_then(Path::parent).and_then(Path::to_str) {
            spec.env.insert("GIT_CEILING_DIRECTORIES".to_owned(), parent.to_owned());
        }
        spec
    }

    /// Writes the user's global settings, and the author of commits if there is one.
    pub(crate) async fn configure(&self, author: Option<&Author>) -> Result<(), String> {
        // An image or a restored disk has them already: one process instead of five.
        let current = self.run("/", &["config", "--global", "--list"]).await.unwrap_or_default();
        let is_set = |name: &str, value: &str| {
            let wanted = format!("{}={value}", name.to_lowercase());
            current.lines().any(|line| line == wanted)
        };
        for (name, value) in SETTINGS.into_iter().filter(|(name, value)| !is_set(name, value)) {
            self.run("/", &["config", "--global", name, value]).await?;
        }
        match author {
            Some(author) => self.set_author(author).await,
            None => Ok(()),
        }
    }

    /// Sets the author of the next commits. In the global settings, because the environment of a
    /// running agent cannot change.
    pub(crate) async fn set_author(&self, author: &Author) -> Result<(), String> {
        let name = git_name(author);
        if self.write_author(&name, &author.email) {
            return Ok(());
        }
        self.run("/", &["config", "--global", "user.name", &name]).await?;
        self.run("/", &["config", "--global", "user.email", &author.email]).await.map(drop)
    }

    // Without a process, which would delay the prompt. False if that has to be left to git.
    fn write_author(&self, name: &str, email: &str) -> bool {
        if self.sandbox.env(self.user).contains_key("GIT_CONFIG_GLOBAL") {
            return false;
        }
        let path = Path::new(&self.sandbox.home(self.user)).join(".gitconfig");
        let Ok(Some(old)) = files::read_small(&path, self.user) else { return false };
        match author::with_author(&old, name, email) {
            Some(new) => new == old || files::write_small(&path, self.user, &new).is_ok(),
            None => false,
        }
    }

    /// Makes git refuse what loses work in a checkout, and push to its branch. The agent could undo
    /// it, but not by accident.
    pub(crate) fn enforce_rules(&self, checkout: &Checkout) -> std::io::Result<()> {
        let (folder, branch) = (self.folder(&checkout.folder), checkout.branch.as_deref());
        rules::enforce(Path::new(&folder), branch, self.user)
    }

    /// The commit that is checked out.
    pub(crate) async fn commit(&self, checkout: &Checkout) -> Option<String> {
        let folder = self.folder(&checkout.folder);
        if has_repository(&folder) { self.head(&folder).await } else { None }
    }

    /// Brings a checkout into the state that `start` requires.
    pub(crate) async fn sync(
        &self,
        checkout: &Checkout,
        start: BootStart,
    ) -> Result<SyncResult, String> {
        let folder = self.folder(&checkout.folder);
        let before = if has_repository(&folder) { self.head(&folder).await } else { None };
        let what = self.sync_checkout(checkout, start).await?;
        let after = match &what {
            // Only fetched: what is checked out stays.
            _ if start == BootStart::Restore && before.is_some() => before.clone(),
            _ => self.head(&folder).await,
        };
        Ok(SyncResult { what, before, after, kept: None })
    }

    async fn sync_checkout(&self, checkout: &Checkout, start: BootStart) -> Result<Synced, String> {
        let workspace = self.sandbox.workspace();
        let folder = self.folder(&checkout.folder);
        let exists = has_repository(&folder);
        // Only before the first turn: later the agent may have changed it, and must get its disk.
        if exists && checkout.clone_missing {
            self.check_origin(&folder, &checkout.remote).await?;
        }
        if start == BootStart::Restore && (exists || !checkout.clone_missing) {
            return Ok(match self.fetch(&folder, checkout).await {
                Ok(()) => Synced::UpToDate,
                Err(tail) => Synced::Stale(format!("cannot fetch {}: {tail}", checkout.name)),
            });
        }
        if !exists {
            self.clone(&workspace, checkout, start).await?;
            return Ok(Synced::Cloned);
        }
        // The base may have been replaced: its history stays out, as in a clone.
        let depth: &[&str] = if start == BootStart::Rebuild { &["--depth", "1"] } else { &[] };
        self.fetch_with(&folder, checkout, depth).await?;
        self.check_out(&folder, checkout, start).await?;
        Ok(Synced::UpToDate)
    }

    // Renamed only when it is complete: an interrupted clone must not look like a checkout at the
    // next boot.
    async fn clone(
        &self,
        workspace: &str,
        checkout: &Checkout,
        start: BootStart,
    ) -> Result<(), String> {
        let part = format!(".{}.part", checkout.folder);
        let (at, folder) =
            (format!("{workspace}/{part}"), format!("{workspace}/{}", checkout.folder));
        remove(&at).await.map_err(|error| format!("cannot remove {at}: {error}"))?;
        // Only the newest commit of the base: history and other sessions' branches may be large.
        // `git fetch --unshallow` brings the history.
        // An agent may hide the user's settings from its commands, as Gemini CLI does.
        let push = "push.autoSetupRemote=true";
        let mut arguments = vec!["clone", "--quiet", "--depth", "1", "--config", push];
        arguments.extend(checkout.base.iter().flat_map(|base| ["--branch", base.as_str()]));
        arguments.extend(["--", &checkout.remote, &part]);
        self.run_for(NETWORK_TIMEOUT, workspace, &arguments).await?;
        // The agent's own `git fetch` brings every branch, as in any other clone.
        self.run(&at, &["config", "remote.origin.fetch", ALL_BRANCHES]).await?;
        self.check_out(&at, checkout, start).await?;
        std::fs::rename(&at, &folder)
            .map_err(|error| format!("cannot move the clone to {folder}: {error}"))
    }

    /// Fetches the base and the session's branch.
    async fn fetch(&self, folder: &str, checkout: &Checkout) -> Result<(), String> {
        self.fetch_with(folder, checkout, &[]).await
    }

    async fn fetch_with(
        &self,
        folder: &str,
        checkout: &Checkout,
        options: &[&str],
    ) -> Result<(), String> {
        self.set_origin(folder, &checkout.remote).await?;
        let own = checkout.branch.as_deref();
        if let Some(base) = &checkout.base {
            return self.fetch_branches(folder, Some(base), own, options).await;
        }
        // The remote's default branch may have changed. Queried in parallel, because it takes as
        // long as a fetch without changes.
        let known = self.default_branch(folder).await;
        let head = ["ls-remote", "--symref", "origin", "HEAD"];
        let head = self.run_for(NETWORK_TIMEOUT, folder, &head);
        let (fetched, head) =
            tokio::join!(self.fetch_branches(folder, known.as_deref(), own, options), head);
        // Without an answer the old value stays.
        let Ok(head) = head else { return fetched };
        let Some(branch) = symref_branch(&head) else {
            // An empty repository has no branch to fetch.
            return if head.trim().is_empty() { Ok(()) } else { fetched };
        };
        if known.as_deref() == Some(branch) {
            return fetched;
        }
        self.fetch_branches(folder, Some(branch), own, options).await?;
        let origin = format!("refs/remotes/origin/{branch}");
        self.run(folder, &["symbolic-ref", "refs/remotes/origin/HEAD", &origin]).await.map(drop)
    }

    async fn fetch_branches(
        &self,
        folder: &str,
        base: Option<&str>,
        own: Option<&str>,
        options: &[&str],
    ) -> Result<(), String> {
        let base = base.map(|base| format!("+refs/heads/{base}:refs/remotes/origin/{base}"));
        // A pattern, because the session may not have pushed its branch: git takes a missing
        // branch for an error, and a pattern without a match for none.
        let own = own.map(|own| format!("+refs/heads/{own}*:refs/remotes/origin/{own}*"));
        let mut arguments = vec!["fetch", "--quiet", "--prune"];
        arguments.extend(options);
        arguments.push("origin");
        arguments.extend(base.iter().chain(&own).map(String::as_str));
        if base.is_none() && own.is_none() {
            return Ok(());
        }
        self.run_for(NETWORK_TIMEOUT, folder, &arguments).await.map(drop)
    }

    /// Fetches the history that the clone left out.
    async fn complete_history(&self, folder: &str) -> Result<(), String> {
        let shallow = self.last_line(folder, &["rev-parse", "--is-shallow-repository"]).await;
        if shallow.as_deref() != Some("true") {
            return Ok(());
        }
        let fetch = ["fetch", "--quiet", "--unshallow", "origin"];
        self.run_for(NETWORK_TIMEOUT, folder, &fetch).await.map(drop)
    }

    /// The origin of a checkout. Refuses another owner's repository of the same name, which the
    /// disk of another session may hold: work would reach the wrong one.
    async fn check_origin(&self, folder: &str, remote: &str) -> Result<Option<String>, String> {
        let origin = self.last_line(folder, &["remote", "get-url", "origin"]).await;
        match &origin {
            Some(origin) if origin != remote && is_at_door(origin) && is_at_door(remote) => {
                Err(format!("{folder} is a checkout of {origin}, not of {remote}"))
            }
            _ => Ok(origin),
        }
    }

    async fn set_origin(&self, folder: &str, remote: &str) -> Result<(), String> {
        let verb = match self.check_origin(folder, remote).await? {
            Some(origin) if origin == remote => return Ok(()),
            Some(_) => "set-url",
            // A repository created inside has no remote yet.
            None => "add",
        };
        self.run(folder, &["remote", verb, "origin", remote]).await.map(drop)
    }

    async fn check_out(
        &self,
        folder: &str,
        checkout: &Checkout,
        start: BootStart,
    ) -> Result<(), String> {
        let Some(base) = self.base(folder, checkout).await else {
            return self.check_out_unborn(folder, checkout).await;
        };
        let branch = match (&checkout.branch, start) {
            (Some(branch), BootStart::Fresh | BootStart::Image | BootStart::Restore) => {
                branch.as_str()
            }
            _ => base.as_str(),
        };
        // Forced: changes of a build in tracked files are discarded. The branch does not track the
        // base, so that a plain push goes to a branch of the same name.
        let origin = format!("refs/remotes/origin/{base}");
        let track = if branch == base { "--track" } else { "--no-track" };
        let check_out = ["checkout", "--quiet", "--force", track, "-B", branch, &origin];
        self.run(folder, &check_out).await.map(drop)
    }

    async fn base(&self, folder: &str, checkout: &Checkout) -> Option<String> {
        if let Some(base) = &checkout.base {
            return Some(base.to_string());
        }
        let base = self.default_branch(folder).await?;
        // An empty repository may name a default branch that does not exist.
        let commit = format!("refs/remotes/origin/{base}^{{commit}}");
        let exists = self.run(folder, &["rev-parse", "--verify", "--quiet", &commit]).await;
        exists.ok().map(|_| base)
    }

    // The remote's default branch, as of the last fetch.
    async fn default_branch(&self, folder: &str) -> Option<String> {
        let head = ["symbolic-ref", "--short", "refs/remotes/origin/HEAD"];
        Some(self.last_line(folder, &head).await?.strip_prefix("origin/")?.to_owned())
    }

    // The result of a successful command; warnings come before it.
    async fn last_line(&self, folder: &str, arguments: &[&str]) -> Option<String> {
        let output = self.run(folder, arguments).await.ok()?;
        output.trim_end().lines().last().map(str::to_owned)
    }

    // An empty repository: the first commit will be on the session's branch.
    async fn check_out_unborn(&self, folder: &str, checkout: &Checkout) -> Result<(), String> {
        let Some(branch) = &checkout.branch else { return Ok(()) };
        let reference = format!("refs/heads/{branch}");
        self.run(folder, &["symbolic-ref", "HEAD", &reference]).await.map(drop)
    }
}

fn has_repository(folder: &str) -> bool {
    Path::new(folder).join(".git").exists()
}

/// Whether a program of the repository may have changed the checkout before the session's first
/// turn.
fn may_set_up(folder: &Path) -> bool {
    [".harvest/setup.sh", CONFIG_FILE].iter().any(|file| folder.join(file).is_file())
}

/// The name that an author's commits have.
fn git_name(author: &Author) -> String {
    format!("{} (Harvest)", author.name)
}

fn is_at_door(remote: &str) -> bool {
    let path = remote.strip_prefix("http://").and_then(|rest| rest.strip_prefix(GIT_NAME));
    path.is_some_and(|path| path.starts_with('/'))
}

// Removes an interrupted clone, on another thread because it may be large.
async fn remove(folder: &str) -> std::io::Result<()> {
    let folder = folder.to_owned();
    match blocking_io(move || std::fs::remove_dir_all(folder)).await {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

// Parses `ref: refs/heads/main<tab>HEAD` of `ls-remote --symref`.
fn symref_branch(output: &str) -> Option<&str> {
    let line = output.lines().find_map(|line| line.strip_prefix("ref: refs/heads/"))?;
    let branch = line.strip_suffix("\tHEAD")?;
    (!branch.is_empty()).then_some(branch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_branch_is_parsed_from_symref() {
        assert_eq!(symref_branch("ref: refs/heads/trunk/x\tHEAD\n0b5a\tHEAD"), Some("trunk/x"));
        assert_eq!(symref_branch("0b5a\tHEAD"), None);
        assert_eq!(symref_branch(""), None);
    }
}
