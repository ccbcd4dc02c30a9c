//! Diffs between two turns of a session: of its checkouts, by git, and of its whole disk, by
//! comparing layers. A session without a running sandbox is not started: git runs in an ephemeral
//! sandbox, without network, started from the turn's snapshot.

use harvest_proto::{
    RepositoryName, SandboxId, SessionId, SnapshotId,
    api::{DiffFiles, DiffStat, FileChanges, FileDiff, Snapshot, Turn},
    bridge::{DiffFormat, GitQuery},
};
use harvest_store::{CheckoutRecord, SessionRecord, TurnTree};
use tokio::sync::Semaphore;

use super::{Sessions, sandbox::ready_bridge};
use crate::{
    bridge::Bridge,
    checkout,
    compute_meter::compute_owner,
    driver::BusyGuard,
    ephemeral::{EphemeralError, EphemeralSandbox},
    error::SessionError,
    error_chain::error_chain,
    sandboxes::{DiffBase, SandboxError, StartFrom},
    trees::{self, Diff, TreeError},
};

// The limit for all checkouts together: enough for a person to read.
const MAX_PATCH_BYTES: usize = 8 << 20;

// The most changed files listed by name.
const MAX_DISK_CHANGES: usize = 20_000;

// Limits concurrent diffs: each may start two ephemeral sandboxes and buffers its output.
static CONCURRENT_DIFFS: Semaphore = Semaphore::const_new(2);

/// The two ends of a diff. The default is from the start of the session to its current state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiffRange {
    /// The changes of one turn.
    pub turn: Option<u32>,
    /// From the end of this turn; 0 is the start of the session.
    pub from: Option<u32>,
    /// To the end of this turn; `None` is the current state.
    pub to: Option<u32>,
}

impl Sessions {
    /// The changes in the session's checkouts, as printed by `git diff`.
    ///
    /// # Errors
    /// When the session or turn does not exist, or its snapshot is gone.
    pub async fn diff_patch(
        &self,
        session: &SessionId,
        range: DiffRange,
    ) -> Result<Vec<u8>, SessionError> {
        if range == DiffRange::default() {
            return Ok(self.diff(session).await?.into_bytes());
        }
        let mut all = Vec::new();
        for (_, (text, truncated)) in self.compare(session, range, DiffFormat::Patch).await? {
            all.extend(text);
            if truncated {
                all.extend_from_slice("\n… the rest of the diff is left out\n".as_bytes());
            }
        }
        Ok(all)
    }

    /// The changed files of the session's checkouts, with line counts.
    ///
    /// # Errors
    /// As [`Sessions::diff_patch`].
    pub async fn diff_stat(
        &self,
        session: &SessionId,
        range: DiffRange,
    ) -> Result<DiffFiles, SessionError> {
        let mut files = DiffFiles::default();
        for (repository, (text, truncated)) in
            self.compare(session, range, DiffFormat::Numstat).await?
        {
            files.cut |= truncated;
            files.items.extend(
                text.split(|byte| *byte == 0).filter_map(|line| parse_numstat(&repository, line)),
            );
        }
        let sum = |of: fn(&FileDiff) -> Option<u64>| files.items.iter().filter_map(of).sum();
        files.total = DiffStat {
            files: files.items.len() as u64,
            insertions: sum(|file| file.insertions),
            deletions: sum(|file| file.deletions),
        };
        Ok(files)
    }

    /// The changed files of the session's whole disk. The current state is the newest snapshot.
    ///
    /// # Errors
    /// As [`Sessions::diff_patch`]; also when the provider cannot compare disks.
    pub async fn diff_disk(
        &self,
        session: &SessionId,
        range: DiffRange,
    ) -> Result<FileChanges, SessionError> {
        let history = self.history(session).await?;
        let (from, to) = history.points(range)?;
        let Some(snapshots) = self.shared.sandboxes.provider.snapshots() else {
            return Err(SessionError::conflict(
                "no_disks",
                "the sandbox provider cannot compare disks",
                "`harvest diff SESSION` compares the checkouts",
            ));
        };
        let after = history.snapshot(to)?;
        let before = match from {
            DiffPoint::Turn(0) if history.fork_origin().is_none() => {
                // The oldest snapshot was taken in the session's first sandbox, or in one that
                // continues from it.
                let oldest =
                    history.snapshots.iter().find(|one| !one.gone).map(|one| one.id.clone());
                DiffBase::OriginOf(oldest.unwrap_or_else(|| after.clone()))
            }
            point => DiffBase::Snapshot(history.snapshot(point)?),
        };
        Ok(snapshots.changes(&before, &after, MAX_DISK_CHANGES).await?)
    }

    async fn history(&self, session: &SessionId) -> Result<SessionHistory, SessionError> {
        let store = &self.shared.store;
        Ok(SessionHistory {
            record: store.session_get(session).await?,
            turns: store.turn_list(session).await?,
            trees: store.tree_list(session).await?,
            snapshots: store.snapshot_list(session).await?,
        })
    }

    /// Diffs each checkout.
    async fn compare(
        &self,
        session: &SessionId,
        range: DiffRange,
        format: DiffFormat,
    ) -> Result<Vec<(RepositoryName, Diff)>, SessionError> {
        let history = self.history(session).await?;
        let (from, to) = history.points(range)?;
        // One permit covers every sandbox this diff starts; a permit per sandbox could deadlock.
        let _permit = CONCURRENT_DIFFS.acquire().await.map_err(|_| SessionError::Stopped)?;
        let handle = self.handle(session).await?;
        // Marked busy first, so that a frozen sandbox is thawed by the time it is used.
        let busy = handle.busy();
        let live = ready_bridge(&handle).await.map(|bridge| (bridge, busy));
        let (mut all, mut budget) = (Vec::new(), MAX_PATCH_BYTES);
        let checkouts = &history.record.checkouts;
        let prefixed = checkouts.len() > 1;
        for checkout in checkouts {
            let (sessions, history, live) = (self, &history, live.as_ref());
            let diff = CheckoutDiff { sessions, history, live, checkout, format, prefixed, budget };
            let output = diff.run(from, to).await?;
            budget = budget.saturating_sub(output.0.len());
            all.push((checkout.repository.clone(), output));
        }
        Ok(all)
    }
}

/// A point in a session's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DiffPoint {
    /// The end of a turn; 0 is the start of the session.
    Turn(u32),
    Now,
}

struct SessionHistory {
    record: SessionRecord,
    turns: Vec<Turn>,
    trees: Vec<TurnTree>,
    snapshots: Vec<Snapshot>,
}

impl SessionHistory {
    fn points(&self, range: DiffRange) -> Result<(DiffPoint, DiffPoint), SessionError> {
        let DiffRange { turn, from, to } = range;
        if let Some(number) = turn {
            if from.is_some() || to.is_some() {
                let what = "give either `turn`, or `from` and `to`";
                return Err(SessionError::invalid("invalid_range", what));
            }
            let turn = self.turn(number)?;
            let before = turn.after.unwrap_or_else(|| number.saturating_sub(1));
            return Ok((DiffPoint::Turn(before), DiffPoint::Turn(number)));
        }
        let from = DiffPoint::Turn(from.unwrap_or(0));
        Ok((from, to.map_or(DiffPoint::Now, DiffPoint::Turn)))
    }

    fn turn(&self, number: u32) -> Result<&Turn, SessionError> {
        let found = self.turns.iter().find(|turn| turn.number == number);
        let turn = found.ok_or_else(|| SessionError::missing(format!("turn {number}")))?;
        if turn.outcome.is_none() {
            let what = format!("turn {number} has not ended");
            let hint =
                "wait for it to end, or compare with the current state: `harvest diff SESSION`";
            return Err(SessionError::conflict("not_ended", what, hint));
        }
        Ok(turn)
    }

    /// The snapshot a fork started from.
    fn fork_origin(&self) -> Option<SnapshotId> {
        self.snapshots.iter().find(|one| one.turn == Some(0) && !one.gone).map(|one| one.id.clone())
    }

    fn snapshot(&self, point: DiffPoint) -> Result<SnapshotId, SessionError> {
        let hint = "`harvest turns SESSION` shows the turns that have a snapshot";
        let gone = |what: String| SessionError::conflict("no_snapshot", what, hint);
        match point {
            DiffPoint::Now => {
                let newest = self.record.session.snapshot_id.clone();
                newest.ok_or_else(|| gone("the session has no snapshot yet".to_owned()))
            }
            DiffPoint::Turn(0) => self
                .fork_origin()
                .ok_or_else(|| gone("the session's start has no snapshot".to_owned())),
            DiffPoint::Turn(number) => {
                let turn = self.turn(number)?;
                let why =
                    turn.dropped.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
                turn.snapshot_id
                    .clone()
                    .ok_or_else(|| gone(format!("turn {number} has no snapshot{why}")))
            }
        }
    }

    /// The saved tree of a checkout at a point, if there is one.
    fn tree(
        &self,
        checkout: &CheckoutRecord,
        point: DiffPoint,
    ) -> Result<Option<String>, SessionError> {
        let saved = |number: u32| {
            let is_saved =
                |tree: &&TurnTree| tree.turn == number && tree.repository == checkout.repository;
            self.trees.iter().find(is_saved).map(|tree| tree.tree.clone())
        };
        Ok(match point {
            DiffPoint::Now => None,
            DiffPoint::Turn(0) if self.fork_origin().is_none() => {
                let base = checkout.base_commit.as_deref();
                Some(base.unwrap_or(checkout::EMPTY_TREE).to_owned())
            }
            DiffPoint::Turn(0) => saved(0),
            DiffPoint::Turn(number) => {
                self.turn(number)?;
                saved(number)
            }
        })
    }
}

/// Compares one checkout at two points.
struct CheckoutDiff<'a> {
    sessions: &'a Sessions,
    history: &'a SessionHistory,
    live: Option<&'a (Bridge, BusyGuard)>,
    checkout: &'a CheckoutRecord,
    format: DiffFormat,
    /// With several checkouts, paths start with the checkout's folder.
    prefixed: bool,
    /// The most bytes of output.
    budget: usize,
}

impl CheckoutDiff<'_> {
    async fn run(&self, from: DiffPoint, to: DiffPoint) -> Result<Diff, SessionError> {
        let (before, mut after) =
            (self.history.tree(self.checkout, from)?, self.history.tree(self.checkout, to)?);
        if let Some((bridge, _)) = self.live {
            if to == DiffPoint::Now {
                after = Some(self.save(bridge).await?);
            }
            if let (Some(before), Some(after)) = (&before, &after)
                && let Some(diff) = self.diff(bridge, before, after).await?
            {
                return Ok(diff);
            }
        }
        // A tree is missing in the session's sandbox: compare in one started from the later
        // snapshot.
        let later = match (self.live, to) {
            (Some(_), DiffPoint::Now) => None,
            _ => Some(self.start_at(to).await?),
        };
        let bridge = match (&later, self.live) {
            (Some(later), _) => &later.bridge,
            (None, Some((bridge, _))) => bridge,
            (None, None) => unreachable!("without a live sandbox one is started"),
        };
        let after = match after {
            Some(after) => after,
            None => self.save(bridge).await?,
        };
        let output = self.diff_with_copy(bridge, from, before, &after).await;
        if let Some(later) = later {
            later.remove().await;
        }
        output
    }

    /// Diffs in `bridge`'s sandbox, copying the earlier tree there when it is missing.
    async fn diff_with_copy(
        &self,
        bridge: &Bridge,
        from: DiffPoint,
        before: Option<String>,
        after: &str,
    ) -> Result<Diff, SessionError> {
        if let Some(before) = &before
            && let Some(diff) = self.diff(bridge, before, after).await?
        {
            return Ok(diff);
        }
        let earlier = self.start_at(from).await?;
        let source = &earlier.bridge;
        let copied = async {
            let before = match before {
                Some(before) => before,
                None => self.save(source).await?,
            };
            let base = self.checkout.base_commit.as_deref();
            trees::copy_tree(source, bridge, &self.checkout.folder, &before, base)
                .await
                .map_err(failed)?;
            self.diff(bridge, &before, after).await
        };
        let output = copied.await;
        earlier.remove().await;
        output?.ok_or_else(|| {
            let tail = "its git objects are missing".to_owned();
            failed(TreeError::Git { folder: self.checkout.folder.path(), tail })
        })
    }

    async fn save(&self, bridge: &Bridge) -> Result<String, SessionError> {
        Ok(trees::save(bridge, &self.checkout.folder, None).await.map_err(failed)?.0)
    }

    async fn diff(
        &self,
        bridge: &Bridge,
        from: &str,
        to: &str,
    ) -> Result<Option<Diff>, SessionError> {
        let (from, to) = (from.to_owned(), to.to_owned());
        let comparison =
            GitQuery::Compare { from, to, format: self.format, prefixed: self.prefixed };
        trees::compare(bridge, &self.checkout.folder, comparison, self.budget).await.map_err(failed)
    }

    /// Starts an ephemeral sandbox from the session's snapshot at a point.
    async fn start_at(&self, point: DiffPoint) -> Result<EphemeralSandbox, SessionError> {
        let from = StartFrom::Snapshot(self.history.snapshot(point)?);
        let sandboxes = &self.sessions.shared.sandboxes;
        let (id, owner) = (SandboxId::random(), compute_owner(&self.history.record));
        let started = EphemeralSandbox::start(sandboxes, id, from, None, owner).await;
        started.map_err(|error| not_started("diff_failed", error))
    }
}

fn failed(error: TreeError) -> SessionError {
    let hint = "inspect the checkout with `harvest exec`, or use `--sandbox`";
    SessionError::conflict("diff_failed", error_chain(&error), hint)
}

pub(super) fn not_started(code: &'static str, error: EphemeralError) -> SessionError {
    match error {
        EphemeralError::Sandbox(error) if !matches!(error, SandboxError::Bridge(_)) => error.into(),
        other => SessionError::conflict(
            code,
            error_chain(&other),
            "try again; `harvest doctor` checks this machine",
        ),
    }
}

/// Parses `3<tab>1<tab>path`; binary files have `-` for the counts.
fn parse_numstat(repository: &RepositoryName, line: &[u8]) -> Option<FileDiff> {
    let mut parts = line.splitn(3, |byte| *byte == b'\t');
    let mut number = || {
        let text = parts.next()?;
        Some(std::str::from_utf8(text).ok()?.trim().parse().ok())
    };
    let (insertions, deletions) = (number()?, number()?);
    let path = String::from_utf8_lossy(parts.next()?).into_owned();
    Some(FileDiff { repository: repository.clone(), path, insertions, deletions })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numstat_lines_are_parsed() {
        let read = |line: &[u8]| {
            parse_numstat(&"local/r".parse().unwrap(), line)
                .map(|file| (file.path, file.insertions, file.deletions))
        };
        assert_eq!(read(b"3\t0\ta\tb"), Some(("a\tb".to_owned(), Some(3), Some(0))));
        assert_eq!(read(b"-\t-\tbinary"), Some(("binary".to_owned(), None, None)));
        assert_eq!(read(b"1\t2\t\xff"), Some(("\u{fffd}".to_owned(), Some(1), Some(2))));
        assert_eq!(read(b""), None);
    }
}
