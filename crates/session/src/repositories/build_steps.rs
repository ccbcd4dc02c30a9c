//! The steps of a build: a sandbox is started, the repository prepared in it, its disk saved, and
//! another sandbox started from that.

use std::time::Duration;

use harvest_gateway::ledger::DoorPurpose;
use harvest_proto::{
    AgentName, EventBody, RepositoryName, RuleTarget, RuleVerdict, SandboxId, SecretOwner,
    SessionId, SnapshotId, UpstreamName,
    api::{
        Build, BuildRepository, CheckOutcome, Evidence, Repository, RepositoryConfig,
        SetNetworkRule,
    },
    bridge::{BootStart, Exit},
    event::{BootPhase, SnapshotKind},
};
use harvest_store::{ComputeOwner, RuleOwner};
use tokio::sync::watch;

use super::{
    PassSpec, Repositories,
    build_report::BuildReport,
    build_start::{CurrentImage, has_failed, why_from_image},
    builds::BUILD_POLICY,
    check,
};
use crate::{
    bridge::Bridge,
    checkout,
    ephemeral::{EphemeralDoor, EphemeralError, EphemeralSandbox},
    error_chain::error_chain,
    sandboxes::StartFrom,
    timeouts::millis,
    wall_clock::now,
};

const NO_COMMIT: &str = "no commit is checked out: the repository is empty, or its setup removed \
                         `.git`";

/// A base that moves while its build starts over changes its file at most this often.
const MAX_STARTS: usize = 3;

/// The ids of a build, stored before it begins.
pub(super) struct PlannedBuild {
    pub(super) snapshot: SnapshotId,
    /// Of the first sandbox.
    pub(super) sandbox: SandboxId,
    pub(super) order: BuildRepository,
}

/// A build in progress.
pub(super) struct BuildSteps<'a> {
    pub(super) repositories: &'a Repositories,
    pub(super) repository: &'a Repository,
    pub(super) report: &'a BuildReport,
}

/// How an attempt to build ended.
enum Attempt {
    Built(Box<Build>),
    /// The build has to begin with an image: this one, or the same.
    StartOver {
        why: String,
        image: Option<String>,
    },
}

/// What an attempt starts from.
struct Origin {
    image: CurrentImage,
    /// The build that it continues.
    last: Option<Build>,
}

/// What a boot tells about the repository.
#[derive(Default)]
struct Prepared {
    package_manager: Option<String>,
    config: Option<RepositoryConfig>,
    start_over: Option<(String, Option<String>)>,
}

impl BuildSteps<'_> {
    pub(super) async fn run(&self, planned: PlannedBuild) -> Result<Build, EphemeralError> {
        let PlannedBuild { snapshot, mut sandbox, order } = planned;
        let mut origin = self.origin(&order).await?;
        for _ in 0..MAX_STARTS {
            match self.attempt(&snapshot, sandbox, &origin, &order).await? {
                Attempt::Built(build) => return Ok(*build),
                Attempt::StartOver { why, image } => {
                    let name = image.unwrap_or(origin.image.name);
                    self.report.progress(&format!("starting over from the image {name}: {why}"));
                    origin = Origin { image: self.current(name).await, last: None };
                }
            }
            sandbox = SandboxId::random();
        }
        Err(EphemeralError::Other("`image` in .harvest/config.toml keeps changing".to_owned()))
    }

    /// The last build of the branch or else of the base, unless this one begins with the image.
    async fn origin(&self, order: &BuildRepository) -> Result<Origin, EphemeralError> {
        let Self { repositories, repository, report } = *self;
        let name = repositories.image(Some(repository), &AgentName::default()).await?;
        let image = self.current(name).await;
        // This build may have waited for another one.
        let last = repositories.newest_build(&repository.name, order.branch.as_ref()).await;
        let last = last.map_err(|error| EphemeralError::Other(error_chain(&error)))?;
        let exists = match &last {
            Some(last) => {
                let from = StartFrom::Snapshot(last.snapshot_id.clone());
                repositories.shared.sandboxes.provider.can_start_from(&from).await?
            }
            None => false,
        };
        let last = last.filter(|_| exists);
        let builds = repositories.builds(&repository.name).await;
        let builds = builds.map_err(|error| EphemeralError::Other(error_chain(&error)))?;
        let failed = has_failed(&builds, order.branch.as_ref());
        let why = why_from_image(last.as_ref(), &image, (order.force, failed));
        let last = match (&why, last) {
            (None, Some(last)) => {
                report.note(&format!("continuing the build of {}", last.commit));
                Some(last)
            }
            _ => {
                let why = why.unwrap_or_default();
                report.note(&format!("building from the image {}: {why}", image.name));
                None
            }
        };
        Ok(Origin { image, last })
    }

    async fn current(&self, name: String) -> CurrentImage {
        // A missing image fails the start, with a better error.
        let id = match self.repositories.shared.sandboxes.provider.host() {
            Some(host) => host.image_get(&name).await.ok().map(|image| image.id),
            None => None,
        };
        CurrentImage { name, id }
    }

    async fn attempt(
        &self,
        snapshot: &SnapshotId,
        sandbox: SandboxId,
        Origin { image, last }: &Origin,
        order: &BuildRepository,
    ) -> Result<Attempt, EphemeralError> {
        let Self { repositories, repository, report } = *self;
        let shared = &repositories.shared;
        let started = shared.clock.now();
        let pass = PassSpec {
            // Not a real session: the observer gets the events of the door.
            session: SessionId::random(),
            owner: RuleOwner::Repository(repository.name.clone()),
            network: BUILD_POLICY,
            upstream: watch::channel(UpstreamName::scripted()).1,
            branch: None,
            secrets: vec![SecretOwner::Repository(repository.name.clone()), SecretOwner::Global],
            purpose: DoorPurpose::Work,
        };
        let policy = repositories
            .pass(std::slice::from_ref(repository), pass)
            .await
            .map_err(|error| EphemeralError::Other(error_chain(&error)))?;
        let network = policy.network.clone();
        let door = EphemeralDoor { policy, observer: Some(report.refusal_observer()) };
        report.progress("starting a sandbox");
        let (from, start) = match last {
            Some(last) => (StartFrom::Snapshot(last.snapshot_id.clone()), BootStart::Rebuild),
            None => (StartFrom::Image(image.name.clone()), BootStart::Build),
        };
        let owner =
            ComputeOwner { repository: Some(repository.name.clone()), ..ComputeOwner::default() };
        let counted = owner.clone();
        let mut sandbox =
            EphemeralSandbox::start(&shared.sandboxes, sandbox, from, Some(door), counted).await?;
        let default =
            repositories.image_declared(Some(repository), None, &AgentName::default()).await?;
        // A rebuild has the same file, and installs nothing if no dependency moved.
        let mut prepared = Prepared {
            config: last.as_ref().and_then(|last| last.config.clone()),
            ..Prepared::default()
        };
        let base = order.branch.clone().or_else(|| repository.base.clone());
        let images = (repository.image.as_deref(), default.as_str());
        let booted = sandbox
            .boot(
                (&repository.name, repositories.current_url(&repository.url)),
                base,
                start,
                None,
                |event| {
                    let observed = prepared.observe(event, images, &image.name);
                    if observed.is_ok() {
                        report.event(event);
                    }
                    observed
                },
            )
            .await;
        if let Some((why, image)) = prepared.start_over {
            sandbox.remove().await;
            return Ok(Attempt::StartOver { why, image });
        }
        booted?;
        let Prepared { package_manager, config, .. } = prepared;
        let earlier = last.as_ref().and_then(|last| last.package_manager.clone());
        let package_manager = package_manager.or(earlier);
        let declared = config.clone().unwrap_or_default();
        for (target, command) in missing_rules(&repository.name, &declared) {
            let allowed = network.borrow().allows(&target.name, &ports(&target));
            if !allowed {
                report.warn(format!(
                    "`policy.allow` names {}, which no rule allows; an admin can: {command}",
                    target.name
                ));
            }
        }
        let head = checkout::head(&sandbox.bridge, &repository.name.folder()).await?;
        let commit = head.commit.ok_or_else(|| EphemeralError::Other(NO_COMMIT.to_owned()))?;
        let limit = shared.sandboxes.timeouts.warm;
        let check = self.run_check(&sandbox.bridge, &declared, &commit, limit).await?;
        // Their purpose is to fill caches, which an earlier build has filled.
        if last.is_none() && check.is_none() {
            self.run_tests(&sandbox.bridge, limit).await?;
        }
        report.progress("saving a snapshot");
        sandbox.save(snapshot, SnapshotKind::Build).await?;
        report.progress("starting a sandbox from the snapshot");
        let (id, from) = (SandboxId::random(), StartFrom::Snapshot(snapshot.clone()));
        let proof = EphemeralSandbox::start(&shared.sandboxes, id, from, None, owner).await?;
        proof.remove().await;
        Ok(Attempt::Built(Box::new(Build {
            snapshot_id: snapshot.clone(),
            provider: shared.sandboxes.provider.name().to_owned(),
            commit,
            branch: order.branch.clone(),
            image: image.name.clone(),
            image_id: image.id.clone(),
            layers: last.as_ref().map_or(0, |last| last.layers) + 1,
            package_manager,
            check,
            config,
            millis: millis(shared.clock.now().since(started)),
            built_at: now(),
        })))
    }

    /// Runs the repository's check, if it has one. A failure does not fail the build.
    async fn run_check(
        &self,
        bridge: &Bridge,
        config: &RepositoryConfig,
        commit: &str,
        limit: Duration,
    ) -> Result<Option<Evidence>, EphemeralError> {
        let Self { repository, report, .. } = *self;
        let start = |check: &str| report.progress(&format!("running {check}"));
        let declared = (config.check.as_deref(), limit);
        let commit = commit.to_owned();
        let evidence = check::run(bridge, &repository.name, commit, declared, start).await?;
        if evidence.outcome == CheckOutcome::NoneDeclared {
            return Ok(None);
        }
        report.note(&format!("check: {}\n{}", evidence.outcome, evidence.tail));
        if evidence.exit == Exit::Timeout {
            report.warn(not_over(&evidence.check, limit));
        }
        Ok(Some(evidence))
    }

    /// Runs the repository's tests once: they fill caches that sessions start with. A failure does
    /// not fail the build.
    async fn run_tests(&self, bridge: &Bridge, limit: Duration) -> Result<(), EphemeralError> {
        let Self { repository, report, .. } = *self;
        let folder = repository.name.folder().path();
        let Some(tests) = check::find_tests(bridge, &folder, false).await? else { return Ok(()) };
        report.progress(&format!("running {tests}"));
        let script = format!("{{ {tests}\n}} 2>&1");
        let command = checkout::command(&["/bin/sh", "-c", &script], &folder, millis(limit));
        let output = bridge.run_command(command).await?;
        match output.exit {
            Exit::Code(0) => report.note(&format!("{tests}: passed")),
            Exit::Timeout => report.warn(not_over(&tests, limit)),
            _ => report.warn(format!("{tests} failed:\n{}", output.tail())),
        }
        Ok(())
    }
}

impl Prepared {
    /// Stops the boot when the build has to start over: an earlier build cannot be continued, or
    /// the repository asks for an image other than `used`. An admin's choice wins over the
    /// repository's, which wins over the default.
    fn observe(
        &mut self,
        event: &EventBody,
        (chosen, default): (Option<&str>, &str),
        used: &str,
    ) -> Result<(), EphemeralError> {
        match event {
            EventBody::InstallStep { manager, .. } if manager != "apt" => {
                self.package_manager.get_or_insert_with(|| manager.clone());
            }
            EventBody::RepositoryConfig { config, .. } => self.config = Some((**config).clone()),
            EventBody::BootPhase { failure: Some(failure), .. } if failure.start_over => {
                self.start_over = Some((failure.message.clone(), None));
                return Err(EphemeralError::Other(failure.message.clone()));
            }
            EventBody::BootPhase { phase: BootPhase::Install, failure: None, .. } => {
                let declared = self.config.as_ref().and_then(|config| config.image.as_deref());
                let wanted = chosen.or(declared).unwrap_or(default);
                if wanted != used {
                    let why = ".harvest/config.toml".to_owned();
                    self.start_over = Some((why.clone(), Some(wanted.to_owned())));
                    return Err(EphemeralError::Other(why));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The warning about tests that are ended while they warm up a build.
fn not_over(tests: &str, limit: Duration) -> String {
    format!("{tests} did not end within {} s (`clocks.warm`)", limit.as_secs())
}

/// The names that a repository asks for, with the command that allows each.
fn missing_rules(
    repository: &RepositoryName,
    config: &RepositoryConfig,
) -> Vec<(RuleTarget, String)> {
    let parsed = config.policy.allow.iter().filter_map(|text| {
        let target: RuleTarget = text.parse().ok()?;
        Some((target, format!("`harvest net allow -r {repository} '{text}'`")))
    });
    parsed.collect()
}

fn ports(target: &RuleTarget) -> Vec<u16> {
    let verdict = RuleVerdict::Allow;
    SetNetworkRule { verdict, ports: target.ports.clone(), private: false }.effective_ports()
}

#[cfg(test)]
mod tests {
    use harvest_proto::event::PhaseStatus;

    use super::*;

    /// The image that a build from `used` starts over with.
    fn other(declared: Option<&str>, chosen: Option<&str>, used: &str) -> Option<String> {
        let mut prepared = Prepared::default();
        let image = declared.map(str::to_owned);
        let config = Box::new(RepositoryConfig { image, ..RepositoryConfig::default() });
        let repository = "acme/shop".parse().unwrap();
        let read = EventBody::RepositoryConfig { repository, config };
        let install = EventBody::BootPhase {
            phase: BootPhase::Install,
            status: PhaseStatus::Skipped,
            millis: None,
            tail: None,
            failure: None,
        };
        prepared.observe(&read, (chosen, "agents"), used).unwrap();
        let stopped = prepared.observe(&install, (chosen, "agents"), used);
        assert_eq!(stopped.is_err(), prepared.start_over.is_some());
        prepared.start_over.and_then(|(_, image)| image)
    }

    #[test]
    fn build_starts_over_from_the_declared_image() {
        assert_eq!(other(None, None, "agents"), None);
        assert_eq!(other(Some("base"), None, "agents").as_deref(), Some("base"));
        assert_eq!(other(Some("base"), None, "base"), None);
        assert_eq!(other(None, None, "base").as_deref(), Some("agents"));
    }

    #[test]
    fn image_of_an_admin_wins() {
        assert_eq!(other(Some("base"), Some("claude"), "claude"), None);
    }
}
