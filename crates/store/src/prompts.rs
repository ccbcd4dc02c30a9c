//! Prompts: the queue of a session. A unique index allows at most one dispatched prompt per
//! session.

use harvest_proto::{
    EventBody, PromptId, PromptText, SessionId, Timestamp, TurnId,
    api::{Prompt, PromptStatus},
    bridge::Author,
};

use crate::{
    DbRow, Store, StoreError,
    row::{self, bigint, replace_nul, to_enum_name},
    target::Target,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPrompt {
    pub id: PromptId,
    pub text: PromptText,
    pub author: Author,
    pub at: Timestamp,
}

const SELECT: &str = "SELECT p.*, (SELECT COUNT(*) FROM prompts q WHERE q.session = p.session AND \
     q.status = 'queued' AND q.position <= p.position) AS queue_position FROM prompts p ";

impl Store {
    pub async fn prompt_get(
        &self,
        session: &SessionId,
        prompt: &PromptId,
    ) -> Result<Prompt, StoreError> {
        let row = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} WHERE p.session = $1 AND p.id = $2"
        )))
        .bind(session.to_string())
        .bind(prompt.to_string())
        .fetch_optional(&self.readers)
        .await?
        .ok_or_else(|| StoreError::missing(format!("prompt {prompt}")))?;
        read(&row)
    }

    /// All prompts of a session, oldest first.
    pub async fn prompt_list(&self, session: &SessionId) -> Result<Vec<Prompt>, StoreError> {
        let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} WHERE p.session = $1 ORDER BY p.seq"
        )))
        .bind(session.to_string())
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(read).collect()
    }

    /// The queued prompts, the next one first.
    pub async fn prompt_queue(&self, session: &SessionId) -> Result<Vec<PromptId>, StoreError> {
        let rows = sqlx::query(
            "SELECT id FROM prompts WHERE session = $1 AND status = 'queued' ORDER BY position, seq",
        )
        .bind(session.to_string())
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(|row| row::parsed(row, "id")).collect()
    }

    /// Number of queued prompts in all sessions.
    pub async fn prompt_queued_count(&self) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT COUNT(*) AS number FROM prompts WHERE status = 'queued'")
            .fetch_one(&self.readers)
            .await?;
        row::count(&row, "number")
    }
}

fn read(row: &DbRow) -> Result<Prompt, StoreError> {
    let status = row::enum_name(row, "status")?;
    Ok(Prompt {
        id: row::parsed(row, "id")?,
        text: row::text(row, "text")?,
        author: row::author(row)?,
        status,
        position: (status == PromptStatus::Queued)
            .then(|| row::count(row, "queue_position"))
            .transpose()?,
        turn: row::parsed_optional(row, "turn")?,
        seq: row::count(row, "seq")?,
        created_at: row::time(row, "created_at")?,
    })
}

pub(crate) async fn insert(target: &mut Target<'_>, prompt: NewPrompt) -> Result<(), StoreError> {
    let text = replace_nul(prompt.text.into());
    let body = EventBody::PromptQueued {
        prompt: prompt.id.clone(),
        text: text.clone(),
        author: prompt.author.name.clone(),
    };
    let seq = target.append(prompt.at, None, body);
    sqlx::query(
        "INSERT INTO prompts (id, session, text, author_name, author_email, status, position, seq, created_at)
         VALUES ($1, $2, $3, $4, $5, 'queued',
                 (SELECT COALESCE(MAX(position), 0) + 1 FROM prompts WHERE session = $2), $6, $7)",
    )
    .bind(prompt.id.to_string())
    .bind(target.session.to_string())
    .bind(text)
    .bind(prompt.author.name)
    .bind(prompt.author.email)
    .bind(bigint(seq))
    .bind(prompt.at.as_millis())
    .execute(&mut *target.connection)
    .await
    .map_err(|error| StoreError::or_exists(error, format!("prompt {}", prompt.id)))?;
    Ok(())
}

pub(crate) async fn status(
    target: &mut Target<'_>,
    prompt: &PromptId,
    from: PromptStatus,
    to: PromptStatus,
) -> Result<(), StoreError> {
    let changed = sqlx::query(
        "UPDATE prompts SET status = $4
         WHERE session = $1 AND id = $2 AND status = $3",
    )
    .bind(target.session.to_string())
    .bind(prompt.to_string())
    .bind(to_enum_name(&from))
    .bind(to_enum_name(&to))
    .execute(&mut *target.connection)
    .await
    .map_err(|error| StoreError::or_exists(error, "another dispatched prompt"))?;
    if changed.rows_affected() == 1 {
        Ok(())
    } else {
        Err(StoreError::missing(format!("{} prompt {prompt}", to_enum_name(&from))))
    }
}

/// The turn of the dispatched prompt.
pub(crate) async fn running_turn(target: &mut Target<'_>) -> Result<Option<TurnId>, StoreError> {
    let row = sqlx::query("SELECT turn FROM prompts WHERE session = $1 AND status = 'dispatched'")
        .bind(target.session.to_string())
        .fetch_optional(&mut *target.connection)
        .await?;
    row.map_or(Ok(None), |row| row::parsed_optional(&row, "turn"))
}

pub(crate) async fn reorder(target: &mut Target<'_>, order: &[PromptId]) -> Result<(), StoreError> {
    for (index, prompt) in order.iter().enumerate() {
        sqlx::query(
            "UPDATE prompts SET position = $3 WHERE session = $1 AND id = $2 AND status = 'queued'",
        )
        .bind(target.session.to_string())
        .bind(prompt.to_string())
        .bind(i64::try_from(index + 1).unwrap_or(i64::MAX))
        .execute(&mut *target.connection)
        .await?;
    }
    Ok(())
}
