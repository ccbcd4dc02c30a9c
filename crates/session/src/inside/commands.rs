//! Commands and terminals in a machine.

use std::any::Any;

use harvest_proto::{api::ExecRequest, bridge::Terminal};

use super::Inside;
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
    /// Working folder; the primary checkout when absent.
    pub cwd: Option<String>,
    /// `harvest`, the default, or `root`.
    pub user: Option<String>,
    /// Size and kind.
    pub terminal: Terminal,
}

/// A command that runs. It is killed when this is dropped before it ended, unless it was let go.
pub struct Running {
    exec: Exec,
    in_use: Box<dyn Any + Send>,
}

impl Running {
    /// What it says next; `None` when the connection was lost before it ended.
    pub async fn next(&mut self) -> Option<ExecOutput> {
        self.exec.next().await
    }

    /// Lets it run on although nobody listens: what it says is thrown away. It still ends with the
    /// connection to its machine.
    pub fn let_go(self) {
        let Self { mut exec, in_use } = self;
        tokio::spawn(async move {
            while exec.next().await.is_some() {}
            drop(in_use);
        });
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
        command.timeout_millis = Some(request.timeout_millis.unwrap_or(limit));
        let (exec, input) = self.bridge.exec_open(command, stdin).await?;
        Ok((Running { exec, in_use: self.in_use }, input))
    }

    /// Opens a terminal with a shell or another command on it; for as long as somebody looks.
    ///
    /// # Errors
    /// When the command cannot be started, or the machine's supervisor is too old for terminals.
    pub async fn terminal(self, order: TerminalOrder) -> Result<(Running, ExecInput), SessionError> {
        let argv = match order.argv.is_empty() {
            true => vec!["sh".to_owned(), "-c".to_owned(), SHELL.to_owned()],
            false => order.argv,
        };
        let mut command = self.command(argv, order.cwd, order.user);
        command.terminal = Some(order.terminal);
        let (exec, input) = self.bridge.exec_open(command, true).await?;
        let input = input.expect("a command opened with stdin has it");
        Ok((Running { exec, in_use: self.in_use }, input))
    }
}
