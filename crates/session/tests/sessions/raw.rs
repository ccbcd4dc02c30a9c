//! Sandboxes that no session has, beside sessions.

use harvest_proto::api::machines::{CreateSandbox, ExecOnce};
use harvest_session::{
    Limits,
    machines::{Asker, Commands, MachineError, Sandboxes},
};

use super::{rests::until_reason, *};

async fn limited(sandboxes: usize, sandboxes_per_user: Option<usize>) -> House {
    let mut house = House::new().await;
    house.config.limits = Limits { sandboxes, sandboxes_per_user, checks: 1 };
    house
}

fn by(user: &str) -> Asker {
    Asker { user: Some(user.to_owned()) }
}

fn machines(house: &House, sessions: &Sessions) -> Commands {
    Commands::new(Arc::new(house.fake.clone())).counted(sessions)
}

async fn create(machines: &Commands, user: &str) -> Result<SandboxId, MachineError> {
    Ok(machines.create(&by(user), CreateSandbox::default()).await?.sandbox_id)
}

fn code<T>(answer: Result<T, MachineError>) -> &'static str {
    answer.err().map_or("it was done", |error| error.code())
}

#[tokio::test]
async fn a_sandbox_of_ones_own_has_a_place_until_it_ends_however_it_ends() {
    let house = limited(1, None).await;
    let sessions = house.serve().await;
    let machines = machines(&house, &sessions);
    for end in ["stop", "delete", "crash"] {
        let sandbox = create(&machines, "ada@example.org").await.unwrap();
        assert_eq!(code(create(&machines, "bob@example.org").await), "limit_sandboxes");
        assert_eq!(code(machines.fork(&by("a"), &sandbox, 1).await), "limit_sandboxes");
        let once = ExecOnce { argv: vec!["true".into()], ..ExecOnce::default() };
        assert_eq!(code(machines.exec_once(&by("a"), once, None).await), "limit_sandboxes");
        let waits = house.session(&sessions, Some("hello")).await.id;
        until_reason(&sessions, &waits, "limit_sandboxes").await;
        match end {
            "stop" => drop(machines.stop(&sandbox).await.unwrap()),
            "delete" => machines.delete(&sandbox, false).await.unwrap(),
            _ => house.fake.crash(&sandbox, "by itself"),
        }
        until(&sessions, &waits, ended).await;
        if end == "stop" {
            assert_eq!(code(machines.start(&sandbox).await), "limit_sandboxes", "its place is another's now");
        }
        sessions.delete(&waits).await.unwrap();
    }
}

#[tokio::test]
async fn a_fresh_sandbox_has_its_place_for_its_command_only() {
    let house = limited(1, None).await;
    let sessions = house.serve().await;
    let machines = machines(&house, &sessions);
    for _ in 0..3 {
        let once = ExecOnce { argv: vec!["echo".into(), "hi".into()], ..ExecOnce::default() };
        let lines: Vec<_> = machines.exec_once(&by("a"), once, None).await.unwrap().collect().await;
        assert!(matches!(lines.last(), Some(ExecLine::Exited { .. })), "{lines:?}");
    }
    let sleep = ExecOnce { argv: vec!["sleep".into(), "1000".into()], ..ExecOnce::default() };
    let running = machines.exec_once(&by("a"), sleep, None).await.unwrap();
    assert_eq!(code(create(&machines, "a").await), "limit_sandboxes");
    drop(running);
    machines.settle().await;
    assert!(create(&machines, "a").await.is_ok());
}

#[tokio::test]
async fn what_runs_when_a_server_starts_has_its_place_and_its_makers() {
    let house = limited(9, Some(1)).await;
    let sessions = house.serve().await;
    let sandbox = create(&machines(&house, &sessions), "ada@example.org").await.unwrap();
    sessions.close().await;
    let sessions = house.serve().await;
    let machines = machines(&house, &sessions);
    assert_eq!(code(create(&machines, "ada@example.org").await), "limit_user");
    let waits = house.session(&sessions, Some("hello")).await.id;
    // A session of hers waits as well.
    until_reason(&sessions, &waits, "limit_user").await;
    assert!(create(&machines, "bob@example.org").await.is_ok());
    house.fake.crash(&sandbox, "by itself");
    until(&sessions, &waits, ended).await;
}

#[tokio::test]
async fn a_sandbox_put_back_keeps_its_place() {
    let house = limited(1, None).await;
    let sessions = house.serve().await;
    let machines = machines(&house, &sessions);
    let sandbox = create(&machines, "a").await.unwrap();
    let kept = machines.snapshot(&sandbox).await.unwrap().id;
    machines.restore(&sandbox, &kept).await.unwrap();
    assert_eq!(code(create(&machines, "a").await), "limit_sandboxes");
    house.fake.crash(&sandbox, "by itself");
    while machines.machines().sandbox_ended(&sandbox).await.is_err() || create(&machines, "a").await.is_err()
    {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn without_a_server_nobody_counts() {
    let house = limited(1, None).await;
    let machines = Commands::new(Arc::new(house.fake.clone()));
    for _ in 0..3 {
        machines.create(&Asker::default(), CreateSandbox::default()).await.unwrap();
    }
    assert_eq!(house.fake.sandbox_list().await.unwrap().items.len(), 3);
}
