//! Prepares the sandbox for its session: checkouts, hooks, agent. Each phase is reported as an
//! event; the first failure ends the boot. A boot runs once.

mod beside;
mod config;
mod failure;
mod hooks;
mod rebuild;
mod standby;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    future::Future,
    os::unix::fs::{MetadataExt, chown},
    path::Path,
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::{
    BranchName, CheckoutFolder, EventBody, RepositoryName, SessionId,
    api::RepositoryConfig,
    bridge::{AgentLaunch, Boot, BootStart, Checkout, Fault, Reply},
    door::GIT_NAME,
    event::{BootPhase, PhaseStatus, SyncedCheckout},
    launch::{APP_FOLDER, MEMORY_FILE},
};
use tokio::sync::watch;

use self::{failure::PhaseError, hooks::hook_path};
use crate::{
    agents::{self, AgentContext},
    app, capture, files,
    git::{Git, SyncResult, Synced, large_files::SKIP_DOWNLOAD, public, submodules::Sources},
    install::{self, InstallCommand, Projects},
    outbox::Outbox,
    sandbox::Sandbox,
    turn::Turns,
    users::{AGENT_USER, User},
};

const DEFAULT_HOOK_TIMEOUT: Duration = Duration::from_secs(30 * 60);

// Claude Code's state, which programs of the user can write, takes a hundred times its size in
// memory while it is changed. A longer one stays as it is.
const MAX_CLAUDE_STATE_BYTES: usize = 256 * 1024;

/// Git's system configuration, in the folder of the session.
const GIT_CONFIG: &str = "gitconfig";

/// Names the file of the memory to the stock memory server.
const MEMORY_VARIABLE: &str = "MEMORY_FILE_PATH";
/// Variables of `gh`. The token is a placeholder; the gateway has the credential.
const GH: [(&str, &str); 5] = [
    ("GH_HOST", GIT_NAME),
    ("GH_ENTERPRISE_TOKEN", "held-by-the-gateway"),
    ("GH_NO_UPDATE_NOTIFIER", "1"),
    ("GH_NO_EXTENSION_UPDATE_NOTIFIER", "1"),
    ("GH_TELEMETRY", "0"),
];
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The boot of this sandbox and its progress.
pub(crate) struct BootRunner {
    sandbox: Rc<Sandbox>,
    outbox: Rc<Outbox>,
    turns: Rc<Turns>,
    accepted: RefCell<Option<(SessionId, u64)>>,
    /// The boot order with everything that is known only when a session takes a standby sandbox;
    /// of any other sandbox the first one.
    assigned: watch::Sender<Option<Rc<Boot>>>,
    phase: Cell<Option<BootPhase>>,
    failed: Cell<bool>,
    /// Why the last phase failed.
    last_error: RefCell<String>,
    /// What the checkouts' files declare, as far as this boot has read them.
    configs: RefCell<BTreeMap<CheckoutFolder, RepositoryConfig>>,
}

impl BootRunner {
    pub(crate) fn new(sandbox: Rc<Sandbox>, outbox: Rc<Outbox>, turns: Rc<Turns>) -> Rc<Self> {
        Rc::new(Self {
            sandbox,
            outbox,
            turns,
            accepted: RefCell::default(),
            assigned: watch::Sender::default(),
            phase: Cell::default(),
            failed: Cell::default(),
            last_error: RefCell::default(),
            configs: RefCell::default(),
        })
    }

    /// The epoch of the accepted boot.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.accepted.borrow().as_ref().map(|(_, epoch)| *epoch)
    }

    /// The last phase that was reported.
    pub(crate) fn phase(&self) -> Option<BootPhase> {
        self.phase.get()
    }

    /// Whether that phase failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.get()
    }

    /// Starts the boot. A repeated request only gets a reply, except that the first one without
    /// `standby` assigns a standby sandbox to its session.
    pub(crate) fn accept(self: &Rc<Self>, boot: Boot) -> Result<Reply, Fault> {
        check(&boot)?;
        if let Some((session, epoch)) = &*self.accepted.borrow() {
            if (session, *epoch) == (&boot.session, boot.epoch) {
                self.assign(Rc::new(boot));
                return Ok(Reply::Done);
            }
            return Err(Fault::invalid(format!("this sandbox belongs to session {session}")));
        }
        self.accepted.replace(Some((boot.session.clone(), boot.epoch)));
        self.sandbox.session_env.replace(boot.env.clone());
        self.sandbox.shell_env.replace(boot.agent.as_ref().map(app::env).unwrap_or_default());
        self.lead_git_to_door(&boot.git_hosts);
        if boot.agent.is_some() {
            self.lead_gh_to_door();
        }
        let (name, value) = SKIP_DOWNLOAD;
        let mut env = self.sandbox.session_env.borrow_mut();
        env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        drop(env);
        if let Ok(user) = self.sandbox.user(Some(AGENT_USER)) {
            let path = self.sandbox.home(&user) + MEMORY_FILE.trim_start_matches('~');
            let mut env = self.sandbox.session_env.borrow_mut();
            env.entry(MEMORY_VARIABLE.to_owned()).or_insert(path);
        }
        let (runner, boot) = (Rc::clone(self), Rc::new(boot));
        self.assign(Rc::clone(&boot));
        tokio::task::spawn_local(async move {
            let _reported_as_event = runner.run(&boot).await;
        });
        Ok(Reply::Done)
    }

    /// Leads `gh` to the door, which needs no token; `gh` insists on one. Variables of the image
    /// and of the session win.
    fn lead_gh_to_door(&self) {
        let mut env = self.sandbox.session_env.borrow_mut();
        for (name, value) in GH {
            if !self.sandbox.launch.env.contains_key(name) {
                env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
            }
        }
    }

    /// Makes git and cargo fetch the public repositories of these hosts at the door.
    fn lead_git_to_door(&self, hosts: &[String]) {
        let Some(folder) = self.sandbox.app.as_ref().filter(|_| !hosts.is_empty()) else { return };
        if let Err(error) = app::write_file(folder, GIT_CONFIG, &public::git_config(hosts)) {
            let message = format!("cannot write {APP_FOLDER}: {error}");
            self.outbox.push(None, EventBody::Warning { message });
            return;
        }
        let mut env = self.sandbox.session_env.borrow_mut();
        let path = format!("{APP_FOLDER}/{GIT_CONFIG}");
        env.entry("GIT_CONFIG_SYSTEM".to_owned()).or_insert(path);
        // Cargo's own git does not read all of git's configuration.
        env.entry("CARGO_NET_GIT_FETCH_WITH_CLI".to_owned()).or_insert("true".to_owned());
    }

    async fn run(&self, boot: &Boot) -> Result<(), ()> {
        let user = self.sandbox.user(Some(AGENT_USER)).map_err(|_| ())?;
        let building = matches!(boot.start, BootStart::Build | BootStart::Rebuild);
        // Checkouts that need their setup hook; those on an existing disk have been set up.
        let mut fresh: Vec<&Checkout> = match boot.start {
            BootStart::Build | BootStart::Fresh => boot.repositories.iter().collect(),
            BootStart::Image | BootStart::Restore | BootStart::Rebuild => Vec::new(),
        };
        let timeout = boot.hook_millis.map_or(DEFAULT_HOOK_TIMEOUT, Duration::from_millis);
        let started: Vec<&Checkout> = boot.repositories.iter().filter(|_| !building).collect();
        self.run_phase(BootPhase::Starting, starting(&self.sandbox, &user)).await?;
        self.undo_interrupted_syncs(boot, &user).await;
        match boot.start {
            BootStart::Image | BootStart::Restore => self.apply_kept(boot, &user),
            BootStart::Rebuild => return self.rebuild(boot, &user, timeout).await,
            BootStart::Build | BootStart::Fresh => {}
        }
        if let Some(agent) = &boot.agent
            && self.can_stand_by(boot, &user)
            && self.can_sync_beside(boot, &user).await
        {
            return self.run_beside(boot, &user, agent, timeout).await;
        }
        if boot.standby {
            return self.refuse_standby();
        }
        self.run_phase(BootPhase::Sync, self.sync(boot, &user, &mut fresh)).await?;
        self.enforce_git_rules(boot, &user);
        if let Err(broken) = self.read_configs(&fresh, &user, building) {
            return self.run_phase(BootPhase::Install, async { Err(broken) }).await;
        }
        if !building {
            self.prepare_agents(boot, &user).await;
        }
        self.install(&fresh, &user, building, timeout).await?;
        self.run_hooks(BootPhase::Setup, &fresh, &user, ("setup.sh", timeout)).await?;
        self.run_hooks(BootPhase::Start, &started, &user, ("start.sh", timeout)).await?;
        match boot.agent.as_ref().filter(|_| !building) {
            Some(agent) => self.run_phase(BootPhase::Agent, self.start_agent(boot, agent)).await?,
            None => self.skip(BootPhase::Agent),
        }
        self.report(BootPhase::Ready, PhaseStatus::Done, Some(0), None);
        Ok(())
    }

    /// The disk may be that of a sandbox which died in the middle of a rebase.
    async fn undo_interrupted_syncs(&self, boot: &Boot, user: &User) {
        let git = Git { sandbox: &self.sandbox, user };
        for checkout in &boot.repositories {
            if let Some(message) = git.recover(checkout).await {
                self.outbox.push(None, EventBody::Warning { message });
            }
        }
    }

    /// A session works without the rules, so a failure is only a warning.
    fn enforce_git_rules(&self, boot: &Boot, user: &User) {
        let git = Git { sandbox: &self.sandbox, user };
        for checkout in &boot.repositories {
            if let Err(error) = git.enforce_rules(checkout) {
                let name = &checkout.name;
                let message = format!("git pull and git stash are not refused in {name}: {error}");
                self.outbox.push(None, EventBody::Warning { message });
            }
        }
    }

    /// Writes `/app` and what agents look for in their user's home. A session works without either,
    /// so a failure is only a warning.
    async fn prepare_agents(&self, boot: &Boot, user: &User) {
        let Some(agent) = &boot.agent else { return };
        let workspace = self.sandbox.workspace();
        let folder = |checkout: &Checkout| format!("{workspace}/{}", checkout.folder);
        let mut folders: Vec<String> = boot.repositories.iter().map(folder).collect();
        let (servers, mut warnings) = app::servers(&folders, user, &boot.mcp_servers);
        let (seed, unusable) = app::memory_seed(boot.repositories.first(), &workspace, user);
        warnings.extend(unusable);
        folders.push(workspace);
        if let Some(folder) = &self.sandbox.app {
            let (cwd, opencode) = (primary(&self.sandbox, boot), agents::opencode_config(agent));
            let (servers, folders) = (&servers, &folders[..]);
            let content = app::Content { cwd, servers, launch: agent, folders, opencode, seed };
            if let Err(error) = app::write(folder, content).and_then(|()| app::link_codex_config())
            {
                warnings.push(format!("cannot write {APP_FOLDER}: {error}"));
            }
        }
        if let Err(why) = self.write_user_files(&folders, &servers, user).await {
            warnings.push(format!("cannot write the agents' settings: {why}"));
        }
        for message in warnings {
            self.outbox.push(None, EventBody::Warning { message });
        }
    }

    /// The user writes the files: where a link of its home leads, its own rights decide.
    async fn write_user_files(
        &self,
        folders: &[String],
        servers: &app::Servers,
        user: &User,
    ) -> Result<(), String> {
        let home = self.sandbox.home(user);
        let mut argv: Vec<String> =
            ["sh", "-c", app::WRITE_MISSING, "sh"].map(str::to_owned).into();
        argv.extend(app::missing_files());
        let spec = self.sandbox.process_spec(argv, user, &home);
        let written = capture::run(&self.sandbox, spec, WRITE_TIMEOUT).await;
        written.map_err(|fault| fault.message)?.ok()?;
        let path = Path::new(&home).join(app::CLAUDE_STATE);
        let existing = files::read_small(&path, user).map_err(|error| error.to_string())?;
        if existing.as_ref().is_some_and(|text| text.len() > MAX_CLAUDE_STATE_BYTES) {
            return Ok(());
        }
        match app::claude_state(existing.as_deref(), folders, servers) {
            Some(text) => files::write_small(&path, user, &text).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    async fn start_agent(&self, boot: &Boot, agent: &AgentLaunch) -> PhaseResult {
        let context = AgentContext {
            sandbox: Rc::clone(&self.sandbox),
            outbox: Rc::clone(&self.outbox),
            launch: agent.clone(),
            cwd: primary(&self.sandbox, boot),
            last_warning: Rc::default(),
        };
        let started = self.turns.start(context).await.map(|()| true);
        started.map_err(|error| PhaseError::of_agent(error.permanent).with_tail(error.to_string()))
    }

    /// Installs the dependencies of each checkout. A failure ends only a build.
    async fn install(
        &self,
        checkouts: &[&Checkout],
        user: &User,
        building: bool,
        timeout: Duration,
    ) -> Result<(), ()> {
        let commands = |checkout: &&Checkout| {
            let projects = Projects::read(&self.sandbox, checkout, user);
            let packages = self.config(checkout).packages;
            (projects.commands(&packages, building), (*checkout).clone())
        };
        let wanted: Vec<_> = checkouts.iter().map(commands).collect();
        self.run_installs(wanted, user, building, timeout).await
    }

    async fn run_installs(
        &self,
        mut wanted: Vec<(Vec<InstallCommand>, Checkout)>,
        user: &User,
        building: bool,
        timeout: Duration,
    ) -> Result<(), ()> {
        wanted.retain(|(commands, _)| !commands.is_empty());
        if wanted.is_empty() {
            self.skip(BootPhase::Install);
            return Ok(());
        }
        let work = async {
            let root = self.sandbox.user(Some("root"));
            let root = root.map_err(|fault| PhaseError::transient(fault.message))?;
            for (commands, checkout) in wanted {
                let target = (&*self.sandbox, &*self.outbox);
                let ran = install::run(target, &checkout, commands, (user, &root), timeout).await;
                match ran {
                    Err(failed) if building => {
                        // The step's event has the output.
                        return Err(PhaseError::of_install(failed));
                    }
                    // The step's event is the warning.
                    Ok(()) | Err(_) => {}
                }
            }
            Ok(true)
        };
        self.run_phase(BootPhase::Install, work).await
    }

    fn skip(&self, phase: BootPhase) {
        self.report(phase, PhaseStatus::Skipped, Some(0), None);
    }

    async fn run_phase(
        &self,
        phase: BootPhase,
        work: impl Future<Output = PhaseResult>,
    ) -> Result<(), ()> {
        let started_at = Instant::now();
        self.report(phase, PhaseStatus::Started, None, None);
        let (status, error) = match work.await {
            Ok(true) => (PhaseStatus::Done, None),
            Ok(false) => (PhaseStatus::Skipped, None),
            Err(error) => (PhaseStatus::Failed, Some(error)),
        };
        self.report(phase, status, Some(millis_since(started_at)), error);
        if status == PhaseStatus::Failed { Err(()) } else { Ok(()) }
    }

    fn report(
        &self,
        phase: BootPhase,
        status: PhaseStatus,
        millis: Option<u64>,
        error: Option<PhaseError>,
    ) {
        self.phase.set(Some(phase));
        self.failed.set(status == PhaseStatus::Failed);
        let (failure, tail) = match error {
            Some(PhaseError { failure, tail }) => {
                let lines = [failure.message.as_str(), tail.as_deref().unwrap_or_default()];
                self.last_error.replace(lines.join("\n").trim_end().to_owned());
                (Some(failure), tail)
            }
            None => (None, None),
        };
        self.outbox.push(None, EventBody::BootPhase { phase, status, millis, tail, failure });
    }

    async fn sync<'a>(
        &self,
        boot: &'a Boot,
        user: &User,
        fresh: &mut Vec<&'a Checkout>,
    ) -> PhaseResult {
        let git = Git { sandbox: &self.sandbox, user };
        let configured = git.configure(boot.author.as_ref()).await;
        if boot.repositories.is_empty() {
            // Without repositories the image need not contain git.
            return Ok(false);
        }
        configured.map_err(|tail| PhaseError::transient("cannot configure git").with_tail(tail))?;
        let (began, mut checkouts) = (Instant::now(), Vec::new());
        for checkout in &boot.repositories {
            let synced = git.sync(checkout, boot.start).await;
            let SyncResult { what, before, after, kept: _ } = synced.map_err(|tail| {
                PhaseError::of_sync(&checkout.name, checkout.base.as_ref(), tail)
            })?;
            let repository = checkout.name.clone();
            checkouts.push(SyncedCheckout { repository, before, after, base: None });
            let warning = match what {
                Synced::UpToDate => None,
                Synced::Stale(message) => Some(message),
                Synced::Cloned => {
                    if !fresh.contains(&checkout) {
                        fresh.push(checkout);
                    }
                    let name = &checkout.name;
                    (boot.start == BootStart::Restore).then(|| {
                        format!("{name} was missing on the restored disk and has been cloned")
                    })
                }
            };
            if let Some(message) = warning {
                self.outbox.push(None, EventBody::Warning { message });
            }
        }
        let millis = millis_since(began);
        self.outbox.push(None, EventBody::Synced { checkouts, millis });
        self.complete_checkouts(boot, user).await;
        Ok(true)
    }

    /// Fetches submodules, and warns of what stays incomplete. A restored disk stays as it is.
    async fn complete_checkouts(&self, boot: &Boot, user: &User) {
        if boot.start == BootStart::Restore {
            return;
        }
        let git = Git { sandbox: &self.sandbox, user };
        let sources = Sources { checkouts: &boot.repositories, hosts: &boot.git_hosts };
        for checkout in &boot.repositories {
            let submodules = git.update_submodules(checkout, sources).await;
            for message in submodules.into_iter().chain(git.large_files(checkout).await) {
                self.outbox.push(None, EventBody::Warning { message });
            }
        }
    }
}

/// Why a checkout could not be fetched, in one text.
pub(crate) fn sync_error(name: &RepositoryName, base: Option<&BranchName>, tail: String) -> String {
    let PhaseError { failure, tail } = PhaseError::of_sync(name, base, tail);
    tail.map_or(failure.message.clone(), |tail| format!("{}: {tail}", failure.message))
}

fn millis_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

// Remotes become git arguments.
fn check(boot: &Boot) -> Result<(), Fault> {
    let is_option = |remote: &str| remote.is_empty() || remote.starts_with('-');
    match boot.repositories.iter().find(|checkout| is_option(&checkout.remote)) {
        Some(Checkout { remote, .. }) => {
            Err(Fault::invalid(format!("`{remote}` is not a valid remote")))
        }
        None => Ok(()),
    }
}

/// Whether there was anything to do.
type PhaseResult = Result<bool, PhaseError>;

// Gives the agent's home and the workspace to the agent's user, regardless of the image.
async fn starting(sandbox: &Sandbox, user: &User) -> PhaseResult {
    for folder in [sandbox.home(user), sandbox.workspace()] {
        own(Path::new(&folder), user)
            .map_err(|error| PhaseError::transient(format!("cannot create {folder}: {error}")))?;
    }
    Ok(true)
}

fn own(folder: &Path, user: &User) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    if std::fs::metadata(folder)?.uid() != user.uid {
        chown(folder, Some(user.uid), Some(user.gid))?;
    }
    Ok(())
}

fn primary(sandbox: &Sandbox, boot: &Boot) -> String {
    let workspace = sandbox.workspace();
    match boot.repositories.first() {
        Some(first) => format!("{workspace}/{}", first.folder),
        None => workspace,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(remote: &str) -> Boot {
        let checkout = Checkout {
            name: "acme/shop".parse().unwrap(),
            folder: "shop".parse().unwrap(),
            remote: remote.into(),
            url: None,
            base: None,
            branch: None,
            clone_missing: false,
        };
        Boot {
            session: SessionId::random(),
            epoch: 1,
            start: BootStart::Fresh,
            author: None,
            repositories: vec![checkout],
            agent: None,
            mcp_servers: Vec::new(),
            git_hosts: Vec::new(),
            env: Default::default(),
            hook_millis: None,
            standby: false,
        }
    }

    #[test]
    fn remote_cannot_be_an_option() {
        assert!(check(&boot("http://git.harvest.internal/acme/shop.git")).is_ok());
        for remote in ["", "--upload-pack=sh"] {
            assert!(check(&boot(remote)).is_err(), "{remote}");
        }
    }
}
