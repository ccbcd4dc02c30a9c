//! Commands and terminals in a machine.

use harvest_proto::{api::ExecRequest, bridge::Terminal};

use super::{InUse, Inside};
use crate::{
    bridge::{Exec, ExecInput, ExecOutput},
    error::SessionError,
};

// The shell a person gets: the one they know where the image has it.
const SHELL: &str = "command -v bash >/dev/null && exec bash; exec sh";

/// A terminal somebody wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TerminalOrder {
    /// Program and arguments; a shell when empty.
    pub argv: Vec<String>,
    /// Working folder; the primary checkout, or where the image says, when absent.
    pub cwd: Option<String>,
    /// `harvest`, the default of sessions, or `root`.
    pub user: Option<String>,
    /// Size and kind.
    pub terminal: Terminal,
}

/// A command that runs. When this is dropped before it ended it is killed, or, if it was to be detached,
/// runs on while what it says is thrown away.
pub struct Running {
    exec: Option<Exec>,
    in_use: Option<InUse>,
    detach: bool,
}

impl Running {
    fn new(exec: Exec, in_use: InUse, detach: bool) -> Self {
        Self { exec: Some(exec), in_use: Some(in_use), detach }
    }

    /// What it says next; `None` when the connection was lost before it ended. Cancel-safe.
    pub async fn next(&mut self) -> Option<ExecOutput> {
        self.exec.as_mut()?.next().await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let (Some(mut exec), in_use) = (self.exec.take(), self.in_use.take()) else { return };
        if self.detach {
            tokio::spawn(async move {
                while exec.next().await.is_some() {}
                drop(in_use);
            });
        }
    }
}

impl Inside {
    /// Starts a command. With `stdin` it reads what is written to the second value, else what the request
    /// brings along.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn exec(
        self,
        request: ExecRequest,
        stdin: bool,
    ) -> Result<(Running, Option<ExecInput>), SessionError> {
        let limit = u64::try_from(self.limit.as_millis()).unwrap_or(u64::MAX);
        let mut command = self.command(request.argv, request.cwd, request.user);
        command.env = request.env;
        command.detached = request.detach;
        command.timeout_millis = Some(request.timeout_millis.unwrap_or(limit));
        let (exec, input) = self.bridge.exec_open(command, stdin).await?;
        Ok((Running::new(exec, self.in_use, request.detach), input))
    }

    /// Opens a terminal with a shell or another command on it; for as long as somebody looks.
    ///
    /// # Errors
    /// When the command cannot be started, or the machine's supervisor is too old for terminals.
    pub async fn terminal(
        self,
        order: TerminalOrder,
    ) -> Result<(Running, ExecInput), SessionError> {
        let argv = match order.argv.is_empty() {
            true => vec!["sh".to_owned(), "-c".to_owned(), SHELL.to_owned()],
            false => order.argv,
        };
        let mut command = self.command(argv, order.cwd, order.user);
        command.terminal = Some(order.terminal);
        let (exec, input) = self.bridge.exec_open(command, true).await?;
        let input = input.expect("a command opened with stdin has it");
        Ok((Running::new(exec, self.in_use, false), input))
    }
}
