//! Sessions: one row each, which also gives its events their numbers.

use std::collections::BTreeMap;

use harvest_proto::{
    SandboxId, SessionId, SnapshotId, Timestamp,
    api::{Session, SessionState},
    bridge::Author,
    event::Usage,
};

use crate::{
    CheckoutRecord, DbConnection, DbRow, Lease, NewCheckout, Removal, Store, StoreError, Write,
    checkouts, commit, leases, removals,
    row::{self, plain, to_json, to_word},
    writer::{Done, News},
};

/// A session to be.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSession {
    /// Its id.
    pub id: SessionId,
    /// What to call it.
    pub title: String,
    /// What it works on, the primary one first.
    pub checkouts: Vec<NewCheckout>,
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
    /// The turn of it, if it was the end of one.
    pub forked_turn: Option<u32>,
    /// A name of its creator's, which no other session has.
    pub key: Option<String>,
    /// Variables for what runs in it.
    pub env: BTreeMap<String, String>,
    /// When it is created.
    pub at: Timestamp,
}

/// A session as the store holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionRecord {
    /// What people see of it.
    pub session: Session,
    /// What it works on, the primary one first.
    pub checkouts: Vec<CheckoutRecord>,
    /// The agent's id of the conversation.
    pub conversation: String,
    /// The driver's own words.
    pub drive: String,
    /// Variables for what runs in it.
    pub env: BTreeMap<String, String>,
}

/// Which sessions to list; what is not said fits any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFilter {
    /// In this state.
    pub state: Option<SessionState>,
    /// With this repository among theirs.
    pub repository: Option<String>,
    /// With this in their title, whatever the case of its letters.
    pub title: Option<String>,
    /// With this key.
    pub key: Option<String>,
}

impl SessionFilter {
    /// SQL for after `$3`, and what it asks for in its order.
    fn conditions(&self) -> (String, Vec<String>) {
        let (mut sql, mut texts) = (String::new(), Vec::new());
        let mut add = |text: Option<String>, condition: &str| {
            let Some(text) = text else { return };
            texts.push(text);
            sql += &condition.replace("$?", &format!("${}", texts.len() + 3));
        };
        add(self.state.as_ref().map(to_word), " AND s.state = $?");
        add(self.key.clone(), " AND s.key = $?");
        let named =
            " AND EXISTS (SELECT 1 FROM checkouts c WHERE c.session = s.id AND c.repository = $?)";
        add(self.repository.clone(), named);
        // Not every database knows the small form of every letter.
        let title = self.title.as_ref();
        let small = " AND (LOWER(s.title) LIKE $? ESCAPE '\\'";
        add(title.map(|text| contains(&text.to_lowercase())), small);
        let plain = " OR LOWER(s.title) LIKE $? ESCAPE '\\')";
        add(title.map(|text| contains(&text.to_ascii_lowercase())), plain);
        (sql, texts)
    }
}

/// A pattern for texts that hold this one.
fn contains(text: &str) -> String {
    let mut pattern = String::from("%");
    for letter in text.chars() {
        if matches!(letter, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern + "%"
}

// The diff is left out: it may be a megabyte, and lists do not show it.
const SELECT: &str = "SELECT s.id, s.title, s.state, s.reason, s.position, s.repository, s.branch, s.agent, s.model, \
     s.network, s.author_name, s.author_email, s.conversation, s.sandbox, s.epoch, s.snapshot, s.forked_from, \
     s.forked_turn, s.key, s.env, s.drive, s.input_tokens, s.output_tokens, \
     s.cache_read_tokens, s.cache_write_tokens, s.next_seq, s.created_at, s.last_activity, \
     (SELECT COUNT(*) FROM turns t WHERE t.session = s.id) AS turns, \
     (SELECT COUNT(*) FROM prompts p WHERE p.session = s.id AND p.status = 'queued') AS queued \
     FROM sessions s ";

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
                        let committed =
                            commit::apply(connection, &session, lease, at, writes).await?;
                        // Nobody can follow a session that has just come to be, but somebody may count.
                        news.extend(
                            committed.events.into_iter().map(|event| (session.clone(), event)),
                        );
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
        let mut record = read(&row)?;
        checkouts::complete(&self.readers, std::slice::from_mut(&mut record)).await?;
        Ok(record)
    }

    /// The session that has this key, if one has.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn session_by_key(&self, key: &str) -> Result<Option<SessionId>, StoreError> {
        let row = sqlx::query("SELECT id FROM sessions WHERE key = $1")
            .bind(key.to_owned())
            .fetch_optional(&self.readers)
            .await?;
        row.map(|row| row::parsed(&row, "id")).transpose()
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
        self.session_find(&SessionFilter::default(), before, limit).await
    }

    /// The same, only those that fit.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn session_find(
        &self,
        filter: &SessionFilter,
        before: Option<(Timestamp, SessionId)>,
        limit: u32,
    ) -> Result<Vec<SessionRecord>, StoreError> {
        let (at, id) =
            before.map_or((i64::MAX, String::new()), |(at, id)| (at.as_millis(), id.to_string()));
        let (conditions, texts) = filter.conditions();
        let mut query = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} WHERE (s.created_at, s.id) < ($1, $2) {conditions}
             ORDER BY s.created_at DESC, s.id DESC LIMIT $3"
        )))
        .bind(at)
        .bind(id)
        .bind(i64::from(limit));
        for text in texts {
            query = query.bind(text);
        }
        let rows = query.fetch_all(&self.readers).await?;
        let mut records = rows.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        checkouts::complete(&self.readers, &mut records).await?;
        Ok(records)
    }

    /// The session's work as a diff, as it was when last looked at.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn session_diff(&self, session: &SessionId) -> Result<Option<String>, StoreError> {
        let row = sqlx::query(
            "SELECT d.text FROM sessions s LEFT JOIN diffs d ON d.session = s.id WHERE s.id = $1",
        )
        .bind(session.to_string())
        .fetch_optional(&self.readers)
        .await?
        .ok_or_else(|| StoreError::missing(format!("session {session}")))?;
        row::optional(&row, "text")
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
        self.delete_where(session, lease, None, also, at).await
    }

    /// The same for a session that is archived, has been quiet since `quiet`, and of which nothing is pinned; any
    /// other stays, and with it everything.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn session_delete_archived(
        &self,
        session: &SessionId,
        lease: Lease,
        quiet: Timestamp,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        self.delete_where(session, lease, Some(quiet), Vec::new(), at).await
    }

    async fn delete_where(
        &self,
        session: &SessionId,
        lease: Lease,
        quiet: Option<Timestamp>,
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
                    if let Some(quiet) = quiet
                        && !is_forgotten(connection, &session, quiet).await?
                    {
                        return Ok(None.into());
                    }
                    let mut removals = left_by(connection, &session).await?;
                    removals.extend(
                        also.into_iter().filter(|one| !removals.contains(one)).collect::<Vec<_>>(),
                    );
                    for removal in &removals {
                        removals::insert(connection, removal, at).await?;
                    }
                    sqlx::query("DELETE FROM sessions WHERE id = $1")
                        .bind(session.to_string())
                        .execute(&mut *connection)
                        .await?;
                    Ok(Some(removals).into())
                })
            })
            .await?;
        let Some(removals) = removals else { return Ok(Vec::new()) };
        self.topics.lock().expect("no holder of this lock can panic").remove(&id);
        Ok(removals)
    }
}

async fn is_forgotten(
    connection: &mut DbConnection,
    session: &SessionId,
    quiet: Timestamp,
) -> Result<bool, StoreError> {
    let over = sqlx::query(
        "SELECT 1 FROM sessions s WHERE s.id = $1 AND s.state = $2 AND s.last_activity <= $3 AND NOT EXISTS
         (SELECT 1 FROM snapshots p WHERE p.session = s.id AND p.pinned <> 0)",
    )
    .bind(session.to_string())
    .bind(to_word(&SessionState::Archived))
    .bind(quiet.as_millis())
    .fetch_optional(&mut *connection)
    .await?;
    Ok(over.is_some())
}

/// The session's sandbox and the snapshots no other session may go on from.
async fn left_by(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<Vec<Removal>, StoreError> {
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
        "INSERT INTO sessions (id, title, state, reason, repository, branch, agent, model, network,
         author_name, author_email, conversation, forked_from, forked_turn, key, env, drive, created_at, last_activity)
         VALUES ($1, $2, $3, 'created', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, '', $16, $16)",
    )
    .bind(new.id.to_string())
    .bind(plain(new.title))
    .bind(to_word(&SessionState::Queued))
    .bind(new.checkouts.first().map(|first| first.repository.clone()).unwrap_or_default())
    .bind(new.branch)
    .bind(new.agent)
    .bind(new.model)
    .bind(new.network)
    .bind(new.author.name)
    .bind(new.author.email)
    .bind(new.conversation)
    .bind(new.forked_from.map(|id| id.to_string()))
    .bind(new.forked_turn.map(i64::from))
    .bind(new.key)
    .bind(to_json(&new.env))
    .bind(new.at.as_millis())
    .execute(&mut *connection)
    .await
    .map_err(|error| StoreError::or_exists(error, format!("session {}", new.id)))?;
    checkouts::insert(connection, &new.id, new.checkouts).await
}

/// All but what it works on: see [`checkouts::complete`].
fn read(row: &DbRow) -> Result<SessionRecord, StoreError> {
    let next_seq: u64 = row::count(row, "next_seq")?;
    let env: BTreeMap<String, String> = row::json(row, "env")?;
    let snapshot: Option<SnapshotId> = row::parsed_optional(row, "snapshot")?;
    let session = Session {
        id: row::parsed(row, "id")?,
        key: row::optional(row, "key")?,
        title: row::text(row, "title")?,
        state: row::word(row, "state")?,
        reason: row::text(row, "reason")?,
        position: row::count_optional(row, "position")?,
        repository: row::text(row, "repository")?,
        repositories: Vec::new(),
        branch: row::text(row, "branch")?,
        agent: row::text(row, "agent")?,
        model: row::optional(row, "model")?,
        network: row::text(row, "network")?,
        author: Author {
            name: row::text(row, "author_name")?,
            email: row::text(row, "author_email")?,
        },
        sandbox: row::parsed_optional::<SandboxId>(row, "sandbox")?,
        epoch: row::count(row, "epoch")?,
        snapshot_id: snapshot.clone(),
        snapshot,
        forked_from: row::parsed_optional(row, "forked_from")?,
        forked_turn: row::count_optional(row, "forked_turn")?,
        env: env.keys().cloned().collect(),
        turns: row::count(row, "turns")?,
        queued: row::count(row, "queued")?,
        usage: usage(row)?,
        pull: None,
        pr_number: None,
        pr_url: None,
        seq: next_seq.saturating_sub(1),
        created_at: row::time(row, "created_at")?,
        last_activity: row::time(row, "last_activity")?,
    };
    Ok(SessionRecord {
        session,
        checkouts: Vec::new(),
        conversation: row::text(row, "conversation")?,
        drive: row::text(row, "drive")?,
        env,
    })
}

pub(crate) fn usage(row: &DbRow) -> Result<Usage, StoreError> {
    Ok(Usage {
        input_tokens: row::count(row, "input_tokens")?,
        output_tokens: row::count(row, "output_tokens")?,
        cache_read_tokens: row::count(row, "cache_read_tokens")?,
        cache_write_tokens: row::count(row, "cache_write_tokens")?,
    })
}
