//! The warm pool with fake sandboxes: who gets which sandbox, also when servers die.

use std::collections::{BTreeMap, BTreeSet};

use harvest_proto::{
    NetworkPolicy, SpendingScope,
    api::{PoolStatus, WarmRepository},
    event::StartWay,
};
use harvest_session::{Limits, PoolConfig};

use super::*;
use crate::fuse::{Fuse, Fused};

/// A server whose pool has this many sandboxes per repository, on a machine with much memory.
async fn pooled(per_repository: usize) -> Harness {
    let mut harness = Harness::new().await;
    let meminfo = harness.folder.path().join("meminfo");
    std::fs::write(&meminfo, "MemTotal: 999999999 kB\nMemAvailable: 999999999 kB\n").unwrap();
    harness.config.pool = PoolConfig {
        per_repository,
        refill_delay: Duration::ZERO,
        settle: Duration::ZERO,
        program: "one".to_owned(),
        meminfo,
    };
    harness
}

fn set_memory(harness: &Harness, available_kib: u64) {
    let text = format!("MemTotal: 999999999 kB\nMemAvailable: {available_kib} kB\n");
    std::fs::write(&harness.config.pool.meminfo, text).unwrap();
}

/// Builds the repository and uses it, so that the pool has sandboxes for it.
async fn build_and_use(harness: &Harness) -> Sessions {
    let parts = harness.serve_parts(harness.lease().await).await;
    let lines =
        parts.repositories.build(&demo(), BuildRepository::default(), &ada()).await.unwrap();
    lines.collect::<Vec<_>>().await;
    let first = harness.session(&parts.sessions, None).await;
    until_state(&parts.sessions, &first.id, SessionState::Idle).await;
    parts.sessions
}

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "never: {what}");
}

async fn until_ready(sessions: &Sessions, count: usize) {
    eventually("the pool is full", async || {
        let ready = sessions.pool().iter().filter(|one| one.status == PoolStatus::Ready).count();
        ready == count && sessions.pool().len() == count
    })
    .await;
}

async fn way(sessions: &Sessions, session: &SessionId) -> StartWay {
    let started =
        until(sessions, session, |event| matches!(event.body, EventBody::SandboxStarted { .. }));
    let EventBody::SandboxStarted { way, .. } = started.await.body else { unreachable!() };
    way
}

/// Every sandbox belongs to one session or to one place of the pool, and none to neither.
async fn assert_consistent(harness: &Harness, sessions: &Sessions) {
    let (mut all, mut cursor) = (Vec::new(), None);
    loop {
        let page = sessions.list(cursor.as_deref(), 100).await.unwrap();
        all.extend(page.items);
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    let pool: BTreeSet<SandboxId> = sessions.pool().into_iter().map(|one| one.sandbox_id).collect();
    let mut owned = pool.clone();
    for session in all {
        if let Some(sandbox) = session.sandbox {
            assert!(!pool.contains(&sandbox), "{sandbox} belongs to a session and to the pool");
            assert!(owned.insert(sandbox.clone()), "{sandbox} belongs to two sessions");
        }
    }
    let existing: BTreeSet<SandboxId> = harness.fake.sandboxes().into_iter().collect();
    let (leaked, lost) = (&existing - &owned, &owned - &existing);
    assert!(leaked.is_empty() && lost.is_empty(), "leaked: {leaked:?}, lost: {lost:?}");
}

#[tokio::test]
async fn session_takes_waiting_sandbox() {
    let harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let waiting = sessions.pool()[0].sandbox_id.clone();
    assert!(harness.fake.is_frozen(&waiting));
    let session = harness.session(&sessions, Some("hello")).await;
    until_state(&sessions, &session.id, SessionState::Idle).await;
    assert_eq!(sandbox(&sessions, &session.id).await, waiting);
    assert_eq!(way(&sessions, &session.id).await, StartWay::Pool);
    assert_eq!(harness.fake.prompts_run().len(), 1);
    assert_gapless(&all(&sessions, &session.id).await);
    // It is replaced.
    until_ready(&sessions, 1).await;
    assert_ne!(sessions.pool()[0].sandbox_id, waiting);
    assert_consistent(&harness, &sessions).await;
}

#[tokio::test]
async fn waiting_sandbox_knows_nothing_of_its_session() {
    let harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let waiting = sessions.pool()[0].sandbox_id.clone();
    let doors = harness.doors.0.lock().unwrap().clone();
    let closed = |door: &&DoorPolicy| door.network.borrow().base == NetworkPolicy::None;
    let standby = doors.iter().find(closed).unwrap();
    assert!(standby.repositories.is_empty() && standby.secrets.is_empty());
    let create = CreateSession {
        repository: Some("demo".into()),
        network: Some(NetworkPolicy::Full),
        allow: vec!["example.org".to_owned()],
        author: Some(Author { name: "Eve".into(), email: "eve@example.org".into() }),
        ..CreateSession::default()
    };
    let session = sessions.create(create, ada()).await.unwrap();
    until_state(&sessions, &session.id, SessionState::Idle).await;
    let boots = harness.fake.boots(&waiting);
    let [first, second] = &boots[..] else { panic!("{boots:#?}") };
    assert!(first.standby && first.author.is_none() && first.env.is_empty());
    assert!(!second.standby && second.session == session.id);
    assert_eq!(second.author.as_ref().unwrap().name, "Eve");
    // Nothing is fetched before the session is known, and only that needs the URL.
    let url = second.repositories[0].url.clone();
    let fetched = harvest_proto::bridge::Checkout { url, ..first.repositories[0].clone() };
    assert_eq!(second.repositories, [fetched], "the agent has seen the branch");
    assert_eq!(second.agent, first.agent, "the agent is not started again");
    eventually("the door has the claimer's policy", async || {
        let doors = harness.doors.0.lock().unwrap();
        let own = doors.iter().rfind(|policy| policy.session == session.id);
        own.is_some_and(|policy| {
            let network = policy.network.borrow();
            network.base == NetworkPolicy::Full && network.rules.len() == 1
        })
    })
    .await;
}

#[tokio::test]
async fn session_that_starts_otherwise_takes_none() {
    let harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let same = || CreateSession { repository: Some("demo".into()), ..CreateSession::default() };
    let others = [
        CreateSession { env: [("A".to_owned(), "b".to_owned())].into(), ..same() },
        CreateSession { base: Some("next".parse().unwrap()), ..same() },
        CreateSession { model: Some("opus".parse().unwrap()), ..same() },
        CreateSession { no_questions: true, ..same() },
        CreateSession { secrets: [("S".to_owned(), Secret::new("s".to_owned()))].into(), ..same() },
        CreateSession::default(),
    ];
    for other in others {
        let session = sessions.create(other.clone(), ada()).await.unwrap();
        assert_ne!(way(&sessions, &session.id).await, StartWay::Pool, "{other:?}");
    }
}

#[tokio::test]
async fn refused_session_takes_none() {
    let harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let waiting = sessions.pool();
    let bad = CreateSession {
        repository: Some("demo".into()),
        allow: vec!["no port:x".to_owned()],
        ..CreateSession::default()
    };
    assert!(sessions.create(bad, ada()).await.is_err());
    assert_eq!(sessions.pool(), waiting);
}

#[tokio::test]
async fn outdated_sandbox_is_replaced() {
    let mut harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let first = sessions.pool()[0].sandbox_id.clone();
    sessions.close().await;
    drop(sessions);
    // Another program is pid 1 of new sandboxes.
    harness.config.pool.program = "two".to_owned();
    let sessions = harness.serve().await;
    eventually("it is replaced", async || {
        sessions.pool().iter().all(|one| one.sandbox_id != first) && sessions.pool().len() == 1
    })
    .await;
    until_ready(&sessions, 1).await;
    assert_consistent(&harness, &sessions).await;
}

#[tokio::test]
async fn new_build_replaces_waiting_sandbox_at_once() {
    let harness = pooled(1).await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let build = async || {
        let order = BuildRepository::default();
        let lines = parts.repositories.build(&demo(), order, &ada()).await.unwrap();
        lines.collect::<Vec<_>>().await;
    };
    build().await;
    harness.session(&parts.sessions, None).await;
    until_ready(&parts.sessions, 1).await;
    let first = parts.sessions.pool()[0].sandbox_id.clone();
    build().await;
    // Without being told, the pool would look a minute later.
    eventually("it is replaced", async || {
        let pool = parts.sessions.pool();
        pool.len() == 1 && pool[0].sandbox_id != first && pool[0].status == PoolStatus::Ready
    })
    .await;
    let newest = parts.repositories.get(&demo()).await.unwrap().build.unwrap().snapshot_id;
    let session = harness.session(&parts.sessions, None).await;
    assert_eq!(way(&parts.sessions, &session.id).await, StartWay::Pool);
    let sandbox = sandbox(&parts.sessions, &session.id).await;
    let created = harness.fake.created();
    let spec = created.iter().find(|spec| spec.id == sandbox).unwrap();
    assert_eq!(spec.from, StartFrom::Snapshot(newest));
}

#[tokio::test]
async fn session_learns_what_waiting_sandbox_lacks() {
    for restarted in [false, true] {
        let harness = pooled(1).await;
        harness.fake.set_warnings(&["without its caches"]);
        let mut sessions = build_and_use(&harness).await;
        until_ready(&sessions, 1).await;
        if restarted {
            drop(sessions);
            sessions = harness.serve().await;
            until_ready(&sessions, 1).await;
        }
        let session = harness.session(&sessions, None).await;
        assert_eq!(way(&sessions, &session.id).await, StartWay::Pool);
        let lacks = |event: &Event| matches!(&event.body, EventBody::Warning { message } if message == "the sandbox starts without its caches");
        until(&sessions, &session.id, lacks).await;
    }
}

#[tokio::test]
async fn cpu_before_the_claim_counts_for_the_repository() {
    let harness = pooled(1).await;
    harness.fake.set_boot_cpu(100_000_000);
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let session = harness.session(&sessions, Some("hello")).await;
    assert_eq!(way(&sessions, &session.id).await, StartWay::Pool);
    until_state(&sessions, &session.id, SessionState::Idle).await;
    harness.fake.use_cpu(&sandbox(&sessions, &session.id).await, 5_000_000);
    let begin = Timestamp::from_millis(0);
    let sums = sessions.spending(SpendingScope::Session, begin).await.unwrap();
    let own = sums.iter().find(|sum| sum.name == session.id.to_string()).unwrap();
    assert!((5_000..6_000).contains(&own.cpu_millis), "{own:?}");
}

#[tokio::test]
async fn removed_repository_ends_its_sandbox() {
    let harness = pooled(1).await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let lines =
        parts.repositories.build(&demo(), BuildRepository::default(), &ada()).await.unwrap();
    lines.collect::<Vec<_>>().await;
    let sessions = &parts.sessions;
    let only = harness.session(sessions, None).await;
    until_ready(sessions, 1).await;
    sessions.delete(&only.id).await.unwrap();
    parts.repositories.delete(&demo()).await.unwrap();
    eventually("the pool is empty", async || harness.fake.sandboxes().is_empty()).await;
    assert_eq!(sessions.pool(), []);
}

#[tokio::test]
async fn next_server_adopts_ready_sandbox() {
    let harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let waiting = sessions.pool()[0].sandbox_id.clone();
    drop(sessions);
    let sessions = harness.serve().await;
    until_ready(&sessions, 1).await;
    let session = harness.session(&sessions, Some("hello")).await;
    until_state(&sessions, &session.id, SessionState::Idle).await;
    assert_eq!(sandbox(&sessions, &session.id).await, waiting);
    assert_eq!(harness.fake.boots(&waiting).len(), 2);
}

#[tokio::test]
async fn shutdown_ends_the_pool() {
    let harness = pooled(2).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 2).await;
    sessions.suspend_all(Duration::from_secs(20)).await;
    assert_eq!(sessions.pool(), []);
    assert_eq!(harness.fake.sandboxes(), []);
}

#[tokio::test]
async fn dead_sandbox_is_never_taken() {
    let harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let waiting = sessions.pool()[0].sandbox_id.clone();
    harness.fake.crash(&waiting, "oom");
    let session = harness.session(&sessions, Some("hello")).await;
    until_state(&sessions, &session.id, SessionState::Idle).await;
    assert_eq!(harness.fake.prompts_run().len(), 1);
    eventually("it is removed", async || !harness.fake.sandboxes().contains(&waiting)).await;
}

#[tokio::test]
async fn waiting_session_gets_slot_of_the_pool() {
    let mut harness = pooled(1).await;
    harness.config.limits = Limits { sandboxes: 2, ..Limits::default() };
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    let first = sessions.list(None, 10).await.unwrap().items[0].clone();
    let other = CreateSession { prompt: Some("hold".parse().unwrap()), ..CreateSession::default() };
    let other = sessions.create(other, ada()).await.unwrap();
    until(&sessions, &other.id, started).await;
    assert_eq!(sessions.pool(), []);
    assert_eq!(sessions.get(&first.id).await.unwrap().state, SessionState::Idle, "not paused");
    assert_eq!(harness.fake.sandboxes().len(), 2);
}

#[tokio::test]
async fn short_memory_ends_the_pool() {
    let harness = pooled(1).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 1).await;
    set_memory(&harness, 1);
    let other = sessions.create(CreateSession::default(), ada()).await.unwrap();
    until_state(&sessions, &other.id, SessionState::Idle).await;
    eventually("the pool is empty", async || sessions.pool().is_empty()).await;
    assert_consistent(&harness, &sessions).await;
}

#[tokio::test]
async fn requested_sandbox_is_kept_for_its_user() {
    let harness = pooled(0).await;
    let sessions = build_and_use(&harness).await;
    let warm = || WarmRepository { repository: "demo".parse().unwrap(), agent: None, model: None };
    let mine = sessions.warm(warm(), "Ada@example.org").await.unwrap();
    assert_eq!(mine.status, PoolStatus::Warming);
    assert_eq!(sessions.warm(warm(), &ada().email).await.unwrap(), mine, "one for each user");
    until_ready(&sessions, 1).await;
    let create = || CreateSession { repository: Some("demo".into()), ..CreateSession::default() };
    let eve = Author { name: "Eve".into(), email: "eve@example.org".into() };
    let others = sessions.create(create(), eve).await.unwrap();
    assert_eq!(way(&sessions, &others.id).await, StartWay::Build);
    let own = sessions.create(create(), ada()).await.unwrap();
    until_state(&sessions, &own.id, SessionState::Idle).await;
    assert_eq!(sandbox(&sessions, &own.id).await, mine.sandbox_id);
    assert_eq!(sessions.pool(), []);
    let unknown = WarmRepository { repository: "none".parse().unwrap(), ..warm() };
    assert_eq!(sessions.warm(unknown, &ada().email).await.unwrap_err().code(), "not_found");
}

#[tokio::test]
async fn session_waits_for_sandbox_that_starts_for_it() {
    let harness = pooled(0).await;
    let sessions = build_and_use(&harness).await;
    harness.fake.hold_creates(true);
    let warm = WarmRepository { repository: "demo".parse().unwrap(), agent: None, model: None };
    let mine = sessions.warm(warm, &ada().email).await.unwrap();
    let create = CreateSession { repository: Some("demo".into()), ..CreateSession::default() };
    let (created, ()) = tokio::join!(sessions.create(create, ada()), async {
        tokio::task::yield_now().await;
        harness.fake.hold_creates(false);
    });
    let session = created.unwrap().id;
    until_state(&sessions, &session, SessionState::Idle).await;
    assert_eq!(sandbox(&sessions, &session).await, mine.sandbox_id);
}

#[tokio::test]
async fn repository_without_a_build_is_not_warmed() {
    let harness = pooled(1).await;
    let sessions = harness.serve().await;
    let warm = WarmRepository { repository: "demo".parse().unwrap(), agent: None, model: None };
    assert_eq!(sessions.warm(warm, &ada().email).await.unwrap_err().code(), "no_build");
    let session = harness.session(&sessions, None).await;
    assert_eq!(way(&sessions, &session.id).await, StartWay::Image);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_hundred_claims_share_no_sandbox() {
    const CALLERS: usize = 8;
    let harness = pooled(4).await;
    let sessions = build_and_use(&harness).await;
    until_ready(&sessions, 4).await;
    let callers = (0..CALLERS).map(|number| {
        let sessions = sessions.clone();
        tokio::spawn(async move {
            let email = format!("user{number}@example.org");
            let mut created = Vec::new();
            for _ in 0..200 / CALLERS {
                let warm = WarmRepository {
                    repository: "demo".parse().unwrap(),
                    agent: None,
                    model: None,
                };
                sessions.warm(warm, &email).await.unwrap();
                let create = CreateSession {
                    repository: Some("demo".into()),
                    prompt: Some("hello".parse().unwrap()),
                    ..CreateSession::default()
                };
                let user = Author { name: "User".into(), email: email.clone() };
                created.push(sessions.create(create, user).await.unwrap().id);
            }
            created
        })
    });
    let mut created = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        created.extend(caller.await.unwrap());
    }
    let mut ways: BTreeMap<StartWay, usize> = BTreeMap::new();
    for session in &created {
        until_state(&sessions, session, SessionState::Idle).await;
        *ways.entry(way(&sessions, session).await).or_default() += 1;
    }
    assert!(ways[&StartWay::Pool] > 150, "{ways:?}");
    eventually("requested sandboxes that were too many are removed", async || {
        harness.fake.sandboxes().len() == 201 + sessions.pool().len()
    })
    .await;
    assert_consistent(&harness, &sessions).await;
    let ran: BTreeSet<PromptId> = harness.fake.prompts_run().into_iter().collect();
    assert_eq!((created.len(), ran.len(), harness.fake.prompts_run().len()), (200, 200, 200));
}

/// Fills the pool, takes a sandbox, fills it again and ends it.
async fn life(sessions: Sessions) {
    until_ready(&sessions, 1).await;
    let create = CreateSession {
        repository: Some("demo".into()),
        prompt: Some("hello".parse().unwrap()),
        ..CreateSession::default()
    };
    let session = sessions.create(create, ada()).await.unwrap().id;
    until_state(&sessions, &session, SessionState::Idle).await;
    until_ready(&sessions, 1).await;
    sessions.suspend_all(Duration::from_secs(20)).await;
}

#[tokio::test]
async fn server_killed_anywhere_leaves_no_orphan() {
    for steps in 0.. {
        let harness = pooled(1).await;
        let sessions = build_and_use(&harness).await;
        sessions.suspend_all(Duration::from_secs(20)).await;
        sessions.close().await;
        drop(sessions);

        let fuse = Fuse::new(steps);
        let dependencies = Dependencies {
            provider: Arc::new(Fused::new(harness.fake.clone(), &fuse)),
            store: fuse.store(harness.store.clone()),
            ..harness.dependencies(harness.lease().await)
        };
        let killed = {
            let server = async {
                let sessions = ServerParts::open(dependencies).await.unwrap().sessions;
                life(sessions.clone()).await;
                sessions.close().await;
            };
            tokio::select! {
                () = server => false,
                () = fuse.blown() => true,
            }
        };

        let sessions = harness.serve().await;
        until_ready(&sessions, 1).await;
        for session in sessions.list(None, 10).await.unwrap().items {
            eventually("the session rests", async || {
                let state = sessions.get(&session.id).await.unwrap().state;
                matches!(state, SessionState::Idle | SessionState::Paused)
            })
            .await;
        }
        let ran: BTreeSet<PromptId> = harness.fake.prompts_run().into_iter().collect();
        assert_eq!(ran.len(), harness.fake.prompts_run().len(), "no prompt ran twice");
        eventually("orphans are removed", async || {
            let pool = sessions.pool().len();
            let sessions = sessions.list(None, 10).await.unwrap().items.into_iter();
            let owned = sessions.filter(|session| session.sandbox.is_some()).count();
            harness.fake.sandboxes().len() == pool + owned
        })
        .await;
        assert_consistent(&harness, &sessions).await;
        sessions.close().await;
        if !killed {
            assert!(steps > 60, "the server makes only {steps} steps");
            return;
        }
    }
}
