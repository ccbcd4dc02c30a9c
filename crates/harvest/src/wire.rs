//! Puts the parts together: store, vault, engine, provider, forge, gateway, sessions, server. The only
//! place that knows them all; it decides nothing else.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail};
use harvest_engine::{Engine, Limits, Thresholds};
use harvest_gateway::{Gateway, GatewayConfig, ScriptRule, vault::Vault};
use harvest_github::Forge;
use harvest_proto::{Secret, api::Role, bridge::Author};
use harvest_providers::{Local, LocalMachines};
use harvest_server::{Limits as ServerLimits, ServerState};
use harvest_session::{Books, Parts, Sessions, machines::Commands};
use harvest_store::Store;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use crate::{
    client::{Client, ServerFile},
    config::{Config, process_env},
    database, log,
    printer::Advice,
    recipes, supervisor,
};

/// The name of the token that `harvest up` makes by itself.
const FIRST_TOKEN: &str = "first";

/// A pause stops a turn, proves it dead and keeps the disk; longer than a minute and a half it has failed.
const PAUSE_PATIENCE: Duration = Duration::from_secs(90);

/// How long answers under way may take once the server ends.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

// How often to look, 10 ms apart, whether a home that is taken is taken for longer than a look.
const LOOKS: u32 = 20;

// What a zygote takes to go, on a busy machine.
const LAST_LINES: Duration = Duration::from_secs(10);

/// How a server is to be started.
pub(crate) struct Options {
    pub(crate) listen: SocketAddr,
    pub(crate) hosts: Vec<String>,
    /// What the scripted model plays for prompts without a script of their own.
    pub(crate) script: Vec<ScriptRule>,
}

/// What becomes of sandboxes when the server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// They go on; the next server adopts them.
    Keep,
    /// Their sessions are kept on disk.
    Pause,
}

/// A server that answers.
pub(crate) struct Serving {
    home: PathBuf,
    url: String,
    token: Secret<String>,
    token_is_new: bool,
    engine: Engine,
    forge: Forge,
    sessions: Sessions,
    machines: Commands,
    store: Store,
    shutdown: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
    server_file: PathBuf,
    // Held for as long as the home is ours.
    _lock: File,
}

impl Serving {
    /// Starts everything for this configuration's home; answers when requests are answered.
    pub(crate) async fn start(config: &Config, options: Options) -> Result<Self> {
        allow_many_files();
        let home = prepare_home(&config.home)?;
        let lock = take(&home)?;
        let config = config.at(&home);
        let engine = open_engine(&config)?;
        let listener = listen(options.listen).await?;
        let address = listener.local_addr()?;
        let url = format!("http://{address}");
        let store = database::open(&config).await?;
        let forge = Forge::open(home.join("forge"), &format!("{url}/forge"))
            .context("cannot open the forge")?;
        let sessions =
            open_sessions(&config, options.script, engine.clone(), &store, &forge).await?;
        let (token, token_is_new) = ensure_token(&config, &sessions).await?;
        let shutdown = CancellationToken::new();
        let machines = Commands::new(machines(engine.clone(), &home)).counted(&sessions);
        let state = ServerState::new(sessions.clone(), &options.hosts, shutdown.clone())
            .with_forge(forge.router())
            .with_machines(machines.clone());
        let state = state.with_limits(ServerLimits {
            requests_per_second: config.rate_limit,
            connections: usize::try_from(config.max_connections.max(1)).unwrap_or(usize::MAX),
        });
        let task = tokio::spawn(harvest_server::serve(listener, state));
        let server_file = config.server_file();
        let record = serde_json::to_vec(&ServerFile { url: url.clone(), pid: std::process::id() })?;
        write_private(&server_file, &record)?;
        Ok(Self {
            home,
            url,
            token,
            token_is_new,
            engine,
            forge,
            sessions,
            machines,
            store,
            shutdown,
            task,
            server_file,
            _lock: lock,
        })
    }

    /// Where it answers.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Where its state is.
    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    pub(crate) fn forge(&self) -> &Forge {
        &self.forge
    }

    /// The first token, when it was made just now.
    pub(crate) fn new_token(&self) -> Option<&str> {
        self.token_is_new.then(|| self.token.expose().as_str())
    }

    pub(crate) fn client(&self) -> Result<Client> {
        Client::new(&self.url, self.token.clone())
    }

    /// Takes no more requests, ends or leaves sandboxes, and lets go of the home.
    pub(crate) async fn end(self, ending: Ending) -> Result<()> {
        // First, so that no client finds a server that no longer answers.
        let _ = fs::remove_file(&self.server_file);
        self.sessions.give_no_more_places();
        // While requests are answered still: who follows a session sees what becomes of it.
        if ending == Ending::Pause {
            self.sessions.suspend_all(PAUSE_PATIENCE).await;
        }
        self.shutdown.cancel();
        let abort = self.task.abort_handle();
        match tokio::time::timeout(ANSWER_PATIENCE, self.task).await {
            Ok(served) => {
                served.context("the server broke off")?.context("the server's socket broke")?
            }
            // A client that does not read its answer must not keep the server from ending.
            Err(_) => abort.abort(),
        }
        // What does not go in time goes with this process.
        let _ = tokio::time::timeout(ANSWER_PATIENCE, self.machines.settle()).await;
        self.sessions.close().await;
        self.store.close().await;
        let engine = self.engine;
        tokio::task::spawn_blocking(move || engine.rest())
            .await?
            .context("cannot let the zygote go")
    }
}

/// A connection, a door and a bridge are a descriptor each, and the usual first limit is 1024.
fn allow_many_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
}

/// Returns when the process is asked to end: ctrl-c or SIGTERM. A second ctrl-c ends it at once.
pub(crate) async fn asked_to_end() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    tokio::select! {
        _ = terminate.recv() => {}
        ended = tokio::signal::ctrl_c() => ended.context("cannot listen for signals")?,
    }
    tokio::spawn(async {
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(130);
        }
    });
    Ok(())
}

/// The engine of this configuration; needs no server.
pub(crate) fn open_engine(config: &Config) -> Result<Engine> {
    let home = prepare_home(&config.home)?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    Engine::open(harvest_engine::Config {
        supervisor: supervisor::place(&home)?,
        home,
        cache: config.cache.clone(),
        zygote: vec![program.into(), "zygote".into()],
        driver: config.store_driver,
        thresholds: Thresholds::default(),
    })
    .context("cannot open the engine")
}

/// What this machine offers besides sessions; needs no server.
pub(crate) fn machines(engine: Engine, home: &Path) -> Arc<LocalMachines> {
    Arc::new(LocalMachines::new(engine, recipes::all(home)))
}

/// Removes a home nobody serves from, with the sandboxes it holds.
pub(crate) fn remove_home(config: &Config) -> Result<()> {
    end_sandboxes(config)?;
    // The zygote goes by itself and writes its last lines meanwhile, into what is being removed.
    let end = Instant::now() + LAST_LINES;
    loop {
        match fs::remove_dir_all(&config.home) {
            Err(error)
                if error.kind() == std::io::ErrorKind::DirectoryNotEmpty
                    && Instant::now() < end =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return Ok(result?),
        }
    }
}

/// Ends every sandbox of a home nobody serves from, and the zygote; answers how many there were.
pub(crate) fn end_sandboxes(config: &Config) -> Result<usize> {
    let _lock = take(&prepare_home(&config.home)?)?;
    let engine = open_engine(config)?;
    let sandboxes = engine.list().context("cannot list its sandboxes")?;
    for sandbox in &sandboxes {
        engine.remove(sandbox).with_context(|| format!("cannot remove {sandbox}"))?;
    }
    engine.rest().context("cannot let the zygote go")?;
    Ok(sandboxes.len())
}

/// The secrets a server may be given by its environment instead of the vault.
fn environment_secrets() -> BTreeMap<String, Secret<String>> {
    ["ANTHROPIC_API_KEY"]
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), Secret::new(process_env(name)?))))
        .inspect(|(_, secret)| log::learn(secret))
        .collect()
}

fn gateway_config(config: &Config, script_rules: Vec<ScriptRule>) -> GatewayConfig {
    let default = GatewayConfig::default();
    let anthropic_url = config.anthropic_url.clone().unwrap_or(default.anthropic_url);
    GatewayConfig { script_rules, anthropic_url, ..GatewayConfig::default() }
}

/// Sessions on this machine's engine, behind this gateway.
async fn open_sessions(
    config: &Config,
    script: Vec<ScriptRule>,
    engine: Engine,
    store: &Store,
    forge: &Forge,
) -> Result<Sessions> {
    let vault = Vault::open(&config.home.join("vault.key")).context("cannot open the vault")?;
    let vault = Arc::new(vault.telling(log::learn));
    let lease =
        store.server_lease(SystemTime::now().into()).await.context("cannot take the store over")?;
    let books = Books::new(store.clone(), lease, Arc::clone(&vault), config.budget_tokens)
        .with_environment(environment_secrets());
    let gateway = Gateway::new(Arc::new(books), gateway_config(config, script));
    // Asking this host's package tools takes seconds; only who needs the answer waits for it.
    let trusted = config.trusted.clone();
    let trusted = async move {
        match trusted {
            Some(names) => names,
            None => tokio::task::spawn_blocking(harvest_gateway::host_registries)
                .await
                .unwrap_or_default(),
        }
    };
    let parts = Parts {
        store: store.clone(),
        lease,
        provider: Arc::new(Local::new(engine, Limits::default())),
        doors: Arc::new(gateway),
        pulls: Arc::new(forge.clone()),
        vault,
        config: harvest_session::Config {
            clocks: config.clocks.clone(),
            limits: config.limits,
            retention: config.retention.clone(),
            image: config.image.clone(),
            trusted: Vec::new(),
            budget_tokens: config.budget_tokens,
        },
    };
    Sessions::open_trusting(parts, trusted).await.context("cannot take the sessions up")
}

/// The token in the home's file; the first one when there is none.
async fn ensure_token(config: &Config, sessions: &Sessions) -> Result<(Secret<String>, bool)> {
    let path = config.token_file();
    if let Ok(text) = fs::read_to_string(&path) {
        let token = text.trim().to_owned();
        if sessions.token_check(&token).await?.is_some() {
            return Ok((Secret::new(token), false));
        }
    }
    let named = |configured: &Option<String>, key, other: &str| {
        configured.clone().or_else(|| git_setting(key)).unwrap_or_else(|| other.to_owned())
    };
    let user = Author {
        name: named(&config.author_name, "user.name", "You"),
        email: named(&config.author_email, "user.email", "you@localhost"),
    };
    // One of that name whose file is lost is of no use to anybody.
    let token = sessions.token_replace(FIRST_TOKEN, user, Role::Admin).await;
    let token = token.context("cannot make the first token")?;
    write_private(&path, token.expose().as_bytes())?;
    Ok((token, true))
}

/// What the person has told git about themselves.
fn git_setting(key: &str) -> Option<String> {
    let output =
        std::process::Command::new("git").args(["config", "--global", key]).output().ok()?;
    let value = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !value.is_empty()).then_some(value)
}

/// A token nobody can guess: 160 random bits.
pub(crate) fn random_token() -> String {
    use ring::rand::SecureRandom;
    let mut bytes = [0u8; 20];
    let random = ring::rand::SystemRandom::new();
    random.fill(&mut bytes).expect("the kernel's random source is there on every Linux we support");
    bytes.iter().fold(String::from("hv_"), |token, byte| token + &format!("{byte:02x}"))
}

pub(crate) fn prepare_home(home: &Path) -> Result<PathBuf> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(home);
    made.map_err(|error| unusable(home, &error, "cannot be made"))?;
    // Asked for ahead: the first file that cannot be written would say it in its own words.
    let writable = rustix::fs::access(home, rustix::fs::Access::WRITE_OK);
    writable.map_err(|error| unusable(home, &error.into(), "cannot be written to"))?;
    home.canonicalize().with_context(|| format!("cannot find {}", home.display()))
}

fn unusable(home: &Path, error: &std::io::Error, otherwise: &str) -> anyhow::Error {
    let why = match error.kind() {
        std::io::ErrorKind::ReadOnlyFilesystem => {
            "is on a file system that is read-only".to_owned()
        }
        _ => format!("{otherwise}: {error}"),
    };
    let hint = "name a folder that can be written to with --home or HARVEST_HOME";
    Advice::new(format!("the home {} {why}", home.display()), hint).into()
}

/// Whether somebody serves from this home.
pub(crate) fn is_served(home: &Path) -> bool {
    // Shared: who looks at the same time is no server.
    File::open(home.join("server.lock")).is_ok_and(|file| file.try_lock_shared().is_err())
}

/// One server per home: two would drive the same sessions.
fn take(home: &Path) -> Result<File> {
    let path = home.join("server.lock");
    let file =
        fs::OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    // Who looks whether somebody serves holds it for a moment.
    let free = (0..LOOKS).any(|look| {
        std::thread::sleep(if look == 0 { Duration::ZERO } else { Duration::from_millis(10) });
        file.try_lock().is_ok()
    });
    if !free {
        let message = format!("another server runs from {}", home.display());
        bail!(Advice::new(message, "end it first, or use another home with --home"));
    }
    Ok(file)
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|error| {
        let hint = "choose another with `--listen 127.0.0.1:PORT`";
        anyhow::Error::new(error).context(Advice::new(format!("cannot listen on {address}"), hint))
    })?;
    Ok(listener)
}

/// Under its name only once it is whole, and for nobody else's eyes.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let half = path.with_extension(format!("{}.half", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&half)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&half, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
