//! Compares, when a server starts, what the store knows with what the machine holds, both ways. What
//! nobody knows is removed; what is known and gone is told on its session. People's own sandboxes and
//! snapshots are not looked at, nor anything of another store. Mounts and cgroups are the zygote's: it
//! clears those without a sandbox when it starts.

use std::collections::HashSet;

use harvest_proto::{EventBody, SandboxId, SessionId, SnapshotId, api::Snapshot};
use harvest_store::{Removal, SessionRecord, Write};

use crate::{
    disks::{Disks, KeptDisk},
    error::SessionError,
    wiring::{Shared, now, words},
};

const STORE_NAME: &str = "store_name";

/// What there was when the server started.
pub(crate) struct Reconcile {
    sandboxes: Vec<SandboxId>,
    /// `None` when the machine looks after its disks by itself.
    disks: Option<DisksThen>,
    owned: HashSet<SandboxId>,
    /// Every snapshot a driver has in mind, be it about to exist.
    meant: HashSet<SnapshotId>,
    ours: bool,
}

struct DisksThen {
    /// What the store knew before the machine was asked: what is missing there was there once.
    known: Vec<(SessionId, Snapshot)>,
    held: Vec<KeptDisk>,
}

impl Reconcile {
    /// Looks at the machine before any session goes on: what comes later is nobody's stray.
    pub(crate) async fn begin(shared: &Shared) -> Result<Self, SessionError> {
        let known = shared.store.snapshot_all().await?;
        let sandboxes = shared.provider.list().await?;
        let (mut ours, mut then) = (true, None);
        if let Some(disks) = shared.provider.disks() {
            ours = is_ours(shared, disks).await?;
            then = Some(DisksThen { known, held: disks.list().await? });
        }
        Ok(Self { sandboxes, disks: then, owned: HashSet::new(), meant: HashSet::new(), ours })
    }

    /// A session of the store, and with it what it uses.
    pub(crate) fn owned_by(&mut self, record: &SessionRecord) {
        self.owned.extend(record.session.sandbox.clone());
        self.meant.extend(record.session.snapshot.clone());
        self.meant.extend(mentioned(&record.drive));
    }

    /// Ends and removes what nobody owns, and tells what is missing.
    pub(crate) async fn finish(self, shared: &Shared) -> Result<(), SessionError> {
        let Self { sandboxes, disks, owned, mut meant, ours } = self;
        if !ours {
            tracing::warn!(
                "this home holds sandboxes and snapshots of another store; they are left alone"
            );
        }
        let strays: Vec<_> =
            sandboxes.into_iter().filter(|one| ours && !owned.contains(one)).collect();
        for sandbox in &strays {
            if let Err(error) = shared.provider.end(sandbox).await {
                tracing::warn!(%sandbox, error = words(&error), "a sandbox nobody owns cannot be ended");
            }
        }
        // When no sandbox starts from them any more.
        for (snapshot, _) in shared.store.build_unfinished().await? {
            shared
                .store
                .build_fail(shared.lease, &snapshot, "the server was restarted", now())
                .await?;
        }
        let Some(DisksThen { known, held }) = disks else { return Ok(()) };
        meant.extend(shared.store.snapshot_of_builds().await?);
        meant.extend(
            shared.store.snapshot_all().await?.into_iter().map(|(_, snapshot)| snapshot.id),
        );
        let Difference { strangers, missing, back } = compare(known, &meant, &held);
        let strangers = if ours { strangers } else { Vec::new() };
        let counts = (strays.len(), strangers.len(), missing.len(), back.len());
        let strangers = strangers.into_iter().map(Removal::Snapshot).collect();
        shared.store.removal_add(shared.lease, strangers, now()).await?;
        for (session, snapshot) in missing {
            tell_missing(shared, &session, &snapshot).await?;
        }
        for (session, snapshot) in back {
            shared.store.snapshot_gone(&session, shared.lease, &snapshot, false).await?;
        }
        let (sandboxes, snapshots, missing, back) = counts;
        tracing::info!(
            sandboxes,
            snapshots,
            missing,
            back,
            "removed what nobody owns, compared the rest"
        );
        Ok(())
    }
}

/// What differs between the store and the machine.
#[derive(Debug, Default, PartialEq, Eq)]
struct Difference {
    /// On the machine, and nobody knows what for.
    strangers: Vec<SnapshotId>,
    /// Known, and not on the machine.
    missing: Vec<(SessionId, Snapshot)>,
    /// On the machine again.
    back: Vec<(SessionId, SnapshotId)>,
}

fn compare(
    known: Vec<(SessionId, Snapshot)>,
    meant: &HashSet<SnapshotId>,
    held: &[KeptDisk],
) -> Difference {
    let there: HashSet<&SnapshotId> = held.iter().map(|disk| &disk.id).collect();
    let mut difference = Difference::default();
    for (session, snapshot) in known {
        match (there.contains(&snapshot.id), snapshot.gone) {
            (false, false) => difference.missing.push((session, snapshot)),
            (true, true) => difference.back.push((session, snapshot.id)),
            _ => {}
        }
    }
    difference.strangers =
        held.iter().filter(|disk| !meant.contains(&disk.id)).map(|disk| disk.id.clone()).collect();
    difference
}

/// The snapshots named anywhere in a driver's own words, whichever version wrote them.
fn mentioned(drive: &str) -> impl Iterator<Item = SnapshotId> + '_ {
    let ours = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    drive.split(move |letter| !ours(letter)).filter_map(|word| word.parse().ok())
}

async fn is_ours(shared: &Shared, disks: &dyn Disks) -> Result<bool, SessionError> {
    let name = match shared.store.meta_get(STORE_NAME).await? {
        Some(name) => name,
        None => {
            let name = SessionId::random().part().to_owned();
            shared.store.meta_set(STORE_NAME, &name).await?;
            name
        }
    };
    Ok(disks.belongs_to(&name).await?)
}

async fn tell_missing(
    shared: &Shared,
    session: &SessionId,
    snapshot: &Snapshot,
) -> Result<(), SessionError> {
    shared.store.snapshot_gone(session, shared.lease, &snapshot.id, true).await?;
    let of = match snapshot.turn {
        Some(0) => "what the session began as".to_owned(),
        Some(turn) => format!("turn {turn}"),
        None => "a pause".to_owned(),
    };
    let message = format!(
        "the snapshot of {of} ({}) is no longer on this machine; nothing can be restored or forked from it",
        snapshot.id
    );
    let event =
        Write::Event { at: now(), turn: None, body: Box::new(EventBody::Warning { message }) };
    shared.store.session_commit(session, shared.lease, now(), vec![event]).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use harvest_proto::{Timestamp, event::SnapshotKind};

    use super::*;

    fn snapshot(id: &SnapshotId, gone: bool) -> (SessionId, Snapshot) {
        let (kind, created_at) = (SnapshotKind::Turn, Timestamp::from_millis(0));
        (
            SessionId::random(),
            Snapshot { id: id.clone(), kind, turn: Some(1), pinned: false, gone, created_at },
        )
    }

    fn kept(id: &SnapshotId) -> KeptDisk {
        KeptDisk {
            id: id.clone(),
            bytes: 0,
            created_at: Timestamp::from_millis(0),
            layers: Vec::new(),
        }
    }

    #[test]
    fn only_what_nobody_knows_is_a_stranger_and_only_what_was_there_is_missing() {
        let ids: Vec<SnapshotId> = (0..5).map(|_| SnapshotId::random()).collect();
        let [fine, lost, back, stranger, meant] = &ids[..] else { unreachable!() };
        let known = vec![snapshot(fine, false), snapshot(lost, false), snapshot(back, true)];
        let all: HashSet<_> = [fine, lost, back, meant].into_iter().cloned().collect();
        let found = compare(known, &all, &[kept(fine), kept(back), kept(stranger), kept(meant)]);
        assert_eq!(found.strangers, std::slice::from_ref(stranger));
        assert_eq!(found.missing.iter().map(|(_, one)| &one.id).collect::<Vec<_>>(), [lost]);
        assert_eq!(found.back.iter().map(|(_, one)| one).collect::<Vec<_>>(), [back]);
    }

    #[test]
    fn a_snapshot_is_found_wherever_a_driver_mentions_it() {
        let (one, two) = (SnapshotId::random(), SnapshotId::random());
        let drive = format!(r#"{{"disk":"{one}","machine":{{"new":["{two}"]}},"other":"snp_"}}"#);
        assert_eq!(mentioned(&drive).collect::<Vec<_>>(), [one, two]);
    }
}
