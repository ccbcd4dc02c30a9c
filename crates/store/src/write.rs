//! The writes of a session: [`apply`] runs a list of them under the server lease and numbers the
//! events. `commit.rs` makes them a transaction.

use std::sync::Arc;

use harvest_proto::{
    AgentName, BranchName, Effort, Event, EventBody, ModelRef, Money, PromptId, RepositoryName,
    SessionId, SnapshotId, Timestamp, TrafficCount, TurnId, TurnReason,
    api::{AgentInfo, Artifact, DiffStat, NetworkRule, PromptStatus, PullRequest},
    bridge::OutboxEvent,
    event::{SnapshotKind, TurnOutcome},
};

use crate::{
    DbConnection, Lease, StoreError, artifacts,
    budgets::{self, BudgetOwner},
    checkouts::{self, CheckoutColumn},
    children::{self, Lineage},
    events::{self, NewEvents},
    idempotency, leases, network, network_log, pool,
    prompts::{self, NewPrompt},
    pull_requests, pushed_commits,
    row::{self, bigint},
    secrets::{self, SealedSecret},
    sessions::{self, DriverState},
    snapshots,
    target::{Outbox, Target},
    turns::{self, TurnTree},
};

/// A change of a session.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Appends an event created by the server.
    Event {
        at: Timestamp,
        turn: Option<TurnId>,
        body: Box<EventBody>,
    },
    /// Appends an event created by the server to the turn in progress, if there is one.
    EventInTurn {
        at: Timestamp,
        body: Box<EventBody>,
    },
    /// Appends an event of the supervisor, unless its outbox number is stored already.
    Outbox {
        epoch: u64,
        event: Box<OutboxEvent>,
    },
    /// Records an event of the supervisor as handled without storing it.
    OutboxSkip {
        epoch: u64,
        number: u64,
    },
    /// Updates the driver's state and the columns derived from it. Ignored for an older epoch.
    DriverState(DriverState),
    /// Appends a prompt to the queue, with its event.
    PromptInsert(Box<NewPrompt>),
    /// Changes the status of a prompt.
    PromptStatus {
        prompt: PromptId,
        /// The current status; any other is an error.
        from: PromptStatus,
        to: PromptStatus,
    },
    /// Reorders the queued prompts.
    QueueOrder(Vec<PromptId>),
    /// Inserts a turn that starts.
    TurnInsert {
        turn: TurnId,
        number: u32,
        prompt: PromptId,
        at: Timestamp,
    },
    /// Records the end of a turn.
    TurnEnd {
        turn: TurnId,
        outcome: TurnOutcome,
        reason: Option<TurnReason>,
        at: Timestamp,
    },
    /// Records the git tree of a checkout after a turn.
    TurnTree {
        turn: TurnId,
        /// Number of the turn it continued from.
        after: u32,
        repository: RepositoryName,
        tree: String,
        /// Changes of the turn.
        stat: DiffStat,
    },
    /// Copies the git trees of another session's turn as the start of this session.
    TreeShare {
        session: SessionId,
        turn: u32,
    },
    /// Inserts a snapshot, optionally as that of a turn.
    SnapshotInsert {
        snapshot: SnapshotId,
        kind: SnapshotKind,
        turn: Option<TurnId>,
        at: Timestamp,
    },
    /// Names a snapshot of the session, and pins it.
    SnapshotName {
        snapshot: SnapshotId,
        name: String,
    },
    /// Adds another session's snapshot as the start of this session. The snapshot must still exist.
    SnapshotShare {
        snapshot: SnapshotId,
        at: Timestamp,
    },
    /// Takes the member of the warm pool that has this session's id; an error when it is not there.
    PoolClaim,
    /// Records that another session's agent created this session.
    ChildOf(Lineage),
    /// Adds a network rule of the session.
    NetworkRule(NetworkRule),
    /// Copies the network rules of another session.
    NetworkRulesOf(SessionId),
    /// Stores a secret of the session.
    Secret(Box<SealedSecret>),
    /// Adds to the network log, in the turn in progress if there is one.
    Traffic {
        at: Timestamp,
        counts: Vec<TrafficCount>,
    },
    /// Sets the position in the queue for a sandbox slot; `None` when the session does not wait.
    Position(Option<u32>),
    Title(String),
    /// Another agent continues the session. Prompts that wait already keep the present one, with
    /// its model and effort.
    Agent(AgentName),
    /// What the agent said of itself.
    AgentInfo(Box<AgentInfo>),
    /// The session continues with this model.
    Model(ModelRef),
    /// The session continues with this effort.
    Effort(Effort),
    /// Sets the base branch of a repository unless one was given: the remote's default branch.
    DefaultBase {
        repository: RepositoryName,
        base: BranchName,
    },
    /// Sets where the session's diff in a repository begins: a commit, or the tree that setup left.
    BaseCommit {
        repository: RepositoryName,
        commit: String,
    },
    /// Stores the session's changes as a diff.
    Diff(String),
    /// Adds a file that the agent handed over; its content is stored already.
    Artifact(Box<Artifact>),
    /// Sets or removes the session's budget.
    Budget(Option<Money>),
    /// Records a push through the git door.
    Pushed {
        repository: RepositoryName,
        commit: String,
    },
    /// Records that a push is about to be sent that moves the branch from one commit to another,
    /// in place of it or on top of it. Earlier pushes without an answer no longer count.
    PushBegun {
        repository: RepositoryName,
        old: String,
        new: String,
        replaces: bool,
    },
    /// Records that the remote refused a push.
    PushFailed {
        repository: RepositoryName,
        commit: String,
    },
    /// Stores the session's pull request in a repository.
    PullRequest {
        repository: RepositoryName,
        pull_request: Box<PullRequest>,
    },
    /// Records under an idempotency key the id of an object that this commit creates.
    CreatedId {
        key: String,
        id: String,
    },
    /// Records that a pushed commit has its pull request and evidence.
    Reviewed {
        repository: RepositoryName,
        commit: String,
    },
}

impl Write {
    /// True for a write whose size comes from a user or a sandbox.
    pub(crate) fn grows(&self) -> bool {
        matches!(
            self,
            Self::Outbox { .. }
                | Self::EventInTurn { .. }
                | Self::PromptInsert(_)
                | Self::Diff(_)
                | Self::Artifact(_)
                | Self::TurnTree { .. }
                | Self::Traffic { .. }
        )
    }
}

/// Result of a commit.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    /// Appended events in order.
    pub events: Vec<Arc<Event>>,
    /// Number of the session's newest event.
    pub seq: u64,
}

impl Committed {
    /// The appended events, for followers of the session.
    pub(crate) fn new_events(&self, session: &SessionId) -> NewEvents {
        self.events.iter().map(|event| (session.clone(), Arc::clone(event))).collect()
    }
}

pub(crate) async fn apply(
    connection: &mut DbConnection,
    session: &SessionId,
    lease: Lease,
    at: Timestamp,
    writes: Vec<Write>,
) -> Result<Committed, StoreError> {
    let epoch = writes.iter().find_map(|write| match write {
        Write::Outbox { epoch, .. } => Some(*epoch),
        _ => None,
    });
    let found = sqlx::query(
        "SELECT s.next_seq, (SELECT number FROM leases WHERE name = 'server') AS lease,
         (SELECT stored FROM outboxes o WHERE o.session = s.id AND o.epoch = $2) AS stored
         FROM sessions s WHERE s.id = $1",
    )
    .bind(session.to_string())
    .bind(bigint(epoch.unwrap_or(0)))
    .fetch_optional(&mut *connection)
    .await?;
    let Some(found) = found else {
        leases::check(connection, lease).await?;
        return Err(StoreError::missing(format!("session {session}")));
    };
    if row::count_optional(&found, "lease")? != Some(lease.0) {
        return Err(StoreError::LeaseLost);
    }
    let outbox =
        Outbox::new(epoch.unwrap_or(0), row::count_optional(&found, "stored")?.unwrap_or(0));
    let next_seq = row::count(&found, "next_seq")?;
    let mut target =
        Target { connection, session: session.clone(), next_seq, events: Vec::new(), outbox };
    for write in writes {
        apply_one(&mut target, write).await?;
    }
    events::flush(&mut target).await?;
    events::outbox_flush(&mut target).await?;
    sessions::advance(&mut target, at).await?;
    Ok(Committed { seq: target.next_seq - 1, events: target.events })
}

async fn apply_one(target: &mut Target<'_>, write: Write) -> Result<(), StoreError> {
    match write {
        Write::Event { at, turn, body } => {
            target.append(at, turn, *body);
            Ok(())
        }
        Write::EventInTurn { at, body } => {
            let turn = prompts::running_turn(target).await?;
            target.append(at, turn, *body);
            Ok(())
        }
        Write::Outbox { epoch, event } => events::append_outbox(target, epoch, *event).await,
        Write::OutboxSkip { epoch, number } => {
            events::advance_outbox(target, epoch, number).await.map(drop)
        }
        Write::DriverState(state) => sessions::set_driver_state(target, state).await,
        Write::PromptInsert(prompt) => prompts::insert(target, *prompt).await,
        Write::PromptStatus { prompt, from, to } => {
            prompts::status(target, &prompt, from, to).await
        }
        Write::QueueOrder(order) => prompts::reorder(target, &order).await,
        Write::TurnInsert { turn, number, prompt, at } => {
            turns::insert(target, &turn, number, &prompt, at).await
        }
        Write::TurnEnd { turn, outcome, reason, at } => {
            turns::end(target, &turn, outcome, reason, at).await
        }
        Write::TurnTree { turn, after, repository, tree, stat } => {
            let tree = TurnTree { turn: after, repository, tree };
            turns::insert_tree(target, &turn, after, tree, stat).await
        }
        Write::TreeShare { session, turn } => turns::share_trees(target, &session, turn).await,
        Write::SnapshotInsert { snapshot, kind, turn, at } => {
            snapshots::insert(target, &snapshot, kind, turn.as_ref(), at).await
        }
        Write::SnapshotName { snapshot, name } => snapshots::name(target, &snapshot, name).await,
        Write::SnapshotShare { snapshot, at } => snapshots::share(target, &snapshot, at).await,
        Write::PoolClaim => pool::claim(target).await,
        Write::ChildOf(lineage) => children::insert(target, lineage).await,
        Write::NetworkRule(rule) => network::insert(target, &rule).await,
        Write::NetworkRulesOf(session) => network::copy(target, &session).await,
        Write::Secret(secret) => secrets::insert(target, *secret).await,
        Write::Traffic { at, counts } => network_log::add(target, at, counts).await,
        Write::Title(title) => sessions::set_title(target, title).await,
        Write::Agent(agent) => {
            prompts::keep_options(target).await?;
            sessions::set_agent(target, agent).await
        }
        Write::AgentInfo(info) => sessions::set_agent_info(target, &info).await,
        Write::Model(model) => sessions::set_model(target, model).await,
        Write::Effort(effort) => sessions::set_effort(target, effort).await,
        Write::DefaultBase { repository, base } => {
            checkouts::update(target, CheckoutColumn::DefaultBase, repository, base.into()).await
        }
        Write::BaseCommit { repository, commit } => {
            checkouts::update(target, CheckoutColumn::BaseCommit, repository, commit).await
        }
        Write::Diff(diff) => sessions::set_diff(target, diff).await,
        Write::PushBegun { repository, old, new, replaces } => {
            pushed_commits::begin(target, &repository, (old, new), replaces).await
        }
        Write::PushFailed { repository, commit } => {
            pushed_commits::refuse(target, &repository, commit).await
        }
        Write::Pushed { repository, commit } => {
            pushed_commits::accept(target, &repository, commit.clone()).await?;
            checkouts::update(target, CheckoutColumn::Pushed, repository, commit).await
        }
        Write::PullRequest { repository, pull_request } => {
            pull_requests::upsert(target, repository, &pull_request).await
        }
        Write::Reviewed { repository, commit } => {
            checkouts::update(target, CheckoutColumn::Reviewed, repository, commit).await
        }
        Write::Artifact(artifact) => artifacts::insert(target, *artifact).await,
        Write::Budget(limit) => {
            let owner = BudgetOwner::Session(target.session.clone());
            budgets::set(target.connection, &owner, limit).await
        }
        Write::CreatedId { key, id } => idempotency::add_created_id(target, key, id).await,
        Write::Position(position) => sessions::set_position(target, position).await,
    }
}
