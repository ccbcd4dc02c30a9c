//! Commands in standalone sandboxes: in an existing one, or in an ephemeral one that is removed
//! afterwards, even when the caller goes away.

use std::{sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use harvest_proto::{
    SandboxId,
    api::{CreateSandbox, ExecLine, ExecOnce, Language, RunCommand},
    bridge::{BridgeRole, Command, Exit, FileRequest, ToSupervisor},
};
use tokio::{runtime::Handle, sync::Semaphore};
use tokio_util::task::TaskTracker;

use super::{
    CreatedEphemeral, HostError, NewSandbox, Requester, SandboxHost, lifecycle::SandboxSlot,
};
use crate::{
    bridge::{Bridge, BridgeError, Exec, ExecOutput, InputStream, InputTask},
    context::{Shared, error_chain},
    error::fault_code,
    sandbox_handle::SandboxHandle,
    timeouts::Timeouts,
};

const SIGKILL: i32 = 9;

// How long a command waits for a sandbox slot before it is refused.
const SLOT_TIMEOUT: Duration = Duration::from_secs(30);

// The most commands that wait for a slot at once.
const MAX_WAITING: usize = 64;

/// Creates standalone sandboxes and runs commands in them. Clones share one state.
#[derive(Clone)]
pub struct StandaloneSandboxes {
    pub(super) host: Arc<dyn SandboxHost>,
    /// Ephemeral sandboxes that are being removed.
    removals: TaskTracker,
    /// The server's admission and store; `None` without a server.
    pub(super) shared: Option<Arc<Shared>>,
    pub(super) slot_timeout: Duration,
    /// Commands that wait for a slot.
    pub(super) waiting: Arc<Semaphore>,
}

impl StandaloneSandboxes {
    #[must_use]
    pub fn new(host: Arc<dyn SandboxHost>) -> Self {
        Self {
            host,
            removals: TaskTracker::new(),
            shared: None,
            slot_timeout: SLOT_TIMEOUT,
            waiting: Arc::new(Semaphore::new(MAX_WAITING)),
        }
    }

    /// Sets how long a command waits for a sandbox slot.
    #[must_use]
    pub fn with_slot_timeout(mut self, slot_timeout: Duration) -> Self {
        self.slot_timeout = slot_timeout;
        self
    }

    #[must_use]
    pub fn host(&self) -> &dyn SandboxHost {
        &*self.host
    }

    /// Waits until all ephemeral sandboxes are removed. No command may be started meanwhile.
    pub async fn settle(&self) {
        self.removals.close();
        self.removals.wait().await;
    }

    /// Runs a command in a sandbox. Dropping the stream kills the command.
    ///
    /// # Errors
    /// When the sandbox is not running or the request is invalid.
    pub async fn exec(
        &self,
        sandbox: &SandboxId,
        request: RunCommand,
        input: Option<InputStream>,
    ) -> Result<BoxStream<'static, ExecLine>, HostError> {
        let command = PreparedCommand::new(request, input)?;
        let stream = self.host.sandbox_dial(sandbox).await?;
        let cleanup = Cleanup::default();
        let opened = Bridge::open(stream, BridgeRole::Client, None).await;
        Ok(self
            .run(sandbox.clone(), opened.map(|opened| opened.bridge), command, cleanup)
            .await?
            .boxed())
    }

    /// A handle to the files and terminals of a running sandbox.
    ///
    /// # Errors
    /// When the sandbox is not running or belongs to a session.
    pub async fn sandbox_handle(&self, sandbox: &SandboxId) -> Result<SandboxHandle, HostError> {
        let stream = self.host.sandbox_dial(sandbox).await?;
        let opened = Bridge::open(stream, BridgeRole::Client, None).await;
        let opened = opened.map_err(|error| HostError::Failed {
            doing: format!("cannot connect to the supervisor of {sandbox}"),
            hint: matches!(error, BridgeError::OtherVersion { .. }).then(|| {
                "restart the sandbox for this version's supervisor: `harvest sandbox stop`, then `harvest sandbox start`"
                    .to_owned()
            }),
            source: error.into(),
        })?;
        Ok(SandboxHandle::new(
            opened.bridge,
            "/".to_owned(),
            Timeouts::default().exec,
            Box::new(()),
        )
        .with_image_defaults())
    }

    /// Runs a command in an ephemeral sandbox, removed when the stream ends or is dropped.
    ///
    /// # Errors
    /// When no slot is free, the sandbox cannot be started, or the request is invalid.
    pub async fn exec_once(
        &self,
        requester: &Requester,
        request: ExecOnce,
        input: Option<InputStream>,
    ) -> Result<BoxStream<'static, ExecLine>, HostError> {
        let (order, request) = request.parts();
        let command = PreparedCommand::new(request, input)?;
        let (sandbox_guard, warnings, bridge) = self.create_ephemeral(requester, order).await?;
        let sandbox = sandbox_guard.sandbox.clone();
        let cleanup = Cleanup { sandbox_guard: Some(sandbox_guard), code_file: None };
        let started = ExecLine::Started { sandbox: sandbox.clone(), warnings };
        let lines = self.run(sandbox, Ok(bridge), command, cleanup).await?;
        Ok(stream::iter([started]).chain(lines).boxed())
    }

    /// Creates an ephemeral sandbox. Runs in its own task, so that a caller that goes away cannot
    /// leak a half-created sandbox.
    async fn create_ephemeral(
        &self,
        requester: &Requester,
        order: CreateSandbox,
    ) -> Result<(EphemeralGuard, Vec<String>, Bridge), HostError> {
        let (sandboxes, id, made_by) = (self.clone(), SandboxId::random(), requester.user.clone());
        let slot = self.wait_for_slot(&id, requester.user.as_deref()).await?;
        let created = tokio::spawn(async move {
            let new = NewSandbox { id, made_by, order };
            let CreatedEphemeral { created, bridge } =
                sandboxes.host.sandbox_create_ephemeral(new).await?;
            let sandbox = created.sandbox_id;
            let guard = EphemeralGuard {
                sandboxes,
                sandbox,
                slot,
                runtime: Handle::current(),
                removed: false,
            };
            Ok((guard, created.warnings, Bridge::open_without_welcome(bridge)))
        });
        created.await.unwrap_or_else(|error| {
            let doing = "cannot start a sandbox".to_owned();
            Err(HostError::Failed { doing, hint: None, source: error.into() })
        })
    }

    async fn run(
        &self,
        sandbox: SandboxId,
        bridge: Result<Bridge, BridgeError>,
        command: PreparedCommand,
        mut cleanup: Cleanup,
    ) -> Result<impl Stream<Item = ExecLine> + Send + use<>, HostError> {
        let started = match bridge {
            Ok(bridge) => command.start(&bridge, &mut cleanup).await?,
            Err(error) => Err(error),
        };
        let state = match started {
            Ok((exec, input_task)) => StreamState::Running(Box::new(RunningCommand {
                host: Arc::clone(&self.host),
                sandbox,
                exec,
                input_task,
                cleanup,
            })),
            Err(BridgeError::Fault(fault)) => {
                let code = fault_code(&fault).to_owned();
                StreamState::Last(ExecLine::Failed { code, message: fault.message }, cleanup)
            }
            Err(error) => StreamState::Last(
                sandbox_exited(&*self.host, &sandbox, Some(&error)).await,
                cleanup,
            ),
        };
        Ok(stream::unfold(state, StreamState::next))
    }
}

/// A validated request.
struct PreparedCommand {
    command: Command,
    code: Option<(Language, String)>,
    input: Option<InputStream>,
}

impl PreparedCommand {
    fn new(request: RunCommand, input: Option<InputStream>) -> Result<Self, HostError> {
        let code = match (request.lang, request.code) {
            (Some(language), Some(code)) => Some((language, code)),
            (None, None) => None,
            _ => {
                return Err(HostError::invalid(
                    "invalid_command",
                    "`code` and `lang` must be given together",
                ));
            }
        };
        if code.is_none() && request.argv.first().is_none_or(String::is_empty) {
            return Err(HostError::invalid("invalid_command", "`argv` is empty"));
        }
        let stdin = request.stdin.map(|text| BASE64_STANDARD.decode(text)).transpose();
        let stdin =
            stdin.map_err(|_| HostError::invalid("invalid_stdin", "`stdin` is not base64"))?;
        let limit = u64::try_from(Timeouts::default().exec.as_millis()).unwrap_or(u64::MAX);
        let command = Command {
            argv: request.argv,
            env: request.env,
            cwd: request.cwd,
            user: request.user,
            timeout_millis: Some(request.timeout_millis.unwrap_or(limit))
                .filter(|millis| *millis > 0),
            ..Command::default()
        };
        let input = input.or_else(|| stdin.map(|bytes| stream::iter([Ok(bytes)]).boxed()));
        Ok(Self { command, code, input })
    }

    /// The outer error means the request failed, the inner one that the sandbox failed.
    async fn start(
        mut self,
        bridge: &Bridge,
        cleanup: &mut Cleanup,
    ) -> Result<StartedCommand, HostError> {
        if let Some((language, code)) = self.code.take() {
            let path = match self.write_code(bridge, language, &code).await {
                Ok(path) => path,
                Err(error @ BridgeError::Fault(_)) => {
                    let doing = "cannot write the code into the sandbox".to_owned();
                    return Err(HostError::Failed { doing, hint: None, source: error.into() });
                }
                Err(error) => return Ok(Err(error)),
            };
            // An ephemeral sandbox is removed as a whole.
            cleanup.code_file = cleanup.sandbox_guard.is_none().then(|| (bridge.clone(), path));
        }
        Ok(match self.input {
            Some(input) => bridge
                .exec_streamed(self.command, input)
                .await
                .map(|(exec, input)| (exec, Some(input))),
            None => bridge.exec(self.command, None).await.map(|exec| (exec, None)),
        })
    }

    /// Writes the code to a file: command lines are public and limited in length.
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

type StartedCommand = Result<(Exec, Option<InputTask>), BridgeError>;

/// The work left when a command has ended.
#[derive(Default)]
struct Cleanup {
    /// The sandbox to remove, when it is ephemeral.
    sandbox_guard: Option<EphemeralGuard>,
    /// The code file to delete, when the sandbox stays.
    code_file: Option<(Bridge, String)>,
}

impl Cleanup {
    async fn run(self) {
        if let Some(sandbox_guard) = self.sandbox_guard {
            sandbox_guard.remove().await;
        }
        if let Some((bridge, path)) = self.code_file {
            let request = FileRequest::Remove { path, tree: false };
            // Best effort: the command's result is already sent.
            let _ = bridge.request(|id| ToSupervisor::File { id, request }).await;
        }
    }
}

/// Removes an ephemeral sandbox, at the latest on drop. If that fails, the zygote removes it when
/// this process ends.
struct EphemeralGuard {
    sandboxes: StandaloneSandboxes,
    sandbox: SandboxId,
    slot: Option<SandboxSlot>,
    runtime: Handle,
    removed: bool,
}

impl EphemeralGuard {
    async fn remove(mut self) {
        delete(&self.sandboxes.host, &self.sandbox, self.slot.take()).await;
        self.removed = true;
    }
}

impl Drop for EphemeralGuard {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        let (host, sandbox) = (Arc::clone(&self.sandboxes.host), self.sandbox.clone());
        let slot = self.slot.take();
        let deleting = async move { delete(&host, &sandbox, slot).await };
        self.sandboxes.removals.spawn_on(deleting, &self.runtime);
    }
}

async fn delete(host: &Arc<dyn SandboxHost>, sandbox: &SandboxId, slot: Option<SandboxSlot>) {
    let deleted = host.sandbox_delete(sandbox, true).await;
    // A user may have removed it already.
    if let Err(error) = deleted
        && !matches!(error, HostError::Missing { .. })
    {
        tracing::warn!(%sandbox, error = %error_chain(&error), "cannot remove an ephemeral sandbox; it stays until this process ends");
        slot.into_iter().for_each(|slot| slot.watch(Arc::clone(host)));
    }
}

/// The state of a command's output stream.
enum StreamState {
    Running(Box<RunningCommand>),
    Last(ExecLine, Cleanup),
    Cleanup(Cleanup),
}

struct RunningCommand {
    host: Arc<dyn SandboxHost>,
    sandbox: SandboxId,
    exec: Exec,
    input_task: Option<InputTask>,
    cleanup: Cleanup,
}

impl StreamState {
    async fn next(self) -> Option<(ExecLine, Self)> {
        match self {
            Self::Running(command) => Some(command.next().await),
            Self::Last(line, cleanup) => Some((line, Self::Cleanup(cleanup))),
            Self::Cleanup(cleanup) => {
                cleanup.run().await;
                None
            }
        }
    }
}

impl RunningCommand {
    async fn next(mut self: Box<Self>) -> (ExecLine, StreamState) {
        let data = |bytes: Vec<u8>| BASE64_STANDARD.encode(bytes);
        let output = tokio::select! {
            output = self.exec.next() => output,
            // Dropping the command kills it.
            () = input_broken(&mut self.input_task) => {
                let message = "the input broke off; the command was killed".to_owned();
                let line = ExecLine::Failed { code: "input_aborted".to_owned(), message };
                return (line, StreamState::Cleanup(self.cleanup));
            }
        };
        match output {
            Some(ExecOutput::Stdout { bytes, .. }) => {
                (ExecLine::Stdout { data: data(bytes) }, StreamState::Running(self))
            }
            Some(ExecOutput::Stderr { bytes, .. }) => {
                (ExecLine::Stderr { data: data(bytes) }, StreamState::Running(self))
            }
            Some(ExecOutput::Exited { exit, millis }) => {
                let reason = match exit {
                    // In a shared sandbox the limit may have hit another command.
                    Exit::Signal(SIGKILL) if self.cleanup.sandbox_guard.is_some() => {
                        self.host.sandbox_exceeded_limit(&self.sandbox).await
                    }
                    _ => None,
                };
                (ExecLine::Exited { exit, millis, reason }, StreamState::Cleanup(self.cleanup))
            }
            Some(ExecOutput::End) | None => {
                let line = sandbox_exited(&*self.host, &self.sandbox, None).await;
                (line, StreamState::Cleanup(self.cleanup))
            }
        }
    }
}

async fn input_broken(input_task: &mut Option<InputTask>) {
    match input_task {
        Some(input_task) => input_task.aborted().await,
        None => std::future::pending().await,
    }
}

/// The last line of a command whose sandbox exited.
async fn sandbox_exited(
    host: &dyn SandboxHost,
    sandbox: &SandboxId,
    error: Option<&BridgeError>,
) -> ExecLine {
    let reason = match (host.sandbox_exit_reason(sandbox).await, error) {
        (Some(reason), _) => reason,
        (None, Some(error)) => error_chain(error),
        (None, None) => "its supervisor closed the bridge".to_owned(),
    };
    let message = format!("the sandbox exited before the command ended: {reason}");
    ExecLine::Failed { code: "sandbox_ended".to_owned(), message }
}
