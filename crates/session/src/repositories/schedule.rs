//! The schedule: every half hour it looks at the images and at the base of each repository, and
//! builds what has moved. Looking asks the remote for one reference and starts no process. A run
//! that the server missed is run once, later. Paused by an admin, it stays so across restarts.

use std::{sync::Arc, time::Duration};

use futures_util::stream::{self, StreamExt};
use harvest_proto::{
    RepositoryName, SecretOwner, Timestamp,
    api::{
        BuildLine, BuildRepository, BuildStatus, BuildSummary, Repository, RunStatus, Schedule,
        ScheduleRun,
    },
};
use tokio::sync::Notify;

use super::{Repositories, refresh_images::RefreshedImages};
use crate::{error::SessionError, error_chain::error_chain, jobs::Job, tasks::Tasks, wall_clock};

/// The user that scheduled builds count as when users take turns.
const USER: &str = "schedule";
const CRON: &str = "*/30 * * * *";
const PERIOD: Duration = Duration::from_secs(30 * 60);
/// How often the job looks whether a run is due. The clock of the machine may be changed.
const POLL_INTERVAL: Duration = Duration::from_secs(20);
/// Repositories that are looked at or built at the same time; builds also need slots.
const PARALLEL: usize = 4;
/// Builds of the same commit before it is left alone.
const MAX_ATTEMPTS: usize = 3;
const PAUSED: &str = "schedule_paused";
/// When the work of once a day was last done.
const DAILY: &str = "schedule_daily";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The newest time at or before `now` at which a run is for.
fn tick(now: Timestamp) -> Timestamp {
    let period = i64::try_from(PERIOD.as_millis()).unwrap_or(i64::MAX);
    Timestamp::from_millis(now.as_millis().div_euclid(period) * period)
}

/// The run that is due at `now`, when the last one was for `last`.
fn due(last: Timestamp, now: Timestamp) -> Option<Timestamp> {
    Some(tick(now)).filter(|tick| *tick > last)
}

/// Whether a repository with these builds, newest first, is to be built at this commit; or anyway,
/// because it was built on another image.
fn needs_build(builds: &[BuildSummary], tip: &str, other_image: bool) -> bool {
    let mut failed = 0;
    for build in builds {
        if build.branch.is_some() && build.status != BuildStatus::Building {
            continue;
        }
        let same = build.commit.as_deref() == Some(tip);
        match build.status {
            BuildStatus::Building => return false,
            BuildStatus::Ready => return (!same || other_image) && failed < MAX_ATTEMPTS,
            BuildStatus::Failed => failed += usize::from(same),
        }
    }
    failed < MAX_ATTEMPTS
}

/// What a run did with a repository.
pub(super) enum LookOutcome {
    Unchanged,
    Built(RepositoryName),
    Failed { name: RepositoryName, why: String, built: bool },
}

impl LookOutcome {
    pub(super) fn failure(&self) -> Option<&str> {
        match self {
            Self::Failed { why, .. } => Some(why),
            _ => None,
        }
    }
}

impl Repositories {
    /// Starts the job that runs the schedule.
    pub(crate) fn spawn_schedule(&self, tasks: &Tasks) {
        let job =
            Job { name: "schedule", period: Some(POLL_INTERVAL), wake: Arc::new(Notify::new()) };
        let (repositories, started) = (self.clone(), wall_clock::now());
        job.spawn(tasks, move || {
            let repositories = repositories.clone();
            async move {
                repositories.run_due(started, wall_clock::now()).await?;
                Ok(())
            }
        });
    }

    /// Runs the schedule if a run is due. A server that never ran one starts with the next.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn run_due(
        &self,
        started: Timestamp,
        now: Timestamp,
    ) -> Result<Option<ScheduleRun>, SessionError> {
        if self.is_paused().await? {
            return Ok(None);
        }
        let last = self.shared.store.schedule_last().await?;
        let last = last.map_or_else(|| tick(started), |run| run.timestamp);
        match due(last, now) {
            Some(tick) => self.run(tick, now).await.map(Some),
            None => Ok(None),
        }
    }

    /// The schedule and its newest run.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn schedule(&self) -> Result<Schedule, SessionError> {
        let paused = self.is_paused().await?;
        let disabled = !self.shared.schedule;
        let period = i64::try_from(PERIOD.as_millis()).unwrap_or(i64::MAX);
        let next = Timestamp::from_millis(tick(wall_clock::now()).as_millis() + period);
        Ok(Schedule {
            cron: CRON.to_owned(),
            paused,
            disabled,
            next: Some(next).filter(|_| !paused && !disabled),
            last: self.shared.store.schedule_last().await?,
        })
    }

    /// The runs that are kept, newest first.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn schedule_runs(&self) -> Result<Vec<ScheduleRun>, SessionError> {
        Ok(self.shared.store.schedule_list().await?)
    }

    /// Runs the schedule now, also while it is paused.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn schedule_run(&self) -> Result<ScheduleRun, SessionError> {
        let now = wall_clock::now();
        self.run(now, now).await
    }

    /// Pauses the schedule, or resumes it.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn schedule_pause(&self, paused: bool) -> Result<Schedule, SessionError> {
        self.shared.store.meta_set(PAUSED, if paused { "true" } else { "false" }).await?;
        self.schedule().await
    }

    /// Whether the work of once a day is due; then it counts as done. A new home begins its first
    /// day.
    async fn daily_is_due(&self, now: Timestamp) -> Result<bool, SessionError> {
        let last = self.shared.store.meta_get(DAILY).await?;
        let last = last.and_then(|last| last.parse::<i64>().ok());
        let day = i64::try_from(DAY.as_millis()).unwrap_or(i64::MAX);
        if last.is_some_and(|last| (last..last.saturating_add(day)).contains(&now.as_millis())) {
            return Ok(false);
        }
        self.shared.store.meta_set(DAILY, &now.as_millis().to_string()).await?;
        Ok(last.is_some())
    }

    pub(super) async fn is_paused(&self) -> Result<bool, SessionError> {
        Ok(self.shared.store.meta_get(PAUSED).await?.as_deref() == Some("true"))
    }

    async fn run(&self, tick: Timestamp, now: Timestamp) -> Result<ScheduleRun, SessionError> {
        let (store, lease) = (&self.shared.store, self.shared.sandboxes.lease);
        let mut run = ScheduleRun {
            status: RunStatus::Running,
            timestamp: tick,
            started: now,
            ended: None,
            attempts: 0,
            image_rebuilt: false,
            images: Vec::new(),
            rebuilt: Vec::new(),
            tail: String::new(),
        };
        store.schedule_begin(lease, &run).await?;
        let clock = self.shared.clock.now();
        let limit = self.shared.sandboxes.timeouts.schedule_run;
        let deadline = tokio::time::sleep(limit);
        tokio::pin!(deadline);
        let daily = self.daily_is_due(now).await?;
        let images = async {
            let refreshed = self.refresh_images(daily).await;
            if daily {
                self.clear_state_caches().await;
            }
            refreshed
        };
        let refreshed = tokio::select! {
            refreshed = images => refreshed,
            () = &mut deadline => RefreshedImages::default(),
        };
        run.images = refreshed.rebuilt;
        let mut lines = refreshed.failed;
        let repositories = self.list().await?;
        let mut outcomes = stream::iter(repositories)
            .map(|one| self.clone().refresh_in_task(one))
            .buffer_unordered(PARALLEL);
        loop {
            let outcome = tokio::select! {
                outcome = outcomes.next() => outcome,
                () = &mut deadline => {
                    lines.push(format!("not over after {} s", limit.as_secs()));
                    None
                }
            };
            match outcome {
                None => break,
                Some(LookOutcome::Unchanged) => {}
                Some(LookOutcome::Built(name)) => {
                    run.attempts += 1;
                    run.rebuilt.push(name);
                }
                Some(LookOutcome::Failed { name, why, built }) => {
                    run.attempts += u64::from(built);
                    lines.push(format!("{name}: {}", why.lines().next().unwrap_or_default()));
                }
            }
        }
        run.rebuilt.sort();
        run.image_rebuilt = !run.rebuilt.is_empty() || !run.images.is_empty();
        run.status = if lines.is_empty() { RunStatus::Success } else { RunStatus::Failed };
        run.tail = lines.join("\n");
        run.ended = Some(now.after(self.shared.clock.now().since(clock)));
        store.schedule_end(lease, &run).await?;
        Ok(run)
    }

    /// The commit of a repository's base; `None` when the remote does not answer.
    async fn tip(&self, repository: &Repository) -> Option<Option<String>> {
        let base = repository.base.as_ref();
        let access = self.git_access(repository, None);
        if let Some(tip) = self.shared.forge.tip(&access.url, base) {
            return Some(tip);
        }
        // No user asks: a user's token is not used.
        let owners = [SecretOwner::Repository(repository.name.clone()), SecretOwner::Global];
        self.shared.sandboxes.doors.tip(&access, &owners, base).await
    }

    /// A task of its own: the end of the run does not cancel it between the row of a build and the
    /// build.
    async fn refresh_in_task(self, repository: Repository) -> LookOutcome {
        let (name, tasks) = (repository.name.clone(), self.shared.sandboxes.tasks.clone());
        let stopped =
            || LookOutcome::Failed { name, why: "the server stopped".into(), built: false };
        let refreshed = tasks.spawn(async move { self.refresh(repository).await }).await;
        refreshed.ok().flatten().unwrap_or_else(stopped)
    }

    /// Looks at a repository, and builds it if it has moved.
    pub(super) async fn refresh(&self, repository: Repository) -> LookOutcome {
        let name = repository.name.clone();
        let failed = |why: String, built| LookOutcome::Failed { name: name.clone(), why, built };
        let tip = self.tip(&repository).await;
        let Some(tip) = tip else { return failed("cannot reach its remote".to_owned(), false) };
        let Some(tip) = tip else { return failed("its base does not exist".to_owned(), false) };
        match self.shared.store.build_list(&name).await {
            Ok(builds) if !needs_build(&builds, &tip, self.has_other_image(&repository).await) => {
                return LookOutcome::Unchanged;
            }
            Ok(_) => {}
            Err(error) => return failed(error_chain(&error), false),
        }
        let mut lines =
            match self.begin_build(repository, BuildRepository::default(), USER, Some(tip)).await {
                Ok(lines) => lines,
                Err(error) => return failed(error_chain(&error), false),
            };
        while let Some(line) = lines.next().await {
            match line {
                BuildLine::Built { .. } => return LookOutcome::Built(name),
                BuildLine::Failed { message, .. } => return failed(message, true),
                _ => {}
            }
        }
        failed("the build ended without a result".to_owned(), true)
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::SnapshotId;

    use super::*;

    fn minutes(minutes: i64) -> Timestamp {
        Timestamp::from_millis(minutes * 60_000)
    }

    #[test]
    fn missed_runs_are_caught_up_once() {
        assert_eq!(due(minutes(30), minutes(59)), None);
        assert_eq!(due(minutes(30), minutes(60)), Some(minutes(60)));
        assert_eq!(due(minutes(30), minutes(1000)), Some(minutes(990)));
        assert_eq!(due(minutes(990), minutes(1000)), None);
        assert_eq!(due(minutes(1000), minutes(30)), None, "the clock was set back");
    }

    #[test]
    fn a_day_has_48_runs() {
        let (mut last, mut runs) = (tick(minutes(7)), 0);
        for now in 7..(7 + 24 * 60) {
            if let Some(tick) = due(last, minutes(now)) {
                (last, runs) = (tick, runs + 1);
            }
        }
        assert_eq!(runs, 48);
    }

    #[test]
    fn only_moved_repositories_are_built() {
        let build = |status, commit: &str| BuildSummary {
            snapshot_id: SnapshotId::random(),
            status,
            commit: Some(commit.to_owned()),
            branch: None,
            package_manager: None,
            error: None,
            millis: None,
            started_at: minutes(0),
            ended_at: None,
        };
        let (ready, failed) = (BuildStatus::Ready, BuildStatus::Failed);
        let needs_build = |builds: &[BuildSummary], tip| super::needs_build(builds, tip, false);
        assert!(needs_build(&[], "b"));
        assert!(needs_build(&[build(ready, "a")], "b"));
        assert!(!needs_build(&[build(ready, "b"), build(ready, "a")], "b"));
        assert!(super::needs_build(&[build(ready, "b")], "b", true), "on another image");
        let branch = BuildSummary { branch: "x".parse().ok(), ..build(ready, "b") };
        assert!(needs_build(&[branch, build(ready, "a")], "b"), "of another branch");
        assert!(!needs_build(&[build(BuildStatus::Building, "a")], "b"));
        let failures = |count| {
            let mut builds = vec![build(failed, "b"); count];
            builds.push(build(ready, "a"));
            builds
        };
        assert!(needs_build(&failures(2), "b"));
        assert!(!needs_build(&failures(3), "b"), "three attempts are enough");
        assert!(needs_build(&failures(3), "c"), "a newer commit may build");
    }
}
