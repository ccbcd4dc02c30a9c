//! Reviews pushed commits after a turn: opens the pull request and runs the repository's check on
//! exactly that commit, in a fresh sandbox the agent never touched.

use harvest_gateway::ledger::DoorPurpose;
use harvest_proto::{
    EventBody, SessionId,
    api::{CheckOutcome, Evidence, Repository},
};
use harvest_store::{CheckoutRecord, SessionRecord, StoreError, Write};

use super::{
    Repositories, RepositoryContext,
    check_run::{CheckOrder, run_check},
    pull_requests,
    verifications::{VerificationRecord, describe},
    verify::of_session,
};
use crate::{
    compute_meter::compute_owner, ephemeral::EphemeralError, error_chain::error_chain,
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
        let new = of_session(session, &record.session.branch, checkout, commit);
        let reviewed =
            match VerificationRecord::begin(repositories, new, &record.session.author).await {
                Ok(verification) => {
                    review_one(repositories, &record, checkout, commit, verification).await
                }
                Err(error) => Err(other(error)),
            };
        match reviewed {
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

/// Opens the pull request of a pushed commit, runs its check, and shows the result. The record ends
/// with it.
pub(super) async fn review_one(
    repositories: &Repositories,
    record: &SessionRecord,
    checkout: &CheckoutRecord,
    commit: &str,
    verification: VerificationRecord,
) -> Result<Evidence, EphemeralError> {
    let reviewed = try_review_one(repositories, record, checkout, commit, &verification).await;
    let result = reviewed.as_ref().map(Evidence::clone).map_err(describe);
    // The next prompt may follow the event at once, and the agent is to be told of a failure in it.
    let tasks = &repositories.shared.sandboxes.tasks;
    tasks.spawn_to_completion(async move { verification.end(result, None).await });
    reviewed
}

async fn try_review_one(
    repositories: &Repositories,
    record: &SessionRecord,
    checkout: &CheckoutRecord,
    commit: &str,
    verification: &VerificationRecord,
) -> Result<Evidence, EphemeralError> {
    let shared = &repositories.shared;
    let repository = shared.store.repository_get(&checkout.repository).await.map_err(other)?;
    let work = PushedCommit { record, checkout, repository: &repository, commit };
    let pull = pull_requests::open_after_push(shared, work).await?;
    let session = &record.session;
    verification.step("waiting for a slot");
    let _slot = shared.sandboxes.checks.acquire(&session.author.email.to_lowercase()).await;
    verification.running().await.map_err(other)?;
    let user = &session.author;
    let judge = repositories.judge(&repository, checkout.base.as_ref(), user).await;
    let order = CheckOrder {
        repository: &repository,
        judge: &judge,
        purpose: DoorPurpose::Check,
        branch: Some(&session.branch),
        commit,
        user,
        agent: &session.agent,
        // What the session may not reach, the code that it wrote may not either.
        network: session.network,
        session: Some(&session.id),
        owner: compute_owner(record),
        snapshot: verification.snapshot.clone(),
    };
    let evidence = run_check(repositories, order, &|step| verification.step(step)).await?;
    let (newest, status) = (is_newest(shared, work).await?, judge.status());
    // Evidence of a newer commit may be there already. This one stays in the row and at its commit.
    let pull = pull.filter(|_| newest);
    let shown = (&evidence, status.as_str());
    let mut writes = pull_requests::publish_evidence(shared, work, pull, shown).await?;
    if !newest {
        write(shared, &session.id, writes).await.map_err(other)?;
        return Ok(evidence);
    }
    let reviewed = Write::Reviewed { repository: repository.name, commit: commit.to_owned() };
    // First: clients that follow the session stop waiting at the first warning.
    writes.splice(0..0, [event(EventBody::Evidence(evidence.clone())), reviewed]);
    write(shared, &session.id, writes).await.map_err(other)?;
    Ok(evidence)
}

/// Whether no other commit has been pushed meanwhile.
async fn is_newest(
    shared: &RepositoryContext,
    work: PushedCommit<'_>,
) -> Result<bool, EphemeralError> {
    let record = shared.store.session_get(&work.record.session.id).await.map_err(other)?;
    let now = record.checkouts.iter().find(|now| now.repository == work.checkout.repository);
    Ok(now.is_some_and(|now| now.pushed_commit.as_deref() == Some(work.commit)))
}

/// A commit pushed through the git door.
#[derive(Clone, Copy)]
pub(super) struct PushedCommit<'a> {
    pub(super) record: &'a SessionRecord,
    pub(super) checkout: &'a CheckoutRecord,
    pub(super) repository: &'a Repository,
    pub(super) commit: &'a str,
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
    use crate::repositories::check;

    fn evidence(outcome: CheckOutcome) -> Evidence {
        Evidence {
            repository: "acme/shop".parse().unwrap(),
            commit: "4363bc6f00".into(),
            check: check::CHECK.into(),
            command: check::CHECK.into(),
            base: None,
            base_commit: None,
            changed: Vec::new(),
            changed_count: 0,
            snapshot_id: None,
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
