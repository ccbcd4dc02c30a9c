//! How often the programs of sessions use the API of forges: GitHub counts requests by sign-in, and
//! people, pushes and checks use the same one.

use std::time::{Duration, Instant};

use harvest_proto::{RepositoryName, SessionId};

use crate::token_buckets::TokenBuckets;

// GitHub answers 5,000 requests of a sign-in in an hour. In the first one, a full bucket and what
// is refilled make 3,000 of a repository.
const OF_SESSION: u32 = 600;
const OF_REPOSITORY: u32 = 1500;

/// Counts the calls of this server's sessions.
#[derive(Debug)]
pub(crate) struct ForgeCalls {
    sessions: TokenBuckets<SessionId>,
    repositories: TokenBuckets<RepositoryName>,
}

impl Default for ForgeCalls {
    fn default() -> Self {
        Self { sessions: hourly(OF_SESSION), repositories: hourly(OF_REPOSITORY) }
    }
}

fn hourly<K: Eq + std::hash::Hash>(count: u32) -> TokenBuckets<K> {
    TokenBuckets::new(count, f64::from(count) / 3600.0)
}

/// A call that comes too early.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{whose} made {limit} calls of the forge's API, as many as Harvest makes in an hour; try \
     again in {} s",
    .wait.as_secs() + 1
)]
pub(crate) struct TooManyCalls {
    whose: &'static str,
    limit: u32,
    wait: Duration,
}

impl ForgeCalls {
    /// Counts one call.
    pub(super) fn take(
        &self,
        session: &SessionId,
        repository: &RepositoryName,
        now: Instant,
    ) -> Result<(), TooManyCalls> {
        let (whose, limit) = ("this session", OF_SESSION);
        let own = self.sessions.take(session.clone(), now);
        own.map_err(|wait| TooManyCalls { whose, limit, wait })?;
        let (whose, limit) = ("the sessions of this repository", OF_REPOSITORY);
        let all = self.repositories.take(repository.clone(), now);
        all.map_err(|wait| TooManyCalls { whose, limit, wait })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_session_and_repository_are_limited() {
        let (calls, start) = (ForgeCalls::default(), Instant::now());
        let (app, other) = (repository("app"), repository("other"));
        let sessions: Vec<SessionId> = (0..4).map(|_| SessionId::random()).collect();
        let count = |session: &SessionId, repository, now| {
            (0..2_000).filter(|_| calls.take(session, repository, now).is_ok()).count()
        };
        assert_eq!(count(&sessions[0], &app, start), 600);
        assert_eq!(count(&sessions[0], &other, start), 0, "in whatever repository");
        assert_eq!(count(&sessions[1], &app, start), 600);
        assert_eq!(count(&sessions[2], &app, start), 300, "of all sessions together");
        assert_eq!(count(&sessions[3], &other, start), 600, "in another repository");
        let refused = calls.take(&sessions[0], &app, start).unwrap_err().to_string();
        let expected = "this session made 600 calls of the forge's API, as many as Harvest makes \
                        in an hour; try again in 7 s";
        assert_eq!(refused, expected);
        assert!(calls.take(&sessions[0], &app, start + Duration::from_secs(7)).is_ok());
    }

    fn repository(name: &str) -> RepositoryName {
        RepositoryName::new("acme", name).unwrap()
    }
}
