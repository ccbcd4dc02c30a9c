//! Sessions that agents created: the session that created each, and the one at the root.

use harvest_proto::SessionId;

use crate::{DbRow, Store, StoreError, row, target::Target};

/// Where a session created by an agent comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lineage {
    /// The session whose agent created it.
    pub parent: SessionId,
    /// The session at the root, which a user created.
    pub root: SessionId,
}

/// The sessions below a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildCounts {
    pub all: u64,
    /// Those with work to do.
    pub active: u64,
}

impl Store {
    /// The lineage of a session; `None` for one that no agent created.
    pub async fn child_lineage(&self, session: &SessionId) -> Result<Option<Lineage>, StoreError> {
        let query = sqlx::query("SELECT parent, root FROM child_sessions WHERE session = $1")
            .bind(session.to_string());
        let read = |row: &DbRow| {
            Ok(Lineage { parent: row::parsed(row, "parent")?, root: row::parsed(row, "root")? })
        };
        self.optional(query, read).await
    }

    /// Counts the sessions below a root.
    pub async fn child_counts(&self, root: &SessionId) -> Result<ChildCounts, StoreError> {
        let query = sqlx::query(
            "SELECT COUNT(*) AS children, CAST(COALESCE(SUM(CASE WHEN s.state IN ('queued',
             'starting', 'running', 'needs_input') THEN 1 ELSE 0 END), 0) AS BIGINT) AS active
             FROM child_sessions c JOIN sessions s ON s.id = c.session WHERE c.root = $1",
        )
        .bind(root.to_string());
        let read = |row: &DbRow| {
            Ok(ChildCounts {
                all: row::count(row, "children")?,
                active: row::count(row, "active")?,
            })
        };
        Ok(self.optional(query, read).await?.unwrap_or(ChildCounts { all: 0, active: 0 }))
    }
}

pub(crate) async fn insert(target: &mut Target<'_>, lineage: Lineage) -> Result<(), StoreError> {
    let sql = "INSERT INTO child_sessions (session, parent, root) VALUES ($1, $2, $3)";
    let query = target.query(sql).bind(lineage.parent.to_string()).bind(lineage.root.to_string());
    target.execute(query).await.map(drop)
}
