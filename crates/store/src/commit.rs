//! Everything that changes in a session goes through one act: [`Store::session_commit`] takes a list
//! of writes and does all or none of them, under the server lease, numbering events as it goes.

use std::sync::Arc;

use harvest_proto::{
    Event, EventBody, PromptId, SandboxId, SessionId, SnapshotId, Timestamp, TurnId,
    api::{DiffStat, PromptStatus, Pull, SessionState},
    bridge::{Author, OutboxEvent},
    event::{SnapshotKind, TurnOutcome, Usage},
};

use crate::{
    DbConnection, Lease, Store, StoreError,
    append::{self, Append},
    checkouts::{self, Fact},
    events::{self, Outbox},
    idempotency, prompts, pulls,
    row::{self, bigint, plain, to_word},
    snapshots, turns,
    writer::{Done, News},
};

/// One change of a session.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Append an event of the server's own.
    Event {
        /// When it happened.
        at: Timestamp,
        /// The turn it belongs to.
        turn: Option<TurnId>,
        /// What happened.
        body: Box<EventBody>,
    },
    /// Append an event of the server's own that belongs to the turn in progress, if there is one.
    EventInTurn {
        /// When it happened.
        at: Timestamp,
        /// What happened.
        body: Box<EventBody>,
    },
    /// Append an event of the supervisor, unless its outbox number is stored already.
    Outbox {
        /// The sandbox's epoch.
        epoch: u64,
        /// The event.
        event: Box<OutboxEvent>,
    },
    /// What the driver needs to go on after a restart, and what of it people see.
    Drive {
        /// The driver's own words.
        drive: String,
        /// The state shown.
        state: SessionState,
        /// Why it is shown.
        reason: String,
        /// The sandbox, while there is one.
        sandbox: Option<SandboxId>,
        /// The count of sandboxes so far.
        epoch: u64,
        /// The newest snapshot.
        snapshot: Option<SnapshotId>,
    },
    /// Put a prompt at the queue's end, with its event.
    PromptInsert(Box<NewPrompt>),
    /// A prompt goes from one status to another.
    PromptStatus {
        /// Which.
        prompt: PromptId,
        /// The status it must have now; any other is a mistake of the caller.
        from: PromptStatus,
        /// The status it gets.
        to: PromptStatus,
    },
    /// The waiting prompts in their new order.
    PromptOrder(Vec<PromptId>),
    /// A turn begins.
    TurnInsert {
        /// Its id.
        turn: TurnId,
        /// Its number in the session.
        number: u32,
        /// The prompt it carries out.
        prompt: PromptId,
        /// When.
        at: Timestamp,
    },
    /// A turn ended.
    TurnEnd {
        /// Which.
        turn: TurnId,
        /// How.
        outcome: TurnOutcome,
        /// When.
        at: Timestamp,
    },
    /// What a turn left of a checkout.
    TurnTree {
        /// Which turn.
        turn: TurnId,
        /// The number of the turn it went on from.
        after: u32,
        /// The repository.
        repository: String,
        /// The git tree.
        tree: String,
        /// What it changed.
        stat: DiffStat,
    },
    /// The session begins with what a turn of another left of its checkouts.
    TreeShare {
        /// Whose.
        session: SessionId,
        /// The turn's number.
        turn: u32,
    },
    /// A snapshot was taken, perhaps after a turn.
    SnapshotInsert {
        /// Which.
        snapshot: SnapshotId,
        /// Why.
        kind: SnapshotKind,
        /// The turn it follows.
        turn: Option<TurnId>,
        /// When.
        at: Timestamp,
    },
    /// The session begins as a snapshot of another session's, which must be there still.
    SnapshotShare {
        /// Which.
        snapshot: SnapshotId,
        /// When.
        at: Timestamp,
    },
    /// As which number in line the session waits for a place; `None` when it does not.
    Position(Option<u32>),
    /// What to call the session.
    Title(String),
    /// The remote's default branch: what work in this repository starts from unless another was named.
    DefaultBase {
        /// Which repository.
        repository: String,
        /// Its branch.
        base: String,
    },
    /// The commit the session's work in this repository is compared with.
    BaseCommit {
        /// Which repository.
        repository: String,
        /// Its commit.
        commit: String,
    },
    /// The session's work so far, as a diff.
    Diff(String),
    /// The session used this much more.
    Usage(Usage),
    /// A commit passed the git door.
    Pushed {
        /// To which repository.
        repository: String,
        /// Which.
        commit: String,
    },
    /// The session's pull request in this repository as it stands.
    Pull {
        /// Which repository.
        repository: String,
        /// The pull request.
        pull: Box<Pull>,
        /// When.
        at: Timestamp,
    },
    /// This, under the idempotency key it was asked for with.
    Made {
        /// The key.
        key: String,
        /// What was made.
        id: String,
    },
    /// That commit's pull request and evidence are done.
    Reviewed {
        /// Of which repository.
        repository: String,
        /// Which.
        commit: String,
    },
}

/// A prompt to put into the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPrompt {
    /// Its id.
    pub id: PromptId,
    /// What it says.
    pub text: String,
    /// Who wrote it.
    pub author: Author,
    /// When it came.
    pub at: Timestamp,
}

/// What a commit did.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    /// The events it appended, in their order.
    pub events: Vec<Arc<Event>>,
    /// The session's newest event now.
    pub seq: u64,
}

impl Committed {
    /// What those who follow the session are to hear.
    pub(crate) fn news(&self, session: &SessionId) -> News {
        self.events.iter().map(|event| (session.clone(), Arc::clone(event))).collect()
    }
}

impl Store {
    /// Does all of `writes`, or none.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over; [`StoreError::NotFound`] when the
    /// session is gone.
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
                    let news = committed.news(&session);
                    Ok(Done { answer: committed, news })
                })
            })
            .await
    }
}

// Not a column of its session: that row is written with every event, and a diff may be long.
const DIFF: &str = "INSERT INTO diffs (session, text) VALUES ($1, $2)
     ON CONFLICT (session) DO UPDATE SET text = excluded.text";

/// The session a list of writes is being done for.
pub(crate) struct Target<'c> {
    pub(crate) connection: &'c mut DbConnection,
    pub(crate) session: SessionId,
    pub(crate) next_seq: u64,
    /// Appended, and written all at once when every write is done.
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
    /// What is written once however many writes there were.
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
            Write::Drive { .. } => self.drive(write).await,
            Write::PromptInsert(prompt) => prompts::insert(self, *prompt).await,
            Write::PromptStatus { prompt, from, to } => {
                prompts::status(self, &prompt, from, to).await
            }
            Write::PromptOrder(order) => prompts::order(self, &order).await,
            Write::TurnInsert { turn, number, prompt, at } => {
                turns::insert(self, &turn, number, &prompt, at).await
            }
            Write::TurnEnd { turn, outcome, at } => turns::end(self, &turn, outcome, at).await,
            Write::TurnTree { turn, after, repository, tree, stat } => {
                let tree = turns::TurnTree { turn: after, repository, tree };
                turns::tree(self, &turn, after, tree, stat).await
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
                checkouts::learn(self, Fact::DefaultBase, repository, base).await
            }
            Write::BaseCommit { repository, commit } => {
                checkouts::learn(self, Fact::BaseCommit, repository, commit).await
            }
            Write::Diff(text) => self.column(DIFF, text).await,
            Write::Pushed { repository, commit } => {
                checkouts::learn(self, Fact::Pushed, repository, commit).await
            }
            Write::Pull { repository, pull, at } => {
                pulls::upsert(self, repository, &pull, at).await
            }
            Write::Reviewed { repository, commit } => {
                checkouts::learn(self, Fact::Reviewed, repository, commit).await
            }
            Write::Usage(usage) => self.usage(usage).await,
            Write::Made { key, id } => idempotency::made(self, key, id).await,
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
            .bind(plain(text))
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    async fn drive(&mut self, write: Write) -> Result<(), StoreError> {
        let Write::Drive { drive, state, reason, sandbox, epoch, snapshot } = write else {
            return Ok(());
        };
        sqlx::query(
            "UPDATE sessions SET drive = $2, state = $3, reason = $4, sandbox = $5, epoch = $6, snapshot = $7
             WHERE id = $1 AND epoch <= $6",
        )
        .bind(self.session.to_string())
        .bind(drive)
        .bind(to_word(&state))
        .bind(reason)
        .bind(sandbox.map(|id| id.to_string()))
        .bind(bigint(epoch))
        .bind(snapshot.map(|id| id.to_string()))
        .execute(&mut *self.connection)
        .await?;
        Ok(())
    }

    /// Counted for the session, and for its turn in progress.
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
