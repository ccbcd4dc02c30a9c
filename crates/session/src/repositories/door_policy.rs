//! The policy of a sandbox's door: which repositories and names it reaches.

use futures_util::future::BoxFuture;
use harvest_gateway::ledger::{DoorPolicy, DoorPurpose, GitAccess};
use harvest_proto::{
    BranchName, NetworkPolicy, RepositoryName, SecretOwner, SessionId, UpstreamName,
    api::{AllowedName, Repository, RepositoryConfig},
    bridge::Author,
};
use harvest_store::{RuleOwner, SessionRecord};
use tokio::sync::watch;

use super::Repositories;
use crate::{agents::Agents, error::SessionError};

/// The names `trusted` sandboxes may reach, once they are known.
pub(crate) type Trusted = futures_util::future::Shared<BoxFuture<'static, Vec<AllowedName>>>;

impl Repositories {
    /// The pass of a sandbox. Without a branch it may only read. Except with the policy `none` this
    /// waits until the trusted names are known.
    pub(crate) async fn pass(
        &self,
        repositories: &[Repository],
        spec: PassSpec,
    ) -> Result<DoorPolicy, SessionError> {
        let access = |repository: &Repository| self.git_access(repository, spec.branch.clone());
        Ok(DoorPolicy {
            network: self.open_policy(spec.owner, spec.network).await?,
            session: spec.session,
            upstream: spec.upstream,
            repositories: repositories.iter().map(access).collect(),
            secrets: spec.secrets,
            purpose: spec.purpose,
        })
    }

    /// How a repository's remote is reached. Without a branch it may only be read.
    pub(super) fn git_access(
        &self,
        repository: &Repository,
        branch: Option<BranchName>,
    ) -> GitAccess {
        GitAccess {
            name: repository.name.clone(),
            url: self.current_url(&repository.url),
            local: self.shared.forge.is_local(&repository.url),
            secret: repository.secret.clone(),
            branch,
        }
    }
}

pub(crate) struct PassSpec {
    pub(crate) session: SessionId,
    /// Whose network rules apply.
    pub(crate) owner: RuleOwner,
    pub(crate) network: NetworkPolicy,
    pub(crate) upstream: watch::Receiver<UpstreamName>,
    pub(crate) branch: Option<BranchName>,
    /// Whose secrets are used, narrowest scope first.
    pub(crate) secrets: Vec<SecretOwner>,
    pub(crate) purpose: DoorPurpose,
}

/// Whose secrets a session uses, narrowest scope first.
pub(crate) fn owners_of(record: &SessionRecord) -> Vec<SecretOwner> {
    let session = &record.session;
    let repositories = record.checkouts.iter().map(|one| one.repository.clone());
    let own = SecretOwner::Session(session.id.clone());
    std::iter::once(own).chain(shared_owners(repositories, &session.author)).collect()
}

/// Whose secrets all sessions of an author on these repositories use.
pub(crate) fn shared_owners(
    repositories: impl Iterator<Item = RepositoryName>,
    author: &Author,
) -> Vec<SecretOwner> {
    repositories
        .map(SecretOwner::Repository)
        .chain([SecretOwner::user(&author.email), SecretOwner::Global])
        .collect()
}

impl PassSpec {
    pub(crate) fn of_session(record: &SessionRecord, agents: &Agents) -> Self {
        let session = &record.session;
        let upstream = agents.upstream_of(&session.agent, session.model.as_ref());
        Self {
            session: session.id.clone(),
            owner: RuleOwner::Session(session.id.clone()),
            network: session.network,
            // An agent that is no longer configured does not start; this reaches no service.
            upstream: watch::channel(upstream.unwrap_or_else(|_| UpstreamName::scripted())).1,
            branch: Some(session.branch.clone()),
            secrets: owners_of(record),
            purpose: DoorPurpose::Work,
        }
    }
}

/// The policy of a check, or of a session that is created without one: a repository can only make
/// it stricter.
pub(crate) fn default_network(declared: Option<&RepositoryConfig>) -> NetworkPolicy {
    let wanted = declared.and_then(|config| config.policy.network);
    wanted.unwrap_or_default().stricter(NetworkPolicy::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_can_only_narrow_the_network() {
        let declared = |network| {
            let mut config = RepositoryConfig::default();
            config.policy.network = Some(network);
            default_network(Some(&config))
        };
        assert_eq!(declared(NetworkPolicy::None), NetworkPolicy::None);
        assert_eq!(declared(NetworkPolicy::Full), NetworkPolicy::Trusted);
        assert_eq!(default_network(None), NetworkPolicy::Trusted);
    }
}
