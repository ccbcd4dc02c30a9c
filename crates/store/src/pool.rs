//! The warm pool: sandboxes that wait for a session. A row is written before its sandbox exists. It
//! is deleted in the transaction that inserts the session, or before the sandbox is removed, so a
//! sandbox never belongs to two.

use std::collections::BTreeMap;

use harvest_proto::{AgentName, Effort, ModelRef, RepositoryName, SandboxId, SessionId, Timestamp};

use crate::{
    DbRow, Lease, Store, StoreError,
    reserve::OnFullDisk,
    row::{self, to_json},
    target::Target,
};

/// A sandbox of the pool, and what is decided of the session that will take it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolMember {
    /// The id of that session.
    pub session: SessionId,
    pub sandbox: SandboxId,
    pub repository: RepositoryName,
    /// The agent's id of the conversation.
    pub conversation: String,
    /// What the sandbox was started with, as JSON; a session that would start with the same can
    /// take it.
    pub spec: String,
    /// The agent has started.
    pub ready: bool,
    /// What the sandbox started without; known once it is ready.
    pub warnings: Vec<String>,
    pub created_at: Timestamp,
}

/// The agent of a session, as its creator chose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentChoice {
    pub agent: AgentName,
    pub model: Option<ModelRef>,
    pub effort: Option<Effort>,
    pub no_questions: bool,
}

impl Store {
    /// All members, oldest first.
    pub async fn pool_list(&self) -> Result<Vec<PoolMember>, StoreError> {
        let query = sqlx::query(
            "SELECT session, sandbox, repository, conversation, spec, ready, warnings, created_at
             FROM pool_members ORDER BY created_at, session",
        );
        self.all(query, read).await
    }

    pub async fn pool_insert(&self, lease: Lease, member: &PoolMember) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO pool_members
             (session, sandbox, repository, conversation, spec, ready, warnings, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(member.session.to_string())
        .bind(member.sandbox.to_string())
        .bind(member.repository.to_string())
        .bind(member.conversation.clone())
        .bind(member.spec.clone())
        .bind(i64::from(member.ready))
        .bind(to_json(&member.warnings))
        .bind(member.created_at.as_millis());
        self.writer.execute_on(OnFullDisk::Refuse, Some(lease), query).await.map(drop)
    }

    /// The agent of a member has started, whose sandbox started with these warnings; false when
    /// there is no such member any more.
    pub async fn pool_ready(
        &self,
        lease: Lease,
        session: &SessionId,
        warnings: &[String],
    ) -> Result<bool, StoreError> {
        let query =
            sqlx::query("UPDATE pool_members SET ready = 1, warnings = $2 WHERE session = $1")
                .bind(session.to_string())
                .bind(to_json(&warnings));
        Ok(self.writer.execute(Some(lease), query).await? > 0)
    }

    /// Takes a member out of the pool, also on a full disk, so that no session can take it; false
    /// when one has.
    pub async fn pool_delete(&self, lease: Lease, session: &SessionId) -> Result<bool, StoreError> {
        let query =
            sqlx::query("DELETE FROM pool_members WHERE session = $1").bind(session.to_string());
        Ok(self.writer.execute_on(OnFullDisk::UseReserve, Some(lease), query).await? > 0)
    }

    /// The agent of the newest session of each repository, of sessions created since then. Only a
    /// session's first repository counts.
    pub async fn pool_choices(
        &self,
        since: Timestamp,
    ) -> Result<BTreeMap<RepositoryName, AgentChoice>, StoreError> {
        let query = sqlx::query(
            "SELECT c.repository, s.agent, s.model, s.effort, s.no_questions FROM sessions s
             JOIN checkouts c ON c.session = s.id AND c.position = 0
             WHERE s.created_at >= $1 ORDER BY s.created_at, s.id",
        )
        .bind(since.as_millis());
        let choice = |row: &DbRow| {
            let choice = AgentChoice {
                agent: row::parsed(row, "agent")?,
                model: row::parsed_optional(row, "model")?,
                effort: row::parsed_optional(row, "effort")?,
                no_questions: row::count::<u8>(row, "no_questions")? > 0,
            };
            Ok((row::parsed(row, "repository")?, choice))
        };
        // Later rows replace earlier ones.
        let all: Vec<_> = self.all(query, choice).await?;
        Ok(all.into_iter().collect())
    }
}

/// Takes the member for the session that this transaction inserts.
pub(crate) async fn claim(target: &mut Target<'_>) -> Result<(), StoreError> {
    let query = target.query("DELETE FROM pool_members WHERE session = $1 AND ready = 1");
    match target.execute(query).await? {
        0 => Err(StoreError::missing(format!("pool member {}", target.session))),
        _ => Ok(()),
    }
}

fn read(row: &DbRow) -> Result<PoolMember, StoreError> {
    Ok(PoolMember {
        session: row::parsed(row, "session")?,
        sandbox: row::parsed(row, "sandbox")?,
        repository: row::parsed(row, "repository")?,
        conversation: row::text(row, "conversation")?,
        spec: row::text(row, "spec")?,
        ready: row::count::<u8>(row, "ready")? > 0,
        warnings: row::json(row, "warnings")?,
        created_at: row::time(row, "created_at")?,
    })
}
