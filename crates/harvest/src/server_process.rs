//! The server process: builds store, vault, engine, provider, forge, gateway, sessions and HTTP
//! server, and shuts them down in order. The only module that knows all of them.

use std::{
    fs::{self, File},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail};
use harvest_engine::{Engine, Thresholds};
use harvest_forge::{Forge, Forges, LocalForge};
use harvest_gateway::{
    Authority, Gateway, GatewayConfig, HostProxies, PrivateHosts, ScriptRule, host_registries,
    registries_in, trusted_names, vault::Vault,
};
use harvest_proto::{
    Secret,
    api::{AllowedName, Role, SandboxLimits},
    bridge::Author,
    launch::NetworkSettings,
};
use harvest_providers::{Local, debian_mirrors, host_settings};
use harvest_server::{Limits as ServerLimits, ServerState};
use harvest_session::{
    Accounts, Dependencies, PoolConfig, ServerParts, Sessions, StoreLedger, error_chain,
};
use harvest_store::Store;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use crate::{
    atomic_write::{remove_unfinished, write_private},
    client::{Client, ServerFile},
    config::{Config, prices, process_env},
    database, identity, known_secrets, log,
    printer::Advice,
    recipes, supervisor,
};

/// Where the store has the certificate authority.
const AUTHORITY: &str = "certificate_authority";

/// The name of the token that `harvest up` creates.
const FIRST_TOKEN: &str = "first";

// A suspension freezes the turn, or stops the sandbox and saves its disk.
const SUSPEND_TIMEOUT: Duration = Duration::from_secs(90);

// Time for in-flight requests to complete during shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

// Attempts, 10 ms apart, to lock a home: `home_has_server` holds the lock for a moment.
const LOCK_ATTEMPTS: u32 = 20;

// Time for a zygote to exit on a busy machine.
const ZYGOTE_EXIT_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct ServerOptions {
    pub(crate) listen: SocketAddr,
    pub(crate) hosts: Vec<String>,
    /// The scripted model's responses to prompts that contain no script.
    pub(crate) script: Vec<ScriptRule>,
    /// Whether sandboxes may reach the registries of this host's package clients. Finding them
    /// takes seconds.
    pub(crate) host_registries: bool,
}

/// What happens to running sandboxes when the server stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShutdownMode {
    /// Sandboxes keep running; the next server adopts them.
    LeaveRunning,
    /// Turns in progress are frozen for the next server. Other sessions are paused: their disks are
    /// saved and their sandboxes stopped.
    SuspendSessions,
}

/// A server that accepts requests.
pub(crate) struct RunningServer {
    config: Config,
    url: String,
    token: Secret<String>,
    token_is_new: bool,
    engine: Engine,
    forge: LocalForge,
    sessions: Sessions,
    store: Store,
    shutdown: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
    // Held while this process owns the home.
    _home_lock: File,
}

impl RunningServer {
    /// Starts all components; returns once the server accepts requests.
    pub(crate) async fn start(config: &Config, options: ServerOptions) -> Result<Self> {
        raise_file_limit();
        let home = prepare_home(&config.home)?;
        let home_lock = lock_home(&home)?;
        let config = config.at(&home);
        let engine = open_engine(&config)?;
        let listener = listen(options.listen).await?;
        let address = listener.local_addr()?;
        let url = format!("http://{address}");
        let store = database::open(&config).await?;
        let forge = LocalForge::open(home.join("forge"), &format!("{url}/forge"))
            .context("cannot open the local forge")?;
        let parts = open_parts(&config, &options, engine.clone(), &store, &forge).await?;
        let sessions = parts.sessions.clone();
        let (token, token_is_new) = ensure_token(&config, &parts.accounts).await?;
        let shutdown = CancellationToken::new();
        let state =
            ServerState::new(parts, &options.hosts, shutdown.clone()).with_forge(forge.router());
        let state = state.with_limits(ServerLimits {
            requests_per_second: config.rate_limit,
            connections: usize::try_from(config.max_connections.max(1)).unwrap_or(usize::MAX),
        });
        let task = tokio::spawn(harvest_server::serve(listener, state));
        let record = serde_json::to_vec(&ServerFile { url: url.clone(), pid: std::process::id() })?;
        write_private(&config.server_file(), &record)?;
        Ok(Self {
            config,
            url,
            token,
            token_is_new,
            engine,
            forge,
            sessions,
            store,
            shutdown,
            task,
            _home_lock: home_lock,
        })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn home(&self) -> &Path {
        &self.config.home
    }

    pub(crate) fn forge(&self) -> &LocalForge {
        &self.forge
    }

    /// The first token, if this start created it.
    pub(crate) fn new_token(&self) -> Option<&str> {
        self.token_is_new.then(|| self.token.expose().as_str())
    }

    pub(crate) fn client(&self) -> Result<Client> {
        Client::new(&self.url, self.token.clone())
    }

    /// Stops accepting requests, suspends sessions or leaves sandboxes running, and releases the
    /// home.
    pub(crate) async fn shut_down(self, mode: ShutdownMode) -> Result<()> {
        // First, so that no client finds a server that is shutting down.
        let _ = fs::remove_file(self.config.server_file());
        self.sessions.stop_admitting();
        // Before the HTTP server stops, so that clients that follow a session see the pause.
        if mode == ShutdownMode::SuspendSessions {
            self.sessions.suspend_all(SUSPEND_TIMEOUT).await;
        }
        self.shutdown.cancel();
        let abort = self.task.abort_handle();
        match tokio::time::timeout(DRAIN_TIMEOUT, self.task).await {
            Ok(served) => {
                served.context("the server task failed")?.context("the server's socket failed")?
            }
            // A client that does not read its response must not block the shutdown.
            Err(_) => abort.abort(),
        }
        self.sessions.close().await;
        self.store.close().await;
        let engine = self.engine;
        tokio::task::spawn_blocking(move || engine.stop_if_idle())
            .await?
            .context("cannot stop the process that runs sandboxes")
    }
}

/// Raises the soft limit of open files (usually 1024): every connection, door and bridge needs one.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
}

/// Returns on SIGINT or SIGTERM. A second SIGINT exits immediately.
pub(crate) async fn shutdown_signal() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    tokio::select! {
        _ = terminate.recv() => {}
        received = tokio::signal::ctrl_c() => received.context("cannot listen for signals")?,
    }
    tokio::spawn(async {
        if tokio::signal::ctrl_c().await.is_ok() {
            #[expect(clippy::disallowed_methods, reason = "the second ctrl-c skips the shutdown")]
            std::process::exit(130);
        }
    });
    Ok(())
}

/// Opens the engine of this home; needs no server.
pub(crate) fn open_engine(config: &Config) -> Result<Engine> {
    let home = prepare_home(&config.home)?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    Engine::open(harvest_engine::Config {
        supervisor: supervisor::install(&home)?,
        home,
        cache: config.cache.clone(),
        zygote: vec![program.into(), "zygote".into()],
        driver: config.store_driver,
        thresholds: Thresholds::default(),
    })
    .context("cannot set up sandboxes")
}

/// The sandboxes, images and volumes of this home; needs no server. Sandboxes trust the certificate
/// (PEM), if it is not empty.
pub(crate) fn local_provider(engine: Engine, config: &Config, certificate: String) -> Arc<Local> {
    let local = Local::new(engine, recipes::all(&config.home));
    let local = local.with_default_limits(config.sandbox_limits);
    let settings = move || {
        let mut settings = host_settings();
        settings.certificates.push_str(&certificate);
        settings
    };
    let local = local.with_state_bytes(config.state_bytes).with_settings(Box::new(settings));
    Arc::new(local.with_debian_mirrors(config.home.join("debian")))
}

/// Removes a home without a running server, including its sandboxes.
pub(crate) fn remove_home(config: &Config) -> Result<()> {
    remove_all_sandboxes(config)?;
    // The exiting zygote may still write to the folder while it is being removed.
    let deadline = Instant::now() + ZYGOTE_EXIT_TIMEOUT;
    loop {
        match fs::remove_dir_all(&config.home) {
            Err(error)
                if error.kind() == std::io::ErrorKind::DirectoryNotEmpty
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return Ok(result?),
        }
    }
}

/// Removes every sandbox of a home without a running server and stops the zygote. Returns the
/// number of sandboxes.
pub(crate) fn remove_all_sandboxes(config: &Config) -> Result<usize> {
    let _home_lock = lock_home(&prepare_home(&config.home)?)?;
    let engine = open_engine(config)?;
    let sandboxes = engine.list().context("cannot list the sandboxes")?;
    for sandbox in &sandboxes {
        engine.remove(sandbox).with_context(|| format!("cannot remove {sandbox}"))?;
    }
    engine.stop_if_idle().context("cannot stop the process that runs sandboxes")?;
    Ok(sandboxes.len())
}

/// The certificate authority of this home. One that was sealed with another key is replaced:
/// sandboxes trust the new one from their next start on.
async fn open_authority(store: &Store, vault: &Vault) -> Result<Authority> {
    let context = "cannot open the certificate authority";
    if let Some(stored) = store.meta_get(AUTHORITY).await.context(context)? {
        match Authority::open(vault, &stored) {
            Ok(authority) => return Ok(authority),
            Err(error) => tracing::warn!(error = error_chain(&error), "{context}; making another"),
        }
    }
    let stored = Authority::create(vault).context(context)?;
    store.meta_set(AUTHORITY, &stored).await.context(context)?;
    Authority::open(vault, &stored).context(context)
}

fn gateway_config(config: &Config, script_rules: Vec<ScriptRule>) -> GatewayConfig {
    let (upstreams, mcp_servers) = (config.upstreams.clone(), config.mcp_servers.clone());
    let private_hosts = PrivateHosts::new(config.private_hosts.clone());
    GatewayConfig {
        script_rules,
        upstreams,
        mcp_servers,
        private_hosts,
        git_hosts: config.git_hosts.clone(),
        proxies: HostProxies::from_variables(process_env),
        ..GatewayConfig::default()
    }
}

async fn open_parts(
    config: &Config,
    options: &ServerOptions,
    engine: Engine,
    store: &Store,
    forge: &LocalForge,
) -> Result<ServerParts> {
    let vault =
        Vault::open(&config.home.join("vault.key")).context("cannot open the stored secrets")?;
    let vault = Arc::new(vault.with_observer(log::redact));
    let lease = store
        .server_lease(SystemTime::now().into())
        .await
        .context("cannot take over the database")?;
    let environment = known_secrets::in_environment(config);
    environment.values().chain(config.github.secrets()).for_each(log::redact);
    let forge: Arc<dyn Forge> = Arc::new(Forges::new(forge.clone(), config.github.client()?));
    let books = StoreLedger::new(store.clone(), lease, Arc::clone(&vault), config.budget_tokens)
        .with_environment(environment)
        .with_forge(Arc::clone(&forge))
        .with_prices(prices::load(config.prices.as_deref())?)
        .with_history(config.retention.history);
    let authority = Arc::new(open_authority(store, &vault).await?);
    let certificate = authority.pem().to_owned();
    let gateway_config = GatewayConfig {
        authority: Some(authority),
        ..gateway_config(config, options.script.clone())
    };
    let gateway = Gateway::new(Arc::new(books), gateway_config);
    let dependencies = Dependencies {
        store: store.clone(),
        lease,
        provider: local_provider(engine, config, certificate),
        doors: Arc::new(gateway),
        forge,
        vault,
        config: harvest_session::Config {
            timeouts: config.clocks.clone(),
            limits: config.limits,
            retention: config.retention.clone(),
            resources: SandboxLimits::default(),
            image: config.image.clone(),
            agents: config.agents.clone(),
            trusted: Vec::new(),
            private_hosts: PrivateHosts::new(config.private_hosts.clone()),
            budget_tokens: config.budget_tokens,
            schedule: config.schedule,
            pr_mode: config.pr_mode,
            pool: PoolConfig {
                per_repository: config.pool as usize,
                program: supervisor::install(&config.home)?.display().to_string(),
                ..PoolConfig::default()
            },
            artifacts: Some(config.home.join("artifacts")),
        },
    };
    ServerParts::open_with_trusted(dependencies, trusted(config, options.host_registries))
        .await
        .context("cannot recover the sessions")
}

/// The names `trusted` sandboxes may reach. Querying the host's package tools takes seconds; only
/// sessions that need the list wait for it.
fn trusted(
    config: &Config,
    from_host: bool,
) -> impl Future<Output = Vec<AllowedName>> + Send + 'static {
    let configured = config.trusted.clone();
    async move {
        let host = match from_host {
            true => tokio::task::spawn_blocking(all_registries).await.unwrap_or_default(),
            false => Vec::new(),
        };
        trusted_names(host, &configured)
    }
}

/// The registries of this host, and the mirrors that sandboxes are told.
fn all_registries() -> Vec<AllowedName> {
    host_registries().into_iter().chain(told_registries()).collect()
}

/// The registries of this host that sandboxes are told.
pub(crate) fn told_registries() -> Vec<AllowedName> {
    let NetworkSettings { env, files, .. } = host_settings();
    let tool = |name: &str| name.trim_end_matches("rc").trim_end_matches(".toml").to_owned();
    let files = files.iter().map(|(name, text)| (tool(name), text));
    let pip = env.values().map(|text| ("pip".to_owned(), text));
    let told = files.chain(pip).flat_map(|(tool, text)| registries_in(&tool, text));
    told.chain(registries_in("apt", &debian_mirrors().join(" "))).collect()
}

/// The token in the home's file, or a new first token. The flag tells whether it is new.
async fn ensure_token(config: &Config, accounts: &Accounts) -> Result<(Secret<String>, bool)> {
    let path = config.token_file();
    if let Ok(text) = fs::read_to_string(&path) {
        let token = text.trim().to_owned();
        if let Some(known) = accounts.token_check(&token).await? {
            // Created before git knew the user.
            if let Some(user) = identity::configured(config).filter(|_| !known.user.is_known()) {
                accounts.token_set_user(&known.name, &user).await?;
            }
            return Ok((Secret::new(token), false));
        }
    }
    let user = identity::configured(config).unwrap_or(Author::unknown());
    // An existing token of this name whose file is lost is replaced.
    let token = accounts.token_replace(FIRST_TOKEN, user, Role::Admin).await;
    let token = token.context("cannot create the first token")?;
    write_private(&path, token.expose().as_bytes())?;
    Ok((token, true))
}

/// A random token of 160 bits.
pub(crate) fn random_token() -> String {
    use ring::rand::SecureRandom;
    let mut bytes = [0u8; 20];
    let random = ring::rand::SystemRandom::new();
    random.fill(&mut bytes).expect("every supported Linux has a random source");
    bytes.iter().fold(String::from("hv_"), |token, byte| token + &format!("{byte:02x}"))
}

pub(crate) fn prepare_home(home: &Path) -> Result<PathBuf> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(home);
    made.map_err(|error| unusable(home, &error, "cannot be created"))?;
    // Checked up front for a clear message instead of the error of the first write.
    let writable = rustix::fs::access(home, rustix::fs::Access::WRITE_OK);
    writable.map_err(|error| unusable(home, &error.into(), "cannot be written to"))?;
    home.canonicalize().with_context(|| format!("cannot find {}", home.display()))
}

fn unusable(home: &Path, error: &std::io::Error, problem: &str) -> anyhow::Error {
    let why = match error.kind() {
        std::io::ErrorKind::ReadOnlyFilesystem => "is on a read-only file system".to_owned(),
        _ => format!("{problem}: {error}"),
    };
    let hint = "name a writable folder with --home or HARVEST_HOME";
    Advice::new(format!("the home {} {why}", home.display()), hint).into()
}

/// Whether a server runs from this home.
pub(crate) fn home_has_server(home: &Path) -> bool {
    // A shared lock, so that concurrent checks do not take each other for a server.
    File::open(home.join("server.lock")).is_ok_and(|file| file.try_lock_shared().is_err())
}

/// Locks the home: two servers would drive the same sessions.
fn lock_home(home: &Path) -> Result<File> {
    let path = home.join("server.lock");
    let file =
        fs::OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let locked = (0..LOCK_ATTEMPTS).any(|attempt| {
        std::thread::sleep(if attempt == 0 { Duration::ZERO } else { Duration::from_millis(10) });
        file.try_lock().is_ok()
    });
    if !locked {
        let message = format!("another server runs from {}", home.display());
        bail!(Advice::new(message, "stop it with `harvest down`, or use another home with --home"));
    }
    remove_unfinished(home);
    Ok(file)
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|error| {
        let hint = "choose another port with `--listen 127.0.0.1:PORT`";
        anyhow::Error::new(error).context(Advice::new(format!("cannot listen on {address}"), hint))
    })?;
    Ok(listener)
}
