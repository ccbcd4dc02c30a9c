//! Failures around sessions: an unwritable store, concurrent requests, shutdown in the middle of
//! work.

use harvest_proto::api::{AllowedName, NameSource};
use sqlx::{AssertSqlSafe, Connection, SqliteConnection};

use super::{removal::eventually, *};

/// Runs a statement on the database of the store.
pub(super) async fn sql(harness: &Harness, statement: String) {
    let path = harness.folder.path().join("store.db");
    let mut store =
        SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    sqlx::query(AssertSqlSafe(statement)).execute(&mut store).await.unwrap();
    store.close().await.unwrap();
}

/// Makes every write of this kind fail, as on a full disk; `None` undoes it.
pub(super) async fn break_store(harness: &Harness, what: Option<&str>) {
    let order = match what {
        Some(what) => {
            format!("CREATE TRIGGER full BEFORE {what} BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        }
        None => "DROP TRIGGER full".to_owned(),
    };
    sql(harness, order).await;
}

#[tokio::test]
async fn store_failure_is_reported_and_nothing_lost() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    break_store(&harness, Some("UPDATE ON sessions")).await;
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    for _ in 0..3 {
        let reply = tokio::time::timeout(Duration::from_secs(20), sessions.pause(&id)).await;
        assert_eq!(reply.expect("it is answered").unwrap_err().code(), "store_failed");
        tokio::task::yield_now().await;
    }
    break_store(&harness, None).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 1);
}

#[tokio::test]
async fn full_disk_keeps_the_connection_and_stops() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    // Neither the end of the turn nor a lost connection fits on the disk.
    for (name, on) in [
        ("events_full", "INSERT ON events WHEN NEW.body LIKE '%turn_ended%'"),
        ("link_full", "UPDATE OF driver_state ON sessions WHEN NEW.driver_state LIKE '%\"down\"%'"),
    ] {
        let full = "SELECT RAISE(ABORT, 'database or disk is full')";
        sql(&harness, format!("CREATE TRIGGER {name} BEFORE {on} BEGIN {full}; END")).await;
    }
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    for _ in 0..20 {
        sessions.stop(&id).await.expect("a stop is served");
        tokio::task::yield_now().await;
    }
    sql(&harness, "DROP TRIGGER events_full".to_owned()).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 1, "stored without a reconnect");
}

#[tokio::test]
async fn full_disk_costs_only_the_diff() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let full = "SELECT RAISE(ABORT, 'database or disk is full')";
    let on = "INSERT ON diffs";
    sql(&harness, format!("CREATE TRIGGER diff_full BEFORE {on} BEGIN {full}; END")).await;
    let id = harness.session(&sessions, Some("write /a one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sessions.snapshots(&id).await.unwrap().len(), 1, "the turn is saved");
    sessions.terminate(&id).await.expect("a session without its diff can be terminated");
}

#[tokio::test]
async fn session_continues_after_failed_delete() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    break_store(&harness, Some("DELETE ON sessions")).await;
    assert_eq!(sessions.delete(&id).await.unwrap_err().code(), "store_failed");
    let next = send(&sessions, &id, "again").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
}

#[tokio::test]
async fn requests_during_delete_get_not_found() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let (pause, first, second) =
        tokio::join!(sessions.pause(&id), sessions.delete(&id), sessions.delete(&id));
    first.unwrap();
    assert_eq!(second.unwrap_err().code(), "not_found");
    assert_eq!(pause.unwrap_err().code(), "not_found");
    assert!(harness.fake.sandboxes().is_empty());
    assert!(harness.fake.snapshots_taken().is_empty(), "no orphaned snapshot is left");
}

#[tokio::test]
async fn unreviewed_push_is_reviewed_after_restart() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let session = harness.session(&sessions, Some("hold")).await;
    until(&sessions, &session.id, started).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let (repository, branch, commit) = (demo(), session.branch, "c0ffee".into());
    ledger.log(&session.id, EventBody::Pushed { repository, branch, commit }).await;
    sessions.close().await;
    let sessions = harness.serve().await;
    let reviewed =
        |event: &Event| matches!(event.body, EventBody::Evidence(_) | EventBody::Warning { .. });
    let first = until(&sessions, &session.id, reviewed).await;
    assert!(matches!(first.body, EventBody::Evidence(_)), "{first:?}");
}

#[tokio::test]
async fn close_removes_sandbox_of_running_build() {
    let harness = Harness::new().await;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    harness.fake.set_boot_hanging();
    let _build = repositories.build(&demo(), BuildRepository::default(), &ada()).await.unwrap();
    let started = async {
        while harness.fake.sandboxes().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), started).await.expect("a build has a sandbox");
    sessions.close().await;
    assert!(harness.fake.sandboxes().is_empty());
    assert!(repositories.get(&demo()).await.unwrap().build.is_none(), "the build had not finished");
}

#[tokio::test]
async fn builds_of_one_user_leave_a_slot() {
    let mut harness = Harness::new().await;
    harness.config.limits.checks = 2;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    harness.fake.set_boot_hanging();
    let mut builds = Vec::new();
    for (name, user) in
        [("a", "ada@example.org"), ("b", "Ada@example.org"), ("c", "bob@example.org")]
    {
        let url = format!("https://example.org/me/{name}.git");
        let added =
            repositories.add(AddRepository { url, ..AddRepository::default() }, &ada()).await;
        let user = Author { name: "Ada".into(), email: user.into() };
        let (name, order) = (added.unwrap().name, BuildRepository::default());
        builds.push(repositories.build(&name, order, &user).await.unwrap());
    }
    eventually("two users build", || harness.fake.created().len() == 2).await;
    sessions.close().await;
}

#[tokio::test]
async fn forks_and_archived_sessions_can_be_forked() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /kept yes")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let fork = sessions.fork(&id, ForkSession::default(), ada()).await.unwrap().remove(0).id;
    let second = sessions.fork(&fork, ForkSession::default(), ada()).await.unwrap().remove(0).id;
    until_state(&sessions, &second, SessionState::Idle).await;
    assert!(harness.fake.file(&sandbox(&sessions, &second).await, "/kept").is_some());
    sessions.pause(&id).await.unwrap();
    sessions.archive(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Archived).await;
    let third = sessions.fork(&id, ForkSession::default(), ada()).await.unwrap().remove(0).id;
    until_state(&sessions, &third, SessionState::Idle).await;
    assert!(harness.fake.file(&sandbox(&sessions, &third).await, "/kept").is_some());
}

#[tokio::test]
async fn command_waits_for_reconnect_after_restart() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.close().await;
    let sessions = harness.serve().await;
    let request = ExecRequest { argv: vec!["echo".into(), "hi".into()], ..ExecRequest::default() };
    let lines: Vec<ExecLine> = exec(&sessions, &id, request).await.unwrap().collect().await;
    assert!(
        matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
        "{lines:?}"
    );
}

#[tokio::test]
async fn only_trusted_doors_wait_for_trusted_names() {
    let harness = Harness::new().await;
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let dependencies = harness.dependencies(harness.lease().await);
    let trusted = async { receiver.await.unwrap_or_default() };
    let parts = ServerParts::open_with_trusted(dependencies, trusted).await.unwrap();
    let ServerParts { repositories, sessions, .. } = parts;
    let url = "https://example.org/demo.git".to_owned();
    repositories.add(AddRepository { url, ..AddRepository::default() }, &ada()).await.unwrap();
    let trusting = harness.session(&sessions, None).await.id;
    let (repository, network) = (Some("demo".to_owned()), Some(harvest_proto::NetworkPolicy::None));
    let create = CreateSession { repository, network, ..CreateSession::default() };
    let alone = sessions.create(create, ada()).await.unwrap().id;
    until_state(&sessions, &alone, SessionState::Idle).await;
    // The driver does not wait for the names: it answers, and work without network continues.
    until_state(&sessions, &trusting, SessionState::Idle).await;
    let deleted = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &deleted, started).await;
    sessions.delete(&deleted).await.unwrap();
    let name = "packages.example.org".to_owned();
    let (source, tool) = (NameSource::Config, None);
    sender.send(vec![AllowedName { name, source, tool, ports: Vec::new() }]).unwrap();
    removal::eventually("the door to be opened", || harness.doors.0.lock().unwrap().len() == 2)
        .await;
    let passes = harness.doors.0.lock().unwrap().clone();
    let names = |pass: &DoorPolicy| -> Vec<String> {
        pass.network.borrow().trusted.iter().map(|trusted| trusted.name.clone()).collect()
    };
    assert_eq!(
        passes.iter().map(names).collect::<Vec<_>>(),
        [vec![], vec!["packages.example.org".to_owned()]]
    );
}

#[tokio::test]
async fn build_reports_refused_connections() {
    let harness = Harness::new().await;
    // The build stops with the last handle of the sessions.
    let parts = harness.serve_parts(harness.lease().await).await;
    let lines: Vec<harvest_proto::api::BuildLine> = parts
        .repositories
        .build(&demo(), BuildRepository::default(), &ada())
        .await
        .unwrap()
        .collect()
        .await;
    let refused = |line: &harvest_proto::api::BuildLine| matches!(line, harvest_proto::api::BuildLine::EgressRefused { name, .. } if name == "example.org");
    assert!(lines.iter().any(refused), "{lines:?}");
}

#[tokio::test]
async fn repository_keeps_last_two_builds() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let mut built = Vec::new();
    for _ in 0..4 {
        let lines: Vec<harvest_proto::api::BuildLine> = parts
            .repositories
            .build(&demo(), BuildRepository::default(), &ada())
            .await
            .unwrap()
            .collect()
            .await;
        let Some(harvest_proto::api::BuildLine::Built { build }) = lines.last() else {
            panic!("{lines:?}")
        };
        built.push(build.snapshot_id.clone());
    }
    let kept: Vec<_> =
        harness.fake.snapshots_taken().into_iter().map(|(snapshot, _)| snapshot).collect();
    assert!(
        kept.len() == 2 && built[2..].iter().all(|last| kept.contains(last)),
        "{built:?} {kept:?}"
    );
}

#[tokio::test]
async fn refused_prompt_fails_and_next_gets_new_sandbox() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /kept yes")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let refused = send(&sessions, &id, "refuse").await;
    until_status(&sessions, &id, &refused, PromptStatus::Failed).await;
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, StateReason::PromptRefused);
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert!(harness.fake.file(&sandbox(&sessions, &id).await, "/kept").is_some(), "with its files");
    assert_eq!(sessions.get(&id).await.unwrap().epoch, 2);
    let event = until(
        &sessions,
        &id,
        |event| matches!(&event.body, EventBody::TurnEnded { prompt, .. } if *prompt == refused),
    );
    let EventBody::TurnEnded { error: Some(error), .. } = event.await.body else {
        panic!("no reason")
    };
    assert!(error.contains("not restarted"), "{error}");
}

#[tokio::test]
async fn concurrent_requests_share_one_driver() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.pause(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Paused).await;
    sessions.close().await;
    drop(sessions);
    let sessions = harness.serve().await;
    let prompts =
        futures_util::future::join_all((0..20).map(|_| send(&sessions, &id, "again"))).await;
    for prompt in &prompts {
        until_status(&sessions, &id, prompt, PromptStatus::Completed).await;
        assert_eq!(harness.fake.prompts_run().iter().filter(|run| *run == prompt).count(), 1);
    }
}
