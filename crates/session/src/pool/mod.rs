//! The warm pool: sandboxes on the builds of repositories in use, with the agent started and
//! frozen, which wait for a session. See `docs/decisions/0038-warm-pool.md`.
//!
//! A member's row is stored before its sandbox exists. What deletes the row decides what becomes of
//! the sandbox: the transaction that inserts a session, or the end of the member. So a server
//! that is killed anywhere leaves a member, a session, or a sandbox without either, which the next
//! server removes.

mod claim;
mod fill;
mod member;
mod memory;
mod plan;
mod spec;
mod standby_door;

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use harvest_proto::{
    SandboxId, SecretOwner, SessionId, Timestamp,
    api::{PoolSandbox, PoolStatus, Repository},
};
use harvest_store::{AgentChoice, Lease, PoolMember, Store, StoreError};
use serde_json::Value;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use self::{
    member::{MemberState, MemberTask},
    spec::MemberSpec,
};
use crate::{
    monotonic_clock::MonotonicClock, provider_retry::retry, repositories::Repositories,
    sandbox_context::SandboxContext, sandboxes::Found,
};

pub(crate) use claim::ClaimedMember;
pub(crate) use spec::branch;

// A session waits no longer for a sandbox that was requested for it; a start from the build is as
// fast.
const TAKE_TIMEOUT: Duration = Duration::from_secs(3);

// A database that does not answer may come back.
const STORE_RETRY: Duration = Duration::from_secs(2);

/// How the pool is filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// The number of sandboxes per repository that was used in the last 24 hours; 0 is no pool.
    pub per_repository: usize,
    /// How long after the last new session the pool is filled: the session comes first.
    pub refill_delay: Duration,
    /// How long an agent that has started may take to look for its tools.
    pub settle: Duration,
    /// Identifies the program in the sandboxes; those of another one are replaced.
    pub program: String,
    /// Where the memory of the machine is read.
    pub meminfo: PathBuf,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            per_repository: 0,
            refill_delay: Duration::from_secs(3),
            settle: Duration::from_secs(5),
            program: String::new(),
            meminfo: "/proc/meminfo".into(),
        }
    }
}

/// Current numbers, and counts since the server started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Sandboxes that a session can take now.
    pub ready: u64,
    /// Those that start.
    pub starting: u64,
    /// Sessions that took one.
    pub claimed: u64,
    /// Sandboxes started.
    pub started: u64,
}

pub(crate) struct Pool {
    store: Store,
    lease: Lease,
    clock: MonotonicClock,
    context: Arc<SandboxContext>,
    repositories: Repositories,
    config: PoolConfig,
    /// The tools that every session has.
    tools: fn() -> Vec<Value>,
    state: Mutex<PoolState>,
    /// Changes with the state of each member.
    changes: watch::Sender<()>,
    /// Starts the next look at the pool.
    wake: Arc<Notify>,
}

#[derive(Default)]
struct PoolState {
    members: BTreeMap<SessionId, Entry>,
    /// When the last session was created.
    created_at: Option<Instant>,
    /// When members with this specification failed.
    failed: HashMap<String, Timestamp>,
    claimed: u64,
    started: u64,
}

struct Entry {
    member: PoolMember,
    task: MemberTask,
    reserved: Option<Reservation>,
}

/// A user who asked for a sandbox and will take it soon.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reservation {
    user: String,
    until: Instant,
}

impl Reservation {
    fn holds(&self) -> bool {
        Instant::now() < self.until
    }
}

impl Entry {
    fn is_ready(&self) -> bool {
        matches!(*self.task.state.borrow(), MemberState::Ready { .. })
    }

    fn is_starting(&self) -> bool {
        matches!(*self.task.state.borrow(), MemberState::Starting)
    }

    fn describe(&self) -> Option<PoolSandbox> {
        let spec = MemberSpec::from_text(&self.member.spec)?;
        let status = match *self.task.state.borrow() {
            MemberState::Starting => PoolStatus::Warming,
            MemberState::Ready { .. } => PoolStatus::Ready,
            MemberState::Failed => PoolStatus::Failed,
        };
        let PoolMember { sandbox, repository, created_at, .. } = self.member.clone();
        let agent = spec.agent_name();
        Some(PoolSandbox { sandbox_id: sandbox, repository, agent, status, created_at })
    }

    fn reserved_by(&self) -> Option<&str> {
        self.reserved.as_ref().filter(|one| one.holds()).map(|one| one.user.as_str())
    }
}

/// What the pool has for a session.
enum Choice {
    Take(Box<Entry>),
    /// One that was requested for this user is starting.
    Wait,
    Nothing,
}

impl Pool {
    pub(crate) fn new(
        (store, lease): (Store, Lease),
        clock: MonotonicClock,
        context: Arc<SandboxContext>,
        repositories: Repositories,
        config: PoolConfig,
        tools: fn() -> Vec<Value>,
    ) -> Arc<Self> {
        let (state, changes) = Default::default();
        let wake = repositories.changes();
        Arc::new(Self {
            tools,
            store,
            lease,
            clock,
            context,
            repositories,
            config,
            state,
            changes,
            wake,
        })
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().expect("no holder of this lock can panic")
    }

    pub(crate) fn counts(&self) -> PoolCounts {
        let state = self.state();
        let count = |fits: fn(&Entry) -> bool| {
            state.members.values().filter(|entry| fits(entry)).count() as u64
        };
        PoolCounts {
            ready: count(Entry::is_ready),
            starting: count(Entry::is_starting),
            claimed: state.claimed,
            started: state.started,
        }
    }

    /// All sandboxes, oldest first.
    pub(crate) fn list(&self) -> Vec<PoolSandbox> {
        let state = self.state();
        let mut all: Vec<PoolSandbox> =
            state.members.values().filter_map(Entry::describe).collect();
        all.sort_by_key(|one| one.created_at);
        all
    }

    /// Takes a sandbox for a session of this user that would start with the same, if there is one.
    pub(crate) async fn take(
        self: &Arc<Self>,
        repository: &Repository,
        choice: &AgentChoice,
        owners: &[SecretOwner],
        user: &str,
    ) -> Option<ClaimedMember> {
        if self.state().members.is_empty() {
            return None;
        }
        let asked_at = self.clock.now();
        let program = &self.config.program;
        let spec = MemberSpec::of(&self.context, program, repository, choice, owners).await?;
        let (text, user) = (spec.to_text(), user.to_ascii_lowercase());
        let deadline = Instant::now() + TAKE_TIMEOUT;
        let mut changes = self.changes.subscribe();
        let entry = loop {
            changes.borrow_and_update();
            match self.choose(&text, &user) {
                Choice::Take(entry) => break entry,
                Choice::Wait => {
                    tokio::time::timeout_at(deadline, changes.changed()).await.ok()?.ok()?
                }
                Choice::Nothing => return None,
            }
        };
        let Entry { member, task, .. } = *entry;
        let state = task.state.borrow().clone();
        let (events, warnings) = match state {
            MemberState::Ready { events, warnings } => (events, warnings),
            MemberState::Starting | MemberState::Failed => Default::default(),
        };
        // From here on, dropping the claim ends the sandbox.
        let claimed = ClaimedMember {
            pool: Arc::clone(self),
            member,
            source_name: spec.source_name(),
            events,
            warnings,
            asked_at,
            inserted: false,
        };
        let state = task.state.clone();
        // Nothing freezes the sandbox any more.
        task.stop().await;
        let died = matches!(*state.borrow(), MemberState::Failed);
        (!died).then_some(claimed)
    }

    /// Takes the best member out of the list.
    fn choose(&self, spec: &str, user: &str) -> Choice {
        let mut state = self.state();
        let mine = |entry: &&Entry| entry.reserved_by() == Some(user);
        let same = || state.members.values().filter(|entry| entry.member.spec == spec);
        let ready = || same().filter(|entry| entry.is_ready());
        let free = |entry: &&Entry| entry.reserved_by().is_none();
        let best = ready().find(mine).or_else(|| ready().find(free));
        let Some(session) = best.map(|entry| entry.member.session.clone()) else {
            let waits = same().filter(mine).any(Entry::is_starting);
            return if waits { Choice::Wait } else { Choice::Nothing };
        };
        if !self.context.admission.pool_take(&session, user) {
            return Choice::Nothing;
        }
        state
            .members
            .remove(&session)
            .map_or(Choice::Nothing, |entry| Choice::Take(Box::new(entry)))
    }

    /// The state of a member has changed.
    fn on_change(&self, spec: &MemberSpec, failed: bool) {
        if failed {
            self.state().failed.insert(spec.to_text(), self.clock.now());
        }
        self.changes.send_replace(());
        self.wake.notify_one();
    }

    /// A session was created, with a sandbox of the pool or without.
    pub(crate) fn on_created(&self) {
        self.state().created_at = Some(Instant::now());
        self.wake.notify_one();
    }

    /// Ends a member, unless a session has taken it.
    async fn end(&self, session: &SessionId) {
        let Some(entry) = self.state().members.remove(session) else { return };
        let Entry { member, task, .. } = entry;
        task.stop().await;
        self.remove(&member).await;
    }

    /// Removes the sandbox of a member whose task is stopped. First its row: without it the sandbox
    /// can only be removed, by the next server if this one is killed.
    async fn remove(&self, member: &PoolMember) {
        let ours = loop {
            match self.store.pool_delete(self.lease, &member.session).await {
                Ok(ours) => break ours,
                Err(StoreError::LeaseLost | StoreError::Closed) => return,
                Err(error) => tracing::warn!(%error, "cannot end a member of the pool; retrying"),
            }
            tokio::time::sleep(STORE_RETRY).await;
        };
        if ours {
            self.context.meter.end(&member.sandbox).await;
            retry(|| self.context.provider.remove(&member.sandbox)).await;
        }
        self.context.admission.pool_release(&member.session);
    }

    /// Ends all members: the server shuts down.
    pub(crate) async fn end_all(&self) {
        let sessions: Vec<SessionId> = self.state().members.keys().cloned().collect();
        futures_util::future::join_all(sessions.iter().map(|session| self.end(session))).await;
    }

    /// The sandboxes of all members. Read before the provider's are compared with the store's.
    pub(crate) async fn sandboxes(&self) -> Result<Vec<SandboxId>, StoreError> {
        Ok(self.store.pool_list().await?.into_iter().map(|member| member.sandbox).collect())
    }

    /// Adopts the members that an earlier server left ready, and ends the others.
    pub(crate) async fn adopt(self: &Arc<Self>) -> Result<(), StoreError> {
        for member in self.store.pool_list().await? {
            let spec = MemberSpec::from_text(&member.spec).filter(|_| member.ready);
            let found = self.context.provider.find(&member.sandbox).await;
            match spec.filter(|_| matches!(found, Ok(Found::Running))) {
                Some(spec) => {
                    self.context.admission.pool_adopt(&member.session);
                    self.insert(member, spec, None);
                }
                None => {
                    let pool = Arc::clone(self);
                    self.context.tasks.spawn(async move { pool.remove(&member).await });
                }
            }
        }
        Ok(())
    }

    fn insert(
        self: &Arc<Self>,
        member: PoolMember,
        spec: MemberSpec,
        reserved: Option<Reservation>,
    ) {
        let mut state = self.state();
        let task = MemberTask::spawn(self, member.clone(), spec);
        state.members.insert(member.session.clone(), Entry { member, task, reserved });
    }
}
