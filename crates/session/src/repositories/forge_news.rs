//! What happens at forges: pull requests are merged or closed, and branches move. A job asks for
//! the state of open pull requests every few minutes; webhooks tell it of some at once. A webhook
//! is a hint: the state is always read from the forge, so that neither a late nor a lost one does
//! harm.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use harvest_forge::{ForgeFailure, Webhook, WebhookError, WebhookHeaders, WebhookNews};
use harvest_proto::{
    RepositoryName,
    api::{PullRequestState, Repository},
    repository_address::is_same_url,
};
use harvest_store::{StoredPullRequest, WebhookDelivery};
use tokio::{sync::Notify, time::Instant};

use super::{Repositories, pull_requests::remote_of};
use crate::{
    error::SessionError, error_chain::error_chain, jobs::Job, tasks::Tasks, wall_clock::now,
};

/// How often the state of all open pull requests is asked for.
const PERIOD: Duration = Duration::from_secs(300);
/// How often that of those on the local forge: each starts git, and most changes to them go through
/// this server.
const LOCAL_PERIODS: u64 = 6;
// Payloads are kept for a week: checks and reviews have a few kilobytes.
const MAX_PAYLOAD_BYTES: usize = 64 * 1024;

/// Why a webhook is not taken.
#[derive(Debug, thiserror::Error)]
pub enum WebhookRefusal {
    #[error(transparent)]
    Refused(#[from] WebhookError),
    #[error(transparent)]
    Failed(#[from] SessionError),
}

/// Pull requests that webhooks told of since the job last ran.
#[derive(Debug, Default)]
pub(crate) struct ForgeNews {
    wake: Arc<Notify>,
    pending: Mutex<HashSet<(RepositoryName, u64)>>,
    /// When the job last asked for all, and how often it did.
    asked: Mutex<Option<(Instant, u64)>>,
}

/// Which pull requests are asked for besides those that webhooks told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    Hinted,
    Remote,
    All,
}

impl ForgeNews {
    fn tell(&self, repository: RepositoryName, number: u64) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.insert((repository, number));
        self.wake.notify_one();
    }

    fn take(&self) -> HashSet<(RepositoryName, u64)> {
        std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What a run of the job asks for. The first one only begins to count: a server that starts has
    /// other things to do.
    fn round(&self, now: Instant) -> Round {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((last, count)) = *asked else {
            *asked = Some((now, 0));
            return Round::Hinted;
        };
        if now.duration_since(last) < PERIOD {
            return Round::Hinted;
        }
        *asked = Some((now, count + 1));
        if (count + 1).is_multiple_of(LOCAL_PERIODS) { Round::All } else { Round::Remote }
    }
}

impl Repositories {
    /// Starts the job that asks for the state of pull requests.
    pub(crate) fn spawn_forge_news(&self, tasks: &Tasks) {
        let wake = Arc::clone(&self.shared.news.wake);
        let repositories = self.clone();
        Job { name: "pull_requests", period: Some(PERIOD), wake }.spawn(tasks, move || {
            let repositories = repositories.clone();
            async move {
                let hints = repositories.shared.news.take();
                let round = repositories.shared.news.round(Instant::now());
                repositories.refresh_some(&hints, round).await?;
                Ok(())
            }
        });
    }

    /// Asks for the state of all open pull requests.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn refresh_pull_requests(&self) -> Result<(), SessionError> {
        self.refresh_some(&HashSet::new(), Round::All).await
    }

    async fn refresh_some(
        &self,
        hints: &HashSet<(RepositoryName, u64)>,
        round: Round,
    ) -> Result<(), SessionError> {
        if hints.is_empty() && round == Round::Hinted {
            return Ok(());
        }
        for stored in self.shared.store.pull_requests_unmerged().await? {
            let pull = &stored.pull_request;
            let hinted = hints.contains(&(stored.repository.clone(), pull.number));
            let in_round = match round {
                Round::Hinted => false,
                Round::Remote => !self.shared.forge.is_local(&stored.url),
                Round::All => true,
            };
            let wanted = hinted || (in_round && pull.state == PullRequestState::Open);
            if !wanted {
                continue;
            }
            match self.refresh_pull_request(&stored).await {
                Ok(()) => {}
                Err(Some(failure @ ForgeFailure::RateLimited { .. })) => {
                    tracing::warn!(error = error_chain(&failure), "pull requests are asked later");
                    return Ok(());
                }
                Err(failure) => {
                    let why = failure.map_or_else(String::new, |failure| error_chain(&failure));
                    let (repository, number) = (&stored.repository, pull.number);
                    tracing::info!(%repository, number, why, "cannot read a pull request's state");
                }
            }
        }
        Ok(())
    }

    /// `Err(None)` when the session or the repository is gone, or the store failed.
    async fn refresh_pull_request(
        &self,
        stored: &StoredPullRequest,
    ) -> Result<(), Option<ForgeFailure>> {
        let shared = &self.shared;
        let record = shared.store.session_get(&stored.session).await.map_err(|_| None)?;
        let repository = shared.store.repository_get(&stored.repository).await.map_err(|_| None)?;
        let remote = remote_of(shared, &record, &repository).await;
        let current = shared.forge.pull_request(&remote, stored.pull_request.number).await?;
        let (session, name) = (&stored.session, &stored.repository);
        let recorded = self.record_state(session, name, &stored.pull_request, &current).await;
        recorded.map_err(|error| {
            tracing::warn!(error = error_chain(&error), "cannot store a pull request's state");
            None
        })
    }

    /// Takes a webhook. Returns whether it is new: each delivery is taken once in a week.
    ///
    /// # Errors
    /// When webhooks are not set up, or the delivery is not signed with the secret.
    pub async fn receive_webhook(
        &self,
        headers: WebhookHeaders<'_>,
        body: &[u8],
    ) -> Result<bool, WebhookRefusal> {
        let webhook = self.shared.forge.read_webhook(headers, body)?;
        let payload = match webhook.news {
            WebhookNews::Kept if body.len() <= MAX_PAYLOAD_BYTES => {
                std::str::from_utf8(body).ok().map(|text| text.replace('\0', ""))
            }
            _ => None,
        };
        let delivery = WebhookDelivery {
            id: webhook.delivery.clone(),
            event: webhook.event.clone(),
            action: webhook.action.chars().take(100).filter(|c| !c.is_control()).collect(),
            repository: webhook.repository.clone().unwrap_or_default().replace('\0', ""),
            payload,
            at: now(),
        };
        if !self.shared.store.webhook_record(delivery).await.map_err(SessionError::from)? {
            return Ok(false);
        }
        self.apply_webhook(&webhook).await?;
        Ok(true)
    }

    async fn apply_webhook(&self, webhook: &Webhook) -> Result<(), SessionError> {
        let Some(url) = &webhook.repository else { return Ok(()) };
        // Names at GitHub ignore case.
        let url = url.to_lowercase();
        let matching = self.list().await?.into_iter();
        for repository in matching.filter(|one| is_same_url(&one.url.to_lowercase(), &url)) {
            match &webhook.news {
                WebhookNews::PullRequest { number } => {
                    self.shared.news.tell(repository.name, *number);
                }
                WebhookNews::Push { branch: Some(branch), is_default } => {
                    let is_base = match &repository.base {
                        Some(base) => base == branch,
                        None => *is_default,
                    };
                    if is_base {
                        self.look_soon(&repository.name);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Looks at a repository in the background, as the schedule does, if the schedule runs.
    pub(super) fn look_soon(&self, name: &RepositoryName) {
        if !self.shared.schedule {
            return;
        }
        let (repositories, name) = (self.clone(), name.clone());
        self.shared.sandboxes.tasks.spawn(async move {
            let paused = repositories.is_paused().await.unwrap_or(true);
            let found = repositories.get(&name).await;
            if let (false, Ok(repository)) = (paused, found) {
                repositories.look_now(repository).await;
            }
        });
    }

    async fn look_now(&self, repository: Repository) {
        let name = repository.name.clone();
        match self.refresh(repository).await.failure() {
            None => tracing::info!(%name, "looked at a repository after a push"),
            Some(why) => tracing::warn!(%name, why, "cannot build a repository after a push"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sixth_round_includes_the_local_forge() {
        let (news, start) = (ForgeNews::default(), Instant::now());
        let rounds: Vec<Round> = (0..8).map(|count| news.round(start + PERIOD * count)).collect();
        let local: Vec<_> = (0..8).filter(|count| rounds[*count] == Round::All).collect();
        assert_eq!((rounds[0], rounds[1], local), (Round::Hinted, Round::Remote, vec![6]));
        assert_eq!(news.round(start + PERIOD * 7), Round::Hinted, "a webhook starts no round");
    }
}
