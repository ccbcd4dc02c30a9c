//! Builds: a repository is cloned and prepared in an ephemeral sandbox, whose disk becomes the
//! snapshot that sessions start from. A build is published only after a sandbox has started from
//! it; a failed build leaves the previous one in place.

use std::{fmt::Write as _, sync::Mutex, time::Duration};

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_gateway::DoorObserver;
use harvest_proto::{
    AgentName, EventBody, NetworkPolicy, RepositoryName, SandboxId, SecretOwner, SessionId,
    SnapshotId, UpstreamName,
    api::{Build, BuildLine, BuildLog, BuildSummary, CheckOutcome, Evidence, Repository},
    bridge::BootStart,
    event::PhaseStatus,
};
use harvest_store::{ComputeOwner, RuleOwner, StoreError};
use tokio::sync::{mpsc, watch};

use super::{PassSpec, Repositories, RepositoryContext, check};
use crate::{
    bridge::Bridge,
    check_slots::CheckSlot,
    checkout,
    ephemeral::{EphemeralDoor, EphemeralError, EphemeralSandbox},
    error::SessionError,
    error_chain::error_chain,
    sandbox_context::SandboxContext,
    sandboxes::StartFrom,
    timeouts::millis,
    wall_clock::now,
};

/// The network policy of builds.
pub(super) const BUILD_POLICY: NetworkPolicy = NetworkPolicy::Trusted;

// A longer log loses its middle: how it began and how it ended say most.
const MAX_LOG_BYTES: usize = 64 * 1024;

impl Repositories {
    /// Prebuilds a repository for a user, whose e-mail address decides when it is the build's turn.
    /// The build continues when the stream is dropped.
    ///
    /// # Errors
    /// When the repository does not exist or is already being built.
    pub async fn build(
        &self,
        name: &RepositoryName,
        user: &str,
    ) -> Result<BoxStream<'static, BuildLine>, SessionError> {
        self.build_at(name, user, None).await
    }

    /// As [`Repositories::build`], of the base's commit if that is known.
    pub(super) async fn build_at(
        &self,
        name: &RepositoryName,
        user: &str,
        tip: Option<String>,
    ) -> Result<BoxStream<'static, BuildLine>, SessionError> {
        let repository = self.get(name).await?;
        let (snapshot, sandbox) = (SnapshotId::random(), SandboxId::random());
        let SandboxContext { lease, provider, .. } = &*self.shared.sandboxes;
        let begun = self
            .shared
            .store
            .build_begin(*lease, name, &snapshot, (provider.name(), tip), now())
            .await;
        begun.map_err(|error| match error {
            StoreError::Exists { .. } => SessionError::conflict(
                "building",
                format!("a build of `{name}` is already running"),
                format!(
                    "`harvest repo builds {name}` shows it; sessions start without it meanwhile"
                ),
            ),
            other => other.into(),
        })?;
        let (progress, lines) = mpsc::unbounded_channel();
        // E-mail addresses are compared without case.
        let (repositories, user) = (self.clone(), user.to_lowercase());
        self.shared.sandboxes.tasks.spawn(async move {
            // The time limit starts once the build has a slot.
            let slot = repositories.shared.sandboxes.checks.acquire(&user).await;
            let report = BuildReport { progress, log: Mutex::default() };
            let last =
                build_and_publish(&repositories, &repository, &snapshot, sandbox, &report, slot)
                    .await;
            let _ = report.progress.send(last);
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
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    report: &BuildReport,
    slot: CheckSlot,
) -> BuildLine {
    let shared = &repositories.shared;
    let (store, lease) = (&shared.store, shared.sandboxes.lease);
    let limit = shared.sandboxes.timeouts.build;
    let timed_out = Err(EphemeralError::TimedOut { limit });
    let build = build(repositories, repository, snapshot, sandbox, report);
    let built = tokio::time::timeout(limit, build).await.unwrap_or(timed_out);
    drop(slot);
    let failed = |code: &str, message: String| BuildLine::Failed { code: code.to_owned(), message };
    let build = match built {
        Ok(build) => build,
        Err(error) => {
            let message = error_chain(&error);
            let _ = store.build_fail(lease, snapshot, (&message, &report.log()), now()).await;
            let _ = store.build_forget_failed(lease, &repository.name).await;
            if let Some(snapshots) = shared.sandboxes.provider.snapshots() {
                let _ = snapshots.remove(snapshot).await;
            }
            return failed("build_failed", message);
        }
    };
    match store.build_publish(lease, &build, &report.log()).await {
        Ok(()) => {
            remove_outdated_builds(shared, &repository.name).await;
            BuildLine::Built { build }
        }
        Err(error) => failed("store_failed", error_chain(&error)),
    }
}

/// Removes each snapshot before its row, so that the next build retries after a crash in between.
async fn remove_outdated_builds(shared: &RepositoryContext, repository: &RepositoryName) {
    let Some(snapshots) = shared.sandboxes.provider.snapshots() else { return };
    for snapshot in shared.store.build_outdated(repository).await.unwrap_or_default() {
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

async fn build(
    repositories: &Repositories,
    repository: &Repository,
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    report: &BuildReport,
) -> Result<Build, EphemeralError> {
    let shared = &repositories.shared;
    let started = shared.clock.now();
    let order = PassSpec {
        // Not a real session: the observer gets the events of the door.
        session: SessionId::random(),
        owner: RuleOwner::Repository(repository.name.clone()),
        network: BUILD_POLICY,
        upstream: watch::channel(UpstreamName::scripted()).1,
        branch: None,
        secrets: vec![SecretOwner::Repository(repository.name.clone()), SecretOwner::Global],
    };
    let policy = repositories
        .pass(std::slice::from_ref(repository), order)
        .await
        .map_err(|error| EphemeralError::Other(error_chain(&error)))?;
    let door = EphemeralDoor { policy, observer: Some(report.refusal_observer()) };
    report.progress("starting a sandbox");
    let image = repositories.image(Some(repository), &AgentName::default()).await?;
    let from = StartFrom::Image(image);
    let owner =
        ComputeOwner { repository: Some(repository.name.clone()), ..ComputeOwner::default() };
    let counted = owner.clone();
    let mut sandbox =
        EphemeralSandbox::start(&shared.sandboxes, sandbox, from, Some(door), counted).await?;
    let mut package_manager = None;
    let observe = |event: &EventBody| {
        if let EventBody::InstallStep { manager, .. } = event {
            package_manager.get_or_insert_with(|| manager.clone());
        }
        report.event(event);
    };
    sandbox
        .boot(&repository.name, repository.base.clone(), BootStart::Build, None, observe)
        .await?;
    let head = checkout::head(&sandbox.bridge, &repository.name.folder()).await?;
    let commit = head
        .commit
        .ok_or_else(|| EphemeralError::Other("the repository has no commit".to_owned()))?;
    let limit = shared.sandboxes.timeouts.warm;
    let check = run_tests(&sandbox.bridge, repository, &commit, limit, report).await?;
    report.progress("saving a snapshot");
    sandbox.save(snapshot).await?;
    report.progress("starting a sandbox from the snapshot");
    let (id, from) = (SandboxId::random(), StartFrom::Snapshot(snapshot.clone()));
    let proof = EphemeralSandbox::start(&shared.sandboxes, id, from, None, owner).await?;
    proof.remove().await;
    Ok(Build {
        snapshot_id: snapshot.clone(),
        provider: shared.sandboxes.provider.name().to_owned(),
        commit,
        package_manager,
        check,
        millis: millis(shared.clock.now().since(started)),
        built_at: now(),
    })
}

/// Runs the repository's check, or else its tests, once: they fill caches that sessions start with.
/// A failure does not fail the build. Returns the result of the check, if the repository has one.
async fn run_tests(
    bridge: &Bridge,
    repository: &Repository,
    commit: &str,
    limit: Duration,
    report: &BuildReport,
) -> Result<Option<Evidence>, EphemeralError> {
    let start = || report.progress("running .harvest/check.sh");
    let name = &repository.name;
    let evidence = check::run(bridge, name, commit.to_owned(), limit, start).await?;
    if evidence.outcome != CheckOutcome::NoneDeclared {
        report.note(&format!("check: {}\n{}", evidence.outcome, evidence.tail));
        return Ok(Some(evidence));
    }
    let folder = name.folder().path();
    let Some(tests) = check::find_tests(bridge, &folder, false).await? else { return Ok(None) };
    report.progress(&format!("running {tests}"));
    let script = format!("exec {tests} 2>&1");
    let command = checkout::command(&["/bin/sh", "-c", &script], &folder, millis(limit));
    let output = bridge.run_command(command).await?;
    match output.ok() {
        true => report.note(&format!("{tests}: passed")),
        false => report.warn(format!("{tests} failed:\n{}", output.tail())),
    }
    Ok(None)
}

/// Where a build reports: the client, if it is still connected, and the log that is stored.
struct BuildReport {
    progress: mpsc::UnboundedSender<BuildLine>,
    log: Mutex<String>,
}

impl BuildReport {
    fn progress(&self, message: &str) {
        self.note(message);
        // The client may have disconnected.
        let _ = self.progress.send(BuildLine::Progress { message: message.to_owned() });
    }

    fn event(&self, event: &EventBody) {
        match event {
            EventBody::BootPhase { phase, status: PhaseStatus::Started, .. } => {
                let name = serde_json::to_string(phase).unwrap_or_default();
                self.progress(name.trim_matches('"'));
            }
            EventBody::InstallStep { folder, manager, command, millis, failure, tail } => {
                let ended = failure.as_deref().unwrap_or("done");
                self.note(&format!("{command} in {folder}: {ended} ({millis} ms)\n{tail}"));
                let _ = self.progress.send(BuildLine::InstallStep {
                    folder: folder.clone(),
                    manager: manager.clone(),
                    command: command.clone(),
                    millis: *millis,
                    failure: failure.clone(),
                    tail: tail.clone(),
                });
            }
            EventBody::Warning { message } => self.warn(message.clone()),
            _ => {}
        }
    }

    fn warn(&self, message: String) {
        self.note(&format!("warning: {message}"));
        let _ = self.progress.send(BuildLine::Warning { message });
    }

    /// Reports the connections that the network policy refuses.
    fn refusal_observer(&self) -> DoorObserver {
        let progress = self.progress.clone();
        Box::new(move |event| {
            if let EventBody::EgressRefused { name, reason, hint } = event {
                let _ = progress.send(BuildLine::EgressRefused { name, reason, hint });
            }
        })
    }

    fn note(&self, text: &str) {
        let mut log = self.log.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _ = writeln!(log, "{}", text.trim_end());
        if log.len() > MAX_LOG_BYTES {
            let (head, tail) = (
                log.floor_char_boundary(MAX_LOG_BYTES / 4),
                log.ceil_char_boundary(log.len() - MAX_LOG_BYTES / 2),
            );
            log.replace_range(head..tail, "\n…\n");
        }
    }

    fn log(&self) -> String {
        self.log.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_log_keeps_its_beginning_and_end() {
        let (progress, _lines) = mpsc::unbounded_channel();
        let report = BuildReport { progress, log: Mutex::default() };
        report.note("first");
        (0..5000).for_each(|line| report.note(&format!("line {line} with an ä")));
        report.note("last");
        let log = report.log();
        assert!(log.len() <= MAX_LOG_BYTES + 100, "{}", log.len());
        assert!(log.starts_with("first\nline 0") && log.ends_with("last\n"), "{log}");
    }
}
