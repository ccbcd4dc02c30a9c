//! [`Store::session_commit`]: the only way to change a session. It runs a list of writes completely
//! or not at all, under the server lease, and numbers the events.

use std::sync::Arc;

use harvest_proto::{
    Event, EventBody, PromptId, SandboxId, SessionId, SnapshotId, Timestamp, TurnId,
    api::{DiffStat, PromptStatus, PullRequest, SessionState},
    bridge::{Author, OutboxEvent},
    event::{SnapshotKind, TurnOutcome, Usage},
};

use crate::{
    DbConnection, Lease, Store, StoreError,
    append::{self, Append},
    checkouts::{self, CheckoutColumn},
    events::{self, Outbox},
    idempotency, prompts, pulls,
    row::{self, bigint, replace_nul, to_enum_name},
    snapshots, turns,
    writer::{JobOutput, NewEvents},
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
    /// Updates the driver's state and the columns derived from it. Ignored for an older epoch.
    DriverState {
        /// The driver's state as JSON.
        drive: String,
        /// State of the session as users see it.
        state: SessionState,
        reason: String,
        sandbox: Option<SandboxId>,
        epoch: u64,
        snapshot: Option<SnapshotId>,
    },
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
        at: Timestamp,
    },
    /// Records the git tree of a checkout after a turn.
    TurnTree {
        turn: TurnId,
        /// Number of the turn it continued from.
        after: u32,
        repository: String,
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
    /// Adds another session's snapshot as the start of this session. The snapshot must still exist.
    SnapshotShare {
        snapshot: SnapshotId,
        at: Timestamp,
    },
    /// Sets the position in the queue for a sandbox slot; `None` when the session does not wait.
    Position(Option<u32>),
    Title(String),
    /// Sets the base branch of a repository unless one was given: the remote's default branch.
    DefaultBase {
        repository: String,
        base: String,
    },
    /// Sets the base commit of the session's diff in a repository.
    BaseCommit {
        repository: String,
        commit: String,
    },
    /// Stores the session's changes as a diff.
    Diff(String),
    /// Adds to the token usage of the session and of its turn in progress.
    Usage(Usage),
    /// Records a push through the git door.
    Pushed {
        repository: String,
        commit: String,
    },
    /// Stores the session's pull request in a repository.
    PullRequest {
        repository: String,
        pull: Box<PullRequest>,
        at: Timestamp,
    },
    /// Records under an idempotency key the id of an object that this commit creates.
    CreatedId {
        key: String,
        id: String,
    },
    /// Records that a pushed commit has its pull request and evidence.
    Reviewed {
        repository: String,
        commit: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPrompt {
    pub id: PromptId,
    pub text: String,
    pub author: Author,
    pub at: Timestamp,
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

impl Store {
    /// Runs all of `writes` or none. [`StoreError::NotFound`] when the session has been deleted.
    pub async fn session_commit(
        &self,
        session: &SessionId,
        lease: Lease,
        at: Timestamp,
        writes: Vec<Write>,
    ) -> Result<Committed, StoreError> {
        let session = session.clone();
        if append::only_appends(&writes) {
            return self.writer.send(|reply| Append::new(session, lease, at, writes, reply)).await;
        }
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    let committed = apply(connection, &session, lease, at, writes).await?;
                    let events = committed.new_events(&session);
                    Ok(JobOutput { value: committed, events })
                })
            })
            .await
    }
}

// Not a column of `sessions`: that row is rewritten with every event, and a diff may be long.
const DIFF: &str = "INSERT INTO diffs (session, text) VALUES ($1, $2)
     ON CONFLICT (session) DO UPDATE SET text = excluded.text";

/// The session that a list of writes is applied to.
pub(crate) struct Target<'c> {
    pub(crate) connection: &'c mut DbConnection,
    pub(crate) session: SessionId,
    pub(crate) next_seq: u64,
    /// Appended events, inserted together after all writes.
    pub(crate) events: Vec<Arc<Event>>,
    pub(crate) outbox: Outbox,
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
        crate::leases::check(connection, lease).await?;
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
        target.write(write).await?;
    }
    target.finish(at).await?;
    Ok(Committed { seq: target.next_seq - 1, events: target.events })
}

impl Target<'_> {
    async fn finish(&mut self, at: Timestamp) -> Result<(), StoreError> {
        events::flush(self).await?;
        events::outbox_flush(self).await?;
        sqlx::query(
            "UPDATE sessions SET next_seq = $2,
             last_activity = CASE WHEN last_activity > $3 THEN last_activity ELSE $3 END WHERE id = $1",
        )
        .bind(self.session.to_string())
        .bind(bigint(self.next_seq))
        .bind(at.as_millis())
        .execute(&mut *self.connection)
        .await?;
        Ok(())
    }

    async fn write(&mut self, write: Write) -> Result<(), StoreError> {
        match write {
            Write::Event { at, turn, body } => {
                events::append(self, at, turn, *body);
                Ok(())
            }
            Write::EventInTurn { at, body } => {
                let turn = prompts::running_turn(self).await?;
                events::append(self, at, turn, *body);
                Ok(())
            }
            Write::Outbox { epoch, event } => events::append_outbox(self, epoch, *event).await,
            Write::DriverState { .. } => self.driver_state(write).await,
            Write::PromptInsert(prompt) => prompts::insert(self, *prompt).await,
            Write::PromptStatus { prompt, from, to } => {
                prompts::status(self, &prompt, from, to).await
            }
            Write::QueueOrder(order) => prompts::reorder(self, &order).await,
            Write::TurnInsert { turn, number, prompt, at } => {
                turns::insert(self, &turn, number, &prompt, at).await
            }
            Write::TurnEnd { turn, outcome, at } => turns::end(self, &turn, outcome, at).await,
            Write::TurnTree { turn, after, repository, tree, stat } => {
                let tree = turns::TurnTree { turn: after, repository, tree };
                turns::insert_tree(self, &turn, after, tree, stat).await
            }
            Write::TreeShare { session, turn } => turns::share_trees(self, &session, turn).await,
            Write::SnapshotInsert { snapshot, kind, turn, at } => {
                snapshots::insert(self, &snapshot, kind, turn.as_ref(), at).await
            }
            Write::SnapshotShare { snapshot, at } => snapshots::share(self, &snapshot, at).await,
            Write::Title(text) => {
                self.column("UPDATE sessions SET title = $2 WHERE id = $1", text).await
            }
            Write::DefaultBase { repository, base } => {
                checkouts::update(self, CheckoutColumn::DefaultBase, repository, base).await
            }
            Write::BaseCommit { repository, commit } => {
                checkouts::update(self, CheckoutColumn::BaseCommit, repository, commit).await
            }
            Write::Diff(text) => self.column(DIFF, text).await,
            Write::Pushed { repository, commit } => {
                checkouts::update(self, CheckoutColumn::Pushed, repository, commit).await
            }
            Write::PullRequest { repository, pull, at } => {
                pulls::upsert(self, repository, &pull, at).await
            }
            Write::Reviewed { repository, commit } => {
                checkouts::update(self, CheckoutColumn::Reviewed, repository, commit).await
            }
            Write::Usage(usage) => self.usage(usage).await,
            Write::CreatedId { key, id } => idempotency::add_created_id(self, key, id).await,
            Write::Position(position) => self.position(position).await,
        }
    }

    async fn position(&mut self, position: Option<u32>) -> Result<(), StoreError> {
        sqlx::query("UPDATE sessions SET position = $2 WHERE id = $1")
            .bind(self.session.to_string())
            .bind(position.map(i64::from))
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    async fn column(&mut self, sql: &'static str, text: String) -> Result<(), StoreError> {
        sqlx::query(sql)
            .bind(self.session.to_string())
            .bind(replace_nul(text))
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    async fn driver_state(&mut self, write: Write) -> Result<(), StoreError> {
        let Write::DriverState { drive, state, reason, sandbox, epoch, snapshot } = write else {
            return Ok(());
        };
        sqlx::query(
            "UPDATE sessions SET drive = $2, state = $3, reason = $4, sandbox = $5, epoch = $6, snapshot = $7
             WHERE id = $1 AND epoch <= $6",
        )
        .bind(self.session.to_string())
        .bind(drive)
        .bind(to_enum_name(&state))
        .bind(reason)
        .bind(sandbox.map(|id| id.to_string()))
        .bind(bigint(epoch))
        .bind(snapshot.map(|id| id.to_string()))
        .execute(&mut *self.connection)
        .await?;
        Ok(())
    }

    async fn usage(&mut self, usage: Usage) -> Result<(), StoreError> {
        const SET: &str = "SET input_tokens = input_tokens + $2, output_tokens = output_tokens + $3, \
             cache_read_tokens = cache_read_tokens + $4, cache_write_tokens = cache_write_tokens + $5";
        let turn = "WHERE session = $1 AND id = (SELECT turn FROM prompts WHERE session = $1 AND status = 'dispatched')";
        for sql in
            [format!("UPDATE sessions {SET} WHERE id = $1"), format!("UPDATE turns {SET} {turn}")]
        {
            sqlx::query(sqlx::AssertSqlSafe(sql))
                .bind(self.session.to_string())
                .bind(bigint(usage.input_tokens))
                .bind(bigint(usage.output_tokens))
                .bind(bigint(usage.cache_read_tokens))
                .bind(bigint(usage.cache_write_tokens))
                .execute(&mut *self.connection)
                .await?;
        }
        Ok(())
    }
}
