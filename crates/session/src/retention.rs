//! What is kept, and what goes first when there is too much of it. What goes is a pure function of the
//! rules, the time and what there is; a task asks it now and then and has the rest removed.
//!
//! 1. An archived session goes when it has been quiet for `archived`, unless something of it is pinned.
//! 2. Of an archived session only the newest snapshot stays, and pinned ones.
//! 3. Of an open session the newest `snapshots_per_session` stay, and pinned ones.
//! 4. While all snapshots together take more than `snapshots_bytes`, the oldest goes first; none whose
//!    going would free nothing.
//!
//! What a session would go on from never goes while the session is there.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use harvest_proto::{
    SessionId, SnapshotId, Timestamp,
    api::{Dropped, Held, Retained, SessionState, Snapshot},
};
use harvest_store::SessionRecord;

use crate::{
    Sessions,
    disks::KeptDisk,
    error::SessionError,
    removals::carry_out,
    wiring::{Shared, now, words},
};

// Often enough that a day's work does not pile up, seldom enough to cost nothing.
const EVERY: Duration = Duration::from_secs(600);

const PAGE: u32 = 200;

/// What is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// Archived sessions are deleted after so long; never when absent.
    pub archived: Option<Duration>,
    /// So many snapshots of an open session are kept.
    pub snapshots_per_session: usize,
    /// All snapshots of sessions together may take so much; without a limit when absent.
    pub snapshots_bytes: Option<u64>,
}

impl Default for Retention {
    fn default() -> Self {
        // A week of hard work, ten turns an hour, in plain folders: 100 captures of a few MB each.
        Self { archived: None, snapshots_per_session: 100, snapshots_bytes: None }
    }
}

/// What a session holds.
#[derive(Debug, Clone)]
struct Holding {
    session: SessionId,
    archived: bool,
    last_activity: Timestamp,
    /// What it would go on from.
    newest: Option<SnapshotId>,
    /// Oldest first.
    snapshots: Vec<Snapshot>,
}

/// What is to go, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Plan {
    sessions: Vec<(SessionId, &'static str)>,
    snapshots: Vec<(SessionId, SnapshotId, &'static str)>,
}

fn plan(rules: &Retention, now: Timestamp, holdings: &[Holding], disks: &[KeptDisk]) -> Plan {
    let mut plan = Plan::default();
    let mut kept: Vec<(&Holding, &Snapshot)> = Vec::new();
    for holding in holdings {
        let quiet = now.since(holding.last_activity);
        let pinned = holding.snapshots.iter().any(|snapshot| snapshot.pinned);
        if holding.archived && !pinned && rules.archived.is_some_and(|limit| quiet >= limit) {
            plan.sessions.push((holding.session.clone(), "archived_long_ago"));
            continue;
        }
        let (most, why) = match holding.archived {
            true => (0, "archived"),
            false => (rules.snapshots_per_session.max(1), "too_many"),
        };
        let mut extra = holding.snapshots.len().saturating_sub(most);
        for snapshot in &holding.snapshots {
            if extra > 0 && may_go(holding, snapshot) {
                extra -= 1;
                plan.snapshots.push((holding.session.clone(), snapshot.id.clone(), why));
            } else {
                kept.push((holding, snapshot));
            }
        }
    }
    if let Some(most) = rules.snapshots_bytes {
        let over = over_quota(most, kept, disks);
        plan.snapshots
            .extend(over.into_iter().map(|(session, snapshot)| (session, snapshot, "quota")));
    }
    plan
}

fn may_go(holding: &Holding, snapshot: &Snapshot) -> bool {
    !snapshot.pinned && holding.newest.as_ref() != Some(&snapshot.id)
}

/// The oldest of those that may go, until the rest fits; but none that frees nothing, since what stands on
/// it stays.
fn over_quota(
    most: u64,
    mut kept: Vec<(&Holding, &Snapshot)>,
    disks: &[KeptDisk],
) -> Vec<(SessionId, SnapshotId)> {
    let layers: HashMap<&SnapshotId, &[(String, u64)]> =
        disks.iter().map(|disk| (&disk.id, &disk.layers[..])).collect();
    let of = |snapshot: &Snapshot| layers.get(&snapshot.id).copied().unwrap_or_default();
    kept.sort_by_key(|(_, snapshot)| (snapshot.created_at, snapshot.id.clone()));
    let mut users: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
    for (name, bytes) in kept.iter().flat_map(|(_, snapshot)| of(snapshot)) {
        users.entry(name).or_insert((*bytes, 0)).1 += 1;
    }
    let mut total: u64 = users.values().map(|(bytes, _)| bytes).sum();
    let mut going = Vec::new();
    for (holding, snapshot) in kept {
        if total <= most {
            break;
        }
        if may_go(holding, snapshot) {
            for (name, bytes) in of(snapshot) {
                let Some((_, users)) = users.get_mut(name.as_str()) else { continue };
                *users -= 1;
                total -= if *users == 0 { *bytes } else { 0 };
            }
            going.push((holding, snapshot));
        }
    }
    let still: BTreeSet<&str> =
        users.iter().filter(|(_, (_, users))| *users > 0).map(|(name, _)| *name).collect();
    let frees = |snapshot: &Snapshot| {
        of(snapshot).iter().any(|(name, bytes)| *bytes > 0 && !still.contains(name.as_str()))
    };
    going.retain(|(_, snapshot)| frees(snapshot));
    going
        .into_iter()
        .map(|(holding, snapshot)| (holding.session.clone(), snapshot.id.clone()))
        .collect()
}

impl Sessions {
    /// What sessions hold on the disk, and what the rules would have go now.
    ///
    /// # Errors
    /// When the store or the machine cannot be read.
    pub async fn retention(&self) -> Result<Retained, SessionError> {
        let (holdings, titles, disks) = look(&self.shared, true).await?;
        let plan = plan(&self.shared.config.retention, now(), &holdings, &disks);
        Ok(told(&holdings, &titles, &disks, plan))
    }

    /// Has go what the rules say, now rather than in a while. Answers what that was.
    ///
    /// # Errors
    /// As [`Sessions::retention`].
    pub async fn retain(&self) -> Result<Retained, SessionError> {
        let (holdings, titles, disks) = look(&self.shared, true).await?;
        let plan = plan(&self.shared.config.retention, now(), &holdings, &disks);
        carry(&self.shared, &plan).await?;
        Ok(told(&holdings, &titles, &disks, plan))
    }

    /// Keeps a snapshot of a session whatever the rules say, or no longer.
    ///
    /// # Errors
    /// When the session has no such snapshot.
    pub async fn snapshot_pin(
        &self,
        session: &SessionId,
        snapshot: &SnapshotId,
        pinned: bool,
    ) -> Result<Snapshot, SessionError> {
        self.shared.store.session_get(session).await?;
        self.shared.store.snapshot_pin(session, self.shared.lease, snapshot, pinned).await?;
        let all = self.shared.store.snapshot_list(session).await?;
        let found = all.into_iter().find(|one| one.id == *snapshot);
        found.ok_or_else(|| SessionError::missing(format!("snapshot {snapshot}")))
    }
}

/// Keeps to the rules from now until the server ends.
pub(crate) fn spawn(shared: &Arc<Shared>) {
    let own = Arc::clone(shared);
    shared.spawn(async move {
        loop {
            if let Err(error) = keep_to_rules(&own).await {
                tracing::warn!(error = words(&error), "what is kept cannot be looked through");
            }
            tokio::time::sleep(EVERY).await;
        }
    });
}

/// Once.
pub(crate) async fn keep_to_rules(shared: &Shared) -> Result<(), SessionError> {
    let rules = &shared.config.retention;
    let (holdings, _, disks) = look(shared, rules.snapshots_bytes.is_some()).await?;
    carry(shared, &plan(rules, now(), &holdings, &disks)).await
}

async fn look(
    shared: &Shared,
    weigh: bool,
) -> Result<(Vec<Holding>, HashMap<SessionId, SessionRecord>, Vec<KeptDisk>), SessionError> {
    let mut snapshots: HashMap<SessionId, Vec<Snapshot>> = HashMap::new();
    for (session, snapshot) in shared.store.snapshot_all().await? {
        snapshots.entry(session).or_default().push(snapshot);
    }
    let (mut holdings, mut records, mut cursor) = (Vec::new(), HashMap::new(), None);
    loop {
        let page = shared.store.session_list(cursor.clone(), PAGE).await?;
        let Some(last) = page.last() else { break };
        cursor = Some((last.session.created_at, last.session.id.clone()));
        for record in page {
            let session = &record.session;
            holdings.push(Holding {
                session: session.id.clone(),
                archived: session.state == SessionState::Archived,
                last_activity: session.last_activity,
                newest: session.snapshot.clone(),
                snapshots: snapshots.remove(&session.id).unwrap_or_default(),
            });
            records.insert(session.id.clone(), record);
        }
    }
    let disks = match shared.provider.disks() {
        Some(disks) if weigh => disks.weigh().await?,
        _ => Vec::new(),
    };
    Ok((holdings, records, disks))
}

async fn carry(shared: &Shared, plan: &Plan) -> Result<(), SessionError> {
    for (session, why) in &plan.sessions {
        // Somebody may have gone on with it since the plan was made: the store looks again.
        let Some(limit) = shared.config.retention.archived else { continue };
        let quiet = now().before(limit);
        let removals =
            shared.store.session_delete_archived(session, shared.lease, quiet, now()).await?;
        tracing::info!(%session, why, removals = removals.len(), "an archived session's time is up");
        carry_out(shared, &removals).await;
    }
    let mut by_session: BTreeMap<(&SessionId, &'static str), Vec<SnapshotId>> = BTreeMap::new();
    for (session, snapshot, why) in &plan.snapshots {
        by_session.entry((session, *why)).or_default().push(snapshot.clone());
    }
    for ((session, why), snapshots) in by_session {
        let dropped =
            shared.store.snapshot_drop(session, shared.lease, snapshots, why, now()).await?;
        carry_out(shared, &dropped).await;
    }
    Ok(())
}

fn told(
    holdings: &[Holding],
    records: &HashMap<SessionId, SessionRecord>,
    disks: &[KeptDisk],
    plan: Plan,
) -> Retained {
    let own: HashMap<&SnapshotId, u64> = disks.iter().map(|disk| (&disk.id, disk.bytes)).collect();
    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    let held = |holding: &Holding| Held {
        session: holding.session.clone(),
        title: records
            .get(&holding.session)
            .map(|record| record.session.title.clone())
            .unwrap_or_default(),
        snapshots: holding.snapshots.len() as u64,
        pinned: holding.snapshots.iter().filter(|snapshot| snapshot.pinned).count() as u64,
        bytes: holding.snapshots.iter().filter_map(|snapshot| own.get(&snapshot.id)).sum(),
    };
    let used: BTreeSet<&SnapshotId> = holdings
        .iter()
        .flat_map(|holding| &holding.snapshots)
        .map(|snapshot| &snapshot.id)
        .collect();
    for disk in disks.iter().filter(|disk| used.contains(&disk.id)) {
        all.extend(disk.layers.iter().map(|(name, bytes)| (name.as_str(), *bytes)));
    }
    let dropped = |session, snapshot: Option<SnapshotId>, why: &str| Dropped {
        session,
        bytes: snapshot.as_ref().and_then(|snapshot| own.get(snapshot)).copied().unwrap_or(0),
        snapshot,
        why: why.to_owned(),
    };
    let sessions = plan.sessions.into_iter().map(|(session, why)| dropped(session, None, why));
    let snapshots = plan
        .snapshots
        .into_iter()
        .map(|(session, snapshot, why)| dropped(session, Some(snapshot), why));
    Retained {
        items: holdings.iter().map(held).collect(),
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
        Snapshot { id, kind: SnapshotKind::Turn, turn: None, pinned, gone: false, created_at }
    }

    prop_compose! {
        fn any_holding()(
            archived in any::<bool>(),
            quiet in 0i64..10_000,
            pins in proptest::collection::vec(any::<bool>(), 0..12),
        ) -> Holding {
            let snapshots: Vec<_> = pins.iter().zip(0..).map(|(pinned, at)| snapshot(at, *pinned)).collect();
            Holding {
                session: SessionId::random(),
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
            Retention { archived: archived.map(Duration::from_secs), snapshots_per_session, snapshots_bytes }
        }
    }

    /// Each session's snapshots stand on one another, as in plain folders, from where a chain began anew.
    fn disks_of(holdings: &[Holding]) -> Vec<KeptDisk> {
        let mut disks = Vec::new();
        for holding in holdings {
            let mut layers = Vec::new();
            for (number, snapshot) in holding.snapshots.iter().enumerate() {
                if number % 4 == 0 {
                    layers.clear();
                }
                layers.push((snapshot.id.to_string(), 10));
                let (id, created_at) = (snapshot.id.clone(), snapshot.created_at);
                disks.push(KeptDisk { id, bytes: 10, created_at, layers: layers.clone() });
            }
        }
        disks
    }

    proptest! {
        #[test]
        fn what_is_pinned_or_gone_on_from_stays_and_nothing_goes_in_vain(
            holdings in proptest::collection::vec(any_holding(), 0..6),
            rules in any_rules(),
        ) {
            let disks = disks_of(&holdings);
            let plan = plan(&rules, NOW, &holdings, &disks);
            let going: BTreeSet<_> = plan.snapshots.iter().map(|(_, snapshot, _)| snapshot.clone()).collect();
            prop_assert_eq!(going.len(), plan.snapshots.len(), "nothing goes twice");
            for holding in &holdings {
                let deleted = plan.sessions.iter().any(|(session, _)| *session == holding.session);
                let pinned = holding.snapshots.iter().any(|snapshot| snapshot.pinned);
                prop_assert!(!deleted || (holding.archived && !pinned && rules.archived.is_some()));
                for snapshot in &holding.snapshots {
                    let stays = snapshot.pinned || holding.newest.as_ref() == Some(&snapshot.id);
                    prop_assert!(!stays || !going.contains(&snapshot.id));
                    let other = holding.archived && !stays && !deleted;
                    prop_assert!(!other || going.contains(&snapshot.id), "an archived session keeps no more");
                }
                let left = holding.snapshots.iter().filter(|snapshot| !going.contains(&snapshot.id)).count();
                let fixed = holding.snapshots.iter().filter(|snapshot| !may_go(holding, snapshot)).count();
                prop_assert!(deleted || left <= rules.snapshots_per_session.max(1).max(fixed));
            }
            // What went for the quota has freed something.
            let deleted: BTreeSet<_> = plan.sessions.iter().map(|(session, _)| session.clone()).collect();
            let staying = holdings.iter().filter(|holding| !deleted.contains(&holding.session));
            let staying: BTreeSet<String> = staying
                .flat_map(|holding| &holding.snapshots)
                .filter(|snapshot| !going.contains(&snapshot.id))
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
        fn nobody_goes_before_an_older_one_that_would_have_done(
            holdings in proptest::collection::vec(any_holding(), 1..6),
            most in 0u64..300,
        ) {
            let rules = Retention { snapshots_bytes: Some(most), ..Retention::default() };
            // Each by itself, as on btrfs.
            let alone = |snapshot: &Snapshot| KeptDisk {
                id: snapshot.id.clone(),
                bytes: 10,
                created_at: snapshot.created_at,
                layers: vec![(snapshot.id.to_string(), 10)],
            };
            let open: Vec<_> = holdings.into_iter().map(|one| Holding { archived: false, ..one }).collect();
            let disks: Vec<_> = open.iter().flat_map(|one| &one.snapshots).map(alone).collect();
            let plan = plan(&rules, NOW, &open, &disks);
            let left = disks.len() - plan.snapshots.len();
            let movable: Vec<_> = open.iter().flat_map(|one| one.snapshots.iter().filter(|s| may_go(one, s))).collect();
            prop_assert!(left as u64 * 10 <= most || plan.snapshots.len() == movable.len());
            let going: BTreeSet<_> = plan.snapshots.iter().map(|(_, snapshot, _)| snapshot).collect();
            let newest = movable.iter().filter(|one| going.contains(&one.id)).map(|one| one.created_at).max();
            for one in movable.iter().filter(|one| !going.contains(&one.id)) {
                prop_assert!(newest.is_none_or(|newest| one.created_at >= newest));
            }
        }
    }
}
