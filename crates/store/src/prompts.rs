//! Prompts: the queue of a session. A unique index allows at most one dispatched prompt per
//! session.

use harvest_proto::{
    Effort, EventBody, ModelRef, PromptId, PromptText, SessionId, Timestamp, TurnId,
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
    /// The session's when absent.
    pub model: Option<ModelRef>,
    /// The session's when absent.
    pub effort: Option<Effort>,
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
        let query = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} WHERE p.session = $1 AND p.id = $2"
        )))
        .bind(session.to_string())
        .bind(prompt.to_string());
        let found = self.optional(query, read).await?;
        found.ok_or_else(|| StoreError::missing(format!("prompt {prompt}")))
    }

    /// All prompts of a session, oldest first.
    pub async fn prompt_list(&self, session: &SessionId) -> Result<Vec<Prompt>, StoreError> {
        let query = sqlx::query(sqlx::AssertSqlSafe(format!(
            "{SELECT} WHERE p.session = $1 ORDER BY p.seq"
        )))
        .bind(session.to_string());
        self.all(query, read).await
    }

    /// The queued prompts, the next one first.
    pub async fn prompt_queue(&self, session: &SessionId) -> Result<Vec<PromptId>, StoreError> {
        let query = sqlx::query(
            "SELECT id FROM prompts WHERE session = $1 AND status = 'queued' ORDER BY position, seq",
        )
        .bind(session.to_string());
        self.all(query, |row| row::parsed(row, "id")).await
    }

    /// Number of queued prompts in all sessions.
    pub async fn prompt_queued_count(&self) -> Result<u64, StoreError> {
        let sql = "SELECT COUNT(*) AS number FROM prompts WHERE status = 'queued'";
        row::count(&sqlx::query(sql).fetch_one(&self.readers).await?, "number")
    }
}

fn read(row: &DbRow) -> Result<Prompt, StoreError> {
    let status = row::enum_name(row, "status")?;
    Ok(Prompt {
        id: row::parsed(row, "id")?,
        text: row::text(row, "text")?,
        author: row::author(row)?,
        model: row::parsed_optional(row, "model")?,
        effort: row::parsed_optional(row, "effort")?,
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
        "INSERT INTO prompts (id, session, text, author_name, author_email, model, effort, status, position, seq,
         created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, 'queued',
                 (SELECT COALESCE(MAX(position), 0) + 1 FROM prompts WHERE session = $2), $8, $9)",
    )
    .bind(prompt.id.to_string())
    .bind(target.session.to_string())
    .bind(text)
    .bind(prompt.author.name)
    .bind(prompt.author.email)
    .bind(prompt.model.map(String::from))
    .bind(prompt.effort.map(Effort::as_str))
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
    let query = target
        .query("UPDATE prompts SET status = $4 WHERE session = $1 AND id = $2 AND status = $3")
        .bind(prompt.to_string())
        .bind(to_enum_name(&from))
        .bind(to_enum_name(&to));
    match target.execute(query).await {
        Ok(1) => Ok(()),
        Ok(_) => Err(StoreError::missing(format!("{} prompt {prompt}", to_enum_name(&from)))),
        Err(error) => Err(StoreError::or_exists(error, "another dispatched prompt")),
    }
}

/// The turn of the dispatched prompt.
pub(crate) async fn running_turn(target: &mut Target<'_>) -> Result<Option<TurnId>, StoreError> {
    let row = target
        .query("SELECT turn FROM prompts WHERE session = $1 AND status = 'dispatched'")
        .fetch_optional(&mut *target.connection)
        .await?;
    row.map_or(Ok(None), |row| row::parsed_optional(&row, "turn"))
}

pub(crate) async fn reorder(target: &mut Target<'_>, order: &[PromptId]) -> Result<(), StoreError> {
    for (index, prompt) in order.iter().enumerate() {
        let sql =
            "UPDATE prompts SET position = $3 WHERE session = $1 AND id = $2 AND status = 'queued'";
        let query = target.query(sql).bind(prompt.to_string()).bind(bigint(index as u64 + 1));
        target.execute(query).await?;
    }
    Ok(())
}
