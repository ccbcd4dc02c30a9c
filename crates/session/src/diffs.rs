//! What changed between two turns of a session: in its checkouts, as git tells it, and on its whole
//! machine, as the layers tell it. A session that sleeps is not woken for it: git runs in a sandbox
//! started from the turn's snapshot, without a way out, that is gone afterwards.

use harvest_proto::{
    SandboxId, SessionId, SnapshotId,
    api::{DiffFiles, DiffStat, FileDiff, MachineChanges, Snapshot, Turn},
};
use harvest_store::{SessionRecord, TurnTree};
use tokio::sync::Semaphore;

use crate::{
    Sessions,
    bridge::Bridge,
    checkout,
    disks::DiskBefore,
    driver::Busy,
    error::SessionError,
    hidden::{Hidden, HiddenError},
    inside::ready_bridge,
    provider::StartFrom,
    trees::{self, Compared, TreeError},
    wiring::words,
};

// Of all checkouts together. Enough for a person; a generated file is looked at in the machine.
const PATCH_BYTES: usize = 8 << 20;

// How many names of the machine are told one by one.
const MACHINE_NAMES: usize = 20_000;

// Comparisons at a time. Each may need two machines that are nobody's work, and holds what it tells.
static COMPARING: Semaphore = Semaphore::const_new(2);

/// What to compare. Without anything: where the session started with where it stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiffRange {
    /// One turn's own changes.
    pub turn: Option<u32>,
    /// From the end of this turn, 0 being the session's beginning.
    pub from: Option<u32>,
    /// To the end of this turn; to where the session stands when absent.
    pub to: Option<u32>,
}

impl Sessions {
    /// What changed in the session's checkouts, as `git diff` prints it.
    ///
    /// # Errors
    /// When there is no such session or turn, or it cannot be looked into any more.
    pub async fn diff_patch(
        &self,
        session: &SessionId,
        range: DiffRange,
    ) -> Result<Vec<u8>, SessionError> {
        if range == DiffRange::default() {
            return Ok(self.diff(session).await?.into_bytes());
        }
        let mut all = Vec::new();
        for (_, (text, cut)) in self.compare(session, range, &["--patch"]).await? {
            all.extend(text);
            if cut {
                all.extend_from_slice("\n… the rest of the diff is left out\n".as_bytes());
            }
        }
        Ok(all)
    }

    /// How many lines changed in which files of the session's checkouts.
    ///
    /// # Errors
    /// As [`Sessions::diff_patch`].
    pub async fn diff_stat(
        &self,
        session: &SessionId,
        range: DiffRange,
    ) -> Result<DiffFiles, SessionError> {
        let range = if range == DiffRange::default() {
            DiffRange { from: Some(0), ..range }
        } else {
            range
        };
        let mut files = DiffFiles::default();
        for (repository, (text, cut)) in
            self.compare(session, range, &["--numstat", "-z", "--no-renames"]).await?
        {
            files.cut |= cut;
            files
                .items
                .extend(text.split(|byte| *byte == 0).filter_map(|line| file(&repository, line)));
        }
        let sum = |of: fn(&FileDiff) -> Option<u64>| files.items.iter().filter_map(of).sum();
        files.total = DiffStat {
            files: files.items.len() as u64,
            insertions: sum(|file| file.insertions),
            deletions: sum(|file| file.deletions),
        };
        Ok(files)
    }

    /// Every file of the machine that differs. Where the session stands is its newest snapshot.
    ///
    /// # Errors
    /// As [`Sessions::diff_patch`]; also when this machine keeps no disks.
    pub async fn diff_machine(
        &self,
        session: &SessionId,
        range: DiffRange,
    ) -> Result<MachineChanges, SessionError> {
        let known = self.known(session).await?;
        let (from, to) = known.points(range)?;
        let Some(disks) = self.shared.provider.disks() else {
            return Err(SessionError::conflict(
                "no_disks",
                "this machine keeps no disks",
                "leave it out",
            ));
        };
        let after = known.snapshot(to)?;
        let before = match from {
            Point::Turn(0) if known.began().is_none() => {
                // The oldest snapshot there is was taken in the session's first machine, or in a later one
                // that went on from it.
                let oldest = known.snapshots.iter().find(|one| !one.gone).map(|one| one.id.clone());
                DiskBefore::BeginningOf(oldest.unwrap_or_else(|| after.clone()))
            }
            point => DiskBefore::Snapshot(known.snapshot(point)?),
        };
        Ok(disks.changes(&before, &after, MACHINE_NAMES).await?)
    }

    async fn known(&self, session: &SessionId) -> Result<Known, SessionError> {
        let store = &self.shared.store;
        Ok(Known {
            record: store.session_get(session).await?,
            turns: store.turn_list(session).await?,
            trees: store.tree_list(session).await?,
            snapshots: store.snapshot_list(session).await?,
        })
    }

    /// Compares each checkout.
    async fn compare(
        &self,
        session: &SessionId,
        range: DiffRange,
        how: &[&str],
    ) -> Result<Vec<(String, (Vec<u8>, bool))>, SessionError> {
        let known = self.known(session).await?;
        let (from, to) = known.points(range)?;
        // Once for all it will need: two that each wait for what the other holds would wait for ever.
        let _place = COMPARING.acquire().await.map_err(|_| SessionError::Stopped)?;
        let handle = self.handle(session).await?;
        // First, so that a machine that stands still is going by then; one that is not there is not started.
        let busy = handle.busy();
        let live = ready_bridge(&handle).await.map(|bridge| (bridge, busy));
        let (mut all, mut room) = (Vec::new(), PATCH_BYTES);
        let repositories = known.record.repositories();
        let several = repositories.len() > 1;
        for repository in repositories {
            // With several, paths say which, as in a diff without turns.
            let prefixes =
                [format!("--src-prefix=a/{repository}/"), format!("--dst-prefix=b/{repository}/")];
            let prefixes = prefixes.iter().filter(|_| several).map(String::as_str);
            let how: Vec<&str> = how.iter().copied().chain(prefixes).collect();
            let mut comparison =
                Comparison { sessions: self, known: &known, live: live.as_ref(), repository, room };
            let told = comparison.run(from, to, &how).await?;
            room = room.saturating_sub(told.0.len());
            all.push((comparison.repository, told));
        }
        Ok(all)
    }
}

/// A moment of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Point {
    /// The end of a turn, 0 being the beginning.
    Turn(u32),
    /// Where it stands.
    Now,
}

/// What the store knows of a session.
struct Known {
    record: SessionRecord,
    turns: Vec<Turn>,
    trees: Vec<TurnTree>,
    snapshots: Vec<Snapshot>,
}

impl Known {
    fn points(&self, range: DiffRange) -> Result<(Point, Point), SessionError> {
        let DiffRange { turn, from, to } = range;
        if let Some(number) = turn {
            if from.is_some() || to.is_some() {
                let what = "a diff is of one `turn`, or goes `from` one `to` another";
                return Err(SessionError::invalid("invalid_range", what));
            }
            let turn = self.turn(number)?;
            let before = turn.after.unwrap_or_else(|| number.saturating_sub(1));
            return Ok((Point::Turn(before), Point::Turn(number)));
        }
        let from = Point::Turn(from.unwrap_or(0));
        Ok((from, to.map_or(Point::Now, Point::Turn)))
    }

    fn turn(&self, number: u32) -> Result<&Turn, SessionError> {
        let found = self.turns.iter().find(|turn| turn.number == number);
        let turn = found.ok_or_else(|| SessionError::missing(format!("turn {number}")))?;
        if turn.outcome.is_none() {
            let hint = "wait for it, or leave the end out to see how things stand";
            return Err(SessionError::conflict(
                "not_ended",
                format!("turn {number} has not ended"),
                hint,
            ));
        }
        Ok(turn)
    }

    /// The snapshot a fork began as.
    fn began(&self) -> Option<SnapshotId> {
        self.snapshots.iter().find(|one| one.turn == Some(0) && !one.gone).map(|one| one.id.clone())
    }

    /// The snapshot of a moment.
    fn snapshot(&self, point: Point) -> Result<SnapshotId, SessionError> {
        let gone = |what: String| {
            SessionError::conflict(
                "no_snapshot",
                what,
                "see `harvest turns` for those that are kept",
            )
        };
        match point {
            Point::Now => {
                let newest = self.record.session.snapshot.clone();
                newest.ok_or_else(|| gone("the session has no snapshot yet".to_owned()))
            }
            Point::Turn(0) => {
                self.began().ok_or_else(|| gone("its beginning was not kept".to_owned()))
            }
            Point::Turn(number) => {
                let turn = self.turn(number)?;
                let why =
                    turn.dropped.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
                turn.snapshot
                    .clone()
                    .ok_or_else(|| gone(format!("turn {number} has no snapshot{why}")))
            }
        }
    }

    /// The state of a checkout at a moment, where it was noted.
    fn tree(&self, repository: &str, point: Point) -> Result<Option<String>, SessionError> {
        let noted = |number: u32| {
            let tree =
                self.trees.iter().find(|tree| tree.turn == number && tree.repository == repository);
            tree.map(|tree| tree.tree.clone())
        };
        Ok(match point {
            Point::Now => None,
            Point::Turn(0) if self.began().is_none() => {
                let base = self.record.base_commit(repository);
                Some(base.unwrap_or(checkout::EMPTY_TREE).to_owned())
            }
            Point::Turn(0) => noted(0),
            Point::Turn(number) => {
                self.turn(number)?;
                noted(number)
            }
        })
    }
}

/// One checkout at two moments.
struct Comparison<'a> {
    sessions: &'a Sessions,
    known: &'a Known,
    live: Option<&'a (Bridge, Busy)>,
    repository: String,
    /// How much may be told of it.
    room: usize,
}

impl Comparison<'_> {
    async fn run(
        &mut self,
        from: Point,
        to: Point,
        how: &[&str],
    ) -> Result<(Vec<u8>, bool), SessionError> {
        let (before, mut after) =
            (self.known.tree(&self.repository, from)?, self.known.tree(&self.repository, to)?);
        if let Some((bridge, _)) = self.live {
            if to == Point::Now {
                after = Some(self.keep(bridge).await?);
            }
            if let (Some(before), Some(after)) = (&before, &after)
                && let Compared::Told { text, cut } =
                    self.told(bridge, (before, after), how).await?
            {
                return Ok((text, cut));
            }
        }
        // Elsewhere, then: where the later one is.
        let aside = match (self.live, to) {
            (Some(_), Point::Now) => None,
            _ => Some(self.aside(to).await?),
        };
        let bridge = match (&aside, self.live) {
            (Some(aside), _) => &aside.0.bridge,
            (None, Some((bridge, _))) => bridge,
            (None, None) => unreachable!("without a machine of its own one is started"),
        };
        let after = match after {
            Some(after) => after,
            None => self.keep(bridge).await?,
        };
        let told = self.told_of_two(bridge, from, before, &after, how).await;
        if let Some(aside) = aside {
            aside.end().await;
        }
        told
    }

    async fn told_of_two(
        &self,
        bridge: &Bridge,
        from: Point,
        before: Option<String>,
        after: &str,
        how: &[&str],
    ) -> Result<(Vec<u8>, bool), SessionError> {
        if let Some(before) = &before
            && let Compared::Told { text, cut } = self.told(bridge, (before, after), how).await?
        {
            return Ok((text, cut));
        }
        // The earlier one is not here: it is brought along from where it is.
        let aside = self.aside(from).await?;
        let other = &aside.0.bridge;
        let carried = async {
            let before = match before {
                Some(before) => before,
                None => self.keep(other).await?,
            };
            let base = self.known.record.base_commit(&self.repository);
            trees::carry(other, bridge, &self.repository, &before, base).await.map_err(failed)?;
            self.told(bridge, (&before, after), how).await
        };
        let told = carried.await;
        aside.end().await;
        match told? {
            Compared::Told { text, cut } => Ok((text, cut)),
            Compared::Missing => Err(failed(TreeError::Git {
                folder: checkout::folder(&self.repository),
                tail: "its objects are not there any more".to_owned(),
            })),
        }
    }

    async fn keep(&self, bridge: &Bridge) -> Result<String, SessionError> {
        Ok(trees::keep(bridge, &self.repository, "").await.map_err(failed)?.tree)
    }

    async fn told(
        &self,
        bridge: &Bridge,
        points: (&str, &str),
        how: &[&str],
    ) -> Result<Compared, SessionError> {
        trees::compare(bridge, &self.repository, points, how, self.room).await.map_err(failed)
    }

    /// A machine that begins as the session was at a moment, for nothing but looking.
    async fn aside(&self, point: Point) -> Result<Aside, SessionError> {
        let snapshot = self.known.snapshot(point)?;
        let from = StartFrom::Snapshot(snapshot);
        let hidden = Hidden::start(&self.sessions.shared, SandboxId::random(), from, None).await;
        Ok(Aside(hidden.map_err(not_started)?))
    }
}

/// A machine aside.
struct Aside(Hidden);

impl Aside {
    async fn end(self) {
        if let Err(error) = self.0.end().await {
            tracing::warn!(error = words(&error), "a sandbox that compared turns cannot be ended");
        }
    }
}

fn failed(error: TreeError) -> SessionError {
    let hint = "look at the checkout with `harvest exec`, or at `--machine`";
    SessionError::conflict("diff_failed", words(&error), hint)
}

fn not_started(error: HiddenError) -> SessionError {
    match error {
        HiddenError::Provider(error) => error.into(),
        other => SessionError::conflict(
            "diff_failed",
            words(&other),
            "try again; `harvest doctor` may help",
        ),
    }
}

/// `3<tab>1<tab>path`, with `-` for what is not text.
fn file(repository: &str, line: &[u8]) -> Option<FileDiff> {
    let mut parts = line.splitn(3, |byte| *byte == b'\t');
    let mut number = || {
        let text = parts.next()?;
        Some(std::str::from_utf8(text).ok()?.trim().parse().ok())
    };
    let (insertions, deletions) = (number()?, number()?);
    let path = String::from_utf8_lossy(parts.next()?).into_owned();
    Some(FileDiff { repository: repository.to_owned(), path, insertions, deletions })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_numbers_is_a_file() {
        let read =
            |line: &[u8]| file("r", line).map(|file| (file.path, file.insertions, file.deletions));
        assert_eq!(read(b"3\t0\ta\tb"), Some(("a\tb".to_owned(), Some(3), Some(0))));
        assert_eq!(read(b"-\t-\tbinary"), Some(("binary".to_owned(), None, None)));
        assert_eq!(read(b"1\t2\t\xff"), Some(("\u{fffd}".to_owned(), Some(1), Some(2))));
        assert_eq!(read(b""), None);
    }
}
