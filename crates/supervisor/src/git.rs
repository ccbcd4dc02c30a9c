//! Brings checkouts up to date, always as the agent's user and never asking anyone for anything.

use std::time::Duration;

use harvest_proto::{
    bridge::{Author, BootStart, Checkout},
    git::UNHINDERED,
};

use crate::{capture, supervisor::Supervisor, users::User};

// A first clone of a large repository over a parked gateway.
const GIT_LIMIT: Duration = Duration::from_secs(30 * 60);

const LOCAL_LIMIT: Duration = Duration::from_secs(60);

/// Variables that make git fail where it would ask a person.
pub(crate) const NEVER_ASK: [(&str, &str); 2] =
    [("GIT_TERMINAL_PROMPT", "0"), ("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")];

/// What holds for every git of this user. Set once per boot.
const SETTINGS: [(&str, &str); 5] = [
    ("safe.directory", "*"),
    ("push.autoSetupRemote", "true"),
    ("init.defaultBranch", "main"),
    ("user.name", "Harvest"),
    ("user.email", "harvest@localhost"),
];

/// What became of a checkout.
pub(crate) enum Synced {
    /// It was there, and is up to date.
    Brought,
    /// It was there and stays as it is, for this reason.
    Stale(String),
    /// It was not there.
    Cloned,
}

/// Git in one folder.
pub(crate) struct Git<'a> {
    pub(crate) supervisor: &'a Supervisor,
    pub(crate) user: &'a User,
}

impl Git<'_> {
    /// Runs git; its last lines either way.
    async fn run(
        &self,
        folder: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<String, String> {
        let argv =
            std::iter::once("git").chain(arguments.iter().copied()).map(str::to_owned).collect();
        let mut order = self.supervisor.order(argv, self.user, folder);
        order.env.extend(
            NEVER_ASK
                .iter()
                .chain(&UNHINDERED)
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
        );
        let captured =
            capture::run(self.supervisor, order, limit).await.map_err(|fault| fault.message)?;
        let line = format!("git {}", arguments.join(" "));
        captured.ok().map_err(|tail| format!("{line}\n{tail}"))
    }

    /// The user's global settings, the default identity among them.
    pub(crate) async fn settings(&self) -> Result<(), String> {
        // An image or a restored disk has them already: one process says so in the place of five.
        let there =
            self.run("/", &["config", "--global", "--list"], LOCAL_LIMIT).await.unwrap_or_default();
        let is_set = |(name, value): &(&str, &str)| {
            let wanted = format!("{}={value}", name.to_lowercase());
            there.lines().any(|line| line == wanted)
        };
        for (name, value) in SETTINGS.into_iter().filter(|setting| !is_set(setting)) {
            self.run("/", &["config", "--global", name, value], LOCAL_LIMIT).await?;
        }
        Ok(())
    }

    /// Whose name the next commits get. In the user's settings, because the variables of a running
    /// agent cannot change.
    pub(crate) async fn identity(&self, author: &Author) -> Result<(), String> {
        let name = format!("{} (Harvest)", author.name);
        self.run("/", &["config", "--global", "user.name", &name], LOCAL_LIMIT).await?;
        self.run("/", &["config", "--global", "user.email", &author.email], LOCAL_LIMIT).await?;
        Ok(())
    }

    /// Brings one checkout to where `start` wants it.
    pub(crate) async fn sync(
        &self,
        checkout: &Checkout,
        start: BootStart,
    ) -> Result<Synced, String> {
        let workspace = self.supervisor.workspace();
        let folder = format!("{workspace}/{}", checkout.name);
        let there = std::path::Path::new(&folder).join(".git").exists();
        if start == BootStart::Restore && (there || !checkout.clone_missing) {
            return Ok(match self.fetch(&folder, checkout).await {
                Ok(()) => Synced::Brought,
                Err(tail) => Synced::Stale(format!("cannot fetch {}: {tail}", checkout.name)),
            });
        }
        if !there {
            self.clone(&workspace, checkout, start).await?;
            return Ok(Synced::Cloned);
        }
        self.fetch(&folder, checkout).await?;
        self.check_out(&folder, checkout, start).await?;
        Ok(Synced::Brought)
    }

    // Under its name only once it is whole: what is cut off in the middle must not pass for a checkout on the
    // next boot.
    async fn clone(
        &self,
        workspace: &str,
        checkout: &Checkout,
        start: BootStart,
    ) -> Result<(), String> {
        let part = format!(".{}.part", checkout.name);
        let (at, folder) =
            (format!("{workspace}/{part}"), format!("{workspace}/{}", checkout.name));
        remove(&at).await.map_err(|error| format!("cannot remove {at}: {error}"))?;
        let arguments = ["clone", "--quiet", "--", &checkout.remote, &part];
        self.run(workspace, &arguments, GIT_LIMIT).await?;
        self.check_out(&at, checkout, start).await?;
        std::fs::rename(&at, &folder)
            .map_err(|error| format!("cannot put the clone at {folder}: {error}"))
    }

    async fn fetch(&self, folder: &str, checkout: &Checkout) -> Result<(), String> {
        let set =
            self.run(folder, &["remote", "set-url", "origin", &checkout.remote], LOCAL_LIMIT).await;
        if let Err(tail) = set {
            // One that was made inside has none yet.
            let added =
                self.run(folder, &["remote", "add", "origin", &checkout.remote], LOCAL_LIMIT).await;
            added.map_err(|_| tail)?;
        }
        let fetch = self.run(folder, &["fetch", "--quiet", "--prune", "origin"], GIT_LIMIT);
        if checkout.base.is_some() {
            return fetch.await.map(drop);
        }
        // The remote's default branch may have moved. Asked meanwhile: each question takes as long as a
        // fetch that brings nothing.
        let head = self.run(folder, &["ls-remote", "--symref", "origin", "HEAD"], GIT_LIMIT);
        let (fetched, head) = tokio::join!(fetch, head);
        fetched?;
        // Without an answer the old word stands.
        if let Some(branch) = head.ok().as_deref().and_then(default_branch) {
            let origin = format!("refs/remotes/origin/{branch}");
            self.run(folder, &["symbolic-ref", "refs/remotes/origin/HEAD", &origin], LOCAL_LIMIT)
                .await?;
        }
        Ok(())
    }

    async fn check_out(
        &self,
        folder: &str,
        checkout: &Checkout,
        start: BootStart,
    ) -> Result<(), String> {
        let Some(base) = self.base(folder, checkout).await else {
            return self.unborn(folder, checkout).await;
        };
        let branch = match (&checkout.branch, start) {
            (Some(branch), BootStart::Fresh | BootStart::Image | BootStart::Restore) => branch,
            _ => &base,
        };
        // By force: what a build left changed in tracked files is of no one's making. Without a
        // track of the base, so that a plain push goes to the branch's own name.
        let origin = format!("refs/remotes/origin/{base}");
        let track = if *branch == base { "--track" } else { "--no-track" };
        self.run(
            folder,
            &["checkout", "--quiet", "--force", track, "-B", branch, &origin],
            LOCAL_LIMIT,
        )
        .await?;
        Ok(())
    }

    async fn base(&self, folder: &str, checkout: &Checkout) -> Option<String> {
        if let Some(base) = &checkout.base {
            return Some(base.clone());
        }
        let head = self
            .run(folder, &["symbolic-ref", "--short", "refs/remotes/origin/HEAD"], LOCAL_LIMIT)
            .await;
        let base = head.ok()?.trim().strip_prefix("origin/")?.to_owned();
        // An empty repository may name a default branch that does not exist.
        let commit = format!("refs/remotes/origin/{base}^{{commit}}");
        let exists =
            self.run(folder, &["rev-parse", "--verify", "--quiet", &commit], LOCAL_LIMIT).await;
        exists.ok().map(|_| base)
    }

    // An empty repository: the first commit will be on the session's branch.
    async fn unborn(&self, folder: &str, checkout: &Checkout) -> Result<(), String> {
        let Some(branch) = &checkout.branch else { return Ok(()) };
        let reference = format!("refs/heads/{branch}");
        self.run(folder, &["symbolic-ref", "HEAD", &reference], LOCAL_LIMIT).await?;
        Ok(())
    }
}

// What an earlier clone got done. It may be large, and others wait for this thread.
async fn remove(folder: &str) -> std::io::Result<()> {
    let folder = folder.to_owned();
    let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(folder)).await;
    match removed.unwrap_or_else(|_| Err(std::io::ErrorKind::Interrupted.into())) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

// `ref: refs/heads/main<tab>HEAD`, as `ls-remote --symref` says it.
fn default_branch(said: &str) -> Option<&str> {
    let line = said.lines().find_map(|line| line.strip_prefix("ref: refs/heads/"))?;
    let branch = line.strip_suffix("\tHEAD")?;
    (!branch.is_empty()).then_some(branch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_branch_is_what_the_remotes_head_refers_to() {
        assert_eq!(default_branch("ref: refs/heads/trunk/x\tHEAD\n0b5a\tHEAD"), Some("trunk/x"));
        assert_eq!(default_branch("0b5a\tHEAD"), None);
        assert_eq!(default_branch(""), None);
    }
}
