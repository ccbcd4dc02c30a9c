//! What goes wrong around sessions: a store that cannot be written, two people at once, a server that
//! ends in the middle of something.

use sqlx::{AssertSqlSafe, Connection, SqliteConnection};

use super::*;

/// Makes every write of this kind fail, as a full disk would; `None` mends it.
pub(super) async fn break_store(house: &House, what: Option<&str>) {
    let path = house.folder.path().join("store.db");
    let mut store =
        SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    let order = match what {
        Some(what) => {
            format!("CREATE TRIGGER full BEFORE {what} BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        }
        None => "DROP TRIGGER full".to_owned(),
    };
    sqlx::query(AssertSqlSafe(order)).execute(&mut store).await.unwrap();
    store.close().await.unwrap();
}

#[tokio::test]
async fn who_asks_while_the_store_cannot_be_written_hears_so_and_nothing_is_lost() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    break_store(&house, Some("UPDATE ON sessions")).await;
    house.fake.release(&sandbox(&sessions, &id).await);
    for _ in 0..3 {
        let asked = tokio::time::timeout(Duration::from_secs(20), sessions.pause(&id)).await;
        assert_eq!(asked.expect("it is answered").unwrap_err().code(), "store_failed");
        tokio::task::yield_now().await;
    }
    break_store(&house, None).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let events = all(&sessions, &id).await;
    assert_gapless(&events);
    assert_eq!(events.iter().filter(|event| ended(event)).count(), 1);
}

#[tokio::test]
async fn a_session_that_could_not_be_deleted_goes_on() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    break_store(&house, Some("DELETE ON sessions")).await;
    assert_eq!(sessions.delete(&id).await.unwrap_err().code(), "store_failed");
    let next = send(&sessions, &id, "again").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
}

#[tokio::test]
async fn whoever_is_late_hears_that_the_session_is_deleted() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let (pause, first, second) =
        tokio::join!(sessions.pause(&id), sessions.delete(&id), sessions.delete(&id));
    first.unwrap();
    assert_eq!(second.unwrap_err().code(), "not_found");
    assert_eq!(pause.unwrap_err().code(), "not_found");
    assert!(house.fake.list().await.unwrap().is_empty());
    assert!(house.fake.kept().is_empty(), "no snapshot is left without an owner");
}

#[tokio::test]
async fn a_push_left_unreviewed_is_reviewed_by_the_next_server() {
    let house = House::new().await;
    let lease = house.lease().await;
    let sessions = house.serve_with(lease).await;
    let session = house.session(&sessions, Some("hold")).await;
    until(&sessions, &session.id, started).await;
    let books = Books::new(house.store.clone(), lease, house.vault.clone(), None);
    let (repository, branch, commit) = ("demo".into(), session.branch, "c0ffee".into());
    books.log(&session.id, EventBody::Pushed { repository, branch, commit }).await;
    sessions.close().await;
    let sessions = house.serve().await;
    let told =
        |event: &Event| matches!(event.body, EventBody::Evidence(_) | EventBody::Warning { .. });
    let first = until(&sessions, &session.id, told).await;
    assert!(matches!(first.body, EventBody::Evidence(_)), "{first:?}");
}

#[tokio::test]
async fn closing_ends_the_sandbox_of_a_build_under_way() {
    let house = House::new().await;
    let sessions = house.serve().await;
    house.fake.set_boots_hanging();
    let _build = sessions.repository_build("demo").await.unwrap();
    let begun = async {
        while house.fake.list().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), begun).await.expect("a build has a sandbox");
    sessions.close().await;
    assert!(house.fake.list().await.unwrap().is_empty());
    assert!(sessions.repository("demo").await.unwrap().build.is_none(), "it was under way still");
}

#[tokio::test]
async fn a_fork_without_a_turn_and_an_archived_session_can_be_forked() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("write /kept yes")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let fork = sessions.fork(&id, ForkSession::default(), ada()).await.unwrap().remove(0).id;
    let second = sessions.fork(&fork, ForkSession::default(), ada()).await.unwrap().remove(0).id;
    until_state(&sessions, &second, SessionState::Idle).await;
    assert!(house.fake.file(&sandbox(&sessions, &second).await, "/kept").is_some());
    sessions.pause(&id).await.unwrap();
    sessions.archive(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Archived).await;
    let third = sessions.fork(&id, ForkSession::default(), ada()).await.unwrap().remove(0).id;
    until_state(&sessions, &third, SessionState::Idle).await;
    assert!(house.fake.file(&sandbox(&sessions, &third).await, "/kept").is_some());
}

#[tokio::test]
async fn a_command_waits_for_a_ready_machine_to_be_dialled_again() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.close().await;
    let sessions = house.serve().await;
    let request = ExecRequest { argv: vec!["echo".into(), "hi".into()], ..ExecRequest::default() };
    let lines: Vec<ExecLine> = sessions.exec(&id, request).await.unwrap().collect().await;
    assert!(
        matches!(lines.last(), Some(ExecLine::Exited { exit: Exit::Code(0), .. })),
        "{lines:?}"
    );
}

#[tokio::test]
async fn only_doors_to_trusted_names_wait_until_those_are_known() {
    let house = House::new().await;
    let (tell, told) = tokio::sync::oneshot::channel();
    let parts = house.parts(house.lease().await);
    let sessions =
        Sessions::open_trusting(parts, async { told.await.unwrap_or_default() }).await.unwrap();
    let url = "https://example.org/demo.git".to_owned();
    sessions.repository_add(AddRepository { url, ..AddRepository::default() }).await.unwrap();
    let trusting = house.session(&sessions, None).await.id;
    let (repository, network) = (Some("demo".to_owned()), Some("none".to_owned()));
    let create = CreateSession { repository, network, ..CreateSession::default() };
    let alone = sessions.create(create, ada()).await.unwrap().id;
    until_state(&sessions, &alone, SessionState::Idle).await;
    // Its driver waits for no name: it answers, and what needs no way out is done.
    until_state(&sessions, &trusting, SessionState::Idle).await;
    let gone = house.session(&sessions, Some("hold")).await.id;
    until(&sessions, &gone, started).await;
    sessions.delete(&gone).await.unwrap();
    tell.send(vec!["packages.example.org".to_owned()]).unwrap();
    garbage::eventually("the door to be opened", || house.doors.0.lock().unwrap().len() == 2).await;
    let passes = house.doors.0.lock().unwrap().clone();
    let names = Policy::Trusted(vec!["packages.example.org".to_owned()]);
    assert_eq!(passes.iter().map(|pass| &pass.policy).collect::<Vec<_>>(), [&Policy::None, &names]);
}

#[tokio::test]
async fn a_repository_keeps_its_last_two_builds_and_no_more() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let mut built = Vec::new();
    for _ in 0..4 {
        let lines: Vec<harvest_proto::api::BuildLine> =
            sessions.repository_build("demo").await.unwrap().collect().await;
        let Some(harvest_proto::api::BuildLine::Built { build }) = lines.last() else {
            panic!("{lines:?}")
        };
        built.push(build.snapshot.clone());
    }
    let kept: Vec<_> = house.fake.kept().into_iter().map(|(snapshot, _)| snapshot).collect();
    assert!(
        kept.len() == 2 && built[2..].iter().all(|last| kept.contains(last)),
        "{built:?} {kept:?}"
    );
}

#[tokio::test]
async fn an_agent_that_takes_no_prompts_any_more_fails_one_and_the_next_gets_another_sandbox() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("write /kept yes")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let refused = send(&sessions, &id, "refuse").await;
    until_status(&sessions, &id, &refused, PromptStatus::Failed).await;
    until_state(&sessions, &id, SessionState::Paused).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, "prompt_refused");
    let next = send(&sessions, &id, "go on").await;
    until_status(&sessions, &id, &next, PromptStatus::Completed).await;
    assert!(house.fake.file(&sandbox(&sessions, &id).await, "/kept").is_some(), "with its files");
    assert_eq!(sessions.get(&id).await.unwrap().epoch, 2);
    let told = until(
        &sessions,
        &id,
        |event| matches!(&event.body, EventBody::TurnEnded { prompt, .. } if *prompt == refused),
    );
    let EventBody::TurnEnded { error: Some(error), .. } = told.await.body else {
        panic!("it says why")
    };
    assert!(error.contains("not started again"), "{error}");
}

#[tokio::test]
async fn a_session_that_many_ask_for_at_once_gets_one_driver() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.pause(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Paused).await;
    sessions.close().await;
    drop(sessions);
    let sessions = house.serve().await;
    let prompts =
        futures_util::future::join_all((0..20).map(|_| send(&sessions, &id, "again"))).await;
    for prompt in &prompts {
        until_status(&sessions, &id, prompt, PromptStatus::Completed).await;
        assert_eq!(house.fake.runs().iter().filter(|run| *run == prompt).count(), 1);
    }
}
