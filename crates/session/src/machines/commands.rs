//! Commands in sandboxes that no session has: in one that stays, or in a fresh one that is gone afterwards,
//! whatever becomes of who asked.

use std::{sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use harvest_proto::{
    SandboxId,
    api::{
        ExecLine,
        machines::{CreateSandbox, ExecOnce, Language, RunCommand},
    },
    bridge::{Command, Exit, FileRequest, Role, ToSupervisor},
};
use tokio::{runtime::Handle, sync::Semaphore};
use tokio_util::task::TaskTracker;

use super::{Asker, Fresh, MachineError, Machines, NewSandbox, counted::Place};
use crate::{
    bridge::{Bridge, BridgeError, Exec, ExecOutput, Feed, Feeding},
    clocks::Clocks,
    error::fault_code,
    inside::Inside,
    wiring::{Shared, words},
};

/// By signal 9, which says nothing about who sent it.
const KILL: i32 = 9;

// How long a command waits for a place for its sandbox before its caller is told that there is none.
const PATIENCE: Duration = Duration::from_secs(30);

// So many at once.
const MOST_WAITING: usize = 64;

/// Runs commands on a host's machines. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Commands {
    pub(super) machines: Arc<dyn Machines>,
    /// Sandboxes on their way out.
    endings: TaskTracker,
    /// Where sandboxes take places; nowhere without a server.
    pub(super) hall: Option<Arc<Shared>>,
    pub(super) patience: Duration,
    /// Commands that wait for a place.
    pub(super) waiting: Arc<Semaphore>,
}

impl Commands {
    /// On these machines.
    #[must_use]
    pub fn new(machines: Arc<dyn Machines>) -> Self {
        Self {
            machines,
            endings: TaskTracker::new(),
            hall: None,
            patience: PATIENCE,
            waiting: Arc::new(Semaphore::new(MOST_WAITING)),
        }
    }

    /// The same; a command waits no longer than this for a place for its sandbox.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The machines.
    #[must_use]
    pub fn machines(&self) -> &dyn Machines {
        &*self.machines
    }

    /// Returns when every sandbox that was to go is gone. No command may be begun meanwhile.
    pub async fn settle(&self) {
        self.endings.close();
        self.endings.wait().await;
    }

    /// Runs a command in a sandbox. It is killed when the stream is dropped.
    ///
    /// # Errors
    /// When the sandbox does not run, or the request makes no sense.
    pub async fn exec(
        &self,
        sandbox: &SandboxId,
        request: RunCommand,
        feed: Option<Feed>,
    ) -> Result<BoxStream<'static, ExecLine>, MachineError> {
        let job = Job::new(request, feed)?;
        let stream = self.machines.sandbox_dial(sandbox).await?;
        let after = After::default();
        let opened = Bridge::open(stream, Role::Guest, None).await;
        Ok(self.run(sandbox.clone(), opened.map(|opened| opened.bridge), job, after).await?.boxed())
    }

    /// The inside of a sandbox that runs: its files, and terminals in it.
    ///
    /// # Errors
    /// When it does not run, or a session works in it.
    pub async fn inside(&self, sandbox: &SandboxId) -> Result<Inside, MachineError> {
        let stream = self.machines.sandbox_dial(sandbox).await?;
        let opened = Bridge::open(stream, Role::Guest, None).await.map_err(|error| MachineError::Failed {
            doing: format!("cannot speak with the supervisor of {sandbox}"),
            hint: matches!(error, BridgeError::Outdated | BridgeError::OtherVersion { .. }).then(|| {
                "`harvest sandbox stop` and `harvest sandbox start` give it this version's supervisor"
                    .to_owned()
            }),
            source: error.into(),
        })?;
        Ok(Inside::new(opened.bridge, "/".to_owned(), Clocks::default().exec, Box::new(()))
            .as_imaged())
    }

    /// Runs a command in a fresh sandbox, which is gone when the stream has ended or is dropped.
    ///
    /// # Errors
    /// When there is no place for the sandbox, it cannot be started, or the request makes no sense.
    pub async fn exec_once(
        &self,
        asker: &Asker,
        request: ExecOnce,
        feed: Option<Feed>,
    ) -> Result<BoxStream<'static, ExecLine>, MachineError> {
        let (order, request) = request.parts();
        let job = Job::new(request, feed)?;
        let (ending, warnings, bridge) = self.fresh(asker, order).await?;
        let sandbox = ending.sandbox.clone();
        let after = After { ending: Some(ending), written: None };
        let started = ExecLine::Started { sandbox: sandbox.clone(), warnings };
        let lines = self.run(sandbox, Ok(bridge), job, after).await?;
        Ok(stream::iter([started]).chain(lines).boxed())
    }

    /// A sandbox that goes with what this gives. Made in a task of its own: who asks may be gone before it
    /// is there.
    async fn fresh(
        &self,
        asker: &Asker,
        order: CreateSandbox,
    ) -> Result<(Ending, Vec<String>, Bridge), MachineError> {
        let (commands, id, made_by) = (self.clone(), SandboxId::random(), asker.user.clone());
        let place = self.wait(&id, asker.user.as_deref()).await?;
        let made = tokio::spawn(async move {
            let new = NewSandbox { id, made_by, order };
            let Fresh { made, bridge } = commands.machines.sandbox_fresh(new).await?;
            let sandbox = made.sandbox_id;
            let ending =
                Ending { commands, sandbox, place, runtime: Handle::current(), over: false };
            Ok((ending, made.warnings, Bridge::hail(bridge)))
        });
        made.await.unwrap_or_else(|error| {
            let doing = "cannot start a sandbox".to_owned();
            Err(MachineError::Failed { doing, hint: None, source: error.into() })
        })
    }

    async fn run(
        &self,
        sandbox: SandboxId,
        bridge: Result<Bridge, BridgeError>,
        job: Job,
        mut after: After,
    ) -> Result<impl Stream<Item = ExecLine> + Send + use<>, MachineError> {
        let begun = match bridge {
            Ok(bridge) => job.begin(&bridge, &mut after).await?,
            Err(error) => Err(error),
        };
        let step = match begun {
            Ok((exec, feeding)) => Step::Run(Box::new(Run {
                machines: Arc::clone(&self.machines),
                sandbox,
                exec,
                feeding,
                after,
            })),
            Err(BridgeError::Fault(fault)) => {
                let code = fault_code(&fault).to_owned();
                Step::Last(ExecLine::Failed { code, message: fault.message }, after)
            }
            Err(error) => Step::Last(lost(&*self.machines, &sandbox, Some(&error)).await, after),
        };
        Ok(stream::unfold(step, Step::next))
    }
}

/// What is to be run.
struct Job {
    command: Command,
    code: Option<(Language, String)>,
    feed: Option<Feed>,
}

impl Job {
    fn new(request: RunCommand, feed: Option<Feed>) -> Result<Self, MachineError> {
        let code = match (request.lang, request.code) {
            (Some(language), Some(code)) => Some((language, code)),
            (None, None) => None,
            _ => {
                return Err(MachineError::invalid(
                    "invalid_command",
                    "`code` and `lang` go together",
                ));
            }
        };
        if code.is_none() && request.argv.first().is_none_or(String::is_empty) {
            return Err(MachineError::invalid("invalid_command", "`argv` names no command"));
        }
        let stdin = request.stdin.map(|text| BASE64_STANDARD.decode(text)).transpose();
        let stdin =
            stdin.map_err(|_| MachineError::invalid("invalid_stdin", "`stdin` is not base64"))?;
        let limit = u64::try_from(Clocks::default().exec.as_millis()).unwrap_or(u64::MAX);
        let command = Command {
            argv: request.argv,
            env: request.env,
            cwd: request.cwd,
            user: request.user,
            timeout_millis: Some(request.timeout_millis.unwrap_or(limit))
                .filter(|millis| *millis > 0),
            ..Command::default()
        };
        let feed = feed.or_else(|| stdin.map(|bytes| stream::iter([Ok(bytes)]).boxed()));
        Ok(Self { command, code, feed })
    }

    /// The outer error is ours, the inner one the sandbox's.
    async fn begin(mut self, bridge: &Bridge, after: &mut After) -> Result<Begun, MachineError> {
        if let Some((language, code)) = self.code.take() {
            let path = match self.write_code(bridge, language, &code).await {
                Ok(path) => path,
                Err(error @ BridgeError::Fault(_)) => {
                    let doing = "cannot write the code into the sandbox".to_owned();
                    return Err(MachineError::Failed { doing, hint: None, source: error.into() });
                }
                Err(error) => return Ok(Err(error)),
            };
            // In a fresh sandbox it goes with everything else.
            after.written = after.ending.is_none().then(|| (bridge.clone(), path));
        }
        Ok(match self.feed {
            Some(feed) => {
                bridge.exec_fed(self.command, feed).await.map(|(exec, feed)| (exec, Some(feed)))
            }
            None => bridge.exec(self.command, None).await.map(|exec| (exec, None)),
        })
    }

    /// Puts the code into a file, for the command line is everybody's to read and has an end.
    async fn write_code(
        &mut self,
        bridge: &Bridge,
        language: Language,
        code: &str,
    ) -> Result<String, BridgeError> {
        let (program, extension) = match language {
            Language::Python => ("python3", "py"),
            Language::Node => ("node", "js"),
            Language::Bash => ("bash", "sh"),
        };
        let path = format!("/tmp/harvest-{}.{extension}", SandboxId::random().part());
        bridge.file_write(&path, 0o600, self.command.user.clone(), code.as_bytes()).await?;
        let arguments = std::mem::take(&mut self.command.argv);
        self.command.argv =
            [program.to_owned(), path.clone()].into_iter().chain(arguments).collect();
        Ok(path)
    }
}

type Begun = Result<(Exec, Option<Feeding>), BridgeError>;

/// What is to be done when a command is over.
#[derive(Default)]
struct After {
    /// For a fresh sandbox.
    ending: Option<Ending>,
    /// The file that was put into another one.
    written: Option<(Bridge, String)>,
}

impl After {
    async fn tidy(self) {
        if let Some(ending) = self.ending {
            ending.end().await;
        }
        if let Some((bridge, path)) = self.written {
            let request = FileRequest::Remove { path, tree: false };
            // Whatever it says: the command has ended, and that was told.
            let _ = bridge.request(|id| ToSupervisor::File { id, request }).await;
        }
    }
}

/// Takes a fresh sandbox away, at the latest when it is dropped. Where that fails, it goes when this process
/// does.
struct Ending {
    commands: Commands,
    sandbox: SandboxId,
    place: Option<Place>,
    runtime: Handle,
    over: bool,
}

impl Ending {
    async fn end(mut self) {
        delete(&self.commands.machines, &self.sandbox, self.place.take()).await;
        self.over = true;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let (machines, sandbox) = (Arc::clone(&self.commands.machines), self.sandbox.clone());
        let place = self.place.take();
        let deleting = async move { delete(&machines, &sandbox, place).await };
        self.commands.endings.spawn_on(deleting, &self.runtime);
    }
}

async fn delete(machines: &Arc<dyn Machines>, sandbox: &SandboxId, place: Option<Place>) {
    let deleted = machines.sandbox_delete(sandbox, true).await;
    // Somebody may have removed it before.
    if let Err(error) = deleted
        && !matches!(error, MachineError::Missing { .. })
    {
        tracing::warn!(%sandbox, error = %words(&error), "a sandbox is left until this process ends");
        place.into_iter().for_each(|place| place.watch(Arc::clone(machines)));
    }
}

/// Where a command stands.
enum Step {
    Run(Box<Run>),
    Last(ExecLine, After),
    After(After),
}

struct Run {
    machines: Arc<dyn Machines>,
    sandbox: SandboxId,
    exec: Exec,
    feeding: Option<Feeding>,
    after: After,
}

impl Step {
    async fn next(self) -> Option<(ExecLine, Self)> {
        match self {
            Self::Run(run) => Some(run.next().await),
            Self::Last(line, after) => Some((line, Self::After(after))),
            Self::After(after) => {
                after.tidy().await;
                None
            }
        }
    }
}

impl Run {
    async fn next(mut self: Box<Self>) -> (ExecLine, Step) {
        let data = |bytes: Vec<u8>| BASE64_STANDARD.encode(bytes);
        let said = tokio::select! {
            said = self.exec.next() => said,
            // Dropping the command kills it.
            () = torn(&mut self.feeding) => {
                let message = "the input broke off, and the command was killed".to_owned();
                let line = ExecLine::Failed { code: "input_torn".to_owned(), message };
                return (line, Step::After(self.after));
            }
        };
        match said {
            Some(ExecOutput::Stdout { bytes, .. }) => {
                (ExecLine::Stdout { data: data(bytes) }, Step::Run(self))
            }
            Some(ExecOutput::Stderr { bytes, .. }) => {
                (ExecLine::Stderr { data: data(bytes) }, Step::Run(self))
            }
            Some(ExecOutput::Exited { exit, millis }) => {
                let reason = match exit {
                    // Elsewhere something else of the sandbox may have been meant.
                    Exit::Signal(KILL) if self.after.ending.is_some() => {
                        self.machines.sandbox_overdrawn(&self.sandbox).await
                    }
                    _ => None,
                };
                (ExecLine::Exited { exit, millis, reason }, Step::After(self.after))
            }
            Some(ExecOutput::End) | None => {
                let line = lost(&*self.machines, &self.sandbox, None).await;
                (line, Step::After(self.after))
            }
        }
    }
}

async fn torn(feeding: &mut Option<Feeding>) {
    match feeding {
        Some(feeding) => feeding.torn().await,
        None => std::future::pending().await,
    }
}

/// The sandbox went away under a command.
async fn lost(
    machines: &dyn Machines,
    sandbox: &SandboxId,
    error: Option<&BridgeError>,
) -> ExecLine {
    let reason = match (machines.sandbox_why(sandbox).await, error) {
        (Some(reason), _) => reason,
        (None, Some(error)) => words(error),
        (None, None) => "its supervisor closed the bridge".to_owned(),
    };
    let message = format!("the sandbox ended before the command did: {reason}");
    ExecLine::Failed { code: "sandbox_ended".to_owned(), message }
}
