//! Sessions: one row each, which also gives its events their numbers.

use harvest_proto::{
    SandboxId, SessionId, Timestamp,
    api::{Pull, Session, SessionState},
    bridge::Author,
    event::Usage,
};

use crate::{
    DbConnection, DbRow, Lease, Removal, Store, StoreError, Write, commit, leases, removals,
    row::{self, plain, to_word},
    writer::{Done, News},
};

/// A session to be.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSession {
    /// Its id.
    pub id: SessionId,
    /// What to call it.
    pub title: String,
    /// The repository's name.
    pub repository: String,
    /// The branch it starts from; the remote's default when absent.
    pub base: Option<String>,
    /// The branch it works on.
    pub branch: String,
    /// The agent.
    pub agent: String,
    /// The model asked for.
    pub model: Option<String>,
    /// `none` or `trusted`.
    pub network: String,
    /// Who created it.
    pub author: Author,
    /// The agent's id of the conversation.
    pub conversation: String,
    /// The session it was forked from.
    pub forked_from: Option<SessionId>,
    /// The commit its work is compared with, when it is known already.
    pub base_commit: Option<String>,
    /// When it is created.
    pub at: Timestamp,
}

/// A session as the store holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionRecord {
    /// What people see of it.
    pub session: Session,
    /// The branch it starts from; the remote's default when absent.
    pub base: Option<String>,
    /// The agent's id of the conversation.
    pub conversation: String,
    /// The driver's own words.
    pub drive: String,
    /// The commit its work is compared with, once known.
    pub base_commit: Option<String>,
    /// The newest commit that passed the git door.
    pub pushed_commit: Option<String>,
    /// The newest commit whose pull request and evidence are done.
    pub reviewed_commit: Option<String>,
}

// The diff is left out: it may be a megabyte, and lists do not show it.
const SELECT: &str = "SELECT s.id, s.title, s.state, s.reason, s.position, s.repository, s.base, s.branch, s.agent, s.model, \
     s.network, s.author_name, s.author_email, s.conversation, s.sandbox, s.epoch, s.snapshot, s.forked_from, \
     s.drive, s.base_commit, s.pushed_commit, s.reviewed_commit, s.input_tokens, s.output_tokens, \
     s.cache_read_tokens, s.cache_write_tokens, s.next_seq, s.created_at, s.last_activity, l.pull, \
     (SELECT COUNT(*) FROM turns t WHERE t.session = s.id) AS turns, \
     (SELECT COUNT(*) FROM prompts p WHERE p.session = s.id AND p.status = 'queued') AS queued \
     FROM sessions s LEFT JOIN pulls l ON l.session = s.id ";

impl Store {
    /// Creates a session and does `writes` in it, all or nothing.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn session_insert(
        &self,
        lease: Lease,
        new: NewSession,
        writes: Vec<Write>,
    ) -> Result<(), StoreError> {
        self.session_insert_all(lease, vec![(new, writes)]).await
    }

    /// The same for several sessions, all or none of them.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn session_insert_all(
        &self,
        lease: Lease,
        all: Vec<(NewSession, Vec<Write>)>,
    ) -> Result<(), StoreError> {
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let mut news = News::new();
                    for (new, writes) in all {
                        let (session, at) = (new.id.clone(), new.at);
                        insert(connection, new).await?;
                        let committed = commit::apply(connection, &session, lease, at, writes).await?;
                        // Nobody can follow a session that has just come to be, but somebody may count.
                        news.extend(committed.events.into_iter().map(|event| (session.clone(), event)));
                    }
                    Ok(Done { answer: (), news })
                })
            })
            .await
    }

    /// A session.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] when there is none with this id.
    pub async fn session_get(&self, session: &SessionId) -> Result<SessionRecord, StoreError> {
        let row = sqlx::query(sqlx::AssertSqlSafe(format!("{SELECT} WHERE s.id = $1")))
            .bind(session.to_string())
            .fetch_optional(&self.readers)
            .await?
            .ok_or_else(|| StoreError::missing(format!("session {session}")))?;
        read(&row)
    }

    /// Sessions, newest first, at most `limit`, those older than `before` when it is given.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn session_list(
        &self,
        before: Option<(Timestamp, SessionId)>,
        limit: u32,
    ) -> Result<Vec<SessionRecord>, StoreError> {
        let (at, id) = before.map_or((i64::MAX, String::new()), |(at, id)| (at.as_millis(), id.to_string()));
        let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} WHERE (s.created_at, s.id) < ($1, $2)
             ORDER BY s.created_at DESC, s.id DESC LIMIT $3"
        )))
        .bind(at)
        .bind(id)
        .bind(i64::from(limit))
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(read).collect()
    }

    /// The session's work as a diff, as it was when last looked at.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn session_diff(&self, session: &SessionId) -> Result<Option<String>, StoreError> {
        let row = sqlx::query("SELECT diff FROM sessions WHERE id = $1")
            .bind(session.to_string())
            .fetch_optional(&self.readers)
            .await?
            .ok_or_else(|| StoreError::missing(format!("session {session}")))?;
        row::optional(&row, "diff")
    }

    /// Forgets a session and everything in it. What of the machine nobody else uses is to be removed from
    /// then on, together with `also`, which only the session's driver knows of; answers all of that.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn session_delete(
        &self,
        session: &SessionId,
        lease: Lease,
        also: Vec<Removal>,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        let session = session.clone();
        let id = session.clone();
        let removals = self
            .writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let mut removals = left_by(connection, &session).await?;
                    removals
                        .extend(also.into_iter().filter(|one| !removals.contains(one)).collect::<Vec<_>>());
                    for removal in &removals {
                        removals::insert(connection, removal, at).await?;
                    }
                    sqlx::query("DELETE FROM sessions WHERE id = $1")
                        .bind(session.to_string())
                        .execute(&mut *connection)
                        .await?;
                    Ok(removals.into())
                })
            })
            .await?;
        self.topics.lock().expect("no holder of this lock can panic").remove(&id);
        Ok(removals)
    }
}

/// The session's sandbox and the snapshots no other session may go on from.
async fn left_by(connection: &mut DbConnection, session: &SessionId) -> Result<Vec<Removal>, StoreError> {
    let sandbox = sqlx::query("SELECT sandbox FROM sessions WHERE id = $1")
        .bind(session.to_string())
        .fetch_optional(&mut *connection)
        .await?;
    let sandbox = sandbox.map_or(Ok(None), |row| row::parsed_optional(&row, "sandbox"))?;
    let rows = sqlx::query(
        "SELECT id FROM snapshots WHERE session = $1 AND id NOT IN
         (SELECT id FROM snapshots WHERE session <> $1) ORDER BY created_at, id",
    )
    .bind(session.to_string())
    .fetch_all(connection)
    .await?;
    let snapshots = rows.iter().map(|row| Ok(Removal::Snapshot(row::parsed(row, "id")?)));
    sandbox.map(|id| Ok(Removal::Sandbox(id))).into_iter().chain(snapshots).collect()
}

async fn insert(connection: &mut DbConnection, new: NewSession) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO sessions (id, title, state, reason, repository, base, branch, agent, model, network,
         author_name, author_email, conversation, forked_from, base_commit, drive, created_at, last_activity)
         VALUES ($1, $2, $3, 'created', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, '', $15, $15)",
    )
    .bind(new.id.to_string())
    .bind(plain(new.title))
    .bind(to_word(&SessionState::Queued))
    .bind(new.repository)
    .bind(new.base)
    .bind(new.branch)
    .bind(new.agent)
    .bind(new.model)
    .bind(new.network)
    .bind(new.author.name)
    .bind(new.author.email)
    .bind(new.conversation)
    .bind(new.forked_from.map(|id| id.to_string()))
    .bind(new.base_commit)
    .bind(new.at.as_millis())
    .execute(connection)
    .await
    .map_err(|error| StoreError::or_exists(error, format!("session {}", new.id)))?;
    Ok(())
}

fn read(row: &DbRow) -> Result<SessionRecord, StoreError> {
    let next_seq: u64 = row::count(row, "next_seq")?;
    let session = Session {
        id: row::parsed(row, "id")?,
        title: row::text(row, "title")?,
        state: row::word(row, "state")?,
        reason: row::text(row, "reason")?,
        position: row::count_optional(row, "position")?,
        repository: row::text(row, "repository")?,
        branch: row::text(row, "branch")?,
        agent: row::text(row, "agent")?,
        model: row::optional(row, "model")?,
        network: row::text(row, "network")?,
        author: Author { name: row::text(row, "author_name")?, email: row::text(row, "author_email")? },
        sandbox: row::parsed_optional::<SandboxId>(row, "sandbox")?,
        epoch: row::count(row, "epoch")?,
        snapshot: row::parsed_optional(row, "snapshot")?,
        forked_from: row::parsed_optional(row, "forked_from")?,
        turns: row::count(row, "turns")?,
        queued: row::count(row, "queued")?,
        usage: usage(row)?,
        pull: row::json_optional::<Pull>(row, "pull")?,
        seq: next_seq.saturating_sub(1),
        created_at: row::time(row, "created_at")?,
        last_activity: row::time(row, "last_activity")?,
    };
    Ok(SessionRecord {
        session,
        base: row::optional(row, "base")?,
        conversation: row::text(row, "conversation")?,
        drive: row::text(row, "drive")?,
        base_commit: row::optional(row, "base_commit")?,
        pushed_commit: row::optional(row, "pushed_commit")?,
        reviewed_commit: row::optional(row, "reviewed_commit")?,
    })
}

fn usage(row: &DbRow) -> Result<Usage, StoreError> {
    Ok(Usage {
        input_tokens: row::count(row, "input_tokens")?,
        output_tokens: row::count(row, "output_tokens")?,
        cache_read_tokens: row::count(row, "cache_read_tokens")?,
        cache_write_tokens: row::count(row, "cache_write_tokens")?,
    })
}
