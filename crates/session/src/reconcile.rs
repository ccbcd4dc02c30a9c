//! Startup reconciliation between the store and the provider. Orphaned sandboxes and snapshots are
//! removed; a missing snapshot becomes a warning on its session. Standalone sandboxes, their
//! snapshots and anything of another store are left alone. Stale mounts and cgroups are cleared by
//! the zygote when it starts.

use std::{collections::HashSet, sync::Arc, time::Duration};

use harvest_proto::{
    EventBody, SandboxId, SessionId, SnapshotId,
    api::{SandboxOwner, Snapshot, SnapshotOwner},
};
use harvest_store::{Removal, StoreError};
use tokio::sync::Notify;

use crate::{
    context::Shared, driver::event, error::SessionError, error_chain::error_chain, jobs::Job,
    sandboxes::Snapshots, wall_clock::now,
};

const STORE_NAME: &str = "store_name";

// The first requests after a start come first.
const SNAPSHOTS_DELAY: Duration = Duration::from_secs(2);

/// The provider's orphaned sandboxes when the server started.
pub(crate) struct Reconcile {
    orphans: Vec<SandboxId>,
    /// Whether the sandboxes and snapshots belong to this store.
    ours: bool,
}

impl Reconcile {
    /// Lists the provider's sandboxes before any session resumes, so that new ones never look
    /// orphaned.
    pub(crate) async fn begin(shared: &Shared) -> Result<Self, SessionError> {
        let sandboxes = shared.sandboxes.provider.list().await?.into_iter();
        let sandboxes = sandboxes.filter(|listed| listed.owner == SandboxOwner::Session);
        let mut owned = shared.store.session_sandboxes().await?;
        owned.extend(shared.pool.sandboxes().await?);
        let orphans = sandboxes.map(|listed| listed.id).filter(|id| !owned.contains(id)).collect();
        let ours = match shared.sandboxes.provider.snapshots() {
            Some(snapshots) => belongs_to_this_store(shared, snapshots).await?,
            None => true,
        };
        Ok(Self { orphans, ours })
    }

    /// Removes orphaned sandboxes, and starts the comparison of snapshots.
    pub(crate) async fn finish(self, shared: &Arc<Shared>) -> Result<(), SessionError> {
        let Self { orphans, ours } = self;
        if !ours {
            tracing::warn!(
                "this home has sandboxes and snapshots of another store; they are left alone"
            );
        }
        let orphans = if ours { orphans } else { Vec::new() };
        for sandbox in &orphans {
            if let Err(error) = shared.sandboxes.provider.remove(sandbox).await {
                tracing::warn!(%sandbox, error = error_chain(&error), "cannot remove an orphaned sandbox");
            }
        }
        // Only after the orphans are removed: their sandboxes may use these snapshots.
        for snapshot in shared.store.build_unfinished().await? {
            shared
                .store
                .build_fail(shared.lease, &snapshot, ("the server was restarted", ""), now())
                .await?;
        }
        let restarted = "the server was restarted";
        shared.store.verification_end_unfinished(shared.lease, restarted, now()).await?;
        tracing::info!(sandboxes = orphans.len(), "reconciled sandboxes with the store");
        // In the background: it takes as long as the home has snapshots.
        let job = Job { name: "reconcile", period: None, wake: Arc::new(Notify::new()) };
        let context = Arc::clone(shared);
        job.spawn(&shared.tasks, move || {
            let shared = Arc::clone(&context);
            async move {
                tokio::time::sleep(SNAPSHOTS_DELAY).await;
                if ours {
                    shared.artifacts.remove_orphans(&shared.store).await;
                }
                Ok(reconcile_snapshots(&shared, ours).await?)
            }
        });
        Ok(())
    }
}

/// Removes orphaned snapshots and reports missing ones. Sessions may run meanwhile: a snapshot that
/// is taken or removed during the comparison is neither orphaned nor missing.
async fn reconcile_snapshots(shared: &Shared, ours: bool) -> Result<(), SessionError> {
    let Some(snapshots) = shared.sandboxes.provider.snapshots() else { return Ok(()) };
    // Read before `stored`, so that a snapshot missing there did exist.
    let mut known = shared.store.snapshot_all().await?;
    let stored: HashSet<SnapshotId> = snapshots.ids().await?.into_iter().collect();
    // This provider cannot know the snapshots of another one's sessions.
    let elsewhere = shared.store.session_elsewhere(shared.sandboxes.provider.name()).await?;
    known.retain(|(session, _)| !elsewhere.contains(session));
    // Read after `stored`: the name of a snapshot is stored before the snapshot exists.
    let referenced = referenced_snapshots(shared).await?;
    let Difference { orphaned, missing, back } = compare(known, &referenced, &stored);
    let orphaned = if ours { of_sessions(snapshots, orphaned).await? } else { Vec::new() };
    let counts = (orphaned.len(), missing.len(), back.len());
    if !orphaned.is_empty() {
        let removals = orphaned.into_iter().map(Removal::Snapshot).collect();
        shared.store.removal_add(shared.lease, removals, now()).await?;
        shared.removals.wake.notify_one();
    }
    for (session, snapshot) in missing {
        report_missing(shared, &session, &snapshot).await?;
    }
    for (session, snapshot) in back {
        shared.store.snapshot_gone(&session, shared.lease, &snapshot, false).await?;
    }
    let (snapshots, missing, back) = counts;
    tracing::info!(snapshots, missing, back, "reconciled snapshots with the store");
    Ok(())
}

/// Leaves out the snapshots that belong to users, to which the store never refers.
async fn of_sessions(
    snapshots: &dyn Snapshots,
    unreferenced: Vec<SnapshotId>,
) -> Result<Vec<SnapshotId>, SessionError> {
    let mut orphaned = Vec::new();
    for id in unreferenced {
        let found = snapshots.find(&id).await?;
        if found.is_some_and(|stored| stored.owner == SnapshotOwner::Session) {
            orphaned.push(id);
        }
    }
    Ok(orphaned)
}

/// Every snapshot in use, including ones still to be taken. A snapshot moves from a driver's state
/// to the table in one transaction, so the states are read first, and so are those that a request
/// takes.
async fn referenced_snapshots(shared: &Shared) -> Result<HashSet<SnapshotId>, SessionError> {
    let mut referenced = shared.pending_snapshots.all();
    shared.store.session_each_state(|state| referenced.extend(mentioned_snapshots(state))).await?;
    referenced.extend(shared.store.snapshot_of_builds().await?);
    referenced.extend(shared.store.verification_snapshots().await?);
    referenced.extend(shared.store.snapshot_ids().await?);
    Ok(referenced)
}

/// The differences between the store and the provider.
#[derive(Debug, Default, PartialEq, Eq)]
struct Difference {
    /// Stored by the provider, unknown to the store; users' own snapshots, too.
    orphaned: Vec<SnapshotId>,
    /// Known to the store, not stored by the provider.
    missing: Vec<(SessionId, Snapshot)>,
    /// Was missing, stored again.
    back: Vec<(SessionId, SnapshotId)>,
}

fn compare(
    known: Vec<(SessionId, Snapshot)>,
    referenced: &HashSet<SnapshotId>,
    stored: &HashSet<SnapshotId>,
) -> Difference {
    let mut difference = Difference::default();
    for (session, snapshot) in known {
        match (stored.contains(&snapshot.id), snapshot.gone) {
            (false, false) => difference.missing.push((session, snapshot)),
            (true, true) => difference.back.push((session, snapshot.id)),
            _ => {}
        }
    }
    difference.orphaned = stored.difference(referenced).cloned().collect();
    difference
}

/// The snapshot ids in a driver's serialized state.
fn mentioned_snapshots(driver_state: &str) -> impl Iterator<Item = SnapshotId> + '_ {
    let is_id_char = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    driver_state.split(move |letter| !is_id_char(letter)).filter_map(|word| word.parse().ok())
}

async fn belongs_to_this_store(
    shared: &Shared,
    snapshots: &dyn Snapshots,
) -> Result<bool, SessionError> {
    let name = shared.store.meta_claim(STORE_NAME, SessionId::random().part()).await?;
    Ok(snapshots.claim_for_store(&name).await?)
}

async fn report_missing(
    shared: &Shared,
    session: &SessionId,
    snapshot: &Snapshot,
) -> Result<(), SessionError> {
    if !shared.store.snapshot_gone(session, shared.lease, &snapshot.id, true).await? {
        // Retention or a deletion was faster.
        return Ok(());
    }
    let of = match snapshot.turn {
        Some(0) => "the session's start".to_owned(),
        Some(turn) => format!("turn {turn}"),
        None => "a pause".to_owned(),
    };
    let message = format!(
        "the snapshot of {of} ({}) is no longer on this machine; it cannot be restored or forked",
        snapshot.id
    );
    let event = event(now(), None, EventBody::Warning { message });
    match shared.store.session_commit(session, shared.lease, now(), vec![event]).await {
        Ok(_) | Err(StoreError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::{Timestamp, event::SnapshotKind};

    use super::*;

    fn snapshot(id: &SnapshotId, gone: bool) -> (SessionId, Snapshot) {
        let (kind, created_at) = (SnapshotKind::Turn, Timestamp::from_millis(0));
        (
            SessionId::random(),
            Snapshot {
                id: id.clone(),
                kind,
                turn: Some(1),
                name: None,
                pinned: false,
                gone,
                durable: true,
                created_at,
            },
        )
    }

    #[test]
    fn orphaned_missing_and_returned_snapshots_are_distinguished() {
        let ids: Vec<SnapshotId> = (0..5).map(|_| SnapshotId::random()).collect();
        let [fine, lost, back, orphan, pending] = &ids[..] else { unreachable!() };
        let known = vec![snapshot(fine, false), snapshot(lost, false), snapshot(back, true)];
        let all: HashSet<_> = [fine, lost, back, pending].into_iter().cloned().collect();
        let stored = [fine, back, orphan, pending].into_iter().cloned().collect();
        let found = compare(known, &all, &stored);
        assert_eq!(found.orphaned, std::slice::from_ref(orphan));
        assert_eq!(found.missing.iter().map(|(_, one)| &one.id).collect::<Vec<_>>(), [lost]);
        assert_eq!(found.back.iter().map(|(_, one)| one).collect::<Vec<_>>(), [back]);
    }

    #[test]
    fn snapshot_ids_are_found_in_driver_state() {
        let (one, two) = (SnapshotId::random(), SnapshotId::random());
        let json = format!(r#"{{"disk":"{one}","sandbox":{{"new":["{two}"]}},"other":"snp_"}}"#);
        assert_eq!(mentioned_snapshots(&json).collect::<Vec<_>>(), [one, two]);
    }
}
