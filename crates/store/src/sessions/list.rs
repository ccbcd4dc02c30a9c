//! Lists and counts of sessions.

use harvest_proto::{RepositoryName, SessionId, Timestamp, api::SessionState};

use super::{SELECT, SessionRecord, load_checkouts, read};
use crate::{
    Store, StoreError,
    row::{self, to_enum_name},
};

const PAGE: u32 = 200;

/// Conditions for a list of sessions; absent ones match all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFilter {
    pub state: Option<SessionState>,
    /// Matches sessions with this repository among theirs.
    pub repository: Option<RepositoryName>,
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
        add(self.repository.clone().map(String::from), has_repository);
        // SQLite's LOWER only knows ASCII, so the text is compared in both lower-case forms.
        let title = self.title.as_ref();
        let unicode = " AND (LOWER(s.title) LIKE $? ESCAPE '\\'";
        add(title.map(|text| contains(&text.to_lowercase())), unicode);
        let ascii = " OR LOWER(s.title) LIKE $? ESCAPE '\\')";
        add(title.map(|text| contains(&text.to_ascii_lowercase())), ascii);
        (sql, texts)
    }
}

impl Store {
    /// Sessions created before `before`, newest first, at most `limit`.
    pub async fn session_list(
        &self,
        before: Option<(Timestamp, SessionId)>,
        limit: u32,
    ) -> Result<Vec<SessionRecord>, StoreError> {
        self.session_find(&SessionFilter::default(), before, limit).await
    }

    /// Calls `visit` with every session, newest first. Reads a page at a time.
    pub async fn session_each(
        &self,
        mut visit: impl FnMut(SessionRecord),
    ) -> Result<(), StoreError> {
        let mut cursor = None;
        loop {
            let page = self.session_list(cursor, PAGE).await?;
            let Some(last) = page.last() else { return Ok(()) };
            cursor = Some((last.session.created_at, last.session.id.clone()));
            page.into_iter().for_each(&mut visit);
        }
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
        load_checkouts(&self.readers, &mut records).await?;
        Ok(records)
    }

    /// Number of sessions per state; states without sessions are omitted.
    pub async fn session_count(&self) -> Result<Vec<(SessionState, u64)>, StoreError> {
        let query = sqlx::query(
            "SELECT state, COUNT(*) AS number FROM sessions GROUP BY state ORDER BY state",
        );
        self.all(query, |row| Ok((row::enum_name(row, "state")?, row::count(row, "number")?))).await
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
