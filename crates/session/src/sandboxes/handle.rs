//! A sandbox in use: commands, terminals and files over its bridge. The same for the sandboxes of
//! sessions and for standalone ones.

use std::{any::Any, sync::Arc, time::Duration};

use harvest_proto::{
    SandboxId,
    api::SandboxStatus,
    bridge::{BridgeRole, Command},
};

use super::{EphemeralGuard, SandboxError, SandboxProvider, Sandboxes};
use crate::{
    bridge::{Bridge, BridgeError},
    timeouts::Timeouts,
};

/// Keeps a sandbox from becoming idle until it is dropped.
pub type UseGuard = Box<dyn Any + Send + Sync>;

/// What commands and files get when a request does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandDefaults {
    /// The folder of commands; the image's when absent.
    pub folder: Option<String>,
    /// The user of commands; the image's when absent.
    pub user: Option<String>,
    /// The user whose access applies to files, and who owns new ones.
    pub file_user: &'static str,
    pub timeout: Duration,
}

impl CommandDefaults {
    /// Those of a standalone sandbox: the image's, and files belong to the only user that exists in
    /// every image.
    pub(super) fn of_image() -> Self {
        let timeout = Timeouts::default().exec;
        Self { folder: None, user: None, file_user: "root", timeout }
    }
}

/// A sandbox in use. It does not become idle while this, or anything made from it, lives.
pub struct SandboxHandle {
    pub(super) bridge: Bridge,
    pub(super) sandbox: SandboxId,
    pub(super) provider: Arc<dyn SandboxProvider>,
    pub(super) defaults: CommandDefaults,
    pub(super) use_guard: UseGuard,
    /// The sandbox ends with the command.
    pub(super) ephemeral: Option<EphemeralGuard>,
}

impl Sandboxes {
    /// A handle to a sandbox behind a bridge, kept in use by `use_guard`.
    pub(crate) fn handle(
        &self,
        sandbox: SandboxId,
        bridge: Bridge,
        defaults: CommandDefaults,
        use_guard: UseGuard,
    ) -> SandboxHandle {
        let provider = Arc::clone(&self.provider);
        SandboxHandle { bridge, sandbox, provider, defaults, use_guard, ephemeral: None }
    }

    /// A handle to a running standalone sandbox.
    ///
    /// # Errors
    /// When the sandbox is not running or belongs to a session.
    pub async fn standalone_handle(
        &self,
        sandbox: &SandboxId,
    ) -> Result<SandboxHandle, SandboxError> {
        let found = self.standalone(sandbox, "run a command in").await?;
        if found.state == SandboxStatus::Running {
            self.open_door(sandbox, found.door.as_ref()).await?;
        }
        let stream = self.provider.connect(sandbox).await?;
        let opened = Bridge::open(stream, BridgeRole::Client, None).await;
        let opened = opened.map_err(|error| SandboxError::Failed {
            doing: format!("cannot connect to {sandbox}"),
            hint: matches!(error, BridgeError::OtherVersion { .. }).then(|| {
                format!(
                    "restart it: `harvest sandbox stop {sandbox}`, then `harvest sandbox start {sandbox}`"
                )
            }),
            source: error.into(),
        })?;
        let defaults = CommandDefaults::of_image();
        Ok(self.handle(sandbox.clone(), opened.bridge, defaults, Box::new(())))
    }
}

impl SandboxHandle {
    /// A command with the defaults of this sandbox.
    pub(super) fn command(
        &self,
        argv: Vec<String>,
        cwd: Option<String>,
        user: Option<String>,
    ) -> Command {
        let cwd = cwd.or_else(|| self.defaults.folder.clone());
        let user = user.or_else(|| self.defaults.user.clone());
        Command { argv, cwd, user, ..Command::default() }
    }
}
