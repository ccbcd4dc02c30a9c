//! `harvest verify`: runs a repository's check on any commit or pull request, and shows the result
//! at the forge.

use harvest_forge::RemoteRepository;
use harvest_gateway::ledger::DoorPurpose;
use harvest_proto::{
    AgentName, BranchName, Hint as _, NetworkPolicy, RepositoryName, SecretOwner, SessionId,
    VerificationId,
    api::{Evidence, Repository, Verification, VerificationStatus, VerifyRepository},
    bridge::Author,
};
use harvest_store::{CheckoutRecord, ComputeOwner};

use super::{
    Repositories,
    check_run::{CheckOrder, run_check},
    evidence::review_one,
    judge::Judge,
    pull_requests::{remote_for, set_status},
    verifications::{Ordered, VerificationRecord, describe},
};
use crate::{error::SessionError, error_chain::error_chain, wall_clock::now};

/// What is to be verified.
struct Target {
    revision: String,
    pull_request: Option<u64>,
    commit: String,
    branch: Option<BranchName>,
    base: Option<BranchName>,
    /// Whether a branch of the repository is at the commit: its author may write there.
    is_own: bool,
}

impl Repositories {
    /// Starts the check of a commit for a user, whose e-mail address decides when it is its turn.
    /// It continues when the caller goes away. The same check that waits or runs is returned.
    ///
    /// # Errors
    /// When the repository, branch or pull request does not exist, the remote does not answer, or
    /// the user has too many unfinished verifications.
    pub async fn verify(
        &self,
        name: &RepositoryName,
        order: VerifyRepository,
        user: &Author,
    ) -> Result<Verification, SessionError> {
        let repository = self.get(name).await?;
        let remote = remote_for(&self.shared, &[SecretOwner::user(&user.email)], &repository).await;
        let target = self.target(&repository, &remote, order, user).await?;
        let new = new_verification(name, None, &target);
        let record = match VerificationRecord::order(self, new, user).await? {
            Ordered::Begun(record) => record,
            Ordered::Same(same) => return Ok(*same),
        };
        let queued = record.current();
        let (repositories, user) = (self.clone(), user.clone());
        self.shared.sandboxes.tasks.spawn(async move {
            repositories.run_verification(record, repository, remote, target, &user).await;
        });
        Ok(queued)
    }

    /// Starts the checks of what a session has pushed, again. Their results are evidence of the
    /// session, as after a turn.
    ///
    /// # Errors
    /// When the session does not exist or has pushed nothing, or its author has too many unfinished
    /// verifications.
    pub async fn verify_session(
        &self,
        session: &SessionId,
    ) -> Result<Vec<Verification>, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let mut started = Vec::new();
        for checkout in &record.checkouts {
            let Some(commit) = checkout.pushed_commit.clone() else { continue };
            let new = of_session(session, &record.session.branch, checkout, &commit);
            let author = &record.session.author;
            let verification = match VerificationRecord::order(self, new, author).await? {
                Ordered::Begun(verification) => verification,
                Ordered::Same(same) => {
                    started.push(*same);
                    continue;
                }
            };
            started.push(verification.current());
            let (repositories, record, checkout) = (self.clone(), record.clone(), checkout.clone());
            self.shared.sandboxes.tasks.spawn(async move {
                let _kept_in_the_row =
                    review_one(&repositories, &record, &checkout, &commit, verification).await;
            });
        }
        if started.is_empty() {
            let what = format!("session {session} has pushed nothing");
            let hint = format!("`harvest send {session} \"commit and push\"` pushes its work");
            return Err(SessionError::conflict("nothing_pushed", what, hint));
        }
        Ok(started)
    }

    async fn target(
        &self,
        repository: &Repository,
        remote: &RemoteRepository,
        order: VerifyRepository,
        user: &Author,
    ) -> Result<Target, SessionError> {
        let base = repository.base.clone();
        match (order.revision, order.pull_request) {
            (Some(_), Some(_)) => Err(SessionError::invalid(
                "invalid_revision",
                "give a revision or a pull request, not both",
            )),
            (_, Some(number)) => {
                let found = self.shared.forge.pull_request(remote, number).await;
                let found = found.map_err(|failure| {
                    let hint =
                        failure.hint().map_or("check the number".into(), |hint| hint.into_owned());
                    let what =
                        format!("cannot read pull request #{number}: {}", error_chain(&failure));
                    SessionError::conflict("forge_failed", what, hint)
                })?;
                let revision = found.branch.to_string();
                let (commit, base) = (found.commit, Some(found.base));
                // The branch may be in another repository: the commit is fetched by its id.
                let tip = self.remote_tip(repository, Some(&found.branch), user).await;
                let is_own = tip.flatten().as_ref() == Some(&commit);
                let pull_request = Some(number);
                Ok(Target { revision, pull_request, commit, branch: None, base, is_own })
            }
            (Some(revision), None) if is_commit(&revision) => {
                let commit = revision.to_ascii_lowercase();
                let (pull_request, branch, is_own) = (None, None, false);
                Ok(Target { revision, pull_request, commit, branch, base, is_own })
            }
            (revision, None) => {
                let branch = revision.map(|revision| parse_branch(&revision)).transpose()?;
                let branch = branch.or_else(|| base.clone());
                let commit = self.tip_for(repository, branch.as_ref(), user).await?;
                let revision = branch.as_ref().map_or("HEAD".to_owned(), ToString::to_string);
                Ok(Target { revision, pull_request: None, commit, branch, base, is_own: true })
            }
        }
    }

    /// The newest commit of a branch, or of the default branch.
    async fn tip_for(
        &self,
        repository: &Repository,
        branch: Option<&BranchName>,
        user: &Author,
    ) -> Result<String, SessionError> {
        let name = &repository.name;
        let Some(tip) = self.remote_tip(repository, branch, user).await else {
            let what = format!("the remote of {name} does not answer");
            let hint = "`harvest repo show` prints its URL; try again";
            return Err(SessionError::conflict("remote_unavailable", what, hint));
        };
        tip.ok_or_else(|| {
            let shown = branch.map_or("its default branch", |branch| branch.as_str());
            SessionError::invalid("no_branch", format!("{name} has no branch {shown}"))
                .with_hint("name a branch, or the full id of a commit (40 characters)")
        })
    }

    async fn run_verification(
        &self,
        record: VerificationRecord,
        repository: Repository,
        remote: RemoteRepository,
        target: Target,
        user: &Author,
    ) {
        record.step("waiting for a slot");
        // E-mail addresses are compared without case.
        let _slot = self.shared.sandboxes.checks.acquire(&user.email.to_lowercase()).await;
        if let Err(error) = record.running().await {
            return drop(record.end(Err(error_chain(&error)), None).await);
        }
        let owner = ComputeOwner {
            repository: Some(repository.name.clone()),
            user: Some(user.email.clone()),
            ..ComputeOwner::default()
        };
        let judge = self.judge(&repository, target.base.as_ref(), user).await;
        let order = CheckOrder {
            repository: &repository,
            judge: &judge,
            purpose: match target.is_own {
                true => DoorPurpose::Check,
                false => DoorPurpose::StrangersCheck,
            },
            branch: target.branch.as_ref(),
            commit: &target.commit,
            user,
            agent: &AgentName::default(),
            network: NetworkPolicy::default(),
            session: None,
            owner,
            snapshot: record.snapshot.clone(),
        };
        match run_check(self, order, &|step| record.step(step)).await {
            Ok(evidence) => {
                record.step("showing the result at the forge");
                let unpublished = self.publish(&remote, &target, (&evidence, &judge)).await.err();
                record.end(Ok(evidence), unpublished).await;
            }
            Err(error) => drop(record.end(Err(describe(&error)), None).await),
        }
    }

    /// Shows the result at the forge; the error says why not.
    async fn publish(
        &self,
        remote: &RemoteRepository,
        target: &Target,
        (evidence, judge): (&Evidence, &Judge),
    ) -> Result<(), String> {
        let forge = &self.shared.forge;
        if !forge.owns(&remote.url) {
            return Err("the remote has no API for commit statuses that Harvest knows".to_owned());
        }
        if let Some(number) = target.pull_request {
            let shown = forge.set_evidence(&remote.url, number, evidence.clone()).await;
            shown.map_err(|failure| error_chain(&failure))?;
        }
        let set =
            set_status(&self.shared, remote, &target.commit, (evidence, &judge.status())).await;
        set.map_err(|failure| error_chain(&failure))
    }
}

/// The record of a check of what a session has pushed.
pub(super) fn of_session(
    session: &SessionId,
    branch: &BranchName,
    checkout: &CheckoutRecord,
    commit: &str,
) -> Verification {
    let target = Target {
        revision: branch.to_string(),
        pull_request: None,
        commit: commit.to_owned(),
        branch: Some(branch.clone()),
        base: checkout.base.clone(),
        is_own: true,
    };
    new_verification(&checkout.repository, Some(session), &target)
}

fn new_verification(
    repository: &RepositoryName,
    session: Option<&SessionId>,
    target: &Target,
) -> Verification {
    Verification {
        id: VerificationId::random(),
        repository: repository.clone(),
        session: session.cloned(),
        revision: target.revision.clone(),
        pull_request: target.pull_request,
        commit: target.commit.clone(),
        base: target.base.clone(),
        status: VerificationStatus::Queued,
        step: String::new(),
        evidence: None,
        error: None,
        unpublished: None,
        started_at: now(),
        ended_at: None,
    }
}

/// Whether a text is the full id of a commit.
fn is_commit(text: &str) -> bool {
    [40, 64].contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn parse_branch(text: &str) -> Result<BranchName, SessionError> {
    text.parse().map_err(|error: harvest_proto::names::InvalidBranchName| {
        SessionError::invalid("invalid_revision", error.to_string())
            .with_hint("name a branch, or the full id of a commit (40 characters)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_ids_are_commits_and_others_branches() {
        let id = "4363bc6f00".repeat(4);
        assert!(is_commit(&id) && is_commit(&id.to_uppercase()));
        for other in ["main", "4363bc6", &id[1..], "z363bc6f004363bc6f004363bc6f004363bc6f00"] {
            assert!(!is_commit(other), "{other}");
        }
        for hostile in ["-x", "../x", "a..b", "a b", "", "@{1}"] {
            assert!(parse_branch(hostile).is_err(), "{hostile}");
        }
    }
}
