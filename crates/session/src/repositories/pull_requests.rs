//! Pull requests of what sessions push: one for each head branch. The commit that the store records
//! as pushed and not reviewed is the intent: a server that was killed after the forge opened a pull
//! request, and before that was recorded, finds it by its branch.

use std::time::Duration;

use harvest_forge::{
    CheckState, CheckStatus, ForgeFailure, PullRequestChange, PullRequestSpec, RemoteRepository,
};
use harvest_proto::{
    BranchName, EventBody, Hint as _, SecretOwner, SessionId,
    api::{CheckOutcome, Evidence, PullRequest, PullRequestMode, PullRequestState, Repository},
};
use harvest_store::{CheckoutRecord, SessionRecord, StoreError, Write};

use super::{
    RepositoryContext,
    evidence::{PushedCommit, event, other, write},
    pull_request_body::{self as body, Facts},
};
use crate::{ephemeral::EphemeralError, error_chain::error_chain};

// Retries for a forge that fails briefly; after that, the next turn or restart tries again.
const RETRIES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

// How much of the prompt the pull request quotes.
const PROMPT_CHARACTERS: usize = 4000;

/// The token that users keep for GitHub.
const GITHUB_TOKEN: &str = "GITHUB_TOKEN";

/// What the agent or a user says about a pull request; the session's title and first prompt by
/// default.
#[derive(Debug, Clone, Default)]
pub(crate) struct PullRequestText {
    pub(crate) title: Option<String>,
    pub(crate) summary: Option<String>,
    /// The base where neither session nor repository names one.
    pub(crate) base: Option<BranchName>,
    /// A user's text replaces that of other people, an agent's does not.
    pub(crate) by_user: bool,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(transparent)]
    Forge(#[from] ForgeFailure),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether a push opens or updates a pull request by itself. One that people closed stays closed.
fn is_wanted(mode: PullRequestMode, known: Option<&PullRequest>) -> bool {
    match known.map(|known| known.state) {
        Some(PullRequestState::Open) => true,
        Some(PullRequestState::Closed) => false,
        Some(PullRequestState::Merged) | None => mode != PullRequestMode::None,
    }
}

/// Opens or updates the pull request of a pushed commit, if the session is to have one. A forge
/// that refuses for good is reported by an event: the commit is checked nevertheless.
pub(super) async fn open_after_push(
    shared: &RepositoryContext,
    work: PushedCommit<'_>,
) -> Result<Option<PullRequest>, EphemeralError> {
    let mode = work.record.session.pr_mode.unwrap_or(shared.pr_mode);
    if !is_wanted(mode, known_pull(work)) {
        return Ok(None);
    }
    match open(shared, work, &PullRequestText::default(), None).await {
        Ok(pull) => Ok(Some(pull)),
        Err(OpenError::Store(error)) => Err(other(error)),
        Err(OpenError::Forge(failure)) if failure.may_pass() => Err(other(failure)),
        Err(OpenError::Forge(failure)) => {
            let writes = vec![event(skipped(work, &failure, "no pull request was opened"))];
            write(shared, &work.record.session.id, writes).await.map_err(other)?;
            Ok(None)
        }
    }
}

fn skipped(work: PushedCommit<'_>, failure: &ForgeFailure, what: &str) -> EventBody {
    EventBody::PrSkipped {
        repository: work.repository.name.clone(),
        reason: format!("{what}: {}", error_chain(failure)),
        hint: failure.hint().map(std::borrow::Cow::into_owned),
    }
}

/// Shows the result of the check on the pull request and as a status of the commit. Returns what is
/// to be stored with the result.
pub(super) async fn publish_evidence(
    shared: &RepositoryContext,
    work: PushedCommit<'_>,
    pull: Option<PullRequest>,
    (evidence, status): (&Evidence, &str),
) -> Result<Vec<Write>, EphemeralError> {
    if !shared.forge.owns(&shared.forge.current_url(&work.repository.url)) {
        return Ok(Vec::new());
    }
    let (mut writes, mut failed) = (Vec::new(), Vec::new());
    if let Some(pull) = pull {
        match show_evidence(shared, work, pull, evidence).await {
            Ok(pull) => {
                // The check took minutes: the state may have been recorded meanwhile.
                let record = shared.store.session_get(&work.record.session.id).await;
                let record = record.map_err(other)?;
                let now = known_pull(PushedCommit { record: &record, ..work });
                let (state, draft) =
                    now.map_or((pull.state, pull.draft), |now| (now.state, now.draft));
                let pull = PullRequest { state, draft, ..pull };
                writes.push(pull_request_write(shared, work, &pull));
            }
            Err(failure) => failed.push(failure),
        }
    }
    let remote = remote_of(shared, work.record, work.repository).await;
    failed.extend(set_status(shared, &remote, work.commit, (evidence, status)).await.err());
    for failure in failed {
        if failure.may_pass() {
            return Err(other(failure));
        }
        writes.push(event(skipped(work, &failure, "the check's result is not shown there")));
    }
    Ok(writes)
}

async fn show_evidence(
    shared: &RepositoryContext,
    work: PushedCommit<'_>,
    pull: PullRequest,
    evidence: &Evidence,
) -> Result<PullRequest, ForgeFailure> {
    let remote = remote_of(shared, work.record, work.repository).await;
    let (forge, number) = (&shared.forge, pull.number);
    with_retry(|| forge.set_evidence(&remote.url, number, evidence.clone())).await?;
    let current = with_retry(|| forge.pull_request(&remote, number)).await?;
    let text = body::update(&current.body, &facts(work, Some(evidence)), None);
    let mut shown = pull;
    if text != current.body {
        let change = PullRequestChange { body: Some(text.clone()), ..Default::default() };
        with_retry(|| forge.update_pull_request(&remote, number, change.clone())).await?;
        // People's changes to the text above must still differ from what Harvest wrote.
        if body::has_same_summary(&shown.body, &text) {
            shown.body = text;
        }
    }
    shown.evidence = Some(evidence.clone());
    Ok(shown)
}

/// Shows the result of a check as a status of its commit, with this context.
pub(super) async fn set_status(
    shared: &RepositoryContext,
    remote: &RemoteRepository,
    commit: &str,
    (evidence, context): (&Evidence, &str),
) -> Result<(), ForgeFailure> {
    let state = match evidence.outcome {
        CheckOutcome::Passed => CheckState::Success,
        CheckOutcome::Failed => CheckState::Failure,
        CheckOutcome::NoneDeclared => return Ok(()),
    };
    let description = format!(
        "{} {} ({}), run by Harvest in a fresh sandbox",
        evidence.check,
        evidence.outcome,
        body::describe(&evidence.exit)
    );
    let status = CheckStatus { state, context: context.to_owned(), description };
    with_retry(|| shared.forge.set_status(remote, commit, status.clone())).await
}

fn known_pull<'a>(work: PushedCommit<'a>) -> Option<&'a PullRequest> {
    let all = &work.record.session.repositories;
    all.iter().find(|known| known.name == work.repository.name)?.pr.as_ref()
}

fn facts<'a>(work: PushedCommit<'a>, evidence: Option<&'a Evidence>) -> Facts<'a> {
    let session = &work.record.session;
    let evidence = evidence.filter(|evidence| evidence.commit == work.commit);
    let (session, agent, turns) = (&session.id, &session.agent, session.turns);
    Facts { session, agent, turns, commit: work.commit, evidence }
}

/// Opens the pull request of a pushed commit, or brings the open one up to date.
pub(super) async fn open(
    shared: &RepositoryContext,
    work: PushedCommit<'_>,
    text: &PullRequestText,
    draft: Option<bool>,
) -> Result<PullRequest, OpenError> {
    let PushedCommit { record, checkout, repository, commit } = work;
    let session = &record.session;
    let remote = remote_of(shared, record, repository).await;
    if !shared.forge.owns(&remote.url) {
        return Err(ForgeFailure::NoApi { url: remote.url }.into());
    }
    let known = known_pull(work);
    let evidence = known.and_then(|known| known.evidence.as_ref());
    let facts = facts(work, evidence);
    let found = with_retry(|| shared.forge.find_pull_request(&remote, &session.branch)).await?;
    let pull = match found {
        Some(current) => {
            let change = change(&current, known, text, &facts);
            match change == PullRequestChange::default() {
                true => current,
                false => {
                    let number = current.number;
                    let update =
                        || shared.forge.update_pull_request(&remote, number, change.clone());
                    let updated = with_retry(update).await?;
                    remembered(updated, &current, known, &change)
                }
            }
        }
        None => {
            let summary = match &text.summary {
                Some(summary) => summary.clone(),
                None => quoted_prompt(shared, &session.id).await,
            };
            let spec = PullRequestSpec {
                title: text.title.clone().unwrap_or_else(|| session.title.clone()),
                body: body::compose(&summary, &facts),
                branch: session.branch.clone(),
                base: known_base(checkout, repository)
                    .or_else(|| text.base.clone())
                    .unwrap_or_else(|| "main".parse().expect("`main` is a valid branch")),
                draft: draft
                    .unwrap_or(session.pr_mode.unwrap_or(shared.pr_mode) == PullRequestMode::Draft),
            };
            with_retry(|| shared.forge.open_pull_request(&remote, spec.clone())).await?
        }
    };
    let evidence = evidence.filter(|evidence| evidence.commit == commit).cloned();
    let pull = PullRequest { commit: commit.to_owned(), evidence, ..pull };
    let is_new =
        known.is_none_or(|known| (known.number, &known.commit) != (pull.number, &pull.commit));
    if is_new || text.title.is_some() || text.summary.is_some() {
        let opened = EventBody::PrOpened {
            repository: repository.name.clone(),
            number: pull.number,
            url: shared.forge.current_url(&pull.url),
            branch: pull.branch.clone(),
        };
        let writes = vec![pull_request_write(shared, work, &pull), event(opened)];
        write(shared, &session.id, writes).await?;
    }
    Ok(pull)
}

/// The base that the session or the repository names.
pub(super) fn known_base(checkout: &CheckoutRecord, repository: &Repository) -> Option<BranchName> {
    checkout.base.clone().or_else(|| repository.base.clone())
}

/// What is to be changed in an open pull request. What people changed since Harvest wrote it stays.
fn change(
    current: &PullRequest,
    known: Option<&PullRequest>,
    text: &PullRequestText,
    facts: &Facts<'_>,
) -> PullRequestChange {
    let known = known.filter(|known| known.number == current.number);
    let own_title = text.by_user || known.is_none_or(|known| known.title == current.title);
    let own_summary = text.by_user
        || known.is_none_or(|known| body::has_same_summary(&known.body, &current.body));
    let title = text.title.clone().filter(|title| own_title && *title != current.title);
    let summary = text.summary.as_deref().filter(|_| own_summary);
    let body = body::update(&current.body, facts, summary);
    PullRequestChange { title, body: Some(body).filter(|body| *body != current.body) }
}

/// The pull request as Harvest wrote it: where people's text stayed, the earlier record stays too,
/// so that it still differs from theirs.
fn remembered(
    updated: PullRequest,
    current: &PullRequest,
    known: Option<&PullRequest>,
    change: &PullRequestChange,
) -> PullRequest {
    let Some(known) = known.filter(|known| known.number == current.number) else { return updated };
    let title = if change.title.is_some() { updated.title } else { known.title.clone() };
    let kept = body::has_same_summary(&updated.body, &current.body);
    let body = if kept { known.body.clone() } else { updated.body };
    PullRequest { title, body, ..updated }
}

async fn quoted_prompt(shared: &RepositoryContext, session: &SessionId) -> String {
    let prompts = shared.store.prompt_list(session).await.unwrap_or_default();
    let prompt: String = prompts
        .first()
        .map(|prompt| prompt.text.chars().take(PROMPT_CHARACTERS).collect())
        .unwrap_or_default();
    prompt.lines().map(|line| format!("> {line}\n")).collect()
}

/// The repository at its forge, with the token of the session's author or of the repository. The
/// local forge needs none.
pub(super) async fn remote_of(
    shared: &RepositoryContext,
    record: &SessionRecord,
    repository: &Repository,
) -> RemoteRepository {
    let session = &record.session;
    let author =
        [SecretOwner::Session(session.id.clone()), SecretOwner::user(&session.author.email)];
    remote_for(shared, &author, repository).await
}

/// The repository at its forge, with the token of one of these owners or of the repository.
pub(super) async fn remote_for(
    shared: &RepositoryContext,
    author: &[SecretOwner],
    repository: &Repository,
) -> RemoteRepository {
    let url = shared.forge.current_url(&repository.url);
    if shared.forge.is_local(&url) || !shared.forge.owns(&url) {
        return RemoteRepository { url, token: None };
    }
    let (doors, of_repository) =
        (&shared.sandboxes.doors, SecretOwner::Repository(repository.name.clone()));
    // A global token is not sent to any repository that a user names, unless the server signs in
    // with it.
    let own = [author, std::slice::from_ref(&of_repository)].concat();
    let mut token = doors.secret(&own, GITHUB_TOKEN).await;
    if let (None, Some(name)) = (&token, &repository.secret) {
        let owners = [&own[..], &[SecretOwner::Global]].concat();
        token = doors.secret(&owners, name).await;
    }
    RemoteRepository { url, token }
}

pub(super) fn pull_request_write(
    shared: &RepositoryContext,
    work: PushedCommit<'_>,
    pull: &PullRequest,
) -> Write {
    let pull = PullRequest { url: shared.forge.stable_url(&pull.url), ..pull.clone() };
    Write::PullRequest { repository: work.repository.name.clone(), pull_request: Box::new(pull) }
}

/// Repeats a call that fails briefly.
async fn with_retry<T, F>(mut call: impl FnMut() -> F) -> Result<T, ForgeFailure>
where
    F: Future<Output = Result<T, ForgeFailure>>,
{
    for wait in RETRIES {
        match call().await {
            Err(failure) if failure.is_brief() => tokio::time::sleep(wait).await,
            result => return result,
        }
    }
    call().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull(title: &str, body: &str) -> PullRequest {
        PullRequest {
            number: 1,
            url: "http://forge/1".into(),
            title: title.into(),
            body: body.into(),
            state: PullRequestState::Open,
            draft: false,
            branch: "b".parse().unwrap(),
            base: "main".parse().unwrap(),
            commit: "c".into(),
            evidence: None,
        }
    }

    #[test]
    fn closed_pull_request_is_not_replaced_by_push() {
        use PullRequestMode::{Draft, None as No, Ready};
        let known = |state| PullRequest { state, ..pull("t", "b") };
        let open = known(PullRequestState::Open);
        let (closed, merged) = (known(PullRequestState::Closed), known(PullRequestState::Merged));
        for (mode, known, wanted) in [
            (Ready, None, true),
            (Draft, None, true),
            (No, None, false),
            (No, Some(&open), true),
            (Ready, Some(&closed), false),
            (Ready, Some(&merged), true),
            (No, Some(&merged), false),
        ] {
            assert_eq!(is_wanted(mode, known), wanted, "{mode} {known:?}");
        }
    }

    #[test]
    fn agent_does_not_replace_what_people_wrote() {
        let (session, agent) = (SessionId::random(), Default::default());
        let facts =
            Facts { session: &session, agent: &agent, turns: 1, commit: "c", evidence: None };
        let written = pull("Mine", &body::compose("Text", &facts));
        let text = |by_user| PullRequestText {
            title: Some("New".into()),
            summary: Some("Other".into()),
            base: None,
            by_user,
        };
        let untouched = change(&written, Some(&written), &text(false), &facts);
        assert_eq!(untouched.title.as_deref(), Some("New"));
        assert!(untouched.body.unwrap().starts_with("Other\n"));
        let edited = PullRequest {
            title: "Theirs".into(),
            body: format!("Theirs too. {}", written.body),
            ..written.clone()
        };
        let kept = change(&edited, Some(&written), &text(false), &facts);
        assert_eq!(kept, PullRequestChange::default());
        let asked = change(&edited, Some(&written), &text(true), &facts);
        assert_eq!(asked.title.as_deref(), Some("New"));
        assert!(asked.body.unwrap().starts_with("Other\n"));
        // After an update that kept people's text, it still counts as theirs.
        let later = Facts { turns: 2, ..facts };
        let kept = change(&edited, Some(&written), &text(false), &later);
        let updated = PullRequest { body: kept.body.clone().unwrap(), ..edited.clone() };
        let known = remembered(updated.clone(), &edited, Some(&written), &kept);
        let again = change(&updated, Some(&known), &text(false), &later);
        assert_eq!(again, PullRequestChange::default());
    }
}
