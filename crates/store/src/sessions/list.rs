//! Lists and counts of sessions.

use std::collections::HashSet;

use harvest_proto::{
    RepositoryName, SandboxId, SessionId, SnapshotId, Timestamp, api::SessionState,
};

use super::{SELECT, SessionKey, SessionRecord, load_checkouts, read};
use crate::{
    DbRow, Store, StoreError,
    row::{self, to_enum_name},
};

const PAGE: u32 = 200;

/// Conditions for a list of sessions; absent ones match all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFilter {
    pub state: Option<SessionState>,
    /// Only archived sessions, or only others.
    pub archived: Option<bool>,
    /// Matches ids that begin with this text.
    pub id_prefix: Option<String>,
    /// Matches sessions with this repository among theirs.
    pub repository: Option<RepositoryName>,
    /// Matches titles that contain this text, ignoring case.
    pub title: Option<String>,
    pub key: Option<SessionKey>,
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
        add(self.id_prefix.clone(), " AND s.id >= $?");
        // Texts are compared by bytes, and no character has larger ones.
        let end = self.id_prefix.as_ref().map(|prefix| format!("{prefix}\u{10ffff}"));
        add(end, " AND s.id < $?");
        let key = self.key.as_ref();
        add(key.map(SessionKey::owner_column), " AND s.key_owner = $?");
        add(key.map(|key| key.text.clone()), " AND s.key = $?");
        let has_repository =
            " AND EXISTS (SELECT 1 FROM checkouts c WHERE c.session = s.id AND c.repository = $?)";
        add(self.repository.clone().map(String::from), has_repository);
        // SQLite's LOWER only knows ASCII, so the text is compared in both lower-case forms.
        let title = self.title.as_ref();
        let unicode = " AND (LOWER(s.title) LIKE $? ESCAPE '\\'";
        add(title.map(|text| contains(&text.to_lowercase())), unicode);
        let ascii = " OR LOWER(s.title) LIKE $? ESCAPE '\\')";
        add(title.map(|text| contains(&text.to_ascii_lowercase())), ascii);
        // Not a parameter: only a constant condition can use the index of open sessions.
        sql += match self.archived {
            None => "",
            Some(true) => " AND s.state = 'archived'",
            Some(false) => " AND s.state <> 'archived'",
        };
        (sql, texts)
    }
}

/// Position in a list: the time and the id of its last session. The id is a text, because the
/// session may be damaged.
pub type SessionCursor = (Timestamp, String);

/// A page of a list.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionPage {
    /// The sessions that could be read.
    pub records: Vec<SessionRecord>,
    /// Where the next page starts, if there is one.
    pub next: Option<SessionCursor>,
}

/// What retention needs to know about a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionSummary {
    pub id: SessionId,
    pub title: String,
    pub state: SessionState,
    pub provider: String,
    pub snapshot: Option<SnapshotId>,
    pub last_activity: Timestamp,
}

impl Store {
    /// A summary of every session, newest first. One statement: a home may have thousands.
    pub async fn session_summaries(&self) -> Result<Vec<SessionSummary>, StoreError> {
        let query = sqlx::query(
            "SELECT id, title, state, provider, snapshot, last_activity FROM sessions
             ORDER BY created_at DESC, id DESC",
        );
        self.all(query, summary).await
    }

    /// The summary of a session; `None` when there is no such session.
    pub async fn session_summary(
        &self,
        session: &SessionId,
    ) -> Result<Option<SessionSummary>, StoreError> {
        let query = sqlx::query(
            "SELECT id, title, state, provider, snapshot, last_activity FROM sessions WHERE id = $1",
        );
        self.optional(query.bind(session.to_string()), summary).await
    }

    /// Sessions that match the filter and were created before `before`, newest first, at most
    /// `limit`.
    pub async fn session_find(
        &self,
        filter: &SessionFilter,
        before: Option<SessionCursor>,
        limit: u32,
    ) -> Result<SessionPage, StoreError> {
        let (at, id) = before.map_or((i64::MAX, String::new()), |(at, id)| (at.as_millis(), id));
        let (conditions, texts) = filter.conditions();
        // Few sessions have a key or a prefix. `+` keeps both databases from walking the index by
        // age instead, in search of them.
        let few = filter.id_prefix.is_some() || filter.key.is_some();
        let age = if few { "+s.created_at" } else { "s.created_at" };
        let mut query = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} WHERE ({age}, s.id) < ($1, $2) {conditions}
             ORDER BY {age} DESC, s.id DESC LIMIT $3"
        )))
        .bind(at)
        .bind(id)
        .bind(i64::from(limit) + 1);
        for text in texts {
            query = query.bind(text);
        }
        let mut rows = query.fetch_all(&self.readers).await?;
        let more = rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let cursor =
            |row: &DbRow| Some((row::time(row, "created_at").ok()?, row::text(row, "id").ok()?));
        let next = rows.iter().rev().filter(|_| more).find_map(cursor);
        let mut records: Vec<SessionRecord> = row::readable(&rows, read)?;
        load_checkouts(&self.readers, &mut records).await?;
        Ok(SessionPage { records, next })
    }

    /// Number of sessions per state; states without sessions are omitted.
    pub async fn session_count(&self) -> Result<Vec<(SessionState, u64)>, StoreError> {
        let query = sqlx::query(
            "SELECT state, COUNT(*) AS number FROM sessions GROUP BY state ORDER BY state",
        );
        self.all(query, |row| Ok((row::enum_name(row, "state")?, row::count(row, "number")?))).await
    }
}

impl Store {
    /// The sessions that have a sandbox, a queued prompt, an unreviewed commit or other work,
    /// oldest first. Takes as long as there are such sessions, however many rest.
    pub async fn session_at_work(&self) -> Result<Vec<SessionRecord>, StoreError> {
        let sql = format!(
            "{SELECT} WHERE s.id IN (SELECT id FROM sessions WHERE resting = 0
             UNION SELECT session FROM prompts WHERE status = 'queued'
             UNION SELECT session FROM checkouts WHERE pushed_commit IS NOT NULL
             AND (reviewed_commit IS NULL OR reviewed_commit <> pushed_commit))
             ORDER BY s.created_at, s.id"
        );
        let mut records: Vec<SessionRecord> =
            self.all(sqlx::query(sqlx::AssertSqlSafe(sql)), read).await?;
        for page in records.chunks_mut(PAGE as usize) {
            load_checkouts(&self.readers, page).await?;
        }
        Ok(records)
    }

    /// The sandboxes of all sessions, also of damaged ones.
    pub async fn session_sandboxes(&self) -> Result<HashSet<SandboxId>, StoreError> {
        // A session with a sandbox does not rest.
        let query = sqlx::query(
            "SELECT id, sandbox FROM sessions WHERE resting = 0 AND sandbox IS NOT NULL",
        );
        self.all(query, |row| row::parsed(row, "sandbox")).await
    }

    /// The sessions to which a retention rule may apply: archived ones without activity since
    /// `quiet` or with several snapshots, and any with more than `snapshots`.
    pub async fn session_for_retention(
        &self,
        quiet: Option<Timestamp>,
        snapshots: u64,
    ) -> Result<Vec<SessionId>, StoreError> {
        let query = sqlx::query(
            "SELECT id FROM sessions WHERE state = 'archived' AND last_activity <= $1
             UNION SELECT s.id FROM sessions s JOIN
             (SELECT session, COUNT(*) AS number FROM snapshots GROUP BY session HAVING COUNT(*) > 1) p
             ON p.session = s.id WHERE s.state = 'archived' OR p.number > $2",
        )
        .bind(quiet.map_or(i64::MIN, Timestamp::as_millis))
        .bind(row::bigint(snapshots));
        self.all(query, |row| row::parsed(row, "id")).await
    }

    /// The sessions of other providers.
    pub async fn session_elsewhere(
        &self,
        provider: &str,
    ) -> Result<HashSet<SessionId>, StoreError> {
        let query = sqlx::query("SELECT id FROM sessions WHERE provider <> $1");
        self.all(query.bind(provider.to_owned()), |row| row::parsed(row, "id")).await
    }

    /// Calls `visit` with the driver's state of every session, also of damaged ones.
    pub async fn session_each_state(&self, mut visit: impl FnMut(&str)) -> Result<(), StoreError> {
        let mut after = String::new();
        loop {
            let rows = sqlx::query(
                "SELECT id, driver_state, snapshot FROM sessions WHERE id > $1 ORDER BY id LIMIT $2",
            )
            .bind(after.clone())
            .bind(i64::from(PAGE))
            .fetch_all(&self.readers)
            .await?;
            let Some(last) = rows.last() else { return Ok(()) };
            after = row::text(last, "id")?;
            for row in &rows {
                let texts = [row::optional(row, "driver_state"), row::optional(row, "snapshot")];
                texts.iter().filter_map(|text| text.as_ref().ok()?.as_deref()).for_each(&mut visit);
            }
        }
    }
}

fn summary(row: &DbRow) -> Result<SessionSummary, StoreError> {
    Ok(SessionSummary {
        id: row::parsed(row, "id")?,
        title: row::text(row, "title")?,
        state: row::enum_name(row, "state")?,
        provider: row::text(row, "provider")?,
        snapshot: row::parsed_optional(row, "snapshot")?,
        last_activity: row::time(row, "last_activity")?,
    })
}

/// A LIKE pattern for texts that contain this one.
fn contains(text: &str) -> String {
    let mut pattern = "%".to_owned();
    for letter in text.chars() {
        if matches!(letter, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern + "%"
}
