//! The policy of a sandbox's door: which repositories and names it reaches.

use futures_util::future::BoxFuture;
use harvest_gateway::ledger::{DoorPolicy, GitAccess, ResolvedPolicy};
use harvest_proto::{
    BranchName, NetworkPolicy, SessionId, UpstreamName,
    api::{AllowedName, NetworkRules, Repository},
};
use harvest_store::SessionRecord;
use tokio::sync::watch;

use super::Repositories;
use crate::agents::Agents;

/// The names `trusted` sandboxes may reach, once they are known.
pub(crate) type Trusted = futures_util::future::Shared<BoxFuture<'static, Vec<AllowedName>>>;

impl Repositories {
    /// The pass of a sandbox. Without a branch it may only read. With the `trusted` policy this
    /// waits until the trusted names are known.
    pub(crate) async fn pass(&self, repositories: &[Repository], spec: PassSpec) -> DoorPolicy {
        let access = |repository: &Repository| self.git_access(repository, spec.branch.clone());
        DoorPolicy {
            session: spec.session,
            network: match spec.network {
                NetworkPolicy::None => ResolvedPolicy::None,
                NetworkPolicy::Trusted => {
                    let names = self.shared.trusted.clone().await;
                    ResolvedPolicy::Trusted(names.into_iter().map(|one| one.name).collect())
                }
            },
            upstream: spec.upstream,
            repositories: repositories.iter().map(access).collect(),
        }
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
            local: self.shared.forge.is_own(&repository.url),
            secret: repository.secret.clone(),
            branch,
        }
    }

    /// The names that a sandbox with this policy may connect to. With `trusted` this waits until
    /// they are known.
    pub async fn network_rules(&self, policy: NetworkPolicy) -> NetworkRules {
        let names = match policy {
            NetworkPolicy::None => Vec::new(),
            NetworkPolicy::Trusted => self.shared.trusted.clone().await,
        };
        NetworkRules { policy, names }
    }
}

pub(crate) struct PassSpec {
    pub(crate) session: SessionId,
    pub(crate) network: NetworkPolicy,
    pub(crate) upstream: watch::Receiver<UpstreamName>,
    pub(crate) branch: Option<BranchName>,
}

impl PassSpec {
    pub(crate) fn of_session(record: &SessionRecord, agents: &Agents) -> Self {
        let session = &record.session;
        let upstream = agents.upstream_of(&session.agent, session.model.as_ref());
        Self {
            session: session.id.clone(),
            network: session.network,
            // An agent that is no longer configured does not start; this reaches no service.
            upstream: watch::channel(upstream.unwrap_or_else(|_| UpstreamName::scripted())).1,
            branch: Some(session.branch.clone()),
        }
    }
}
