//! Turns: prompts carried out, numbered per session.

use harvest_proto::{PromptId, SessionId, Timestamp, TurnId, api::Turn, event::TurnOutcome};

use crate::{
    DbRow, Store, StoreError,
    commit::Target,
    row::{self, to_word},
};

const SELECT: &str = "SELECT t.*, COALESCE(s.gone, 0) AS gone FROM turns t \
     LEFT JOIN snapshots s ON s.session = t.session AND s.id = t.snapshot ";

impl Store {
    /// A session's turns, oldest first.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn turn_list(&self, session: &SessionId) -> Result<Vec<Turn>, StoreError> {
        let rows =
            sqlx::query(sqlx::AssertSqlSafe(format!("{SELECT} WHERE t.session = $1 ORDER BY t.number")))
                .bind(session.to_string())
                .fetch_all(&self.readers)
                .await?;
        rows.iter().map(read).collect()
    }
}

fn read(row: &DbRow) -> Result<Turn, StoreError> {
    let gone = row::count::<u64>(row, "gone")? != 0;
    let dropped = row::optional(row, "dropped")?;
    Ok(Turn {
        id: row::parsed(row, "id")?,
        number: row::count(row, "number")?,
        prompt: row::parsed(row, "prompt")?,
        outcome: row::word_optional(row, "outcome")?,
        snapshot: row::parsed_optional(row, "snapshot")?.filter(|_| !gone),
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
    sqlx::query("INSERT INTO turns (id, session, number, prompt, started_at) VALUES ($1, $2, $3, $4, $5)")
        .bind(turn.to_string())
        .bind(target.session.to_string())
        .bind(i64::from(number))
        .bind(prompt.to_string())
        .bind(at.as_millis())
        .execute(&mut *target.connection)
        .await
        .map_err(|error| StoreError::or_exists(error, format!("turn {number}")))?;
    sqlx::query("UPDATE prompts SET turn = $3 WHERE session = $1 AND id = $2")
        .bind(target.session.to_string())
        .bind(prompt.to_string())
        .bind(turn.to_string())
        .execute(&mut *target.connection)
        .await?;
    Ok(())
}

pub(crate) async fn end(
    target: &mut Target<'_>,
    turn: &TurnId,
    outcome: TurnOutcome,
    at: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE turns SET outcome = $3, ended_at = $4 WHERE session = $1 AND id = $2 AND outcome IS NULL",
    )
    .bind(target.session.to_string())
    .bind(turn.to_string())
    .bind(to_word(&outcome))
    .bind(at.as_millis())
    .execute(&mut *target.connection)
    .await?;
    Ok(())
}
