//! Reviews pushed commits after a turn: opens the pull request and runs the repository's check on
//! exactly that commit, in a fresh sandbox the agent never touched.

use harvest_proto::{
    EventBody, SandboxId, SessionId,
    api::{CheckOutcome, Evidence, Repository},
    bridge::BootStart,
};
use harvest_store::{CheckoutRecord, SessionRecord, StoreError, Write};

use super::{
    PassSpec, Repositories, RepositoryContext, boot_start, check, pull_requests, shared_owners,
};
use crate::{
    bridge::BridgeError,
    checkout,
    compute_meter::compute_owner,
    ephemeral::{EphemeralDoor, EphemeralError, EphemeralSandbox},
    error_chain::error_chain,
    wall_clock::now,
};

impl Repositories {
    /// Reviews the newest pushed commit of each checkout that is not yet reviewed, and returns the
    /// results. Failures to review become warnings and are retried after the next turn.
    pub(crate) async fn review(&self, session: &SessionId) -> Vec<Evidence> {
        let (results, failed) = try_review(self, session).await;
        if failed.is_empty() {
            return results;
        }
        // All warnings at once and last: clients that follow the session stop waiting at the first
        // one.
        let warnings = failed.into_iter().map(|why| {
            tracing::warn!(%session, why, "cannot review the pushed commit");
            event(EventBody::Warning { message: why })
        });
        let _ = write(&self.shared, session, warnings.collect()).await;
        results
    }
}

/// Returns the results, and a message for each checkout that could not be reviewed.
async fn try_review(
    repositories: &Repositories,
    session: &SessionId,
) -> (Vec<Evidence>, Vec<String>) {
    let (mut results, mut failed) = (Vec::new(), Vec::new());
    let record = match repositories.shared.store.session_get(session).await {
        Ok(record) => record,
        Err(StoreError::NotFound { .. }) => return (results, failed),
        Err(error) => {
            failed.push(format!("cannot check the pushed commit yet: {}", error_chain(&error)));
            return (results, failed);
        }
    };
    // A failure of one checkout does not stop the others.
    for checkout in &record.checkouts {
        let Some(commit) = checkout.unreviewed() else { continue };
        match review_one(repositories, &record, checkout, commit).await {
            Ok(evidence) => results.push(evidence),
            Err(error) => failed.push(format!(
                "cannot check the commit pushed to {} yet: {}",
                checkout.repository,
                error_chain(&error)
            )),
        }
    }
    (results, failed)
}

/// What the agent is told about failed checks in front of its next prompt.
pub(crate) fn describe_failures(results: &[Evidence]) -> Option<String> {
    let failed = results.iter().filter(|evidence| evidence.outcome == CheckOutcome::Failed);
    let notes: Vec<_> = failed.map(describe_failure).collect();
    (!notes.is_empty()).then(|| notes.concat())
}

fn describe_failure(evidence: &Evidence) -> String {
    let Evidence { repository, commit, check, tail, .. } = evidence;
    let commit: String = commit.chars().take(7).collect();
    let tail = tail.trim_end();
    format!("[Harvest ran {check} on commit {commit} of {repository}; it failed:\n{tail}\n]\n\n")
}

async fn review_one(
    repositories: &Repositories,
    record: &SessionRecord,
    checkout: &CheckoutRecord,
    commit: &str,
) -> Result<Evidence, EphemeralError> {
    let shared = &repositories.shared;
    let repository = shared.store.repository_get(&checkout.repository).await.map_err(other)?;
    let work = PushedCommit { record, checkout, repository: &repository, commit };
    let pull = pull_requests::open_after_push(shared, work).await?;
    let user = record.session.author.email.to_lowercase();
    let _slot = shared.sandboxes.checks.acquire(&user).await;
    let limit = shared.sandboxes.timeouts.check + shared.sandboxes.timeouts.boot;
    let evidence = tokio::time::timeout(limit, gather(repositories, work))
        .await
        .map_err(|_| EphemeralError::TimedOut { limit })??;
    let mut writes = pull_requests::publish_evidence(shared, work, pull, &evidence).await?;
    let reviewed = Write::Reviewed { repository: repository.name, commit: commit.to_owned() };
    // First: clients that follow the session stop waiting at the first warning.
    writes.splice(0..0, [event(EventBody::Evidence(evidence.clone())), reviewed]);
    write(shared, &record.session.id, writes).await.map_err(other)?;
    Ok(evidence)
}

/// A commit pushed through the git door.
#[derive(Clone, Copy)]
pub(super) struct PushedCommit<'a> {
    pub(super) record: &'a SessionRecord,
    pub(super) checkout: &'a CheckoutRecord,
    pub(super) repository: &'a Repository,
    pub(super) commit: &'a str,
}

/// Runs the repository's check on the commit in a fresh sandbox.
async fn gather(
    repositories: &Repositories,
    work: PushedCommit<'_>,
) -> Result<Evidence, EphemeralError> {
    let shared = &repositories.shared;
    let PushedCommit { record, checkout, repository, commit } = work;
    let base = checkout.base.as_ref();
    let repository = &repositories.on_branch(repository.clone(), base).await.map_err(other)?;
    let from = repositories.origin(Some(repository), &record.session.agent).await?;
    let start = boot_start(&from);
    let pass = PassSpec::of_session(record, &shared.sandboxes.agents);
    // The check runs what the agent wrote: the session's own secrets are not for it.
    let secrets = shared_owners([repository.name.clone()].into_iter(), &record.session.author);
    let pass = PassSpec { branch: None, secrets, ..pass };
    let pass = repositories.pass(std::slice::from_ref(repository), pass).await.map_err(other)?;
    let door = EphemeralDoor { policy: pass, observer: None };
    let owner = compute_owner(record);
    let id = SandboxId::random();
    let mut sandbox =
        EphemeralSandbox::start(&shared.sandboxes, id, from, Some(door), owner).await?;
    let author = Some(&record.session.author);
    // A build's disk was made from the file that its row records.
    let build = repository.build.as_ref().filter(|_| start == BootStart::Image);
    let mut config = build.and_then(|build| build.config.clone());
    let observe = |event: &EventBody| {
        if let EventBody::RepositoryConfig { config: read, .. } = event {
            config = Some((**read).clone());
        }
        Ok(())
    };
    sandbox.boot(&repository.name, checkout.base.clone(), start, author, observe).await?;
    // What the pushed branch changes of it has no effect.
    let declared = match check::has_script(&sandbox.bridge, &repository.name).await? {
        true => None,
        false => config.and_then(|config| config.check),
    };
    let branch = &record.session.branch;
    let changed =
        checkout::check_out(&sandbox.bridge, &repository.name.folder(), branch, commit).await;
    let changed = changed.map_err(|error| match error {
        BridgeError::Fault(fault) => {
            EphemeralError::Other(format!("cannot check out commit {commit}: {}", fault.message))
        }
        lost => lost.into(),
    })?;
    let limit = shared.sandboxes.timeouts.check;
    let mut evidence = check::run_sealed(
        &sandbox.bridge,
        &repository.name,
        commit.to_owned(),
        (declared.as_deref(), limit),
    )
    .await?;
    if changed && declared.is_none() {
        evidence.check.push_str(" (changed by this branch)");
    }
    sandbox.remove().await;
    Ok(evidence)
}

pub(super) fn other(error: impl std::error::Error) -> EphemeralError {
    EphemeralError::Other(error_chain(&error))
}

pub(super) fn event(body: EventBody) -> Write {
    Write::Event { at: now(), turn: None, body: Box::new(body) }
}

pub(super) async fn write(
    shared: &RepositoryContext,
    session: &SessionId,
    writes: Vec<Write>,
) -> Result<(), StoreError> {
    shared.store.session_commit(session, shared.sandboxes.lease, now(), writes).await.map(drop)
}

#[cfg(test)]
mod tests {
    use harvest_proto::bridge::Exit;

    use super::*;

    fn evidence(outcome: CheckOutcome) -> Evidence {
        Evidence {
            repository: "acme/shop".parse().unwrap(),
            commit: "4363bc6f00".into(),
            check: check::CHECK.into(),
            outcome,
            exit: Exit::Code(1),
            millis: 1,
            tail: "1 test failed\n".into(),
            at: now(),
        }
    }

    #[test]
    fn only_failed_checks_are_described() {
        let results = [CheckOutcome::Passed, CheckOutcome::NoneDeclared].map(evidence);
        assert_eq!(describe_failures(&results), None);
        let failed = [CheckOutcome::Passed, CheckOutcome::Failed].map(evidence);
        let expected = "[Harvest ran .harvest/check.sh on commit 4363bc6 of acme/shop; it failed:\n\
                        1 test failed\n]\n\n";
        assert_eq!(describe_failures(&failed).as_deref(), Some(expected));
    }
}
