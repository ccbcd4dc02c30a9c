//! Terminals in a sandbox.

use harvest_proto::bridge::Terminal;

use super::{CommandHandle, SandboxError, SandboxHandle};
use crate::bridge::ExecInput;

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

impl SandboxHandle {
    /// Opens a terminal with a shell or another command, until the handle is dropped.
    ///
    /// # Errors
    /// When the command cannot be started.
    pub async fn terminal(
        self,
        request: TerminalRequest,
    ) -> Result<(CommandHandle, ExecInput), SandboxError> {
        let argv = match request.argv.is_empty() {
            true => vec!["sh".to_owned(), "-c".to_owned(), SHELL.to_owned()],
            false => request.argv,
        };
        let mut command = self.command(argv, request.cwd, request.user);
        command.terminal = Some(request.terminal);
        let mut running = CommandHandle::new(self, false);
        let input = running.run(command, true).await?;
        Ok((running, input.expect("a command opened with stdin has it")))
    }
}
