//! A boot that starts the agent while the checkouts are fetched, see
//! `docs/decisions/0040-reads-during-the-sync.md`.

use std::{path::PathBuf, time::Duration};

use harvest_proto::{
    EventBody,
    bridge::{AgentLaunch, Boot, BootStart, Checkout},
    event::{BootPhase, PhaseStatus, SyncedCheckout},
};

use super::{BootRunner, failure::PhaseError, hook_path, millis_since, primary};
use crate::{
    git::{Git, Synced},
    install,
    users::User,
};

/// Files that agents read when they start.
const RULES: [&str; 2] = ["AGENTS.md", "CLAUDE.md"];

/// Files of a checkout that `/app` is made of.
const APP_SOURCES: [&str; 3] = [".mcp.json", ".harvest/mcp.json", ".harvest/memory-seed.json"];

/// A checkout after its fetch.
struct Fetched<'a> {
    checkout: &'a Checkout,
    before: Option<String>,
    after: Option<String>,
}

impl Fetched<'_> {
    /// The commits, if the checkout has moved.
    fn moved(&self) -> Option<(&str, &str)> {
        let commits = (self.before.as_deref()?, self.after.as_deref()?);
        (commits.0 != commits.1).then_some(commits)
    }
}

impl BootRunner {
    /// Whether the agent can start before the fetch; puts the checkouts on the session's branch.
    pub(super) async fn can_sync_beside(&self, boot: &Boot, user: &User) -> bool {
        let restored_or_built = matches!(boot.start, BootStart::Image | BootStart::Restore);
        // Servers of the agent may need what the hook starts.
        let has_hook =
            |checkout: &Checkout| hook_path(&self.sandbox, checkout, "start.sh").is_file();
        if !restored_or_built
            || boot.repositories.is_empty()
            || boot.repositories.iter().any(has_hook)
        {
            return false;
        }
        let git = Git { sandbox: &self.sandbox, user };
        if git.configure(boot.author.as_ref()).await.is_err() {
            return false;
        }
        for checkout in &boot.repositories {
            if !git.begin_locally(checkout, boot.start).await {
                return false;
            }
        }
        true
    }

    /// Starts the agent, and syncs the checkouts beside it.
    pub(super) async fn run_beside(
        &self,
        boot: &Boot,
        user: &User,
        agent: &AgentLaunch,
        timeout: Duration,
    ) -> Result<(), ()> {
        let _keeps_the_sandbox_busy = self.sandbox.detached.register();
        self.enforce_git_rules(boot, user);
        self.sandbox.sync.begin();
        for name in RULES {
            self.sandbox
                .sync
                .remember_file(&PathBuf::from(primary(&self.sandbox, boot)).join(name));
        }
        let start = async {
            self.prepare_agents(boot, user).await;
            self.run_phase(BootPhase::Agent, self.start_agent(boot, agent)).await?;
            self.be_assigned(boot, user).await;
            self.report(BootPhase::Ready, PhaseStatus::Done, Some(0), None);
            Ok(())
        };
        let sync = async {
            let boot = &*self.assigned().await;
            match self.sync_beside(boot, user, timeout).await {
                Ok(moved) => self.sandbox.sync.end(&moved),
                Err(()) => {
                    let reason = self.last_error.take();
                    self.turns.sync_failed(reason.clone());
                    self.sandbox.sync.fail(reason);
                }
            }
            Ok(())
        };
        // Without an agent the sandbox is discarded, and the fetch with it.
        tokio::try_join!(start, sync).map(|_| ())
    }

    // Returns a description of each checkout that has moved.
    async fn sync_beside(
        &self,
        boot: &Boot,
        user: &User,
        timeout: Duration,
    ) -> Result<Vec<String>, ()> {
        let began = std::time::Instant::now();
        let mut fetched = Vec::new();
        let fetch = self.fetch_beside(boot, user, timeout, &mut fetched);
        self.run_phase(BootPhase::Sync, fetch).await?;
        let millis = millis_since(began);
        self.follow_moved(boot, user, timeout, &fetched).await?;
        let git = Git { sandbox: &self.sandbox, user };
        let (mut checkouts, mut moved) = (Vec::new(), Vec::new());
        for one in &fetched {
            if let Some((before, after)) = one.moved() {
                let (before, after) = (short(before), short(after));
                moved.push(format!("{} from {before} to {after}", one.checkout.name));
            }
            let base = match &one.after {
                Some(after) if boot.start == BootStart::Image => {
                    Some(git.base_of_changes(one.checkout, after).await)
                }
                _ => None,
            };
            checkouts.push(SyncedCheckout {
                repository: one.checkout.name.clone(),
                before: one.before.clone(),
                after: one.after.clone(),
                base,
            });
        }
        self.outbox.push(None, EventBody::Synced { checkouts, millis });
        Ok(moved)
    }

    async fn fetch_beside<'a>(
        &self,
        boot: &'a Boot,
        user: &User,
        timeout: Duration,
        fetched: &mut Vec<Fetched<'a>>,
    ) -> super::PhaseResult {
        let git = Git { sandbox: &self.sandbox, user };
        for checkout in &boot.repositories {
            let error = |tail| PhaseError::of_sync(&checkout.name, checkout.base.as_ref(), tail);
            let is_permanent = |tail: &str| error(tail.to_owned()).failure.permanent;
            let synced = git.sync_beside(checkout, boot.start, timeout, is_permanent).await;
            let synced = synced.map_err(error)?;
            let stale = match synced.what {
                Synced::Stale(message) => Some(message),
                Synced::UpToDate | Synced::Cloned => None,
            };
            for message in stale.into_iter().chain(synced.kept) {
                self.outbox.push(None, EventBody::Warning { message });
            }
            let (before, after) = (synced.before, synced.after);
            fetched.push(Fetched { checkout, before, after });
        }
        self.complete_checkouts(boot, user).await;
        Ok(true)
    }

    /// Installs and sets up again what the new commits change.
    async fn follow_moved(
        &self,
        boot: &Boot,
        user: &User,
        timeout: Duration,
        fetched: &[Fetched<'_>],
    ) -> Result<(), ()> {
        let git = Git { sandbox: &self.sandbox, user };
        let patterns = install::path_patterns();
        let manifests: Vec<&str> = patterns.iter().map(String::as_str).collect();
        let (mut installs, mut setups, mut sources) = (Vec::new(), Vec::new(), false);
        for one in fetched {
            let Some(commits) = one.moved() else { continue };
            let checkout = one.checkout;
            if git.differs(checkout, commits, &manifests).await {
                installs.push(checkout);
            }
            if git.differs(checkout, commits, &[".harvest/setup.sh"]).await {
                setups.push(checkout);
            }
            sources |= git.differs(checkout, commits, &APP_SOURCES).await;
        }
        if sources {
            self.prepare_agents(boot, user).await;
            let message = "the repository's MCP servers have changed: the agent uses them after its \
                           next start";
            self.outbox.push(None, EventBody::Warning { message: message.to_owned() });
        }
        self.install(&installs, user, false, timeout).await?;
        self.run_hooks(BootPhase::Setup, &setups, user, ("setup.sh", timeout)).await?;
        let all: Vec<&Checkout> = fetched.iter().map(|one| one.checkout).collect();
        self.run_hooks(BootPhase::Start, &all, user, ("start.sh", timeout)).await
    }
}

fn short(commit: &str) -> &str {
    commit.get(..7).unwrap_or(commit)
}
