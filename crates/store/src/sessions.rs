//! Sessions: one row each, which also numbers the session's events.

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
    row::{self, replace_nul, to_enum_name, to_json},
    writer::{JobOutput, NewEvents},
};

#[derive(Debug, Clone, PartialEq)]
pub struct NewSession {
    pub id: SessionId,
    pub title: String,
    /// The primary checkout first.
    pub checkouts: Vec<NewCheckout>,
    pub branch: String,
    pub agent: String,
    pub model: Option<String>,
    /// `none` or `trusted`.
    pub network: String,
    pub author: Author,
    /// The agent's id of the conversation.
    pub conversation: String,
    pub forked_from: Option<SessionId>,
    pub forked_turn: Option<u32>,
    /// The creator's unique key for the session.
    pub key: Option<String>,
    pub env: BTreeMap<String, String>,
    pub at: Timestamp,
}

/// A session with the columns that the API does not show.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionRecord {
    pub session: Session,
    /// The primary checkout first.
    pub checkouts: Vec<CheckoutRecord>,
    /// The agent's id of the conversation.
    pub conversation: String,
    /// The driver's state as JSON.
    pub drive: String,
    pub env: BTreeMap<String, String>,
}

/// Conditions for a list of sessions; absent ones match all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFilter {
    pub state: Option<SessionState>,
    /// Matches sessions with this repository among theirs.
    pub repository: Option<String>,
    /// Matches titles that contain this text, ignoring case.
    pub title: Option<String>,
    pub key: Option<String>,
}

impl SessionFilter {
    /// SQL conditions with parameters after `$3`, and the values of these parameters.
    fn conditions(&self) -> (String, Vec<String>) {
        let (mut sql, mut texts) = (String::new(), Vec::new());
        let mut add = |text: Option<String>, condition: &str| {
            let Some(text) = text else { return };
            texts.push(text);
            sql += &condition.replace("$?", &format!("${}", texts.len() + 3));
        };
        add(self.state.as_ref().map(to_enum_name), " AND s.state = $?");
        add(self.key.clone(), " AND s.key = $?");
        let has_repository =
            " AND EXISTS (SELECT 1 FROM checkouts c WHERE c.session = s.id AND c.repository = $?)";
        add(self.repository.clone(), has_repository);
        // SQLite's LOWER only knows ASCII, so the text is compared in both lower-case forms.
        let title = self.title.as_ref();
        let unicode = " AND (LOWER(s.title) LIKE $? ESCAPE '\\'";
        add(title.map(|text| contains(&text.to_lowercase())), unicode);
        let ascii = " OR LOWER(s.title) LIKE $? ESCAPE '\\')";
        add(title.map(|text| contains(&text.to_ascii_lowercase())), ascii);
        (sql, texts)
    }
}

/// A LIKE pattern for texts that contain this one.
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
    /// Creates a session and applies `writes` to it, both or neither.
    pub async fn session_insert(
        &self,
        lease: Lease,
        new: NewSession,
        writes: Vec<Write>,
    ) -> Result<(), StoreError> {
        self.session_insert_all(lease, vec![(new, writes)]).await
    }

    /// Creates several sessions, all or none.
    pub async fn session_insert_all(
        &self,
        lease: Lease,
        all: Vec<(NewSession, Vec<Write>)>,
    ) -> Result<(), StoreError> {
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let mut events = NewEvents::new();
                    for (new, writes) in all {
                        let (session, at) = (new.id.clone(), new.at);
                        insert(connection, new).await?;
                        let committed =
                            commit::apply(connection, &session, lease, at, writes).await?;
                        // A new session has no followers, but the watcher counts its events.
                        events.extend(
                            committed.events.into_iter().map(|event| (session.clone(), event)),
                        );
                    }
                    Ok(JobOutput { value: (), events })
                })
            })
            .await
    }

    pub async fn session_get(&self, session: &SessionId) -> Result<SessionRecord, StoreError> {
        let row = sqlx::query(sqlx::AssertSqlSafe(format!("{SELECT} WHERE s.id = $1")))
            .bind(session.to_string())
            .fetch_optional(&self.readers)
            .await?
            .ok_or_else(|| StoreError::missing(format!("session {session}")))?;
        let mut record = read(&row)?;
        checkouts::load_into(&self.readers, std::slice::from_mut(&mut record)).await?;
        Ok(record)
    }

    pub async fn session_by_key(&self, key: &str) -> Result<Option<SessionId>, StoreError> {
        let row = sqlx::query("SELECT id FROM sessions WHERE key = $1")
            .bind(key.to_owned())
            .fetch_optional(&self.readers)
            .await?;
        row.map(|row| row::parsed(&row, "id")).transpose()
    }

    /// Sessions created before `before`, newest first, at most `limit`.
    pub async fn session_list(
        &self,
        before: Option<(Timestamp, SessionId)>,
        limit: u32,
    ) -> Result<Vec<SessionRecord>, StoreError> {
        self.session_find(&SessionFilter::default(), before, limit).await
    }

    /// Sessions that match the filter and were created before `before`, newest first, at most
    /// `limit`.
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
        checkouts::load_into(&self.readers, &mut records).await?;
        Ok(records)
    }

    /// The session's changes as a diff, as last stored.
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

    /// Deletes a session with everything in it, and adds removals for its sandbox, for the
    /// snapshots that no other session uses, and for `also`, which only the session's driver knows.
    /// Returns these removals.
    pub async fn session_delete(
        &self,
        session: &SessionId,
        lease: Lease,
        also: Vec<Removal>,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        self.delete_where(session, lease, None, also, at).await
    }

    /// Deletes a session if it is archived, has been inactive since `quiet`, and has no pinned
    /// snapshot. Otherwise does nothing.
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
                        && !is_expired(connection, &session, quiet).await?
                    {
                        return Ok(None.into());
                    }
                    let mut removals = removals_of(connection, &session).await?;
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

async fn is_expired(
    connection: &mut DbConnection,
    session: &SessionId,
    quiet: Timestamp,
) -> Result<bool, StoreError> {
    let expired = sqlx::query(
        "SELECT 1 FROM sessions s WHERE s.id = $1 AND s.state = $2 AND s.last_activity <= $3 AND NOT EXISTS
         (SELECT 1 FROM snapshots p WHERE p.session = s.id AND p.pinned <> 0)",
    )
    .bind(session.to_string())
    .bind(to_enum_name(&SessionState::Archived))
    .bind(quiet.as_millis())
    .fetch_optional(&mut *connection)
    .await?;
    Ok(expired.is_some())
}

/// The session's sandbox, and the snapshots that no other session uses.
async fn removals_of(
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
         author_name, author_email, conversation, forked_from, forked_turn, key, env, drive,
         created_at, last_activity)
         VALUES ($1, $2, $3, 'created', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, '', $16, $16)",
    )
    .bind(new.id.to_string())
    .bind(replace_nul(new.title))
    .bind(to_enum_name(&SessionState::Queued))
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

/// Everything but the checkouts: see [`checkouts::load_into`].
fn read(row: &DbRow) -> Result<SessionRecord, StoreError> {
    let next_seq: u64 = row::count(row, "next_seq")?;
    let env: BTreeMap<String, String> = row::json(row, "env")?;
    let snapshot: Option<SnapshotId> = row::parsed_optional(row, "snapshot")?;
    let session = Session {
        id: row::parsed(row, "id")?,
        key: row::optional(row, "key")?,
        title: row::text(row, "title")?,
        state: row::enum_name(row, "state")?,
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
