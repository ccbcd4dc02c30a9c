//! Runs the check of a commit in a fresh sandbox: what the base declares, in the tree of the
//! commit, with the repository's network and without a model.

use harvest_gateway::{DoorObserver, ledger::DoorPurpose};
use harvest_proto::{
    AgentName, BranchName, NetworkPolicy, SandboxId, SessionId, SnapshotId, UpstreamName,
    api::{Evidence, Repository},
    bridge::Author,
    event::SnapshotKind,
};
use harvest_store::{ComputeOwner, RuleOwner};
use tokio::sync::watch;

use super::{
    PassSpec, Repositories, boot_start,
    check::{self, Declared},
    default_network,
    evidence::other,
    judge::Judge,
    shared_owners,
};
use crate::{
    bridge::BridgeError,
    checkout::{self, CheckedOut},
    ephemeral::{EphemeralDoor, EphemeralError, EphemeralSandbox},
};

/// A check to run.
pub(super) struct CheckOrder<'a> {
    pub(super) repository: &'a Repository,
    /// The branch that declares the check.
    pub(super) judge: &'a Judge,
    /// Whether the commit is the repository's own, or a stranger's.
    pub(super) purpose: DoorPurpose,
    /// A branch of the remote that has the commit; without one the commit itself is fetched.
    pub(super) branch: Option<&'a BranchName>,
    pub(super) commit: &'a str,
    /// Whose token opens the repository.
    pub(super) user: &'a Author,
    /// Decides the image, where the repository has neither image nor build.
    pub(super) agent: &'a AgentName,
    /// The network that the check may use at most.
    pub(super) network: NetworkPolicy,
    /// Receives the refusals of the door.
    pub(super) session: Option<&'a SessionId>,
    pub(super) owner: ComputeOwner,
    /// Where the disk is saved afterwards.
    pub(super) snapshot: SnapshotId,
}

/// Runs a check, and calls `step` with what it does. The time limit covers everything.
pub(super) async fn run_check(
    repositories: &Repositories,
    order: CheckOrder<'_>,
    step: &(dyn Fn(&str) + Sync),
) -> Result<Evidence, EphemeralError> {
    let timeouts = &repositories.shared.sandboxes.timeouts;
    let limit = timeouts.check + timeouts.boot;
    let judge = order.judge;
    let run = tokio::time::timeout(limit, run(repositories, order, step));
    let evidence = run.await.map_err(|_| EphemeralError::TimedOut { limit })??;
    Ok(judge.name(evidence))
}

async fn run(
    repositories: &Repositories,
    order: CheckOrder<'_>,
    step: &(dyn Fn(&str) + Sync),
) -> Result<Evidence, EphemeralError> {
    let shared = &repositories.shared;
    let on_branch =
        repositories.on_branch(order.repository.clone(), order.judge.boots.as_ref()).await;
    let repository = &on_branch.map_err(other)?;
    let from = repositories.origin(Some(repository), order.agent).await?;
    let start = boot_start(&from);
    step("starting a sandbox");
    let door = door(repositories, repository, &order).await?;
    let id = SandboxId::random();
    let mut sandbox =
        EphemeralSandbox::start(&shared.sandboxes, id, from, Some(door), order.owner.clone())
            .await?;
    step("booting on the base");
    let (name, url) = (&repository.name, repositories.current_url(&repository.url));
    let base = order.judge.boots.clone();
    sandbox.boot((name, url), base, start, Some(order.user), |_| Ok(())).await?;
    let script = check::keep_script(&sandbox.bridge, name).await?;
    step("checking out the commit");
    let checked_out =
        checkout::check_out(&sandbox.bridge, &name.folder(), order.branch, order.commit).await;
    let checked_out = checked_out.map_err(|error| match error {
        BridgeError::Fault(fault) => EphemeralError::Other(format!(
            "cannot check out commit {}: {}",
            order.commit, fault.message
        )),
        lost => lost.into(),
    })?;
    let (declared, none) = declared(script, checked_out, &order, repository);
    if let Some(declared) = &declared {
        step(&format!("running {}", declared.describe().0));
    }
    let limit = shared.sandboxes.timeouts.check;
    let evidence = check::run_sealed(&sandbox.bridge, declared.as_ref(), limit, none).await?;
    let saved = match (&declared, shared.sandboxes.provider.snapshots()) {
        (Some(_), Some(_)) => sandbox.save(&order.snapshot, SnapshotKind::Check).await,
        _ => {
            sandbox.remove().await;
            return Ok(evidence);
        }
    };
    // A full disk keeps no snapshots, and the result stands without one.
    if let Err(error) = &saved {
        tracing::warn!(%name, %error, "cannot save the sandbox of a check");
    }
    Ok(Evidence { snapshot_id: saved.is_ok().then_some(order.snapshot), ..evidence })
}

/// What the base declares: the script wins. And the evidence of a check that has not run.
fn declared(
    script: Option<check::KeptScript>,
    checked_out: CheckedOut,
    order: &CheckOrder<'_>,
    repository: &Repository,
) -> (Option<Declared>, Evidence) {
    let CheckedOut { base, declared, changed, changed_count } = checked_out;
    let declared = script.map(Declared::Script).or(declared.map(Declared::Command));
    let none = check::none_declared(&repository.name, order.commit.to_owned());
    let declares = |file: &&str| changed.iter().any(|changed| changed == file);
    let tail = match [check::CHECK, check::CONFIG].iter().find(|file| declares(file)) {
        Some(file) => format!("no check in the base; {file} of this commit counts after its merge"),
        None => none.tail,
    };
    let base_commit = base;
    let none = Evidence { base_commit, changed, changed_count, tail, ..none };
    (declared, none)
}

/// The door of a check: the repository's rules, no model, no tools, read access to the repository.
async fn door(
    repositories: &Repositories,
    repository: &Repository,
    order: &CheckOrder<'_>,
) -> Result<EphemeralDoor, EphemeralError> {
    let declared = repository.build.as_ref().and_then(|build| build.config.as_ref());
    let spec = PassSpec {
        session: order.session.cloned().unwrap_or_else(SessionId::random),
        owner: RuleOwner::Repository(repository.name.clone()),
        network: default_network(declared).stricter(order.network),
        upstream: watch::channel(UpstreamName::scripted()).1,
        branch: None,
        secrets: shared_owners(std::iter::once(repository.name.clone()), order.user),
        purpose: order.purpose,
    };
    let policy = repositories.pass(std::slice::from_ref(repository), spec).await.map_err(other)?;
    // What belongs to no session is stored nowhere.
    let observer = order.session.is_none().then(|| Box::new(drop) as DoorObserver);
    Ok(EphemeralDoor { policy, observer })
}
