//! A sandbox's door as its connections see it: the policy, the shared services, and rate-limited
//! logs of refusals. `listener` accepts the connections.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use harvest_proto::{EventBody, RepositoryName};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

use crate::{
    Shared,
    egress::Lookups,
    ledger::{DoorPolicy, ResolvedPolicy, Tools},
    policy::{self, Verdict},
    traffic::Traffic,
};

// Refusals are rate-limited so that a loop in the sandbox cannot fill the session's history: each
// name and reason once a minute, and at most this many of them.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(60);
const MAX_REFUSALS: usize = 64;
// Two requests of maximum size, or hundreds of usual ones, at a time; further requests wait.
const BODY_MEMORY_KIB: usize = 64 * 1024;
// Calls of tools at a time; further ones wait before their bodies are read. Separate from the
// memory of model calls: a tool may run for minutes.
const MAX_TOOL_CALLS: usize = 16;
// Calls of the API of the repositories whose answers are not sent: each holds megabytes.
const MAX_FORGE_CALLS: usize = 4;
// Calls of the Gemini API by tools at a time. They cost money, and go on when the agent
// disconnects.
const MAX_GEMINI_CALLS: usize = 4;
// Responses of models that are read on after the agent has disconnected; further calls are charged
// as held.
const MAX_DRAINS: usize = 16;
// Pushes whose commits are read: each holds megabytes.
const MAX_PUSH_PROOFS: usize = 2;
// Requests to remote MCP servers whose responses have not ended, streams included: an agent has one
// stream per server.
const MAX_REMOTE_CALLS: usize = 64;

/// Receives the events of a door that belongs to no session, in place of the ledger.
pub type DoorObserver = Box<dyn Fn(EventBody) + Send + Sync>;

/// State shared by the connections of a door.
pub(crate) struct Door {
    pub(crate) shared: Arc<Shared>,
    pub(crate) policy: DoorPolicy,
    observer: Option<DoorObserver>,
    /// Whether it leads to names only, not to models, repositories and tools.
    pub(crate) names_only: bool,
    /// The session's tools; a door that belongs to no session has none.
    pub(crate) tools: Option<Arc<dyn Tools>>,
    /// Cancelled when the door closes.
    pub(crate) closed: CancellationToken,
    refusals: Mutex<Refusals>,
    pub(crate) traffic: Traffic,
    /// Memory for bodies of model calls, in KiB.
    pub(crate) body_memory_kib: Arc<Semaphore>,
    pub(crate) tool_calls: Semaphore,
    pub(crate) forge_calls: Arc<Semaphore>,
    pub(crate) gemini_calls: Arc<Semaphore>,
    pub(crate) remote_calls: Arc<Semaphore>,
    pub(crate) drains: Semaphore,
    pub(crate) push_proofs: Semaphore,
    /// One push at a time to each repository: the next one begins when the outcome is recorded.
    push_turns: HashMap<RepositoryName, Semaphore>,
    pub(crate) lookups: Lookups,
}

impl Door {
    pub(crate) fn new(
        shared: Arc<Shared>,
        policy: DoorPolicy,
        observer: Option<DoorObserver>,
        tools: Option<Arc<dyn Tools>>,
    ) -> Self {
        let names = policy.repositories.iter().map(|access| access.name.clone());
        let push_turns = names.map(|name| (name, Semaphore::new(1))).collect();
        Self {
            shared,
            policy,
            observer,
            names_only: false,
            tools,
            closed: CancellationToken::new(),
            refusals: Mutex::default(),
            traffic: Traffic::default(),
            body_memory_kib: Arc::new(Semaphore::new(BODY_MEMORY_KIB)),
            tool_calls: Semaphore::new(MAX_TOOL_CALLS),
            forge_calls: Arc::new(Semaphore::new(MAX_FORGE_CALLS)),
            gemini_calls: Arc::new(Semaphore::new(MAX_GEMINI_CALLS)),
            remote_calls: Arc::new(Semaphore::new(MAX_REMOTE_CALLS)),
            drains: Semaphore::new(MAX_DRAINS),
            push_proofs: Semaphore::new(MAX_PUSH_PROOFS),
            push_turns,
            lookups: Lookups::default(),
        }
    }

    /// Waits until no other push to a repository is in progress; `None` when the door does not lead
    /// to it.
    pub(crate) async fn push_turn(&self, name: &RepositoryName) -> Option<SemaphorePermit<'_>> {
        self.push_turns.get(name)?.acquire().await.ok()
    }

    /// Records an event of this door.
    pub(crate) async fn log(&self, event: EventBody) {
        match &self.observer {
            Some(observer) => observer(event),
            None => self.shared.ledger.log(&self.policy.session, event).await,
        }
    }

    /// Stores what was counted since the last call. A door that belongs to no session has no log.
    pub(crate) async fn store_traffic(&self) {
        let counts = self.traffic.take();
        if !counts.is_empty() && self.observer.is_none() {
            self.shared.ledger.count_traffic(&self.policy.session, counts).await;
        }
    }

    /// The network policy as it is now.
    pub(crate) fn network(&self) -> ResolvedPolicy {
        self.policy.network.borrow().clone()
    }

    /// Waits until the policy no longer allows an open connection, and returns what it says.
    pub(crate) async fn no_longer_allowed(&self, name: &str, port: u16, private: bool) -> Verdict {
        let mut network = self.policy.network.clone();
        loop {
            let verdict = policy::judge(&network.borrow_and_update(), name, port);
            match verdict {
                Verdict::Allowed { private: now } if now || !private => {}
                other => return other,
            }
            if network.changed().await.is_err() {
                // It is final.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Logs a refused connection or look-up, and returns the reason.
    pub(crate) async fn refuse(&self, name: &str, port: u16, verdict: Verdict) -> String {
        let (reason, hint) = match verdict {
            Verdict::Refused { reason, hint } => (reason, hint),
            // It was allowed on other terms.
            Verdict::Allowed { .. } => ("the network rules changed".to_owned(), None),
        };
        self.traffic.refused(&printable(name), port);
        self.log_refusal(name, &reason, hint).await;
        reason
    }

    /// Logs a refused connection or look-up, rate-limited.
    pub(crate) async fn log_refusal(&self, name: &str, reason: &str, hint: Option<String>) {
        let name = printable(name);
        // A name can be refused for another reason soon, when its rules change.
        if self.refusals().admit_name(&format!("{name} {reason}"), Instant::now()) {
            self.log(EventBody::EgressRefused { name, reason: reason.to_owned(), hint }).await;
        }
    }

    /// Logs a refused push, rate-limited.
    pub(crate) async fn log_refused_push(&self, repository: &RepositoryName, reason: &str) {
        if self.refusals().admit_push(Instant::now()) {
            let reason = reason.chars().take(500).collect();
            self.log(EventBody::PushRefused { repository: repository.clone(), reason }).await;
        }
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Door").field("session", &self.policy.session).finish_non_exhaustive()
    }
}

/// A name from a sandbox without control characters and of limited length.
fn printable(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(253).collect()
}

/// Refusals of the last minute, for rate limiting.
#[derive(Default)]
struct Refusals {
    names: HashMap<String, Instant>,
    pushes: Vec<Instant>,
}

impl Refusals {
    fn expire(&mut self, now: Instant) {
        let recent = |at: &Instant| now.duration_since(*at) < REFUSAL_INTERVAL;
        self.names.retain(|_, at| recent(at));
        self.pushes.retain(recent);
    }

    /// True when the refusal of a name is to be logged.
    fn admit_name(&mut self, name: &str, now: Instant) -> bool {
        self.expire(now);
        if self.names.contains_key(name) || self.names.len() >= MAX_REFUSALS {
            return false;
        }
        self.names.insert(name.to_owned(), now);
        true
    }

    /// True when the refusal of a push is to be logged.
    fn admit_push(&mut self, now: Instant) -> bool {
        self.expire(now);
        let admitted = self.pushes.len() < MAX_REFUSALS;
        if admitted {
            self.pushes.push(now);
        }
        admitted
    }
}
