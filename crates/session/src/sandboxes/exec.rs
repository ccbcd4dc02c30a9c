//! Commands in a sandbox: one request and one stream of output lines, whether the sandbox belongs
//! to a session, stands alone or is created for this command.

use std::{sync::Mutex, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{
    SandboxId,
    api::{ExecLine, ExecRequest, Language, SandboxOwner},
    bridge::{Command, Exit, FileRequest},
};

use super::{
    CommandDefaults, Requester, SandboxError, SandboxHandle, SandboxSpec, Sandboxes, member_limits,
};
use crate::{
    bridge::{Bridge, BridgeError, Exec, ExecInput, ExecOutput, InputStream, InputTask},
    error_chain::error_chain,
    timeouts::millis,
};

const SIGKILL: i32 = 9;

// A supervisor that exits closes its connections a moment before the exit is recorded.
const EXIT_GRACE: Duration = Duration::from_secs(1);

/// The output of a command; the last line says how it ended. Dropping the stream kills the command,
/// unless it is detached.
pub type ExecLines = BoxStream<'static, ExecLine>;

impl Sandboxes {
    /// Runs a command in an ephemeral sandbox, removed when the stream ends or is dropped.
    ///
    /// # Errors
    /// When no slot is free, the sandbox cannot be started, or the request is invalid.
    pub async fn exec_once(
        &self,
        requester: &Requester,
        mut request: ExecRequest,
        input: Option<InputStream>,
    ) -> Result<ExecLines, SandboxError> {
        check_command(&request, true)?;
        let order = *request.sandbox.take().unwrap_or_default();
        let limits = self.member_limits(requester).await?;
        let order = member_limits::applied(limits.as_ref(), order)?;
        let (id, made_by) = (SandboxId::random(), requester.user.clone());
        let owner = SandboxOwner::Process(std::process::id());
        let spec = SandboxSpec::standalone(id.clone(), owner, made_by, order)?;
        let claimant = member_limits::claimant(requester, limits.as_ref())?;
        let slot = self.wait_for_slot(&id, claimant).await?;
        let door = spec.door.clone();
        let (guard, created, stream) = self.create_ephemeral(spec, slot).await?;
        let door = match &door {
            Some(door) => Some(self.new_door(&id, door).await?),
            None => None,
        };
        let started = ExecLine::Started { sandbox: id.clone(), warnings: created.warnings };
        let bridge = Bridge::open_without_welcome(stream);
        let mut handle =
            self.handle(id, bridge, CommandDefaults::of_image(), Box::new(Mutex::new(door)));
        handle.ephemeral = Some(guard);
        Ok(stream::iter([started]).chain(handle.exec_lines(request, input).await?).boxed())
    }
}

impl SandboxHandle {
    /// Runs a command and streams its output.
    ///
    /// # Errors
    /// When the request is invalid.
    pub async fn exec_lines(
        self,
        mut request: ExecRequest,
        input: Option<InputStream>,
    ) -> Result<ExecLines, SandboxError> {
        check_command(&request, false)?;
        if request.detach && input.is_some() {
            let what = "the input of a detached command must be in `stdin`";
            return Err(SandboxError::invalid("invalid_command", what));
        }
        let stdin = request.stdin.take().map(|text| decode(&text)).transpose()?;
        let input = input.or_else(|| stdin.map(|bytes| stream::iter([Ok(bytes)]).boxed()));
        let mut running = CommandHandle::new(self, request.detach);
        let last = match running.start(request, input.is_some()).await {
            Ok(writer) => {
                let task = input.zip(writer).map(|(input, writer)| InputTask::spawn(input, writer));
                // A detached command gets its whole input, even if its client goes away.
                let task = match running.detach {
                    true => task.and_then(InputTask::leave),
                    false => task,
                };
                return Ok(lines(running, task, None));
            }
            Err(SandboxError::Bridge(BridgeError::Fault(fault))) => {
                let code = crate::bridge::fault_code(&fault).to_owned();
                ExecLine::Failed { code, message: fault.message }
            }
            Err(SandboxError::Bridge(error)) => running.connection_lost(Some(&error)).await,
            Err(error) => {
                running.clean_up().await;
                return Err(error);
            }
        };
        Ok(lines(running, None, Some(last)))
    }

    /// Starts a command. With `stdin`, the second value writes to it while it runs.
    ///
    /// # Errors
    /// When the request is invalid, or the command cannot be started.
    pub async fn start(
        self,
        request: ExecRequest,
        stdin: bool,
    ) -> Result<(CommandHandle, Option<ExecInput>), SandboxError> {
        check_command(&request, false)?;
        let mut running = CommandHandle::new(self, request.detach);
        match running.start(request, stdin).await {
            Ok(input) => Ok((running, input)),
            Err(error) => {
                running.clean_up().await;
                Err(error)
            }
        }
    }
}

/// Checks a request before a sandbox is started or resumed for it. Only a command in a new sandbox
/// may describe that sandbox, and it cannot outlive its client.
///
/// # Errors
/// When the request contradicts itself.
pub fn check_command(request: &ExecRequest, in_new_sandbox: bool) -> Result<(), SandboxError> {
    let invalid = |what: &str| Err(SandboxError::invalid("invalid_command", what));
    if request.sandbox.is_some() && !in_new_sandbox {
        return invalid("`sandbox` is only for a command in a new sandbox");
    }
    if request.detach && in_new_sandbox {
        return invalid("`detach` is not for a command in a new sandbox, which ends with it");
    }
    if let Some(stdin) = &request.stdin {
        decode(stdin)?;
    }
    match (request.lang, &request.code) {
        (Some(_), None) | (None, Some(_)) => invalid("`code` and `lang` must be given together"),
        (None, None) if request.argv.first().is_none_or(String::is_empty) => {
            invalid("`argv` is empty")
        }
        _ => Ok(()),
    }
}

fn decode(stdin: &str) -> Result<Vec<u8>, SandboxError> {
    let invalid = |_| SandboxError::invalid("invalid_stdin", "`stdin` is not base64");
    BASE64_STANDARD.decode(stdin).map_err(invalid)
}

/// Writes the code to a file, because command lines are public and limited in length, and makes it
/// the program of the command.
async fn write_code(
    bridge: &Bridge,
    command: &mut Command,
    language: Language,
    code: &str,
) -> Result<String, SandboxError> {
    let (program, extension) = match language {
        Language::Python => ("python3", "py"),
        Language::Node => ("node", "js"),
        Language::Bash => ("bash", "sh"),
    };
    let path = format!("/tmp/harvest-{}.{extension}", SandboxId::random().part());
    match bridge.file_write(&path, 0o600, command.user.clone(), code.as_bytes()).await {
        Ok(_) => {}
        Err(error @ BridgeError::Fault(_)) => {
            return Err(SandboxError::failed("cannot write the code into the sandbox", error));
        }
        Err(error) => return Err(error.into()),
    }
    let arguments = std::mem::take(&mut command.argv);
    command.argv = [program.to_owned(), path.clone()].into_iter().chain(arguments).collect();
    Ok(path)
}

/// A running command. Dropping this kills it; a detached command keeps running and its output is
/// discarded.
pub struct CommandHandle {
    handle: SandboxHandle,
    exec: Option<Exec>,
    detach: bool,
    /// The file to delete when the command has ended.
    code_file: Option<String>,
}

impl CommandHandle {
    /// A command that is still to be started.
    pub(super) fn new(handle: SandboxHandle, detach: bool) -> Self {
        Self { handle, exec: None, detach, code_file: None }
    }

    async fn start(
        &mut self,
        request: ExecRequest,
        stdin: bool,
    ) -> Result<Option<ExecInput>, SandboxError> {
        let timeout =
            request.timeout_millis.unwrap_or_else(|| millis(self.handle.defaults.timeout));
        let mut command = Command {
            env: request.env,
            detached: request.detach,
            // Zero means never.
            timeout_millis: Some(timeout).filter(|millis| *millis > 0),
            ..self.handle.command(request.argv, request.cwd, request.user)
        };
        if let Some((language, code)) = request.lang.zip(request.code) {
            let path = write_code(&self.handle.bridge, &mut command, language, &code).await?;
            // An ephemeral sandbox is removed as a whole.
            self.code_file = self.handle.ephemeral.is_none().then_some(path);
        }
        self.run(command, stdin).await
    }

    pub(super) async fn run(
        &mut self,
        command: Command,
        stdin: bool,
    ) -> Result<Option<ExecInput>, SandboxError> {
        let (exec, input) = self.handle.bridge.exec_piped(command, stdin).await?;
        self.exec = Some(exec);
        Ok(input)
    }

    /// The next output; `None` when the connection is lost before the exit. Cancel-safe.
    pub async fn next(&mut self) -> Option<ExecOutput> {
        self.exec.as_mut()?.next().await
    }

    /// The limit for which an exited command was killed, if any. Only known when no other command
    /// could have hit it.
    async fn exceeded_limit(&self, exit: &Exit) -> Option<String> {
        match exit {
            Exit::Signal(SIGKILL) if self.handle.ephemeral.is_some() => {
                self.handle.provider.exceeded_limit(&self.handle.sandbox).await
            }
            _ => None,
        }
    }

    /// The last line when the outcome of the command is unknown.
    async fn connection_lost(&self, error: Option<&BridgeError>) -> ExecLine {
        let failed = |code: &str, message| ExecLine::Failed { code: code.to_owned(), message };
        let exited = |reason: &str| {
            let message = format!("the sandbox exited before the command ended: {reason}");
            failed("sandbox_ended", message)
        };
        let exit = self.handle.provider.wait(&self.handle.sandbox);
        match tokio::time::timeout(EXIT_GRACE, exit).await {
            Ok(Ok(reason)) => exited(&reason),
            Ok(Err(SandboxError::Missing(_) | SandboxError::NotRunning { .. })) => {
                exited("removed")
            }
            Ok(Err(_)) | Err(_) => {
                let fate = match self.handle.ephemeral {
                    Some(_) => "the command is killed",
                    None => "the command may still be running",
                };
                let why = error.map(|error| format!(": {}", error_chain(error)));
                let why = why.unwrap_or_default();
                failed("lost", format!("the connection to the sandbox was lost; {fate}{why}"))
            }
        }
    }

    /// Removes what was made for the command.
    async fn clean_up(mut self) {
        remove_code(&self.handle.bridge, self.code_file.take()).await;
        if let Some(guard) = self.handle.ephemeral.take() {
            guard.remove().await;
        }
    }
}

impl Drop for CommandHandle {
    fn drop(&mut self) {
        let (exec, code_file) = (self.exec.take(), self.code_file.take());
        let detached = exec.is_some() && self.detach;
        if !detached && code_file.is_none() {
            return;
        }
        let bridge = self.handle.bridge.clone();
        let use_guard = std::mem::replace(&mut self.handle.use_guard, Box::new(()));
        tokio::spawn(async move {
            if let Some(mut exec) = exec.filter(|_| detached) {
                while exec.next().await.is_some() {}
            }
            remove_code(&bridge, code_file).await;
            drop(use_guard);
        });
    }
}

/// Best effort: the command's result is already known.
async fn remove_code(bridge: &Bridge, path: Option<String>) {
    if let Some(path) = path {
        let request = FileRequest::Remove { path, tree: false };
        let _ = bridge.file(Some("root".to_owned()), request).await;
    }
}

/// The output of a command, or only the `last` line of one that did not start; then what was made
/// for it is removed.
fn lines(running: CommandHandle, input: Option<InputTask>, last: Option<ExecLine>) -> ExecLines {
    let state = Some((running, input, last, false));
    stream::unfold(state, |state| async move {
        let (mut running, mut input, mut last, ended) = state?;
        if ended {
            running.clean_up().await;
            if let Some(input) = input {
                input.drain().await;
            }
            return None;
        }
        let (line, ended) = match last.take() {
            Some(last) => (last, true),
            None => next_line(&mut running, &mut input).await,
        };
        Some((line, Some((running, input, last, ended))))
    })
    .boxed()
}

/// The next line, and whether it is the last.
async fn next_line(running: &mut CommandHandle, input: &mut Option<InputTask>) -> (ExecLine, bool) {
    let data = |bytes: Vec<u8>| BASE64_STANDARD.encode(bytes);
    let output = tokio::select! {
        output = running.next() => output,
        () = aborted(input) => {
            // Dropping the command kills it.
            running.exec = None;
            let message = "the input broke off; the command was killed".to_owned();
            return (ExecLine::Failed { code: "input_aborted".to_owned(), message }, true);
        }
    };
    match output {
        Some(ExecOutput::Stdout { bytes, .. }) => (ExecLine::Stdout { data: data(bytes) }, false),
        Some(ExecOutput::Stderr { bytes, .. }) => (ExecLine::Stderr { data: data(bytes) }, false),
        Some(ExecOutput::Exited { exit, millis }) => {
            let reason = running.exceeded_limit(&exit).await;
            (ExecLine::Exited { exit, millis, reason }, true)
        }
        Some(ExecOutput::End) | None => (running.connection_lost(None).await, true),
    }
}

async fn aborted(input: &mut Option<InputTask>) {
    match input {
        Some(input) => input.aborted().await,
        None => std::future::pending().await,
    }
}
