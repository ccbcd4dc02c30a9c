//! Prompts: the queue of a session. A unique index allows at most one dispatched prompt per
//! session.

use harvest_proto::{
    AgentName, Effort, EventBody, ModelRef, PromptId, PromptText, SessionId, Timestamp, TurnId,
    api::{Attachment, Prompt, PromptStatus},
    bridge::Author,
};

use crate::{
    DbRow, Store, StoreError,
    row::{self, bigint, replace_nul, to_enum_name, to_json},
    target::Target,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPrompt {
    pub id: PromptId,
    pub text: PromptText,
    pub author: Author,
    /// The session's when absent.
    pub agent: Option<AgentName>,
    /// With an agent, its default when absent; else the session's.
    pub model: Option<ModelRef>,
    /// The same.
    pub effort: Option<Effort>,
    pub attachments: Vec<NewAttachment>,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewAttachment {
    pub info: Attachment,
    /// The bytes. As text: one column type for both databases.
    pub base64: String,
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

    /// The bytes of a prompt's attachment in base64; the first one has number 1.
    pub async fn attachment_get(
        &self,
        session: &SessionId,
        prompt: &PromptId,
        number: u32,
    ) -> Result<String, StoreError> {
        let sql = "SELECT base64 FROM attachments
             WHERE session = $1 AND prompt = $2 AND number = $3";
        let query = sqlx::query(sql).bind(session.to_string()).bind(prompt.to_string());
        let query = query.bind(i64::from(number));
        let found = self.optional(query, |row| row::text(row, "base64")).await?;
        found.ok_or_else(|| StoreError::missing(format!("attachment {number} of {prompt}")))
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
        agent: row::parsed_optional(row, "agent")?,
        model: row::parsed_optional(row, "model")?,
        effort: row::parsed_optional(row, "effort")?,
        attachments: row::json(row, "attachments")?,
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
    let attachments: Vec<Attachment> =
        prompt.attachments.iter().map(|attachment| attachment.info.clone()).collect();
    let body = EventBody::PromptQueued {
        prompt: prompt.id.clone(),
        text: text.clone(),
        author: prompt.author.name.clone(),
        attachments: attachments.clone(),
    };
    let seq = target.append(prompt.at, None, body);
    sqlx::query(
        "INSERT INTO prompts (id, session, text, author_name, author_email, agent, model, effort,
         attachments, status, position, seq, created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'queued',
                 (SELECT COALESCE(MAX(position), 0) + 1 FROM prompts WHERE session = $2), $10, $11)",
    )
    .bind(prompt.id.to_string())
    .bind(target.session.to_string())
    .bind(text)
    .bind(prompt.author.name)
    .bind(prompt.author.email)
    .bind(prompt.agent.map(|agent| agent.to_string()))
    .bind(prompt.model.map(String::from))
    .bind(prompt.effort.map(Effort::as_str))
    .bind(to_json(&attachments))
    .bind(bigint(seq))
    .bind(prompt.at.as_millis())
    .execute(&mut *target.connection)
    .await
    .map_err(|error| StoreError::or_exists(error, format!("prompt {}", prompt.id)))?;
    for (number, attachment) in (1..).zip(prompt.attachments) {
        let sql = "INSERT INTO attachments (session, prompt, number, base64)
             VALUES ($1, $2, $3, $4)";
        let query = target.query(sql).bind(prompt.id.to_string()).bind(bigint(number));
        target.execute(query.bind(attachment.base64)).await?;
    }
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
        Ok(1) => {}
        Ok(_) => {
            return Err(StoreError::missing(format!("{} prompt {prompt}", to_enum_name(&from))));
        }
        Err(error) => return Err(StoreError::or_exists(error, "another dispatched prompt")),
    }
    if to == PromptStatus::Cancelled {
        // No model sees its images any more.
        let query = target.query("DELETE FROM attachments WHERE session = $1 AND prompt = $2");
        target.execute(query.bind(prompt.to_string())).await?;
    }
    Ok(())
}

/// Gives the prompts that have not run yet the session's present agent, model and effort, before
/// the session gets others.
pub(crate) async fn keep_options(target: &mut Target<'_>) -> Result<(), StoreError> {
    let query = target.query(
        "UPDATE prompts SET
             agent = COALESCE(agent, (SELECT agent FROM sessions WHERE id = $1)),
             model = COALESCE(model, (SELECT model FROM sessions WHERE id = $1)),
             effort = COALESCE(effort, (SELECT effort FROM sessions WHERE id = $1))
         WHERE session = $1 AND status IN ('queued', 'dispatched')",
    );
    target.execute(query).await?;
    Ok(())
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
