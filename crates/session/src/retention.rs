//! Retention: which sessions and snapshots are removed, and in which order. The plan is a pure
//! function of the rules, the time and the current snapshots; a periodic task applies it.
//!
//! 1. An archived session is deleted after `archived` without activity, unless one of its snapshots
//!    is pinned.
//! 2. An archived session keeps its newest snapshot and pinned ones.
//! 3. An open session keeps its newest `snapshots_per_session` snapshots and pinned ones.
//! 4. While all snapshots together take more than `snapshots_bytes`, the oldest is removed first; a
//!    snapshot whose removal frees nothing is skipped.
//!
//! The snapshot from which a session would continue is never removed while the session exists.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use harvest_proto::{
    SessionId, SnapshotId, Timestamp,
    api::{RetentionDrop, RetentionReport, SessionDiskUsage, SessionState, Snapshot},
};
use harvest_store::{SessionSummary, StoreError};
use tokio::sync::Notify;

use crate::{
    error::SessionError, history::HistoryLimits, jobs::Job, removals::Removals,
    sandboxes::SnapshotSize, wall_clock::now,
};

const INTERVAL: Duration = Duration::from_secs(600);

// The first requests after a start come first: the rules concern every snapshot.
const START_DELAY: Duration = Duration::from_secs(5);

/// The retention rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// Archived sessions are deleted after this time; `None` is never.
    pub archived: Option<Duration>,
    /// The number of snapshots an open session keeps.
    pub snapshots_per_session: usize,
    /// The most bytes all session snapshots may take together; `None` is no limit.
    pub snapshots_bytes: Option<u64>,
    /// Events that are stored; the job has nothing to do for them.
    pub history: HistoryLimits,
}

impl Default for Retention {
    fn default() -> Self {
        // With the `dir` driver a capture takes a few MB, so 100 of them are cheap.
        Self {
            archived: None,
            snapshots_per_session: 100,
            snapshots_bytes: None,
            history: HistoryLimits::default(),
        }
    }
}

/// A session and its snapshots.
#[derive(Debug, Clone)]
struct SnapshotUsage {
    session: SessionId,
    title: String,
    archived: bool,
    last_activity: Timestamp,
    /// The snapshot from which the session would continue.
    newest: Option<SnapshotId>,
    /// Oldest first.
    snapshots: Vec<Snapshot>,
}

/// The sessions and snapshots to remove, with reasons.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct RetentionPlan {
    sessions: Vec<(SessionId, &'static str)>,
    snapshots: Vec<(SessionId, SnapshotId, &'static str)>,
}

fn plan(
    rules: &Retention,
    now: Timestamp,
    usages: &[SnapshotUsage],
    disks: &[SnapshotSize],
) -> RetentionPlan {
    let mut plan = RetentionPlan::default();
    let mut kept: Vec<(&SnapshotUsage, &Snapshot)> = Vec::new();
    for usage in usages {
        let inactive = now.since(usage.last_activity);
        let pinned = usage.snapshots.iter().any(|snapshot| snapshot.pinned);
        if usage.archived && !pinned && rules.archived.is_some_and(|limit| inactive >= limit) {
            plan.sessions.push((usage.session.clone(), "archived_long_ago"));
            continue;
        }
        let (max, why) = match usage.archived {
            true => (0, "archived"),
            false => (rules.snapshots_per_session.max(1), "too_many"),
        };
        let mut extra = usage.snapshots.len().saturating_sub(max);
        for snapshot in &usage.snapshots {
            if extra > 0 && may_remove(usage, snapshot) {
                extra -= 1;
                plan.snapshots.push((usage.session.clone(), snapshot.id.clone(), why));
            } else {
                kept.push((usage, snapshot));
            }
        }
    }
    if let Some(max) = rules.snapshots_bytes {
        let over = over_quota(max, kept, disks);
        plan.snapshots
            .extend(over.into_iter().map(|(session, snapshot)| (session, snapshot, "quota")));
    }
    plan
}

fn may_remove(usage: &SnapshotUsage, snapshot: &Snapshot) -> bool {
    !snapshot.pinned && usage.newest.as_ref() != Some(&snapshot.id)
}

/// The oldest removable snapshots until the rest fits, without those that free nothing because
/// newer snapshots use the same layers.
fn over_quota(
    max: u64,
    mut kept: Vec<(&SnapshotUsage, &Snapshot)>,
    disks: &[SnapshotSize],
) -> Vec<(SessionId, SnapshotId)> {
    let layers: HashMap<&SnapshotId, &[(String, u64)]> =
        disks.iter().map(|disk| (&disk.id, &disk.layers[..])).collect();
    let layers_of = |snapshot: &Snapshot| layers.get(&snapshot.id).copied().unwrap_or_default();
    kept.sort_by_key(|(_, snapshot)| (snapshot.created_at, snapshot.id.clone()));
    let mut users: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
    for (name, bytes) in kept.iter().flat_map(|(_, snapshot)| layers_of(snapshot)) {
        users.entry(name).or_insert((*bytes, 0)).1 += 1;
    }
    let mut total: u64 = users.values().map(|(bytes, _)| bytes).sum();
    let mut removed = Vec::new();
    for (usage, snapshot) in kept {
        if total <= max {
            break;
        }
        if may_remove(usage, snapshot) {
            for (name, bytes) in layers_of(snapshot) {
                let Some((_, users)) = users.get_mut(name.as_str()) else { continue };
                *users -= 1;
                total -= if *users == 0 { *bytes } else { 0 };
            }
            removed.push((usage, snapshot));
        }
    }
    let unused = |name: &str| users.get(name).is_none_or(|(_, users)| *users == 0);
    let frees =
        |snapshot| layers_of(snapshot).iter().any(|(name, bytes)| *bytes > 0 && unused(name));
    removed.retain(|(_, snapshot)| frees(snapshot));
    let ids = |(usage, snapshot): (&SnapshotUsage, &Snapshot)| {
        (usage.session.clone(), snapshot.id.clone())
    };
    removed.into_iter().map(ids).collect()
}

/// Applies the retention rules.
pub(crate) struct RetentionEnforcer {
    pub(crate) rules: Retention,
    pub(crate) removals: Arc<Removals>,
}

impl RetentionEnforcer {
    /// Starts the periodic retention job.
    pub(crate) fn spawn(self: &Arc<Self>) {
        let job = Job { name: "retention", period: Some(INTERVAL), wake: Arc::new(Notify::new()) };
        let retention = Arc::clone(self);
        job.spawn(&self.removals.sandboxes.tasks, move || {
            let retention = Arc::clone(&retention);
            async move {
                tokio::time::sleep(START_DELAY).await;
                Ok(retention.enforce().await?)
            }
        });
    }

    /// Applies the rules once.
    pub(crate) async fn enforce(&self) -> Result<(), SessionError> {
        let rules = &self.rules;
        if rules.snapshots_bytes.is_some() {
            let (usages, disks) = load(&self.removals).await?;
            return apply(self, &plan(rules, now(), &usages, &disks)).await;
        }
        let quiet = rules.archived.map(|limit| now().before(limit));
        let most = rules.snapshots_per_session as u64;
        for session in self.removals.store.session_for_retention(quiet, most).await? {
            self.enforce_for(&session).await?;
        }
        Ok(())
    }

    /// Applies the rules to one session, without the quota of all snapshots.
    pub(crate) async fn enforce_for(&self, session: &SessionId) -> Result<(), SessionError> {
        let Removals { store, sandboxes, .. } = &*self.removals;
        let summary = match store.session_summary(session).await {
            // Damaged, which the list reports.
            Err(StoreError::Corrupt { .. }) => return Ok(()),
            summary => summary?,
        };
        // Deleted meanwhile.
        let Some(summary) = summary else { return Ok(()) };
        let snapshots = store.snapshot_list(session).await?;
        let usage = usage_of(summary, snapshots, sandboxes.provider.name());
        let rules = Retention { snapshots_bytes: None, ..self.rules.clone() };
        apply(self, &plan(&rules, now(), usage.as_slice(), &[])).await
    }

    /// The disk usage of sessions, and what retention removes now, or with `dry_run` would remove.
    pub(crate) async fn report(&self, dry_run: bool) -> Result<RetentionReport, SessionError> {
        let (usages, disks) = load(&self.removals).await?;
        let plan = plan(&self.rules, now(), &usages, &disks);
        if !dry_run {
            apply(self, &plan).await?;
        }
        Ok(report(&usages, &disks, plan))
    }
}

async fn load(shared: &Removals) -> Result<(Vec<SnapshotUsage>, Vec<SnapshotSize>), SessionError> {
    let mut snapshots: HashMap<SessionId, Vec<Snapshot>> = HashMap::new();
    for (session, snapshot) in shared.store.snapshot_all().await? {
        snapshots.entry(session).or_default().push(snapshot);
    }
    let mut usages = Vec::new();
    for summary in shared.store.session_summaries().await? {
        let own = snapshots.remove(&summary.id).unwrap_or_default();
        usages.extend(usage_of(summary, own, shared.sandboxes.provider.name()));
    }
    let disks = match shared.sandboxes.provider.snapshots() {
        Some(snapshots) => snapshots.sizes().await?,
        None => Vec::new(),
    };
    Ok((usages, disks))
}

/// `None` for a session of another provider, whose snapshots could not be removed here.
fn usage_of(
    summary: SessionSummary,
    snapshots: Vec<Snapshot>,
    provider: &str,
) -> Option<SnapshotUsage> {
    (summary.provider == provider).then(|| SnapshotUsage {
        snapshots,
        session: summary.id,
        title: summary.title,
        archived: summary.state == SessionState::Archived,
        last_activity: summary.last_activity,
        newest: summary.snapshot,
    })
}

async fn apply(enforcer: &RetentionEnforcer, plan: &RetentionPlan) -> Result<(), SessionError> {
    let removals = &enforcer.removals;
    let (store, lease) = (&removals.store, removals.lease);
    for (session, why) in &plan.sessions {
        // The session may have been resumed since the plan was made: the store checks again.
        let Some(limit) = enforcer.rules.archived else { continue };
        let inactive_since = now().before(limit);
        let deleted = store.session_delete_archived(session, lease, inactive_since, now()).await?;
        tracing::info!(%session, why, removals = deleted.len(), "deleted an archived session");
        removals.remove_now(&deleted).await;
    }
    let mut by_session: BTreeMap<(&SessionId, &'static str), Vec<SnapshotId>> = BTreeMap::new();
    for (session, snapshot, why) in &plan.snapshots {
        by_session.entry((session, *why)).or_default().push(snapshot.clone());
    }
    for ((session, why), snapshots) in by_session {
        let dropped = store.snapshot_drop(session, lease, snapshots, why, now()).await?;
        removals.remove_now(&dropped).await;
    }
    Ok(())
}

fn report(
    usages: &[SnapshotUsage],
    disks: &[SnapshotSize],
    plan: RetentionPlan,
) -> RetentionReport {
    let own: HashMap<&SnapshotId, u64> = disks.iter().map(|disk| (&disk.id, disk.bytes)).collect();
    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    let item = |usage: &SnapshotUsage| SessionDiskUsage {
        session: usage.session.clone(),
        title: usage.title.clone(),
        snapshots: usage.snapshots.len() as u64,
        pinned: usage.snapshots.iter().filter(|snapshot| snapshot.pinned).count() as u64,
        bytes: usage.snapshots.iter().filter_map(|snapshot| own.get(&snapshot.id)).sum(),
    };
    let used: BTreeSet<&SnapshotId> =
        usages.iter().flat_map(|usage| &usage.snapshots).map(|snapshot| &snapshot.id).collect();
    for disk in disks.iter().filter(|disk| used.contains(&disk.id)) {
        all.extend(disk.layers.iter().map(|(name, bytes)| (name.as_str(), *bytes)));
    }
    let dropped = |session, snapshot: Option<SnapshotId>, why: &str| RetentionDrop {
        session,
        bytes: snapshot.as_ref().and_then(|snapshot| own.get(snapshot)).copied().unwrap_or(0),
        snapshot_id: snapshot,
        why: why.to_owned(),
    };
    let sessions = plan.sessions.into_iter().map(|(session, why)| dropped(session, None, why));
    let snapshots = plan
        .snapshots
        .into_iter()
        .map(|(session, snapshot, why)| dropped(session, Some(snapshot), why));
    RetentionReport {
        items: usages.iter().map(item).collect(),
        snapshots_bytes: all.values().sum(),
        dropped: sessions.chain(snapshots).collect(),
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::event::SnapshotKind;
    use proptest::prelude::*;

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(10_000_000);

    fn snapshot(at: i64, pinned: bool) -> Snapshot {
        let (id, created_at) = (SnapshotId::random(), Timestamp::from_millis(at));
        Snapshot {
            id,
            kind: SnapshotKind::Turn,
            turn: None,
            name: None,
            pinned,
            gone: false,
            durable: true,
            created_at,
        }
    }

    prop_compose! {
        fn any_usage()(
            archived in any::<bool>(),
            quiet in 0i64..10_000,
            pins in proptest::collection::vec(any::<bool>(), 0..12),
        ) -> SnapshotUsage {
            let snapshots: Vec<_> =
                pins.iter().zip(0..).map(|(pinned, at)| snapshot(at, *pinned)).collect();
            SnapshotUsage {
                session: SessionId::random(),
                title: String::new(),
                archived,
                last_activity: Timestamp::from_millis(NOW.as_millis() - quiet * 1000),
                newest: snapshots.last().map(|newest| newest.id.clone()),
                snapshots,
            }
        }
    }

    prop_compose! {
        fn any_rules()(
            archived in proptest::option::of(1u64..10_000),
            snapshots_per_session in 0usize..10,
            snapshots_bytes in proptest::option::of(0u64..200),
        ) -> Retention {
            let archived = archived.map(Duration::from_secs);
            Retention { archived, snapshots_per_session, snapshots_bytes, ..Retention::default() }
        }
    }

    /// Each snapshot of a session builds on the one before, with a new chain every four snapshots.
    fn disks_of(usages: &[SnapshotUsage]) -> Vec<SnapshotSize> {
        let mut disks = Vec::new();
        for usage in usages {
            let mut layers = Vec::new();
            for (number, snapshot) in usage.snapshots.iter().enumerate() {
                if number % 4 == 0 {
                    layers.clear();
                }
                layers.push((snapshot.id.to_string(), 10));
                let (id, created_at) = (snapshot.id.clone(), snapshot.created_at);
                disks.push(SnapshotSize { id, bytes: 10, created_at, layers: layers.clone() });
            }
        }
        disks
    }

    proptest! {
        #[test]
        fn pinned_and_newest_snapshots_stay(
            usages in proptest::collection::vec(any_usage(), 0..6),
            rules in any_rules(),
        ) {
            let disks = disks_of(&usages);
            let plan = plan(&rules, NOW, &usages, &disks);
            let removed: BTreeSet<_> =
                plan.snapshots.iter().map(|(_, snapshot, _)| snapshot.clone()).collect();
            prop_assert_eq!(removed.len(), plan.snapshots.len(), "no snapshot is removed twice");
            for usage in &usages {
                let deleted = plan.sessions.iter().any(|(session, _)| *session == usage.session);
                let pinned = usage.snapshots.iter().any(|snapshot| snapshot.pinned);
                prop_assert!(!deleted || (usage.archived && !pinned && rules.archived.is_some()));
                for snapshot in &usage.snapshots {
                    let stays = snapshot.pinned || usage.newest.as_ref() == Some(&snapshot.id);
                    prop_assert!(!stays || !removed.contains(&snapshot.id));
                    // An archived session keeps nothing else.
                    let other = usage.archived && !stays && !deleted;
                    prop_assert!(!other || removed.contains(&snapshot.id));
                }
                let snapshots = usage.snapshots.iter();
                let left = snapshots.clone().filter(|one| !removed.contains(&one.id)).count();
                let fixed = snapshots.filter(|one| !may_remove(usage, one)).count();
                prop_assert!(deleted || left <= rules.snapshots_per_session.max(1).max(fixed));
            }
            // Every snapshot removed for the quota frees space.
            let deleted: BTreeSet<_> =
                plan.sessions.iter().map(|(session, _)| session.clone()).collect();
            let staying = usages.iter().filter(|usage| !deleted.contains(&usage.session));
            let staying: BTreeSet<String> = staying
                .flat_map(|usage| &usage.snapshots)
                .filter(|snapshot| !removed.contains(&snapshot.id))
                .flat_map(|snapshot| disks.iter().find(|disk| disk.id == snapshot.id))
                .flat_map(|disk| disk.layers.iter().map(|(name, _)| name.clone()))
                .collect();
            for (_, snapshot, why) in &plan.snapshots {
                let disk = disks.iter().find(|disk| disk.id == *snapshot).unwrap();
                let frees = disk.layers.iter().any(|(name, _)| !staying.contains(name));
                prop_assert!(*why != "quota" || frees);
            }
        }

        #[test]
        fn quota_removes_oldest_snapshots_first(
            usages in proptest::collection::vec(any_usage(), 1..6),
            max in 0u64..300,
        ) {
            let rules = Retention { snapshots_bytes: Some(max), ..Retention::default() };
            // Independent snapshots, as on btrfs.
            let independent = |snapshot: &Snapshot| SnapshotSize {
                id: snapshot.id.clone(),
                bytes: 10,
                created_at: snapshot.created_at,
                layers: vec![(snapshot.id.to_string(), 10)],
            };
            let open: Vec<_> = usages
                .into_iter()
                .map(|one| SnapshotUsage { archived: false, ..one })
                .collect();
            let disks: Vec<_> =
                open.iter().flat_map(|one| &one.snapshots).map(independent).collect();
            let plan = plan(&rules, NOW, &open, &disks);
            let left = disks.len() - plan.snapshots.len();
            let removable: Vec<_> = open
                .iter()
                .flat_map(|one| one.snapshots.iter().filter(|s| may_remove(one, s)))
                .collect();
            prop_assert!(left as u64 * 10 <= max || plan.snapshots.len() == removable.len());
            let removed: BTreeSet<_> =
                plan.snapshots.iter().map(|(_, snapshot, _)| snapshot).collect();
            let newest = removable
                .iter()
                .filter(|one| removed.contains(&one.id))
                .map(|one| one.created_at)
                .max();
            for one in removable.iter().filter(|one| !removed.contains(&one.id)) {
                prop_assert!(newest.is_none_or(|newest| one.created_at >= newest));
            }
        }
    }
}
