//! The network log: counts of a session's connections by turn, name, port and verdict.

use harvest_proto::{NetworkVerdict, SessionId, Timestamp, TrafficCount, api::NetworkLogEntry};

use crate::{
    DbRow, Store, StoreError,
    row::{self, bounded},
    target::Target,
};

// A sandbox chooses the names; those beyond the limits share one entry per turn and verdict.
// Refused ones, which cost nothing, must not hide those that it connects to.
const MAX_ALLOWED: i64 = 1500;
const MAX_REFUSED: i64 = 500;
const OTHERS: &str = "*";

impl Store {
    /// The network log of a session, by turn, then by name.
    pub async fn network_log(
        &self,
        session: &SessionId,
    ) -> Result<Vec<NetworkLogEntry>, StoreError> {
        let query = sqlx::query(
            "SELECT turn, name, port, verdict, connections, sent, received, first_at, last_at
             FROM network_log WHERE session = $1 ORDER BY turn, name, port, verdict",
        )
        .bind(session.to_string());
        self.all(query, read).await
    }
}

/// Adds counts to the log.
pub(crate) async fn add(
    target: &mut Target<'_>,
    at: Timestamp,
    counts: Vec<TrafficCount>,
) -> Result<(), StoreError> {
    let turns = recent_turns(target, &counts).await?;
    let mut allowed = MAX_ALLOWED - entries(target, NetworkVerdict::Allowed).await?;
    let mut refused = MAX_REFUSED - entries(target, NetworkVerdict::Refused).await?;
    for mut count in counts {
        let turn = turns.iter().find(|turn| turn.contains(count.at)).map_or(0, |turn| turn.number);
        let (room, may_be_known) = match count.verdict {
            NetworkVerdict::Allowed => (&mut allowed, true),
            NetworkVerdict::Refused => (&mut refused, false),
        };
        if *room <= 0 && !(may_be_known && is_known(target, turn, &count).await?) {
            (count.name, count.port) = (OTHERS.to_owned(), 0);
        }
        *room -= 1;
        upsert(target, turn, at, count).await?;
    }
    Ok(())
}

async fn entries(target: &mut Target<'_>, verdict: NetworkVerdict) -> Result<i64, StoreError> {
    let query = target
        .query("SELECT COUNT(*) AS entries FROM network_log WHERE session = $1 AND verdict = $2")
        .bind(verdict.as_str());
    let found = query.fetch_one(&mut *target.connection).await?;
    row::count(&found, "entries")
}

/// When a turn ran.
struct TurnSpan {
    number: u32,
    started: Timestamp,
    ended: Option<Timestamp>,
}

impl TurnSpan {
    fn contains(&self, at: Timestamp) -> bool {
        self.started <= at && self.ended.is_none_or(|ended| at <= ended)
    }
}

/// The turns that these counts may belong to, the newest first. A turn may have ended since.
async fn recent_turns(
    target: &mut Target<'_>,
    counts: &[TrafficCount],
) -> Result<Vec<TurnSpan>, StoreError> {
    let Some(first) = counts.iter().map(|count| count.at).min() else { return Ok(Vec::new()) };
    let found = target
        .query(
            "SELECT number, started_at, ended_at FROM turns
             WHERE session = $1 AND (ended_at IS NULL OR ended_at >= $2) ORDER BY number DESC",
        )
        .bind(first.as_millis())
        .fetch_all(&mut *target.connection)
        .await?;
    let span = |row: &DbRow| {
        Ok(TurnSpan {
            number: row::count(row, "number")?,
            started: row::time(row, "started_at")?,
            ended: row::time_optional(row, "ended_at")?,
        })
    };
    found.iter().map(span).collect()
}

async fn is_known(
    target: &mut Target<'_>,
    turn: u32,
    count: &TrafficCount,
) -> Result<bool, StoreError> {
    let found = sqlx::query(
        "SELECT turn FROM network_log
         WHERE session = $1 AND turn = $2 AND name = $3 AND port = $4 AND verdict = $5",
    )
    .bind(target.session.to_string())
    .bind(i64::from(turn))
    .bind(count.name.clone())
    .bind(i64::from(count.port))
    .bind(count.verdict.as_str())
    .fetch_optional(&mut *target.connection)
    .await?;
    Ok(found.is_some())
}

async fn upsert(
    target: &mut Target<'_>,
    turn: u32,
    at: Timestamp,
    count: TrafficCount,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO network_log (session, turn, name, port, verdict, connections, sent, received,
             first_at, last_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
         ON CONFLICT (session, turn, name, port, verdict) DO UPDATE SET
             connections = network_log.connections + excluded.connections,
             sent = network_log.sent + excluded.sent,
             received = network_log.received + excluded.received, last_at = excluded.last_at",
    )
    .bind(target.session.to_string())
    .bind(i64::from(turn))
    .bind(count.name)
    .bind(i64::from(count.port))
    .bind(count.verdict.as_str())
    .bind(bounded(count.connections))
    .bind(bounded(count.sent))
    .bind(bounded(count.received))
    .bind(count.at.as_millis())
    .bind(at.as_millis())
    .execute(&mut *target.connection)
    .await?;
    Ok(())
}

fn read(row: &DbRow) -> Result<NetworkLogEntry, StoreError> {
    Ok(NetworkLogEntry {
        turn: row::count(row, "turn")?,
        name: row::text(row, "name")?,
        port: row::count(row, "port")?,
        verdict: row::parsed(row, "verdict")?,
        connections: row::count(row, "connections")?,
        sent: row::count(row, "sent")?,
        received: row::count(row, "received")?,
        first_at: row::time(row, "first_at")?,
        last_at: row::time(row, "last_at")?,
    })
}
