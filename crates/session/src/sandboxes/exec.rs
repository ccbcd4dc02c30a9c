//! Commands in a sandbox: one request and one stream of output lines, whether the sandbox belongs
//! to a session, stands alone or is created for this command.

use std::{sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{
    SandboxId,
    api::{ExecLine, ExecRequest, Language, SandboxOwner},
    bridge::{Command, Exit, FileRequest, ToSupervisor},
};

use super::{
    CommandDefaults, Requester, SandboxError, SandboxHandle, SandboxProvider, SandboxSpec,
    Sandboxes,
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
        let order = *request.sandbox.take().unwrap_or_default();
        check(&request)?;
        let (id, made_by) = (SandboxId::random(), requester.user.clone());
        let owner = SandboxOwner::Process(std::process::id());
        let spec = SandboxSpec::standalone(id.clone(), owner, made_by, order)?;
        let slot = self.wait_for_slot(&id, requester.user.as_deref()).await?;
        let (guard, created, stream) = self.create_ephemeral(spec, slot).await?;
        let started = ExecLine::Started { sandbox: id.clone(), warnings: created.warnings };
        let bridge = Bridge::open_without_welcome(stream);
        let mut handle = self.handle(id, bridge, CommandDefaults::of_image(), Box::new(()));
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
        let stdin = request.stdin.take().map(|text| BASE64_STANDARD.decode(text)).transpose();
        let stdin =
            stdin.map_err(|_| SandboxError::invalid("invalid_stdin", "`stdin` is not base64"))?;
        let input = input.or_else(|| stdin.map(|bytes| stream::iter([Ok(bytes)]).boxed()));
        let (provider, sandbox) = (Arc::clone(&self.provider), self.sandbox.clone());
        match self.start(request, input.is_some()).await {
            Ok((running, writer)) => {
                let input =
                    input.zip(writer).map(|(input, writer)| InputTask::spawn(input, writer));
                Ok(lines(running, input))
            }
            Err(SandboxError::Bridge(BridgeError::Fault(fault))) => {
                let code = crate::bridge::fault_code(&fault).to_owned();
                Ok(stream::iter([ExecLine::Failed { code, message: fault.message }]).boxed())
            }
            Err(SandboxError::Bridge(error)) => {
                let last = connection_lost(&*provider, &sandbox, Some(&error)).await;
                Ok(stream::iter([last]).boxed())
            }
            Err(error) => Err(error),
        }
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
        check(&request)?;
        let timeout = request.timeout_millis.unwrap_or_else(|| millis(self.defaults.timeout));
        let mut command = Command {
            env: request.env,
            detached: request.detach,
            // Zero means never.
            timeout_millis: Some(timeout).filter(|millis| *millis > 0),
            ..self.command(request.argv, request.cwd, request.user)
        };
        let mut code_file = None;
        if let Some((language, code)) = request.lang.zip(request.code) {
            let path = write_code(&self.bridge, &mut command, language, &code).await?;
            // An ephemeral sandbox is removed as a whole.
            code_file = self.ephemeral.is_none().then_some(path);
        }
        let (exec, input) = self.bridge.exec_piped(command, stdin).await?;
        let exec = Some(exec);
        Ok((CommandHandle { handle: self, exec, detach: request.detach, code_file }, input))
    }
}

/// Checks what the supervisor could not explain.
fn check(request: &ExecRequest) -> Result<(), SandboxError> {
    let invalid = |what: &str| Err(SandboxError::invalid("invalid_command", what));
    if request.sandbox.is_some() {
        return invalid("`sandbox` is only for a command in a new sandbox");
    }
    match (request.lang, &request.code) {
        (Some(_), None) | (None, Some(_)) => invalid("`code` and `lang` must be given together"),
        (None, None) if request.argv.first().is_none_or(String::is_empty) => {
            invalid("`argv` is empty")
        }
        _ => Ok(()),
    }
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
    pub(super) handle: SandboxHandle,
    pub(super) exec: Option<Exec>,
    pub(super) detach: bool,
    /// The file to delete when the command has ended.
    pub(super) code_file: Option<String>,
}

impl CommandHandle {
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
        let Some(mut exec) = self.exec.take() else { return };
        let (bridge, code_file) = (self.handle.bridge.clone(), self.code_file.take());
        if !self.detach && code_file.is_none() {
            return;
        }
        let use_guard = std::mem::replace(&mut self.handle.use_guard, Box::new(()));
        let detach = self.detach;
        tokio::spawn(async move {
            while detach && exec.next().await.is_some() {}
            drop(exec);
            remove_code(&bridge, code_file).await;
            drop(use_guard);
        });
    }
}

/// Best effort: the command's result is already known.
async fn remove_code(bridge: &Bridge, path: Option<String>) {
    if let Some(path) = path {
        let request = FileRequest::Remove { path, tree: false };
        let _ = bridge.request(|id| ToSupervisor::File { id, request }).await;
    }
}

fn lines(running: CommandHandle, input: Option<InputTask>) -> ExecLines {
    let state = Some((running, input, false));
    stream::unfold(state, |state| async move {
        let (mut running, mut input, ended) = state?;
        if ended {
            running.clean_up().await;
            return None;
        }
        let (line, ended) = next_line(&mut running, &mut input).await;
        Some((line, Some((running, input, ended))))
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
        Some(ExecOutput::End) | None => {
            let SandboxHandle { provider, sandbox, .. } = &running.handle;
            (connection_lost(&**provider, sandbox, None).await, true)
        }
    }
}

async fn aborted(input: &mut Option<InputTask>) {
    match input {
        Some(input) => input.aborted().await,
        None => std::future::pending().await,
    }
}

/// The last line when the outcome of a command is unknown.
async fn connection_lost(
    provider: &dyn SandboxProvider,
    sandbox: &SandboxId,
    error: Option<&BridgeError>,
) -> ExecLine {
    let exited = |reason: String| ExecLine::Failed {
        code: "sandbox_ended".to_owned(),
        message: format!("the sandbox exited before the command ended: {reason}"),
    };
    match tokio::time::timeout(EXIT_GRACE, provider.wait(sandbox)).await {
        Ok(Ok(reason)) => exited(reason),
        Ok(Err(SandboxError::Missing(_) | SandboxError::NotRunning { .. })) => {
            exited("removed".to_owned())
        }
        Ok(Err(_)) | Err(_) => {
            let why = error.map(|error| format!(": {}", error_chain(error))).unwrap_or_default();
            let message = format!(
                "the connection to the sandbox was lost; the command may still be running{why}"
            );
            ExecLine::Failed { code: "lost".to_owned(), message }
        }
    }
}
