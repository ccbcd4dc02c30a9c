//! Twenty-four simulated hours on one server: the clock of the schedule is passed in, idle times
//! are milliseconds. Three users prompt, fork and leave sessions; repositories move and are
//! rebuilt; the warm pool refills; sessions freeze, pause and are deleted. What a round leaves
//! behind would be there 48 times at the end.

use std::collections::BTreeMap;

use harvest_proto::api::RunStatus;
use harvest_session::{Limits, PoolConfig, Retention, Sessions};

use super::*;

/// Rounds of half an hour.
const ROUNDS: i64 = 48;

/// Rounds until caches, pools and connections have their size.
const WARM_UP: i64 = 16;

// Measured: below 1 MB. A leak of 100 kB a round, less than one session's state, would be 3 MB.
const MAX_GROWTH_BYTES: u64 = 3 << 20;

fn minutes(minutes: i64) -> Timestamp {
    Timestamp::from_millis(minutes * 60_000)
}

fn users() -> [Author; 3] {
    ["Ada", "Bob", "Eve"].map(|name| Author {
        name: name.to_owned(),
        email: format!("{}@example.org", name.to_lowercase()),
    })
}

/// What must not grow.
#[derive(Debug)]
struct Held {
    tasks: usize,
    descriptors: usize,
    sandboxes: usize,
    snapshots: usize,
    rows: BTreeMap<String, i64>,
}

impl Held {
    async fn now(harness: &Harness) -> Self {
        Self {
            tasks: tokio::runtime::Handle::current().metrics().num_alive_tasks(),
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            sandboxes: harness.fake.sandboxes().len(),
            snapshots: harness.fake.snapshots_taken().len(),
            rows: rows(&harness.folder.path().join("store.db")).await,
        }
    }
}

/// The rows of each table, but of those that are bounded by time: runs of the schedule, and what
/// sandboxes used (by hour; their last readings are kept for a week).
async fn rows(file: &std::path::Path) -> BTreeMap<String, i64> {
    use sqlx::{AnyConnection, AssertSqlSafe, Connection, Row};
    sqlx::any::install_default_drivers();
    let url = format!("sqlite:{}?mode=ro", file.display());
    let mut connection = AnyConnection::connect(&url).await.unwrap();
    let tables = sqlx::query("SELECT name FROM sqlite_master WHERE type = 'table'");
    let mut counts = BTreeMap::new();
    for table in tables.fetch_all(&mut connection).await.unwrap() {
        let name: String = table.get("name");
        if ["schedule_runs", "compute", "compute_meters"].contains(&name.as_str()) {
            continue;
        }
        let count = AssertSqlSafe(format!("SELECT COUNT(*) AS rows FROM {name}"));
        let row = sqlx::query(count).fetch_one(&mut connection).await.unwrap();
        counts.insert(name, row.get("rows"));
    }
    connection.close().await.unwrap();
    counts
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

async fn settled(harness: &Harness, sessions: &Sessions) -> Held {
    // Sandboxes of deleted sessions end, and the pool refills, in the background.
    let quiet = async {
        loop {
            let ready = sessions.pool().len() == harness.config.pool.per_repository;
            let removed = harness.store.removal_list().await.unwrap().is_empty();
            if ready && removed && harness.fake.sandboxes().len() == sessions.pool().len() {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(20), quiet).await.is_err() {
        panic!("{:?} {:?}", sessions.pool(), harness.fake.sandboxes());
    }
    Held::now(harness).await
}

/// What one user does within half an hour. Returns the sessions, and how often one was frozen.
async fn work(harness: &Harness, sessions: &Sessions, user: &Author) -> ([SessionId; 2], usize) {
    let create = CreateSession {
        repository: Some("demo".into()),
        prompt: Some("write /a one".parse().unwrap()),
        ..CreateSession::default()
    };
    let id = sessions.create(create, user.clone()).await.unwrap().id;
    let second = CreatePrompt::new("write /a two".parse().unwrap());
    let second = sessions.prompt(&id, second, user.clone()).await.unwrap().id;
    until_status(sessions, &id, &second, PromptStatus::Completed).await;
    until_state(sessions, &id, SessionState::Idle).await;
    let order = ForkSession {
        turn: Some(1),
        prompts: vec!["write /a fork".parse().unwrap()],
        ..ForkSession::default()
    };
    let fork = sessions.fork(&id, order, user.clone()).await.unwrap().remove(0).id;
    until(sessions, &fork, ended).await;
    until_state(sessions, &id, SessionState::Paused).await;
    let third = send(sessions, &id, "write /a three").await;
    until_status(sessions, &id, &third, PromptStatus::Completed).await;
    until_state(sessions, &fork, SessionState::Paused).await;
    let events = all(sessions, &id).await;
    assert_gapless(&events);
    let frozen = |event: &&Event| {
        matches!(event.body, EventBody::StateChanged { reason: StateReason::Frozen, .. })
    };
    let frozen = events.iter().filter(frozen).count();
    assert!(!harness.fake.snapshots_taken().is_empty());
    ([id, fork], frozen)
}

#[tokio::test]
async fn simulated_day_leaves_nothing_behind() {
    let timeouts = Timeouts {
        heartbeat: Duration::from_millis(50),
        idle_freeze: Some(Duration::from_millis(10)),
        idle_pause: Duration::from_millis(30),
        ..Timeouts::default()
    };
    // In memory: the commits of a day would wait for the disk.
    let mut harness = Harness::at(tempfile::tempdir_in("/dev/shm").unwrap(), timeouts).await;
    let meminfo = harness.folder.path().join("meminfo");
    std::fs::write(&meminfo, "MemTotal: 999999999 kB\nMemAvailable: 999999999 kB\n").unwrap();
    harness.config.pool = PoolConfig {
        per_repository: 2,
        refill_delay: Duration::ZERO,
        settle: Duration::ZERO,
        program: "one".to_owned(),
        meminfo,
    };
    harness.config.limits = Limits { sandboxes: 8, ..Limits::default() };
    harness.config.retention = Retention { snapshots_per_session: 2, ..Retention::default() };
    let parts = harness.serve_parts(harness.lease().await).await;
    let (sessions, repositories) = (&parts.sessions, &parts.repositories);
    let started = minutes(0);
    let (mut warm, mut resident, mut dropped, mut frozen) = (None, 0, 0, 0);
    for round in 0..ROUNDS {
        let now = minutes(30 * round + 31);
        *harness.doors.2.lock().unwrap() = format!("c0ffee{round:02}");
        let run = repositories.run_due(started, now).await.unwrap();
        assert_eq!(run.map(|run| run.status), Some(RunStatus::Success), "round {round}");
        let [ada, bob, eve] = users();
        let of_users = tokio::join!(
            work(&harness, sessions, &ada),
            work(&harness, sessions, &bob),
            work(&harness, sessions, &eve),
        );
        dropped += sessions.enforce_retention().await.unwrap().dropped.len();
        for (ids, times) in [of_users.0, of_users.1, of_users.2] {
            frozen += times;
            for id in ids {
                sessions.delete(&id).await.unwrap();
            }
        }
        if round == WARM_UP {
            warm = Some(settled(&harness, sessions).await);
            resident = resident_bytes();
        }
    }
    let end = settled(&harness, sessions).await;
    let warm = warm.expect("the day has more rounds");
    assert_eq!((end.sandboxes, end.snapshots, &end.rows), (2, 2, &warm.rows));
    // Tasks and connections come and go; one for each round would be 31.
    assert!(end.tasks <= warm.tasks + 8, "{} tasks, {} before", end.tasks, warm.tasks);
    let (descriptors, before) = (end.descriptors, warm.descriptors);
    assert!(descriptors <= before + 8, "{descriptors} descriptors, {before} before");
    let grown = resident_bytes().saturating_sub(resident);
    assert!(grown < MAX_GROWTH_BYTES, "{grown} bytes more than after round {WARM_UP}");
    assert!(sessions.readiness_problems().await.is_empty());
    assert!(dropped > 0 && frozen > 0, "{dropped} snapshots removed, {frozen} times frozen");
    assert_eq!(repositories.schedule_runs().await.unwrap().len(), 48);
}
