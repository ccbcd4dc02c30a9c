//! The boot of a build that continues an earlier one, see `docs/decisions/0050-rebuilds.md`.

use std::time::Duration;

use harvest_proto::{
    bridge::{Boot, Checkout},
    event::{BootPhase, PhaseStatus},
};

use super::{BootRunner, failure::PhaseError};
use crate::{
    git::Git,
    install::{self, Projects},
    users::User,
};

impl BootRunner {
    pub(super) async fn rebuild(
        &self,
        boot: &Boot,
        user: &User,
        timeout: Duration,
    ) -> Result<(), ()> {
        self.apply_kept(boot, user);
        let git = Git { sandbox: &self.sandbox, user };
        let state = |checkout: &Checkout| Projects::read(&self.sandbox, checkout, user).pins();
        let Some(checkout) = boot.repositories.first() else {
            self.report(BootPhase::Ready, PhaseStatus::Done, Some(0), None);
            return Ok(());
        };
        let (before, pins) = (git.commit(checkout).await, state(checkout));
        let mut cloned = Vec::new();
        self.run_phase(BootPhase::Sync, self.sync(boot, user, &mut cloned)).await?;
        let after = git.commit(checkout).await;
        let (Some(before), Some(after), true) = (before, after, cloned.is_empty()) else {
            return self.start_over("the earlier build has no checkout").await;
        };
        let commits = (before.as_str(), after.as_str());
        if state(checkout) != pins {
            return self.start_over("a pinned version of Node or Python moved").await;
        }
        if git.differs(checkout, commits, &[".harvest"]).await {
            return self.start_over("`.harvest/` moved").await;
        }
        let patterns = install::path_patterns();
        let manifests: Vec<&str> = patterns.iter().map(String::as_str).collect();
        if git.differs(checkout, commits, &manifests).await {
            self.install(&[checkout], user, true, timeout).await?;
            self.run_hooks(BootPhase::Setup, &[checkout], user, ("setup.sh", timeout)).await?;
        } else {
            let commands = Projects::read(&self.sandbox, checkout, user).build_commands();
            self.run_installs(vec![(commands, checkout.clone())], user, true, timeout).await?;
            self.skip(BootPhase::Setup);
        }
        self.report(BootPhase::Ready, PhaseStatus::Done, Some(0), None);
        Ok(())
    }

    async fn start_over(&self, why: &str) -> Result<(), ()> {
        self.run_phase(BootPhase::Install, async { Err(PhaseError::start_over(why)) }).await
    }
}
