//! Sessions: one row each, which also numbers the session's events.

mod delete;
mod list;
mod update;

use std::collections::BTreeMap;

use harvest_proto::{
    AgentName, BranchName, Effort, ModelRef, Money, NetworkPolicy, RepositoryName, SandboxId,
    SessionId, Timestamp,
    api::{PullRequestMode, Session, SessionRepository, SessionState},
    bridge::Author,
    repository_name::WORKSPACE,
};

use crate::{
    DbConnection, DbPool, DbRow, Store, StoreError,
    checkouts::{self, CheckoutRecord, NewCheckout},
    row::{self, replace_nul, to_enum_name, to_json},
};

pub use list::{SessionCursor, SessionFilter, SessionPage, SessionSummary};
pub use update::DriverState;
pub(crate) use update::{
    advance, set_agent, set_agent_info, set_diff, set_driver_state, set_effort, set_model,
    set_position, set_title,
};

#[derive(Debug, Clone, PartialEq)]
pub struct NewSession {
    pub id: SessionId,
    pub title: String,
    /// The primary checkout first.
    pub checkouts: Vec<NewCheckout>,
    pub branch: BranchName,
    pub agent: AgentName,
    pub model: Option<ModelRef>,
    pub effort: Option<Effort>,
    pub network: NetworkPolicy,
    /// The name of the provider that runs its sandbox.
    pub provider: String,
    pub author: Author,
    /// The agent's id of the conversation.
    pub conversation: String,
    pub forked_from: Option<SessionId>,
    pub forked_turn: Option<u32>,
    pub key: Option<SessionKey>,
    pub env: BTreeMap<String, String>,
    /// The agent may not ask the user.
    pub no_questions: bool,
    /// The pull request that the session is to have; the server's setting when absent.
    pub pr_mode: Option<PullRequestMode>,
    pub at: Timestamp,
}

/// A user's name for a session that they created. Different users may use the same text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionKey {
    /// The e-mail address of the user.
    pub owner: String,
    pub text: String,
}

impl SessionKey {
    /// Users are the same whatever the case of their address.
    pub(crate) fn owner_column(&self) -> String {
        self.owner.to_ascii_lowercase()
    }
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
    pub driver_state: String,
    /// Size of the session's events.
    pub history_bytes: u64,
    pub env: BTreeMap<String, String>,
    /// The agent may not ask the user.
    pub no_questions: bool,
}

impl SessionRecord {
    /// Path in the sandbox of the folder that the agent works in.
    #[must_use]
    pub fn work_folder(&self) -> String {
        self.checkouts.first().map_or_else(|| WORKSPACE.to_owned(), |first| first.folder.path())
    }
}

// The diff is left out: it may be a megabyte, and lists do not show it.
const SELECT: &str = "SELECT s.id, s.title, s.state, s.reason, s.position, s.repository, s.branch, s.agent, s.model, \
     s.effort, s.network, s.provider, s.author_name, s.author_email, s.conversation, s.sandbox, s.epoch, s.snapshot, s.forked_from, \
     s.forked_turn, s.key, s.env, s.no_questions, s.pr_mode, s.driver_state, s.input_tokens, s.output_tokens, \
     s.cache_read_tokens, s.cache_write_tokens, s.next_seq, s.history_bytes, s.created_at, s.last_activity, \
     (SELECT info FROM agent_infos a WHERE a.session = s.id) AS agent_info, \
     (SELECT COUNT(*) FROM turns t WHERE t.session = s.id) AS turns, \
     (SELECT COUNT(*) FROM prompts p WHERE p.session = s.id AND p.status = 'queued') AS queued, \
     b.budget, COALESCE(b.spent, 0) AS spent \
     FROM sessions s LEFT JOIN budgets b ON b.owner = 'session:' || s.id ";

impl Store {
    pub async fn session_get(&self, session: &SessionId) -> Result<SessionRecord, StoreError> {
        let row = sqlx::query(sqlx::AssertSqlSafe(format!("{SELECT} WHERE s.id = $1")))
            .bind(session.to_string())
            .fetch_optional(&self.readers)
            .await?
            .ok_or_else(|| StoreError::missing(format!("session {session}")))?;
        let mut record = read(&row)?;
        load_checkouts(&self.readers, std::slice::from_mut(&mut record)).await?;
        Ok(record)
    }

    pub async fn session_exists(&self, session: &SessionId) -> Result<bool, StoreError> {
        let row = sqlx::query("SELECT 1 AS found FROM sessions WHERE id = $1")
            .bind(session.to_string())
            .fetch_optional(&self.readers)
            .await?;
        Ok(row.is_some())
    }

    pub async fn session_author(&self, session: &SessionId) -> Result<Author, StoreError> {
        let query = sqlx::query("SELECT author_name, author_email FROM sessions WHERE id = $1")
            .bind(session.to_string());
        let found = self.optional(query, row::author).await?;
        found.ok_or_else(|| StoreError::missing(format!("session {session}")))
    }

    /// Size of a session's events; `None` when there is no such session.
    pub async fn session_history_bytes(
        &self,
        session: &SessionId,
    ) -> Result<Option<u64>, StoreError> {
        let query = sqlx::query("SELECT history_bytes FROM sessions WHERE id = $1");
        let query = query.bind(session.to_string());
        self.optional(query, |row| row::count(row, "history_bytes")).await
    }

    pub async fn session_by_key(&self, key: &SessionKey) -> Result<Option<SessionId>, StoreError> {
        let query = sqlx::query("SELECT id FROM sessions WHERE key_owner = $1 AND key = $2")
            .bind(key.owner_column())
            .bind(key.text.clone());
        self.optional(query, |row| row::parsed(row, "id")).await
    }

    /// The session's changes as a diff, as last stored.
    pub async fn session_diff(&self, session: &SessionId) -> Result<Option<String>, StoreError> {
        let query = sqlx::query(
            "SELECT d.text FROM sessions s LEFT JOIN diffs d ON d.session = s.id WHERE s.id = $1",
        )
        .bind(session.to_string());
        let found = self.optional(query, |row| row::optional(row, "text")).await?;
        found.ok_or_else(|| StoreError::missing(format!("session {session}")))
    }
}

pub(crate) async fn insert(
    connection: &mut DbConnection,
    new: NewSession,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO sessions (id, title, state, reason, repository, branch, agent, model, network,
         author_name, author_email, conversation, forked_from, forked_turn, key, env, provider,
         no_questions, effort, driver_state, created_at, last_activity, pr_mode, key_owner)
         VALUES ($1, $2, $3, 'created', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17,
         $18, '', $19, $19, $20, $21)",
    )
    .bind(new.id.to_string())
    .bind(replace_nul(new.title))
    .bind(to_enum_name(&SessionState::Queued))
    .bind(new.checkouts.first().map(|first| first.repository.to_string()))
    .bind(String::from(new.branch))
    .bind(new.agent.as_str())
    .bind(new.model.map(String::from))
    .bind(new.network.as_str())
    .bind(new.author.name)
    .bind(new.author.email)
    .bind(new.conversation)
    .bind(new.forked_from.map(|id| id.to_string()))
    .bind(new.forked_turn.map(i64::from))
    .bind(new.key.as_ref().map(|key| key.text.clone()))
    .bind(to_json(&new.env))
    .bind(new.provider)
    .bind(i64::from(new.no_questions))
    .bind(new.effort.map(Effort::as_str))
    .bind(new.at.as_millis())
    .bind(new.pr_mode.map(PullRequestMode::as_str))
    .bind(new.key.as_ref().map(SessionKey::owner_column))
    .execute(&mut *connection)
    .await
    .map_err(|error| StoreError::or_exists(error, format!("session {}", new.id)))?;
    checkouts::insert(connection, &new.id, new.checkouts).await
}

/// Everything but the checkouts.
fn read(row: &DbRow) -> Result<SessionRecord, StoreError> {
    let next_seq: u64 = row::count(row, "next_seq")?;
    let env: BTreeMap<String, String> = row::json(row, "env")?;
    let repository: Option<RepositoryName> = row::parsed_optional(row, "repository")?;
    let session = Session {
        id: row::parsed(row, "id")?,
        key: row::optional(row, "key")?,
        title: row::text(row, "title")?,
        state: row::enum_name(row, "state")?,
        reason: row::parsed(row, "reason")?,
        position: row::count_optional(row, "position")?,
        repo_owner: repository.as_ref().map(|name| name.owner().to_owned()),
        repo_name: repository.as_ref().map(|name| name.name().to_owned()),
        repository,
        repositories: Vec::new(),
        branch: row::parsed(row, "branch")?,
        agent: row::parsed(row, "agent")?,
        model: row::parsed_optional(row, "model")?,
        effort: row::parsed_optional(row, "effort")?,
        agent_info: row::json_optional(row, "agent_info")?,
        network: row::parsed(row, "network")?,
        provider: row::text(row, "provider")?,
        author: row::author(row)?,
        sandbox: row::parsed_optional::<SandboxId>(row, "sandbox")?,
        epoch: row::count(row, "epoch")?,
        snapshot_id: row::parsed_optional(row, "snapshot")?,
        forked_from: row::parsed_optional(row, "forked_from")?,
        forked_turn: row::count_optional(row, "forked_turn")?,
        env: env.keys().cloned().collect(),
        turns: row::count(row, "turns")?,
        queued: row::count(row, "queued")?,
        usage: row::usage(row)?,
        budget_micros: row::count_optional(row, "budget")?.map(Money::from_micros),
        spent_micros: Money::from_micros(row::count(row, "spent")?),
        pr_mode: row::parsed_optional(row, "pr_mode")?,
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
        driver_state: row::text(row, "driver_state")?,
        history_bytes: row::count(row, "history_bytes")?,
        env,
        no_questions: row::count::<i64>(row, "no_questions")? != 0,
    })
}

/// Loads the checkouts and pull requests of sessions.
async fn load_checkouts(readers: &DbPool, records: &mut [SessionRecord]) -> Result<(), StoreError> {
    let ids: Vec<SessionId> = records.iter().map(|record| record.session.id.clone()).collect();
    let mut loaded = checkouts::load(readers, &ids).await?;
    for record in records {
        let session = &mut record.session;
        for checkout in loaded.remove(&session.id).unwrap_or_default() {
            session.repositories.push(SessionRepository {
                name: checkout.record.repository.clone(),
                folder: checkout.record.folder.path(),
                url: checkout.url,
                base: checkout.record.base.clone(),
                branch: session.branch.clone(),
                pr: checkout.pull_request,
            });
            record.checkouts.push(checkout.record);
        }
        let first = session.repositories.iter().find_map(|shown| shown.pr.as_ref());
        session.pr_number = first.map(|pull_request| pull_request.number);
        session.pr_url = first.map(|pull_request| pull_request.url.clone());
    }
    Ok(())
}
