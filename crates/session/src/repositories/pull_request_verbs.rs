//! What agents and users ask of pull requests: open, update, merge. And the record of their state.

use harvest_forge::ForgeFailure;
use harvest_proto::{
    EventBody, Hint as _, RepositoryName, RepositoryRef, SessionId,
    api::{
        CreatePullRequest, MergePullRequest, PullRequest, PullRequestState, Repository,
        SessionRepository, UpdatePullRequest,
    },
};
use harvest_store::{SessionRecord, StoreError, Write};

use super::{
    Repositories,
    evidence::{PushedCommit, event, write},
    pull_requests::{OpenError, PullRequestText, open, remote_of},
};
use crate::{error::SessionError, error_chain::error_chain};

/// A forge's failure as the answer to a user's request.
fn refusal(failure: ForgeFailure, doing: &str) -> SessionError {
    let hint = failure.hint().map_or("try again".into(), |hint| hint.into_owned());
    let what = format!("cannot {doing}: {}", error_chain(&failure));
    SessionError::conflict("forge_failed", what, hint)
}

fn check_repository(
    record: &SessionRecord,
    wanted: Option<&RepositoryRef>,
) -> Result<(), SessionError> {
    let known = |wanted: &RepositoryRef| {
        record.checkouts.iter().any(|checkout| wanted.matches(&checkout.repository))
    };
    match wanted.filter(|wanted| !known(wanted)) {
        Some(wanted) => {
            Err(SessionError::missing(format!("repository `{wanted}` in {}", record.session.id)))
        }
        None => Ok(()),
    }
}

impl Repositories {
    /// Opens or updates the pull requests of everything that a session has pushed. Its commits are
    /// checked after the turn, as always.
    pub(crate) async fn open_pull_requests(
        &self,
        session: &SessionId,
        text: &PullRequestText,
    ) -> Result<Vec<PullRequest>, SessionError> {
        let opened = self.open_matching(session, None, text, None).await?;
        Ok(opened.into_iter().filter_map(|one| one.pr).collect())
    }

    /// Opens the pull requests that a user asks for.
    ///
    /// # Errors
    /// When nothing was pushed, or the forge refuses.
    pub async fn pull_request_create(
        &self,
        session: &SessionId,
        create: CreatePullRequest,
    ) -> Result<Vec<SessionRepository>, SessionError> {
        let CreatePullRequest { repository, title, body, draft } = create;
        let text = PullRequestText { title, summary: body, base: None, by_user: true };
        let opened = self.open_matching(session, repository.as_ref(), &text, draft).await?;
        if opened.is_empty() {
            let what = format!("session {session} has pushed nothing");
            let hint = format!("`harvest send {session} \"commit and push\"` pushes its work");
            return Err(SessionError::conflict("nothing_pushed", what, hint));
        }
        Ok(opened)
    }

    async fn open_matching(
        &self,
        session: &SessionId,
        wanted: Option<&RepositoryRef>,
        text: &PullRequestText,
        draft: Option<bool>,
    ) -> Result<Vec<SessionRepository>, SessionError> {
        let shared = &self.shared;
        let record = shared.store.session_get(session).await?;
        check_repository(&record, wanted)?;
        let mut opened = Vec::new();
        for checkout in &record.checkouts {
            if wanted.is_some_and(|wanted| !wanted.matches(&checkout.repository)) {
                continue;
            }
            let Some(commit) = checkout.pushed_commit.as_deref() else { continue };
            let repository = shared.store.repository_get(&checkout.repository).await?;
            let work = PushedCommit { record: &record, checkout, repository: &repository, commit };
            let pull = open(shared, work, text, draft).await.map_err(|error| match error {
                OpenError::Forge(failure) => refusal(failure, "open the pull request"),
                OpenError::Store(error) => error.into(),
            })?;
            opened.push((repository.name, pull));
        }
        Ok(opened.into_iter().filter_map(|(name, pull)| self.shown(&record, &name, pull)).collect())
    }

    /// Changes an open pull request: its title and description, and whether it is a draft.
    ///
    /// # Errors
    /// When there is none, or the forge refuses.
    pub async fn pull_request_update(
        &self,
        session: &SessionId,
        update: UpdatePullRequest,
    ) -> Result<SessionRepository, SessionError> {
        let UpdatePullRequest { repository, title, body, draft } = update;
        let (record, found) = self.known_pull(session, repository.as_ref()).await?;
        let remote = remote_of(&self.shared, &record, &found.repository).await;
        let current = self.shared.forge.pull_request(&remote, found.pull.number).await;
        let current = current.map_err(|failure| refusal(failure, "read the pull request"))?;
        self.record_state(session, &found.repository.name, &found.pull, &current).await?;
        if current.state != PullRequestState::Open {
            let what = format!("pull request {} is {}", current.number, current.state);
            let hint = "`harvest pr create SESSION` opens another one";
            return Err(SessionError::conflict("not_open", what, hint));
        }
        if let Some(draft) = draft {
            let changed = self.shared.forge.set_draft(&remote, current.number, draft).await;
            let changed = changed.map_err(|failure| refusal(failure, "change the pull request"))?;
            self.record_state(session, &found.repository.name, &found.pull, &changed).await?;
            if title.is_none() && body.is_none() {
                let pull = PullRequest { draft: changed.draft, ..found.pull };
                let shown = self.shown(&record, &found.repository.name, pull);
                return shown.ok_or_else(|| SessionError::missing("checkout"));
            }
        }
        let checkout = record.checkouts.iter().find(|one| one.repository == found.repository.name);
        let checkout = checkout.ok_or_else(|| SessionError::missing("checkout"))?;
        let commit = found.pull.commit.as_str();
        let repository = &found.repository;
        let work = PushedCommit { record: &record, checkout, repository, commit };
        let text = PullRequestText { title, summary: body, base: None, by_user: true };
        let pull = open(&self.shared, work, &text, None).await.map_err(|error| match error {
            OpenError::Forge(failure) => refusal(failure, "update the pull request"),
            OpenError::Store(error) => error.into(),
        })?;
        let shown = self.shown(&record, &repository.name, pull);
        shown.ok_or_else(|| SessionError::missing("checkout"))
    }

    /// Merges a pull request on the local forge, and builds the repository anew.
    ///
    /// # Errors
    /// When there is none, it cannot be merged, or it is at GitHub.
    pub async fn pull_request_merge(
        &self,
        session: &SessionId,
        merge: MergePullRequest,
    ) -> Result<SessionRepository, SessionError> {
        let (record, found) = self.known_pull(session, merge.repository.as_ref()).await?;
        let shared = &self.shared;
        let remote = remote_of(shared, &record, &found.repository).await;
        let merged = shared.forge.merge_pull_request(&remote, found.pull.number).await;
        let merged = merged.map_err(|failure| refusal(failure, "merge the pull request"))?;
        let pull = PullRequest { evidence: found.pull.evidence.clone(), ..merged };
        self.record_state(session, &found.repository.name, &found.pull, &pull).await?;
        let shown = self.shown(&record, &found.repository.name, pull);
        shown.ok_or_else(|| SessionError::missing("checkout"))
    }

    /// Stores the state that a pull request has at its forge now. Title and body stay as Harvest
    /// wrote them, so that changes by people are recognised.
    pub(super) async fn record_state(
        &self,
        session: &SessionId,
        repository: &RepositoryName,
        known: &PullRequest,
        current: &PullRequest,
    ) -> Result<(), StoreError> {
        if (known.state, known.draft) == (current.state, current.draft) {
            return Ok(());
        }
        let url = self.shared.forge.stable_url(&known.url);
        let (state, draft) = (current.state, current.draft);
        let pull = PullRequest { state, draft, url: url.clone(), ..known.clone() };
        let name = repository.clone();
        let mut writes =
            vec![Write::PullRequest { repository: name.clone(), pull_request: Box::new(pull) }];
        if known.state != state {
            let url = self.shared.forge.current_url(&url);
            let changed =
                EventBody::PrChanged { repository: name, number: known.number, url, state };
            writes.push(event(changed));
        }
        write(&self.shared, session, writes).await?;
        if state == PullRequestState::Merged && known.state != state {
            self.look_soon(repository);
        }
        Ok(())
    }

    async fn known_pull(
        &self,
        session: &SessionId,
        wanted: Option<&RepositoryRef>,
    ) -> Result<(SessionRecord, KnownPull), SessionError> {
        let record = self.shared.store.session_get(session).await?;
        check_repository(&record, wanted)?;
        let fits = |one: &&SessionRepository| wanted.is_none_or(|wanted| wanted.matches(&one.name));
        let with_pull = |one: &SessionRepository| Some((one.name.clone(), one.pr.clone()?));
        let mut found: Vec<_> =
            record.session.repositories.iter().filter(fits).filter_map(with_pull).collect();
        if found.len() > 1 {
            let what = format!("session {session} has {} pull requests", found.len());
            let hint = "name the repository: `-r OWNER/NAME`";
            return Err(SessionError::conflict("ambiguous_name", what, hint));
        }
        let Some((name, pull)) = found.pop() else {
            let what = format!("session {session} has no pull request");
            let hint = format!("`harvest pr create {session}` opens one of what was pushed");
            return Err(SessionError::conflict("no_pr", what, hint));
        };
        let repository = self.shared.store.repository_get(&name).await?;
        Ok((record, KnownPull { repository, pull }))
    }

    /// A repository of a session with its new pull request.
    fn shown(
        &self,
        record: &SessionRecord,
        name: &RepositoryName,
        pull: PullRequest,
    ) -> Option<SessionRepository> {
        let found = record.session.repositories.iter().find(|one| one.name == *name)?;
        let (url, pull_url) = (self.current_url(&found.url), self.current_url(&pull.url));
        let pr = Some(PullRequest { url: pull_url, ..pull });
        Some(SessionRepository { url, pr, ..found.clone() })
    }
}

/// A pull request of a session that the store knows.
struct KnownPull {
    repository: Repository,
    pull: PullRequest,
}
