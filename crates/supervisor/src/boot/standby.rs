//! The boot of a standby sandbox, see `docs/decisions/0038-warm-pool.md`: the agent starts before
//! the sandbox belongs to a session, and everything that depends on the session comes later.

use std::{path::Path, rc::Rc};

use harvest_proto::{
    EventBody,
    bridge::Boot,
    event::{BootPhase, PhaseStatus},
};

use super::{BootRunner, failure::PhaseError};
use crate::{app, git::Git, users::User};

impl BootRunner {
    /// Assigns the sandbox to its session, unless this is the order to stand by.
    pub(super) fn assign(&self, boot: Rc<Boot>) {
        if !boot.standby && self.assigned.borrow().is_none() {
            self.assigned.send_replace(Some(boot));
        }
    }

    /// Waits for the order of the session to which the sandbox is assigned.
    pub(super) async fn assigned(&self) -> Rc<Boot> {
        let mut assigned = self.assigned.subscribe();
        let boot = assigned.wait_for(Option::is_some).await.ok().and_then(|boot| boot.clone());
        boot.expect("the sender lives as long as the runner")
    }

    /// Whether the agent finds everything that it needs at its start before the sandbox has a
    /// session, and with it a network: a repository's MCP servers may be elsewhere, or be
    /// downloaded by the command that starts them.
    pub(super) fn can_stand_by(&self, boot: &Boot, user: &User) -> bool {
        let workspace = self.sandbox.workspace();
        let has_servers = |file: &str| {
            let mut paths = boot
                .repositories
                .iter()
                .map(|checkout| Path::new(&workspace).join(&*checkout.folder).join(file));
            paths.any(|path| user.access(|| path.symlink_metadata()).is_ok())
        };
        !boot.standby || !app::SERVER_FILES.into_iter().any(has_servers)
    }

    pub(super) fn refuse_standby(&self) -> Result<(), ()> {
        let why = "the agent cannot start before the sandbox belongs to a session";
        let error = PhaseError::permanent(why);
        self.report(BootPhase::Agent, PhaseStatus::Failed, Some(0), Some(error));
        Err(())
    }

    /// Waits for the session of a standby sandbox, and sets the author of its commits.
    pub(super) async fn be_assigned(&self, first: &Boot, user: &User) {
        let boot = self.assigned().await;
        let git = Git { sandbox: &self.sandbox, user };
        if first.standby
            && let Some(author) = &boot.author
            && let Err(tail) = git.set_author(author).await
        {
            let message = format!("cannot set the author of commits: {tail}");
            self.outbox.push(None, EventBody::Warning { message });
        }
    }
}
