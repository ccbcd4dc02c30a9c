//! Network policies and rules. A policy is the base of a session or build plus the rules that apply
//! to it; the doors that are open follow every change.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use harvest_gateway::{
    DoorListener, DoorObserver,
    ledger::{ResolvedPolicy, TrustedName},
    normalize_entry,
};
use harvest_proto::{
    NetworkPolicy, RepositoryName, RuleScope, RuleVerdict, SessionId,
    api::{NetworkLogEntry, NetworkRule, NetworkRules, SandboxDoor, SetNetworkRule},
};
use harvest_store::RuleOwner;
use tokio::sync::{Mutex, watch};

use super::{Repositories, RepositoryContext, builds::BUILD_POLICY};
use crate::{
    doors::Doors,
    error::SessionError,
    sandboxes::{DoorGuard, SandboxError, StandaloneDoors, allow_rules},
};

const MAX_PORTS: usize = 32;

/// The policies of the doors that are open. The lock is held from reading the rules to publishing
/// them, so that the rules that were stored last are published last.
#[derive(Default)]
pub(crate) struct OpenPolicies(Mutex<Vec<OpenPolicy>>);

struct OpenPolicy {
    owner: RuleOwner,
    /// Rules that are not stored, of a standalone sandbox.
    own: Vec<NetworkRule>,
    policy: watch::Sender<ResolvedPolicy>,
}

impl Repositories {
    /// The policy of a door that is about to open, with every later change. Except with `none` this
    /// waits until the trusted names are known.
    pub(super) async fn open_policy(
        &self,
        owner: RuleOwner,
        base: NetworkPolicy,
    ) -> Result<watch::Receiver<ResolvedPolicy>, SessionError> {
        let name = describe(&owner);
        self.open_policy_with(owner, name, base, Vec::new()).await
    }

    async fn open_policy_with(
        &self,
        owner: RuleOwner,
        name: String,
        base: NetworkPolicy,
        own: Vec<NetworkRule>,
    ) -> Result<watch::Receiver<ResolvedPolicy>, SessionError> {
        let trusted = match base {
            NetworkPolicy::None => Vec::new(),
            // Mirrors of the host may have private addresses and unusual ports.
            NetworkPolicy::Trusted | NetworkPolicy::Full => self.shared.trusted.clone().await,
        };
        let trusted: Arc<[TrustedName]> = trusted.into_iter().map(TrustedName::from).collect();
        let mut open = self.shared.open_policies.0.lock().await;
        open.retain(|one| !one.policy.is_closed());
        let mut rules = self.shared.store.network_rule_list(&owner).await?;
        rules.extend(own.iter().cloned());
        let (policy, receiver) =
            watch::channel(ResolvedPolicy { base, trusted, rules, owner: name });
        open.push(OpenPolicy { owner, own, policy });
        Ok(receiver)
    }

    /// The names and rules of sandboxes of an owner. With `trusted` this waits until the trusted
    /// names are known.
    async fn network_rules(
        &self,
        owner: &RuleOwner,
        policy: NetworkPolicy,
    ) -> Result<NetworkRules, SessionError> {
        let names = match policy {
            NetworkPolicy::Trusted => self.shared.trusted.clone().await,
            NetworkPolicy::None | NetworkPolicy::Full => Vec::new(),
        };
        let rules = self.shared.store.network_rule_list(owner).await?;
        Ok(NetworkRules { policy, names, rules })
    }

    /// The names and rules of new sessions.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn network(&self) -> Result<NetworkRules, SessionError> {
        self.network_rules(&RuleOwner::Everywhere, NetworkPolicy::default()).await
    }

    /// The names and rules of a repository's builds.
    ///
    /// # Errors
    /// When there is no such repository.
    pub async fn repository_network(
        &self,
        name: &RepositoryName,
    ) -> Result<NetworkRules, SessionError> {
        self.get(name).await?;
        self.network_rules(&RuleOwner::Repository(name.clone()), BUILD_POLICY).await
    }

    /// The names and rules of a session.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn session_network(&self, session: &SessionId) -> Result<NetworkRules, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let owner = RuleOwner::Session(session.clone());
        self.network_rules(&owner, record.session.network).await
    }

    /// The network log of a session.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn network_log(
        &self,
        session: &SessionId,
    ) -> Result<Vec<NetworkLogEntry>, SessionError> {
        self.shared.store.session_get(session).await?;
        Ok(self.shared.store.network_log(session).await?)
    }

    /// Adds a rule, or ports to an earlier one for the name. Sandboxes at work follow it at once.
    ///
    /// # Errors
    /// When the name or a port is invalid, or the owner denies the name, does not exist or has too
    /// many rules.
    pub async fn network_rule_set(
        &self,
        owner: &RuleOwner,
        name: &str,
        set: &SetNetworkRule,
    ) -> Result<NetworkRule, SessionError> {
        let rule = network_rule(owner, name, set)?;
        self.check_owner(owner).await?;
        self.check_not_denied(owner, &rule).await?;
        let stored = self.shared.store.network_rule_set(owner, &rule).await?;
        self.publish_rules(owner).await?;
        Ok(stored)
    }

    /// Removes a rule. Sandboxes at work follow at once.
    ///
    /// # Errors
    /// When there is no such rule.
    pub async fn network_rule_remove(
        &self,
        owner: &RuleOwner,
        name: &str,
    ) -> Result<(), SessionError> {
        let name = normalize_entry(name).unwrap_or_else(|| name.to_owned());
        let existed = self.shared.store.network_rule_remove(owner, &name).await?;
        // In any case: an earlier call may have failed between the two.
        self.publish_rules(owner).await?;
        match existed {
            true => Ok(()),
            false => Err(SessionError::missing(format!("network rule for `{name}`"))),
        }
    }

    /// Refuses to allow a name that a rule of the same owner denies: it would have no effect.
    async fn check_not_denied(
        &self,
        owner: &RuleOwner,
        rule: &NetworkRule,
    ) -> Result<(), SessionError> {
        let rules = self.shared.store.network_rule_list(owner).await?;
        let denies = |one: &&NetworkRule| {
            one.verdict == RuleVerdict::Deny && one.scope == rule.scope && one.name == rule.name
        };
        match (rule.verdict, rules.iter().find(denies)) {
            (RuleVerdict::Allow, Some(_)) => {
                let name = &rule.name;
                let hint =
                    format!("`harvest net rm {} '{name}'` removes the rule", describe(owner));
                Err(SessionError::conflict("denied", format!("a rule denies {name}"), hint))
            }
            _ => Ok(()),
        }
    }

    async fn check_owner(&self, owner: &RuleOwner) -> Result<(), SessionError> {
        match owner {
            RuleOwner::Session(session) => {
                self.shared.store.session_get(session).await?;
            }
            RuleOwner::Repository(name) => {
                self.get(name).await?;
            }
            RuleOwner::Everywhere => {}
        }
        Ok(())
    }

    /// Brings the stored rules to the doors that are open.
    async fn publish_rules(&self, changed: &RuleOwner) -> Result<(), SessionError> {
        let mut open = self.shared.open_policies.0.lock().await;
        open.retain(|one| !one.policy.is_closed());
        let mut outcome = Ok(());
        for one in open.iter().filter(|one| may_concern(changed, &one.owner)) {
            match self.shared.store.network_rule_list(&one.owner).await {
                Ok(mut rules) => {
                    rules.extend(one.own.iter().cloned());
                    one.policy.send_if_modified(|policy| {
                        let changed = policy.rules != rules;
                        policy.rules = rules;
                        changed
                    });
                }
                // The others follow nevertheless.
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
        }
        outcome
    }
}

/// The doors of standalone sandboxes on a server: the rules for everywhere apply to them.
pub(crate) struct ServerDoors {
    // Weak: repositories refer to the sandboxes that this opens doors for.
    repositories: Weak<RepositoryContext>,
    doors: Arc<dyn Doors>,
}

impl ServerDoors {
    pub(crate) fn new(repositories: &Repositories, doors: Arc<dyn Doors>) -> Self {
        Self { repositories: Arc::downgrade(&repositories.shared), doors }
    }
}

#[async_trait]
impl StandaloneDoors for ServerDoors {
    async fn open(
        &self,
        listener: Box<dyn DoorListener>,
        door: &SandboxDoor,
        observer: DoorObserver,
    ) -> Result<DoorGuard, SandboxError> {
        let (owner, own) = (RuleOwner::Everywhere, allow_rules(door)?);
        let doing = "cannot read the network rules";
        let shared = self.repositories.upgrade();
        let stopping = || SandboxError::failed(doing, "the server is stopping");
        let shared = shared.ok_or_else(stopping)?;
        let repositories = Repositories { shared };
        let network = repositories.open_policy_with(owner, String::new(), door.policy, own).await;
        let network = network.map_err(|error| SandboxError::failed(doing, error))?;
        Ok(self.doors.open_for_names(listener, network, observer))
    }
}

/// Whether a change of one owner's rules may change what applies to another.
fn may_concern(changed: &RuleOwner, other: &RuleOwner) -> bool {
    match (changed, other) {
        (RuleOwner::Everywhere, _) | (RuleOwner::Repository(_), RuleOwner::Session(_)) => true,
        (one, other) => one == other,
    }
}

/// How `harvest net` names an owner.
fn describe(owner: &RuleOwner) -> String {
    match owner {
        RuleOwner::Session(session) => session.to_string(),
        RuleOwner::Repository(name) => format!("-r {name}"),
        RuleOwner::Everywhere => "--everywhere".to_owned(),
    }
}

/// The rule of a request.
pub(crate) fn network_rule(
    owner: &RuleOwner,
    name: &str,
    set: &SetNetworkRule,
) -> Result<NetworkRule, SessionError> {
    let Some(normal) = normalize_entry(name) else {
        let what = format!("`{name}` is not a host name");
        return Err(SessionError::invalid("invalid_name", what)
            .with_hint("give a name such as `example.org`, or `*.example.org` for all below it"));
    };
    let ports = set.effective_ports();
    if ports.contains(&0) || ports.len() > MAX_PORTS {
        let what = format!("a rule has at most {MAX_PORTS} ports from 1 to 65535");
        return Err(SessionError::invalid("invalid_port", what));
    }
    let scope = owner.scope();
    if set.private && (scope == RuleScope::Session || normal.starts_with("*.")) {
        let what = "only a rule of an admin for a whole name allows private addresses";
        return Err(SessionError::invalid("private_not_allowed", what)
            .with_hint("`harvest net allow --everywhere --private NAME` makes one"));
    }
    Ok(NetworkRule { name: normal, verdict: set.verdict, ports, private: set.private, scope })
}
