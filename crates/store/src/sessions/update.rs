//! Updates of a session's row and of its diff, as part of a commit.

use harvest_proto::{
    AgentName, Effort, ModelRef, SandboxId, SnapshotId, StateReason, Timestamp,
    api::{AgentInfo, SessionState},
};

use crate::{
    StoreError,
    events::HISTORY_BYTES,
    row::{bigint, replace_nul, to_enum_name, to_json},
    target::Target,
};

/// The driver's state and the columns derived from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverState {
    /// The complete state as JSON.
    pub json: String,
    /// State of the session as users see it.
    pub state: SessionState,
    pub reason: StateReason,
    pub sandbox: Option<SandboxId>,
    pub epoch: u64,
    pub snapshot: Option<SnapshotId>,
    /// The session has no sandbox and nothing to do by itself; its queue is not considered.
    pub resting: bool,
}

pub(crate) async fn set_driver_state(
    target: &mut Target<'_>,
    new: DriverState,
) -> Result<(), StoreError> {
    let query = target.query(
        "UPDATE sessions SET driver_state = $2, state = $3, reason = $4, sandbox = $5, epoch = $6, snapshot = $7,
         resting = $8 WHERE id = $1 AND epoch <= $6",
    )
    .bind(new.json)
    .bind(to_enum_name(&new.state))
    .bind(new.reason.as_str())
    .bind(new.sandbox.map(|id| id.to_string()))
    .bind(bigint(new.epoch))
    .bind(new.snapshot.map(|id| id.to_string()))
    .bind(i64::from(new.resting));
    target.execute(query).await.map(drop)
}

pub(crate) async fn set_position(
    target: &mut Target<'_>,
    position: Option<u32>,
) -> Result<(), StoreError> {
    let query = target
        .query("UPDATE sessions SET position = $2 WHERE id = $1")
        .bind(position.map(i64::from));
    target.execute(query).await.map(drop)
}

pub(crate) async fn set_title(target: &mut Target<'_>, title: String) -> Result<(), StoreError> {
    set_text(target, "UPDATE sessions SET title = $2 WHERE id = $1", title).await
}

pub(crate) async fn set_agent(target: &mut Target<'_>, agent: AgentName) -> Result<(), StoreError> {
    set_text(target, "UPDATE sessions SET agent = $2 WHERE id = $1", agent.to_string()).await
}

pub(crate) async fn set_model(target: &mut Target<'_>, model: ModelRef) -> Result<(), StoreError> {
    set_text(target, "UPDATE sessions SET model = $2 WHERE id = $1", model.into()).await
}

pub(crate) async fn set_effort(target: &mut Target<'_>, effort: Effort) -> Result<(), StoreError> {
    set_text(target, "UPDATE sessions SET effort = $2 WHERE id = $1", effort.to_string()).await
}

// Not a column of `sessions`: that row is rewritten with every event, and a diff may be long.
pub(crate) async fn set_diff(target: &mut Target<'_>, diff: String) -> Result<(), StoreError> {
    let sql = "INSERT INTO diffs (session, text) VALUES ($1, $2)
         ON CONFLICT (session) DO UPDATE SET text = excluded.text";
    set_text(target, sql, diff).await
}

// Not a column of `sessions` for the same reason.
pub(crate) async fn set_agent_info(
    target: &mut Target<'_>,
    info: &AgentInfo,
) -> Result<(), StoreError> {
    let sql = "INSERT INTO agent_infos (session, info) VALUES ($1, $2)
         ON CONFLICT (session) DO UPDATE SET info = excluded.info";
    set_text(target, sql, to_json(info)).await
}

async fn set_text(
    target: &mut Target<'_>,
    sql: &'static str,
    text: String,
) -> Result<(), StoreError> {
    let query = target.query(sql).bind(replace_nul(text));
    target.execute(query).await.map(drop)
}

/// Stores the number of the next event and the time of the commit.
pub(crate) async fn advance(target: &mut Target<'_>, at: Timestamp) -> Result<(), StoreError> {
    let query = target
        .query(sqlx::AssertSqlSafe(format!(
            "UPDATE sessions SET history_bytes = {HISTORY_BYTES}, next_seq = $2,
         last_activity = CASE WHEN last_activity > $3 THEN last_activity ELSE $3 END WHERE id = $1"
        )))
        .bind(bigint(target.next_seq))
        .bind(at.as_millis());
    target.execute(query).await.map(drop)
}
