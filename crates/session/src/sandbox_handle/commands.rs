//! Commands and terminals in a sandbox.

use harvest_proto::{api::ExecRequest, bridge::Terminal};

use super::{SandboxHandle, UseGuard};
use crate::{
    bridge::{Exec, ExecInput, ExecOutput},
    error::SessionError,
};

// bash where the image has it.
const SHELL: &str = "command -v bash >/dev/null && exec bash; exec sh";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TerminalRequest {
    /// Program and arguments; a shell when empty.
    pub argv: Vec<String>,
    /// Working folder; the primary checkout, or the image's folder, when absent.
    pub cwd: Option<String>,
    /// `harvest`, the default in sessions, or `root`.
    pub user: Option<String>,
    pub terminal: Terminal,
}

/// A running command. Dropping this kills it; a detached command keeps running and its output is
/// discarded.
pub struct CommandHandle {
    exec: Option<Exec>,
    use_guard: Option<UseGuard>,
    detach: bool,
}

impl CommandHandle {
    fn new(exec: Exec, use_guard: UseGuard, detach: bool) -> Self {
        Self { exec: Some(exec), use_guard: Some(use_guard), detach }
    }

    /// The next output; `None` when the connection is lost before the exit. Cancel-safe.
    pub async fn next(&mut self) -> Option<ExecOutput> {
        self.exec.as_mut()?.next().await
    }
}

impl Drop for CommandHandle {
    fn drop(&mut self) {
        let (Some(mut exec), use_guard) = (self.exec.take(), self.use_guard.take()) else { return };
        if self.detach {
            tokio::spawn(async move {
                while exec.next().await.is_some() {}
                drop(use_guard);
            });
        }
    }
}

impl SandboxHandle {
    /// Starts a command. With `stdin`, the second value writes to it while it runs.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn exec(
        self,
        request: ExecRequest,
        stdin: bool,
    ) -> Result<(CommandHandle, Option<ExecInput>), SessionError> {
        let timeout = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        let mut command = self.command(request.argv, request.cwd, request.user);
        command.env = request.env;
        command.detached = request.detach;
        command.timeout_millis = Some(request.timeout_millis.unwrap_or(timeout));
        let (exec, input) = self.bridge.exec_piped(command, stdin).await?;
        Ok((CommandHandle::new(exec, self.use_guard, request.detach), input))
    }

    /// Opens a terminal with a shell or another command, until the handle is dropped.
    ///
    /// # Errors
    /// When the command cannot be started.
    pub async fn terminal(
        self,
        request: TerminalRequest,
    ) -> Result<(CommandHandle, ExecInput), SessionError> {
        let argv = match request.argv.is_empty() {
            true => vec!["sh".to_owned(), "-c".to_owned(), SHELL.to_owned()],
            false => request.argv,
        };
        let mut command = self.command(argv, request.cwd, request.user);
        command.terminal = Some(request.terminal);
        let (exec, input) = self.bridge.exec_piped(command, true).await?;
        let input = input.expect("a command opened with stdin has it");
        Ok((CommandHandle::new(exec, self.use_guard, false), input))
    }
}
