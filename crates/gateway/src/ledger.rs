//! The interface from the gateway to the rest of Harvest: policies, secrets and accounting. The
//! gateway itself keeps no state about sessions.

use std::sync::Arc;

use async_trait::async_trait;
use harvest_proto::{
    BranchName, CallId, EventBody, NetworkPolicy, RepositoryName, Secret, SecretOwner, SecretScope,
    SessionId, TrafficCount, UpstreamName,
    api::{AllowedName, KeySource, NameSource, NetworkRule},
    event::Usage,
};
use tokio::sync::watch;

use crate::{HeaderTemplate, policy::normalize_entry};

/// Provides secrets, checks budgets and records usage.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// The value of a secret, for the gateway's own requests; it never goes into a sandbox. The
    /// first of the owners that has one wins.
    async fn secret(&self, owners: &[SecretOwner], name: &str) -> Option<Secret<String>>;

    /// Where the value of a secret comes from.
    async fn secret_source(&self, owners: &[SecretOwner], name: &str) -> KeySource;

    /// All secrets of these owners, to be masked.
    async fn secret_values(
        &self,
        owners: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable>;

    /// The secrets that are added to requests for a host, narrowest scope first.
    async fn host_secrets(&self, owners: &[SecretOwner], host: &str) -> Vec<HostSecret>;

    /// Whether the token `GITHUB_TOKEN` is meant for a repository at this URL.
    fn takes_github_token(&self, url: &str) -> bool {
        url.starts_with("https://github.com/")
    }

    /// The server's own credential for a repository that no secret opens, asked for before each
    /// request; it may be another one each time. The error is a sentence for git.
    async fn git_credential(
        &self,
        _url: &str,
        _push: bool,
    ) -> Result<Option<Secret<String>>, String> {
        Ok(None)
    }

    /// The remote refused a credential of [`Ledger::git_credential`].
    fn git_credential_refused(&self, _url: &str, _refused: &Secret<String>) {}

    /// Whether the session pushed this commit to its branch of the repository: it may replace it.
    async fn has_pushed(
        &self,
        _session: &SessionId,
        _repository: &RepositoryName,
        _commit: &str,
    ) -> Result<bool, Refusal> {
        Ok(false)
    }

    /// Records that a push is about to be sent. What is pushed is known even if the server is
    /// killed before the remote answers. One push at a time begins and ends, and forgets earlier
    /// ones that had no answer.
    async fn push_begins(
        &self,
        _session: &SessionId,
        _repository: &RepositoryName,
        _push: BegunPush<'_>,
    ) -> Result<(), Refusal> {
        Ok(())
    }

    /// Records that the remote refused a push. One that it accepted is logged as
    /// [`EventBody::Pushed`].
    async fn push_refused(
        &self,
        _session: &SessionId,
        _repository: &RepositoryName,
        _commit: &str,
    ) {
    }

    /// Logs that secrets are added to a request, before it is sent. A request that cannot be logged
    /// is refused.
    async fn record_use(&self, session: &SessionId, used: HostSecretUse) -> Result<(), Refusal>;

    /// Reserves what a model call may cost, before it is made.
    async fn reserve(&self, session: &SessionId, call: &PlannedCall) -> Result<(), Refusal>;

    /// Settles a reserved call. Returns the tokens that are charged.
    async fn settle(&self, session: &SessionId, call: &PlannedCall, used: Used) -> Usage;

    /// Stores an event of the gateway.
    async fn log(&self, session: &SessionId, event: EventBody);

    /// Adds to the network log of a session.
    async fn count_traffic(&self, session: &SessionId, counts: Vec<TrafficCount>);
}

/// A push that is about to be sent.
#[derive(Debug, Clone, Copy)]
pub struct BegunPush<'a> {
    /// The commit that the branch is at; zeros when it does not exist.
    pub old: &'a str,
    pub new: &'a str,
    /// Whether the new commit is put in place of the old one, not on top of it.
    pub replaces: bool,
}

/// A secret whose value is masked.
#[derive(Debug, Clone)]
pub struct NamedSecret {
    pub name: String,
    pub value: Secret<String>,
}

/// The secrets cannot be read, so their values cannot be masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the stored secrets cannot be read")]
pub struct SecretsUnavailable;

/// A secret that is added to requests for a host.
#[derive(Debug, Clone)]
pub struct HostSecret {
    pub name: String,
    pub scope: SecretScope,
    pub header: HeaderTemplate,
    pub value: Secret<String>,
}

/// A request to which secrets are added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSecretUse {
    /// Name and scope of each secret.
    pub secrets: Vec<(String, SecretScope)>,
    pub host: String,
    pub method: String,
    /// Without the query, which may be private.
    pub path: String,
}

/// The tools of a session, which its agent calls at the tools door.
#[async_trait]
pub trait Tools: Send + Sync {
    /// The tools as MCP describes them, with `name`, `description` and `inputSchema`.
    fn list(&self) -> Vec<serde_json::Value>;

    /// Calls a tool; `None` when there is none of this name.
    async fn call(&self, name: &str, arguments: serde_json::Value) -> Option<ToolResult>;

    /// Answers a request for the API of the session's repositories.
    async fn forge(&self, _call: ForgeCall) -> ForgeAnswer {
        ForgeAnswer::refused(404, "there are no repositories here")
    }
}

/// A request for the API of the session's repositories. Paths and parameters are decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForgeCall {
    /// A read of GitHub's REST API.
    Read {
        /// The segments of the path below the API's.
        path: Vec<String>,
        query: Vec<(String, String)>,
        /// The forms of answers that the client takes.
        accept: String,
    },
    /// A request of GitHub's GraphQL API.
    Graphql { body: Vec<u8> },
}

/// The answer to a [`ForgeCall`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForgeAnswer {
    pub status: u16,
    pub is_json: bool,
    pub body: Vec<u8>,
    /// The parameters of the next page of a list.
    pub next: Option<Vec<(String, String)>>,
}

impl ForgeAnswer {
    /// A refusal in the form of GitHub's API.
    #[must_use]
    pub fn refused(status: u16, message: &str) -> Self {
        let body = serde_json::json!({ "message": message }).to_string().into_bytes();
        Self { status, is_json: true, body, next: None }
    }
}

/// What a tool returns to the agent.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolResult {
    pub text: String,
    /// The same for programs.
    pub structured: Option<serde_json::Value>,
    /// The call failed; the text says why, and what to do.
    pub failed: bool,
}

/// A model call that is about to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedCall {
    pub id: CallId,
    pub upstream: UpstreamName,
    /// The upstream asks for a key. One that does not is not expected to cost anything.
    pub keyed: bool,
    /// Empty when the request names none.
    pub model: String,
    /// Other models that the service may use instead.
    pub fallbacks: Vec<String>,
    pub most: MostTokens,
}

/// The tokens that a call used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Used {
    /// As counted by the service, or estimated from a complete response that has no counts.
    Counted(Usage),
    /// The response was not read to its end: these and an unknown number of others, up to the most
    /// that the request allows.
    AtLeast(Usage),
}

/// The most tokens that a call may use, as far as its request tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MostTokens {
    /// `None` for any number: the request names input that it does not contain.
    pub input: Option<u64>,
    /// Of each response; `None` for as many as the model can write.
    pub output: Option<u64>,
    /// The number of responses.
    pub responses: u64,
}

/// Why a call is refused. The text is for the agent and the user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No later call succeeds before a limit is raised.
    #[error("{0}")]
    Final(String),
    /// A later attempt may succeed.
    #[error("{0}")]
    Retry(String),
}

/// What a sandbox may do at its door.
#[derive(Debug, Clone)]
pub struct DoorPolicy {
    pub session: SessionId,
    /// May change while the door is open; open connections that it no longer allows are cut.
    pub network: watch::Receiver<ResolvedPolicy>,
    /// Receives the model calls that name no upstream. A door whose upstream is `scripted` reaches
    /// no other; every other door reaches all configured ones. A prompt can change it.
    pub upstream: watch::Receiver<UpstreamName>,
    /// Repositories it may fetch from and push to.
    pub repositories: Vec<GitAccess>,
    /// Whose secrets its requests use, narrowest scope first.
    pub secrets: Vec<SecretOwner>,
    /// What the sandbox is for.
    pub purpose: DoorPurpose,
}

/// What the sandbox behind a door is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DoorPurpose {
    /// A session, or a build.
    #[default]
    Work,
    /// The check of a commit: it reaches no model and no tools, and uses no secret of a person or
    /// session except to fetch the repository.
    Check,
    /// As [`Self::Check`], of a commit that is on no branch of the repository, so far as is known:
    /// a stranger may have written it, so it uses no secret for hosts at all.
    StrangersCheck,
}

impl DoorPurpose {
    pub(crate) fn is_check(self) -> bool {
        self != Self::Work
    }
}

impl DoorPolicy {
    /// Whose secrets are added to requests for hosts.
    pub(crate) fn host_secret_owners(&self) -> Vec<SecretOwner> {
        let is_shared = |owner: &&SecretOwner| {
            matches!(owner, SecretOwner::Repository(_) | SecretOwner::Global)
        };
        match self.purpose {
            DoorPurpose::Work => self.secrets.clone(),
            DoorPurpose::Check => self.secrets.iter().filter(is_shared).cloned().collect(),
            DoorPurpose::StrangersCheck => Vec::new(),
        }
    }
}

/// A network policy with the names and rules it consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedPolicy {
    pub base: NetworkPolicy,
    /// The names that `trusted` allows.
    pub trusted: Arc<[TrustedName]>,
    pub rules: Vec<NetworkRule>,
    /// The argument of `harvest net allow` that names the policy's owner: a session's id, or
    /// `-r` and a repository's name. Empty for a standalone sandbox.
    pub owner: String,
}

impl ResolvedPolicy {
    /// A policy without rules.
    #[must_use]
    pub fn of(base: NetworkPolicy, trusted: &[&str]) -> Self {
        let trusted = trusted.iter().filter_map(|name| normalize_entry(name));
        let trusted = trusted.map(|name| TrustedName { name, ports: Vec::new(), private: false });
        let trusted = trusted.collect();
        Self { base, trusted, rules: Vec::new(), owner: "SESSION".to_owned() }
    }

    /// This policy for a door, without later changes.
    #[must_use]
    pub fn fixed(self) -> watch::Receiver<Self> {
        watch::channel(self).1
    }
}

/// A name that `trusted` allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedName {
    /// Normalized. `*.example.org` matches every name below it.
    pub name: String,
    /// Ports besides 80 and 443.
    pub ports: Vec<u16>,
    /// Whether it may have a private address: the host's own package clients use it.
    pub private: bool,
}

impl From<AllowedName> for TrustedName {
    fn from(allowed: AllowedName) -> Self {
        let private = allowed.source == NameSource::Host;
        Self { name: allowed.name, ports: allowed.ports, private }
    }
}

/// A repository behind the git door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GitAccess {
    /// Name of the repository: `http://git.harvest.internal/{owner}/{name}.git` inside.
    pub name: RepositoryName,
    /// URL of the real remote.
    pub url: String,
    /// Whether the remote is the local forge, which is on this machine.
    pub local: bool,
    /// Name of the secret, sent as HTTP basic authentication (user `x-access-token`).
    pub secret: Option<String>,
    /// The branch that the session may create and update, but never delete. It may replace its own
    /// commits there, and no others. `None` is read-only.
    pub branch: Option<BranchName>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_uses_no_secret_of_people_for_hosts() {
        let repository = SecretOwner::Repository("acme/shop".parse().unwrap());
        let shared = vec![repository, SecretOwner::Global];
        let own = [SecretOwner::Session(SessionId::random()), SecretOwner::user("ada@example.org")];
        let policy = |purpose| DoorPolicy {
            session: SessionId::random(),
            network: ResolvedPolicy::of(NetworkPolicy::Trusted, &[]).fixed(),
            upstream: watch::channel(UpstreamName::scripted()).1,
            repositories: Vec::new(),
            secrets: [&own[..], &shared].concat(),
            purpose,
        };
        assert_eq!(policy(DoorPurpose::Check).host_secret_owners(), shared);
        assert_eq!(policy(DoorPurpose::StrangersCheck).host_secret_owners(), []);
        assert_eq!(policy(DoorPurpose::Work).host_secret_owners().len(), 4);
    }
}
