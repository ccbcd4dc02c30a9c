//! The schedule, with fake sandboxes and remotes.

use super::*;

use harvest_proto::api::{BuildStatus, CreateImage, ImageSource, RunStatus};
use harvest_session::{
    Repositories,
    sandboxes::{SandboxProvider as _, StateVolume},
};

fn minutes(minutes: i64) -> Timestamp {
    Timestamp::from_millis(minutes * 60_000)
}

fn set_tip(harness: &Harness, commit: &str) {
    *harness.doors.2.lock().unwrap() = commit.to_owned();
}

async fn built(repositories: &Repositories) -> usize {
    repositories.builds(&demo()).await.unwrap().len()
}

/// Builds the image with all agents.
async fn make_image(harness: &Harness) {
    let from = ImageSource::Recipe("agents".to_owned());
    let order =
        CreateImage { from, name: None, force: false, host_network: false, max_bytes: None };
    let lines = harness.fake.host().unwrap().image_make(order).await.unwrap();
    let _lines: Vec<_> = lines.collect().await;
}

#[tokio::test]
async fn moved_repository_is_rebuilt_once() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    // The commit that fake sandboxes report.
    set_tip(&harness, "c0ffee");
    let first = repositories.schedule_run().await.unwrap();
    assert_eq!((first.tail.as_str(), first.rebuilt), ("", vec![demo()]));
    let commit = repositories.get(&demo()).await.unwrap().build.unwrap().commit;
    set_tip(&harness, &commit);
    let second = repositories.schedule_run().await.unwrap();
    assert_eq!((second.attempts, second.image_rebuilt), (0, false));
    set_tip(&harness, "newer");
    assert_eq!(repositories.schedule_run().await.unwrap().attempts, 1);
    let runs = repositories.schedule_runs().await.unwrap();
    assert_eq!(runs.len(), 3);
    assert!(runs.iter().all(|run| run.status == RunStatus::Success && run.ended.is_some()));
}

#[tokio::test]
async fn simulated_day_has_48_successful_runs() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    set_tip(&harness, "c0ffee");
    let started = minutes(7);
    for now in (7..7 + 24 * 60).step_by(5) {
        repositories.run_due(started, minutes(now)).await.unwrap();
    }
    let runs = repositories.schedule_runs().await.unwrap();
    assert_eq!(runs.len(), 48);
    assert!(runs.iter().all(|run| run.status == RunStatus::Success), "{runs:?}");
    let commit = repositories.get(&demo()).await.unwrap().build.unwrap().commit;
    set_tip(&harness, &commit);
    let before = built(repositories).await;
    repositories.run_due(started, minutes(5000)).await.unwrap();
    repositories.run_due(started, minutes(5001)).await.unwrap();
    assert_eq!(repositories.schedule_runs().await.unwrap().len(), 49, "missed runs are one run");
    assert_eq!(built(repositories).await, before);
}

#[tokio::test]
async fn pause_survives_a_restart() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    assert!(repositories.schedule_pause(true).await.unwrap().paused);
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    assert_eq!(repositories.run_due(minutes(0), minutes(100)).await.unwrap(), None);
    assert!(!repositories.schedule_pause(false).await.unwrap().paused);
    assert!(repositories.run_due(minutes(0), minutes(100)).await.unwrap().is_some());
}

#[tokio::test]
async fn unreachable_remote_fails_only_its_run() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    set_tip(&harness, "");
    let run = repositories.schedule_run().await.unwrap();
    assert_eq!(run.status, RunStatus::Failed);
    assert!(run.tail.contains("local/demo"), "{}", run.tail);
    assert_eq!((run.attempts, built(repositories).await), (0, 0));
}

#[tokio::test]
async fn rebuilt_image_rebuilds_its_repositories() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    let host = harness.fake.host().unwrap();
    make_image(&harness).await;
    set_tip(&harness, "c0ffee");
    repositories.schedule_run().await.unwrap();
    let first = repositories.get(&demo()).await.unwrap().build.unwrap();
    set_tip(&harness, &first.commit);
    assert_eq!(repositories.schedule_run().await.unwrap().attempts, 0);
    host.image_delete("agents").await.unwrap();
    make_image(&harness).await;
    assert_eq!(repositories.schedule_run().await.unwrap().rebuilt, [demo()]);
    let second = repositories.get(&demo()).await.unwrap().build.unwrap();
    assert_ne!(first.image_id, second.image_id);
    assert_eq!(second.layers, 1, "it begins with the image");
    assert_eq!(repositories.schedule_run().await.unwrap().attempts, 0);
}

#[tokio::test]
async fn caches_are_cleared_once_a_day() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    set_tip(&harness, "");
    harness.fake.add_state(&demo());
    let cleared = |harness: &Harness| {
        let state = Some(StateVolume::Repository(demo()));
        harness.fake.created().iter().filter(|spec| spec.state == state).count()
    };
    let mut counts = Vec::new();
    for day in 0..4 {
        for run in [30, 60] {
            repositories.run_due(minutes(0), minutes(day * 24 * 60 + run)).await.unwrap();
        }
        counts.push(cleared(&harness));
    }
    assert_eq!(counts, [0, 1, 2, 3], "a new home begins its first day");
    assert!(harness.fake.sandboxes().is_empty());
}

#[tokio::test]
async fn daily_updates_reach_new_sessions() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    make_image(&harness).await;
    set_tip(&harness, "c0ffee");
    let run = async |now| repositories.run_due(minutes(0), minutes(now)).await.unwrap().unwrap();
    assert_eq!(run(30).await.rebuilt, [demo()]);
    let first = repositories.get(&demo()).await.unwrap().build.unwrap();
    set_tip(&harness, &first.commit);
    harness.fake.set_updates(2);
    assert!(!run(60).await.image_rebuilt, "packages are looked at once a day");
    let daily = run(24 * 60 + 30).await;
    assert_eq!((daily.status, daily.tail.as_str()), (RunStatus::Success, ""));
    assert_eq!((daily.images, daily.rebuilt), (vec!["agents".to_owned()], vec![demo()]));
    let second = repositories.get(&demo()).await.unwrap().build.unwrap();
    assert_ne!(second.image_id, first.image_id);
    let session = harness.session(&parts.sessions, Some("hello")).await;
    until_state(&parts.sessions, &session.id, SessionState::Idle).await;
    let from = harness.fake.created().last().unwrap().from.clone();
    assert_eq!(from, StartFrom::Snapshot(second.snapshot_id));
    assert!(!run(24 * 60 + 60).await.image_rebuilt);
}

#[tokio::test]
async fn run_ends_at_limit_while_builds_go_on() {
    let mut harness = Harness::new().await;
    assert_eq!(harness.config.timeouts.schedule_run, Duration::from_secs(600));
    // The ten minutes of a run, as they pass in a test.
    harness.config.timeouts.schedule_run = Duration::from_millis(300);
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    set_tip(&harness, "c0ffee");
    harness.fake.hold_creates(true);
    let mut now = 0;
    // A busy machine may not get as far as the build within one run.
    while built(repositories).await == 0 {
        now += 30;
        let run = repositories.run_due(minutes(0), minutes(now)).await.unwrap().unwrap();
        assert_eq!(run.status, RunStatus::Failed);
        assert!(run.tail.contains("not over after") && run.ended.is_some(), "{run:?}");
    }
    // Another run leaves the build alone.
    let other = repositories.run_due(minutes(0), minutes(now + 30)).await.unwrap().unwrap();
    assert_eq!((other.attempts, built(repositories).await), (0, 1));
    harness.fake.hold_creates(false);
    let wait = async {
        while repositories.get(&demo()).await.unwrap().build.is_none() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "no build");
    assert_eq!(built(repositories).await, 1);
}

#[tokio::test]
async fn hanging_image_build_ends_the_run() {
    let mut harness = Harness::new().await;
    harness.config.timeouts.schedule_run = Duration::from_millis(300);
    let parts = harness.serve_parts(harness.lease().await).await;
    let repositories = &parts.repositories;
    make_image(&harness).await;
    set_tip(&harness, "c0ffee");
    harness.fake.set_image_builds_hanging();
    let run = repositories.run_due(minutes(0), minutes(30)).await.unwrap().unwrap();
    assert_eq!((run.status, run.images.len()), (RunStatus::Failed, 0));
    assert!(run.tail.contains("not over after"), "{}", run.tail);
    // No row of a build is left that nothing builds.
    let wait = async {
        let builds = async || repositories.builds(&demo()).await.unwrap();
        while builds().await.iter().any(|build| build.status == BuildStatus::Building) {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "it hangs");
}
