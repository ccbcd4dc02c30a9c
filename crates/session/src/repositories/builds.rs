//! Builds: a repository is cloned and prepared in an ephemeral sandbox, whose disk becomes the
//! snapshot that sessions start from. A build is published only after a sandbox has started from
//! it; a failed build leaves the previous one in place.

use std::time::Duration;

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{
    NetworkPolicy, RepositoryName, SandboxId, SnapshotId,
    api::{BuildLine, BuildLog, BuildRepository, BuildSummary, Repository},
    bridge::Author,
};
use harvest_store::StoreError;
use tokio::sync::mpsc;

use super::{
    Repositories, RepositoryContext,
    build_report::BuildReport,
    build_start::outdated,
    build_steps::{BuildSteps, PlannedBuild},
};
use crate::{
    check_slots::CheckSlot, ephemeral::EphemeralError, error::SessionError,
    error_chain::error_chain, sandbox_context::SandboxContext, sandboxes::SandboxError,
    wall_clock::now,
};

// A database that does not answer may come back.
pub(super) const STORE_RETRY: Duration = Duration::from_secs(2);

// The message of programs in a sandbox on a full disk.
const DISK_FULL: &str = "No space left on device";

/// The network policy of builds.
pub(super) const BUILD_POLICY: NetworkPolicy = NetworkPolicy::Trusted;

impl Repositories {
    /// Prebuilds a repository for a user, whose e-mail address decides when it is the build's turn.
    /// The build continues when the stream is dropped.
    ///
    /// # Errors
    /// When the repository or branch does not exist, or it is already being built.
    pub async fn build(
        &self,
        name: &RepositoryName,
        order: BuildRepository,
        user: &Author,
    ) -> Result<BoxStream<'static, BuildLine>, SessionError> {
        let repository = self.get(name).await?;
        // The base's builds have no branch of their own.
        let branch = order.branch.filter(|branch| Some(branch) != repository.base.as_ref());
        if let Some(branch) = &branch {
            self.check_branch(&repository, branch, user).await?;
        }
        let order = BuildRepository { branch, ..order };
        self.begin_build(repository, order, &user.email, None).await
    }

    /// Starts a build, of the branch's commit if that is known.
    pub(super) async fn begin_build(
        &self,
        repository: Repository,
        order: BuildRepository,
        user: &str,
        tip: Option<String>,
    ) -> Result<BoxStream<'static, BuildLine>, SessionError> {
        let name = &repository.name;
        let (snapshot, sandbox) = (SnapshotId::random(), SandboxId::random());
        let SandboxContext { lease, provider, .. } = &*self.shared.sandboxes;
        loop {
            let ended = self.shared.build_ended.notified();
            tokio::pin!(ended);
            // From here on the end of a build is not missed.
            ended.as_mut().enable();
            let begun = self.shared.store.build_begin(
                *lease,
                (name, order.branch.as_ref()),
                &snapshot,
                (provider.name(), tip.clone()),
                now(),
            );
            match begun.await {
                Ok(()) => break,
                Err(StoreError::Exists { .. }) if order.wait => ended.await,
                Err(StoreError::Exists { .. }) => {
                    let hint = format!(
                        "`harvest repo builds {name}` shows it; `repo build --wait` builds after it"
                    );
                    let what = format!("a build of `{name}` is already running");
                    return Err(SessionError::conflict("building", what, hint));
                }
                Err(error) => return Err(error.into()),
            }
        }
        let (progress, lines) = mpsc::unbounded_channel();
        // E-mail addresses are compared without case.
        let (repositories, user) = (self.clone(), user.to_lowercase());
        self.shared.sandboxes.tasks.spawn(async move {
            // The time limit starts once the build has a slot.
            let slot = repositories.shared.sandboxes.checks.acquire(&user).await;
            let report = BuildReport::new(progress);
            let planned = PlannedBuild { snapshot, sandbox, order };
            let last = build_and_publish(&repositories, &repository, planned, &report, slot).await;
            repositories.shared.build_ended.notify_waiters();
            // The disks of its sandboxes wait in the trash, maybe of a disk that they have filled.
            repositories.shared.removals.wake.notify_one();
            report.end(last);
        });
        Ok(stream::unfold(lines, async |mut lines| lines.recv().await.map(|line| (line, lines)))
            .boxed())
    }

    /// The builds of a repository that are kept, newest first.
    ///
    /// # Errors
    /// When the repository does not exist.
    pub async fn builds(&self, name: &RepositoryName) -> Result<Vec<BuildSummary>, SessionError> {
        self.get(name).await?;
        Ok(self.shared.store.build_list(name).await?)
    }

    /// A build with its log.
    ///
    /// # Errors
    /// When the repository has no such build.
    pub async fn build_log(
        &self,
        name: &RepositoryName,
        build: &SnapshotId,
    ) -> Result<BuildLog, SessionError> {
        Ok(self.shared.store.build_log(name, build).await?)
    }
}

async fn build_and_publish(
    repositories: &Repositories,
    repository: &Repository,
    planned: PlannedBuild,
    report: &BuildReport,
    slot: CheckSlot,
) -> BuildLine {
    let shared = &repositories.shared;
    let (store, lease) = (&shared.store, shared.sandboxes.lease);
    let limit = shared.sandboxes.timeouts.build;
    let timed_out = Err(EphemeralError::TimedOut { limit });
    let snapshot = &planned.snapshot.clone();
    let steps = BuildSteps { repositories, repository, report };
    let built = tokio::time::timeout(limit, steps.run(planned)).await.unwrap_or(timed_out);
    drop(slot);
    let build = match built {
        Ok(build) => build,
        Err(error) => {
            let message = error_chain(&error);
            end_failed(shared, &repository.name, snapshot, (&message, &report.log())).await;
            let code = failure_code(&error, &message).to_owned();
            return BuildLine::Failed { code, message };
        }
    };
    match store.build_publish(lease, &build, &report.log()).await {
        Ok(()) => {
            // Sandboxes of the warm pool wait on the build before.
            shared.changes.notify_one();
            remove_outdated_builds(shared, &repository.name).await;
            BuildLine::Built { build: Box::new(build) }
        }
        Err(error) => {
            let message = error_chain(&error);
            // A build with an unknown outcome may be published.
            if !matches!(error, StoreError::Unknown { .. }) {
                end_failed(shared, &repository.name, snapshot, (&message, &report.log())).await;
            }
            BuildLine::Failed { code: "store_failed".to_owned(), message }
        }
    }
}

/// Records that a build failed, and removes what it has saved. Retried: no other build of the
/// repository begins while this one counts as running.
async fn end_failed(
    shared: &RepositoryContext,
    repository: &RepositoryName,
    snapshot: &SnapshotId,
    why: (&str, &str),
) {
    let (store, lease) = (&shared.store, shared.sandboxes.lease);
    loop {
        match store.build_fail(lease, snapshot, why, now()).await {
            Ok(()) => break,
            Err(StoreError::LeaseLost | StoreError::Closed) => return,
            Err(error) => tracing::warn!(%error, "cannot record the end of a build; retrying"),
        }
        tokio::time::sleep(STORE_RETRY).await;
    }
    let _ = store.build_forget_failed(lease, repository).await;
    if let Some(snapshots) = shared.sandboxes.provider.snapshots() {
        let _ = snapshots.remove(snapshot).await;
    }
}

/// `no_room` when a disk was full: the host's, or that of the build's sandbox.
fn failure_code(error: &EphemeralError, message: &str) -> &'static str {
    let refused = matches!(error, EphemeralError::Sandbox(SandboxError::NoSpace { .. }));
    if refused || message.contains(DISK_FULL) { "no_room" } else { "build_failed" }
}

/// Removes each snapshot before its row, so that the next build retries after a crash in between.
async fn remove_outdated_builds(shared: &RepositoryContext, repository: &RepositoryName) {
    let Some(snapshots) = shared.sandboxes.provider.snapshots() else { return };
    let builds = shared.store.build_list(repository).await.unwrap_or_default();
    for snapshot in outdated(&builds) {
        match snapshots.remove(&snapshot).await {
            Ok(()) => {
                let _ = shared.store.build_forget(shared.sandboxes.lease, &snapshot).await;
            }
            Err(error) => {
                tracing::warn!(%snapshot, error = error_chain(&error), "cannot remove an outdated build")
            }
        }
    }
}
