//! Turns: runs of prompts, numbered per session.

use harvest_proto::{
    EventBody, Money, PromptId, RepositoryName, SessionId, SnapshotId, Timestamp, TurnId,
    TurnReason,
    api::{DiffStat, Turn},
    event::TurnOutcome,
};

use crate::{
    DbRow, Store, StoreError,
    row::{self, MAX_COUNT, bounded, to_enum_name},
    target::Target,
};

// Characters of the prompt in a list.
const LIST_TEXT_LENGTH: u32 = 500;

fn select(text: &str) -> String {
    let sum = |column: &str| {
        format!(
            "CAST((SELECT SUM(CASE WHEN x.{column} > {MAX_COUNT} THEN {MAX_COUNT} ELSE x.{column} END)
             FROM turn_trees x WHERE x.session = t.session AND x.number = t.number) AS BIGINT) AS {column}"
        )
    };
    let (files, insertions, deletions) = (sum("files"), sum("insertions"), sum("deletions"));
    format!(
        "SELECT t.*, COALESCE(s.gone, 0) AS gone, {text} AS text, {files}, {insertions}, {deletions}
         FROM turns t
         LEFT JOIN snapshots s ON s.session = t.session AND s.id = t.snapshot
         LEFT JOIN prompts p ON p.session = t.session AND p.id = t.prompt"
    )
}

/// Git tree of a checkout after a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnTree {
    /// Number of the turn; 0 is the session's start.
    pub turn: u32,
    pub repository: RepositoryName,
    /// Hash of the git tree.
    pub tree: String,
}

impl Store {
    /// The sessions whose last turn a budget has ended, oldest first, and the error of that turn.
    pub async fn session_over_budget(&self) -> Result<Vec<(SessionId, String)>, StoreError> {
        let query = sqlx::query(
            r#"SELECT s.id, (SELECT e.body FROM events e WHERE e.session = s.id AND e.turn = t.id
                 AND e.body LIKE '{"type":"turn_ended"%' ORDER BY e.seq DESC LIMIT 1) AS body
             FROM turns t JOIN sessions s ON s.id = t.session
             WHERE t.reason = 'budget' AND s.state <> 'archived'
             AND t.number = (SELECT MAX(l.number) FROM turns l WHERE l.session = t.session)
             ORDER BY s.created_at, s.id"#,
        );
        let read = |row: &DbRow| {
            let message = match row::json_optional(row, "body")? {
                Some(EventBody::TurnEnded { error: Some(error), .. }) => error,
                _ => String::new(),
            };
            Ok((row::parsed(row, "id")?, message))
        };
        self.all(query, read).await
    }

    /// A session's turns, oldest first, with shortened prompts.
    pub async fn turn_list(&self, session: &SessionId) -> Result<Vec<Turn>, StoreError> {
        let shortened = format!("SUBSTR(p.text, 1, {LIST_TEXT_LENGTH})");
        let sql = format!("{} WHERE t.session = $1 ORDER BY t.number", select(&shortened));
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(session.to_string());
        self.all(query, read).await
    }

    /// A turn with its complete prompt.
    pub async fn turn_get(&self, session: &SessionId, number: u32) -> Result<Turn, StoreError> {
        let sql = format!("{} WHERE t.session = $1 AND t.number = $2", select("p.text"));
        let query =
            sqlx::query(sqlx::AssertSqlSafe(sql)).bind(session.to_string()).bind(i64::from(number));
        let found = self.optional(query, read).await?;
        found.ok_or_else(|| StoreError::missing(format!("turn {number} in session {session}")))
    }

    /// Number of the turn that `turn` continues, in a sandbox that started from `snapshot`: the
    /// snapshot's turn, else (after a pause) the preceding one; 0 is the session's start.
    pub async fn turn_before(
        &self,
        session: &SessionId,
        turn: &TurnId,
        snapshot: &SnapshotId,
    ) -> Result<u32, StoreError> {
        let row = sqlx::query(
            "SELECT COALESCE((SELECT turn FROM snapshots WHERE session = $1 AND id = $2),
             (SELECT number - 1 FROM turns WHERE session = $1 AND id = $3), 0) AS number",
        )
        .bind(session.to_string())
        .bind(snapshot.to_string())
        .bind(turn.to_string())
        .fetch_one(&self.readers)
        .await?;
        row::count(&row, "number")
    }

    /// Git trees of all checkouts after each turn.
    pub async fn tree_list(&self, session: &SessionId) -> Result<Vec<TurnTree>, StoreError> {
        let query =
            sqlx::query("SELECT * FROM turn_trees WHERE session = $1 ORDER BY number, repository")
                .bind(session.to_string());
        self.all(query, read_tree).await
    }

    /// Git trees of all checkouts after one turn.
    pub async fn tree_list_of(
        &self,
        session: &SessionId,
        turn: u32,
    ) -> Result<Vec<TurnTree>, StoreError> {
        let query = sqlx::query("SELECT * FROM turn_trees WHERE session = $1 AND number = $2")
            .bind(session.to_string())
            .bind(i64::from(turn));
        self.all(query, read_tree).await
    }
}

fn read_tree(row: &DbRow) -> Result<TurnTree, StoreError> {
    let (repository, tree) = (row::parsed(row, "repository")?, row::text(row, "tree")?);
    Ok(TurnTree { turn: row::count(row, "number")?, repository, tree })
}

fn diff(row: &DbRow) -> Result<Option<DiffStat>, StoreError> {
    let Some(files) = row::count_optional(row, "files")? else { return Ok(None) };
    let lines = |column| Ok::<_, StoreError>(row::count_optional(row, column)?.unwrap_or(0));
    Ok(Some(DiffStat { files, insertions: lines("insertions")?, deletions: lines("deletions")? }))
}

fn read(row: &DbRow) -> Result<Turn, StoreError> {
    let gone = row::count::<u64>(row, "gone")? != 0;
    let dropped = row::optional(row, "drop_reason")?;
    Ok(Turn {
        id: row::parsed(row, "id")?,
        number: row::count(row, "number")?,
        prompt: row::parsed(row, "prompt")?,
        text: row::optional(row, "text")?.unwrap_or_default(),
        after: row::count_optional(row, "after_turn")?,
        diff: diff(row)?,
        usage: row::usage(row)?,
        spent_micros: Money::from_micros(row::count(row, "spent")?),
        outcome: row::enum_name_optional(row, "outcome")?,
        reason: row::parsed_optional(row, "reason")?,
        snapshot_id: row::parsed_optional(row, "snapshot")?.filter(|_| !gone),
        dropped: if gone { Some("gone".to_owned()) } else { dropped },
        started_at: row::time(row, "started_at")?,
        ended_at: row::time_optional(row, "ended_at")?,
    })
}

pub(crate) async fn insert(
    target: &mut Target<'_>,
    turn: &TurnId,
    number: u32,
    prompt: &PromptId,
    at: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO turns (id, session, number, prompt, started_at) VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(turn.to_string())
    .bind(target.session.to_string())
    .bind(i64::from(number))
    .bind(prompt.to_string())
    .bind(at.as_millis())
    .execute(&mut *target.connection)
    .await
    .map_err(|error| StoreError::or_exists(error, format!("turn {number}")))?;
    let query = target
        .query("UPDATE prompts SET turn = $3 WHERE session = $1 AND id = $2")
        .bind(prompt.to_string())
        .bind(turn.to_string());
    target.execute(query).await.map(drop)
}

pub(crate) async fn end(
    target: &mut Target<'_>,
    turn: &TurnId,
    outcome: TurnOutcome,
    reason: Option<TurnReason>,
    at: Timestamp,
) -> Result<(), StoreError> {
    let sql = "UPDATE turns SET outcome = $3, ended_at = $4, reason = $5
         WHERE session = $1 AND id = $2 AND outcome IS NULL";
    let query = target.query(sql).bind(turn.to_string()).bind(to_enum_name(&outcome));
    let query = query.bind(at.as_millis()).bind(reason.map(TurnReason::as_str));
    target.execute(query).await.map(drop)
}

/// Stores the git tree of a checkout after a turn, and the turn it continued from.
pub(crate) async fn insert_tree(
    target: &mut Target<'_>,
    turn: &TurnId,
    after: u32,
    tree: TurnTree,
    stat: DiffStat,
) -> Result<(), StoreError> {
    let sql = "UPDATE turns SET after_turn = $3 WHERE session = $1 AND id = $2 AND number <> $4";
    let (after, next) = (i64::from(after), i64::from(after) + 1);
    target.execute(target.query(sql).bind(turn.to_string()).bind(after).bind(next)).await?;
    let query = target.query(
        "INSERT INTO turn_trees (session, number, repository, tree, files, insertions, deletions)
         SELECT session, number, $3, $4, $5, $6, $7 FROM turns WHERE session = $1 AND id = $2
         ON CONFLICT (session, number, repository) DO UPDATE SET tree = excluded.tree,
         files = excluded.files, insertions = excluded.insertions, deletions = excluded.deletions",
    )
    .bind(turn.to_string())
    .bind(String::from(tree.repository))
    .bind(tree.tree)
    .bind(bounded(stat.files))
    .bind(bounded(stat.insertions))
    .bind(bounded(stat.deletions));
    target.execute(query).await.map(drop)
}

/// Copies the git trees of another session's turn as turn 0 of this session.
pub(crate) async fn share_trees(
    target: &mut Target<'_>,
    from: &SessionId,
    number: u32,
) -> Result<(), StoreError> {
    let query = target.query(
        "INSERT INTO turn_trees (session, number, repository, tree, files, insertions, deletions)
         SELECT $1, 0, repository, tree, 0, 0, 0 FROM turn_trees WHERE session = $2 AND number = $3
         ON CONFLICT (session, number, repository) DO NOTHING",
    )
    .bind(from.to_string())
    .bind(i64::from(number));
    target.execute(query).await.map(drop)
}
