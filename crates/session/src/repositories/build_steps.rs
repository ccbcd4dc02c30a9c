//! The steps of a build: a sandbox is started, the repository prepared in it, its disk saved, and
//! another sandbox started from that.

use std::time::Duration;

use harvest_proto::{
    AgentName, EventBody, RepositoryName, RuleTarget, RuleVerdict, SandboxId, SecretOwner,
    SessionId, SnapshotId, UpstreamName,
    api::{Build, CheckOutcome, Evidence, Repository, RepositoryConfig, SetNetworkRule},
    bridge::BootStart,
    event::BootPhase,
};
use harvest_store::{ComputeOwner, RuleOwner};
use tokio::sync::watch;

use super::{PassSpec, Repositories, build_report::BuildReport, builds::BUILD_POLICY, check};
use crate::{
    bridge::Bridge,
    checkout,
    ephemeral::{EphemeralDoor, EphemeralError, EphemeralSandbox},
    error_chain::error_chain,
    sandboxes::StartFrom,
    timeouts::millis,
    wall_clock::now,
};

/// A base that moves while its build starts over changes its file at most this often.
const MAX_STARTS: usize = 3;

/// The ids of a build, stored before it begins.
pub(super) struct PlannedBuild {
    pub(super) snapshot: SnapshotId,
    /// Of the first sandbox.
    pub(super) sandbox: SandboxId,
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
    /// The repository asks for another image than the one it was started from.
    OtherImage(String),
}

/// What a boot tells about the repository.
#[derive(Default)]
struct Prepared {
    package_manager: Option<String>,
    config: Option<RepositoryConfig>,
    other_image: Option<String>,
}

impl BuildSteps<'_> {
    pub(super) async fn run(&self, planned: PlannedBuild) -> Result<Build, EphemeralError> {
        let agent = AgentName::default();
        let mut image = self.repositories.image(Some(self.repository), &agent).await?;
        let mut sandbox = planned.sandbox;
        for _ in 0..MAX_STARTS {
            match self.attempt(&planned.snapshot, sandbox, &image).await? {
                Attempt::Built(build) => return Ok(*build),
                Attempt::OtherImage(other) => {
                    self.report.note(&format!("starting over from the image {other}"));
                    image = other;
                }
            }
            sandbox = SandboxId::random();
        }
        Err(EphemeralError::Other("`image` in .harvest/config.toml keeps changing".to_owned()))
    }

    async fn attempt(
        &self,
        snapshot: &SnapshotId,
        sandbox: SandboxId,
        image: &str,
    ) -> Result<Attempt, EphemeralError> {
        let Self { repositories, repository, report } = *self;
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
        let network = policy.network.clone();
        let door = EphemeralDoor { policy, observer: Some(report.refusal_observer()) };
        report.progress("starting a sandbox");
        let from = StartFrom::Image(image.to_owned());
        let owner =
            ComputeOwner { repository: Some(repository.name.clone()), ..ComputeOwner::default() };
        let counted = owner.clone();
        let mut sandbox =
            EphemeralSandbox::start(&shared.sandboxes, sandbox, from, Some(door), counted).await?;
        let default =
            repositories.image_declared(Some(repository), None, &AgentName::default()).await?;
        let mut prepared = Prepared::default();
        let booted = sandbox
            .boot(&repository.name, repository.base.clone(), BootStart::Build, None, |event| {
                report.event(event);
                prepared.observe(event, (repository.image.as_deref(), &default), image)
            })
            .await;
        if let Some(other) = prepared.other_image {
            sandbox.remove().await;
            return Ok(Attempt::OtherImage(other));
        }
        booted?;
        let Prepared { package_manager, config, .. } = prepared;
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
        let commit = head
            .commit
            .ok_or_else(|| EphemeralError::Other("the repository has no commit".to_owned()))?;
        let limit = shared.sandboxes.timeouts.warm;
        let check = self.run_tests(&sandbox.bridge, &declared, &commit, limit).await?;
        report.progress("saving a snapshot");
        sandbox.save(snapshot).await?;
        report.progress("starting a sandbox from the snapshot");
        let (id, from) = (SandboxId::random(), StartFrom::Snapshot(snapshot.clone()));
        let proof = EphemeralSandbox::start(&shared.sandboxes, id, from, None, owner).await?;
        proof.remove().await;
        Ok(Attempt::Built(Box::new(Build {
            snapshot_id: snapshot.clone(),
            provider: shared.sandboxes.provider.name().to_owned(),
            commit,
            package_manager,
            check,
            config,
            millis: millis(shared.clock.now().since(started)),
            built_at: now(),
        })))
    }

    /// Runs the repository's check, or else its tests, once: they fill caches that sessions start
    /// with. A failure does not fail the build. Returns the result of the check, if the repository
    /// has one.
    async fn run_tests(
        &self,
        bridge: &Bridge,
        config: &RepositoryConfig,
        commit: &str,
        limit: Duration,
    ) -> Result<Option<Evidence>, EphemeralError> {
        let Self { repository, report, .. } = *self;
        let start = |check: &str| report.progress(&format!("running {check}"));
        let name = &repository.name;
        let declared = (config.check.as_deref(), limit);
        let evidence = check::run(bridge, name, commit.to_owned(), declared, start).await?;
        if evidence.outcome != CheckOutcome::NoneDeclared {
            report.note(&format!("check: {}\n{}", evidence.outcome, evidence.tail));
            return Ok(Some(evidence));
        }
        let folder = name.folder().path();
        let Some(tests) = check::find_tests(bridge, &folder, false).await? else {
            return Ok(None);
        };
        report.progress(&format!("running {tests}"));
        let script = format!("{{ {tests}\n}} 2>&1");
        let command = checkout::command(&["/bin/sh", "-c", &script], &folder, millis(limit));
        let output = bridge.run_command(command).await?;
        match output.ok() {
            true => report.note(&format!("{tests}: passed")),
            false => report.warn(format!("{tests} failed:\n{}", output.tail())),
        }
        Ok(None)
    }
}

impl Prepared {
    /// Stops the boot when the repository asks for an image other than `used`. An admin's choice
    /// wins over the repository's, which wins over the default.
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
            EventBody::BootPhase { phase: BootPhase::Install, failure: None, .. } => {
                let declared = self.config.as_ref().and_then(|config| config.image.as_deref());
                let wanted = chosen.or(declared).unwrap_or(default);
                if wanted != used {
                    self.other_image = Some(wanted.to_owned());
                    return Err(EphemeralError::Other("another image".to_owned()));
                }
            }
            _ => {}
        }
        Ok(())
    }
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
        assert_eq!(stopped.is_err(), prepared.other_image.is_some());
        prepared.other_image
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
