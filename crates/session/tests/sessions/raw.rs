//! Sandboxes that no session has, beside sessions.

use harvest_proto::api::machines::{CreateSandbox, ExecOnce};
use harvest_session::{
    Claim, Limits,
    machines::{Asker, Commands, MachineError, Sandboxes},
};

use super::{rests::until_reason, *};

async fn limited(sandboxes: usize, sandboxes_per_user: Option<usize>) -> House {
    let mut house = House::new().await;
    house.config.limits = Limits { sandboxes, sandboxes_per_user, checks: 1 };
    house
}

fn by(user: &str) -> Asker {
    Asker { user: Some(user.to_owned()), ..Asker::default() }
}

fn machines(house: &House, sessions: &Sessions) -> Commands {
    Commands::new(Arc::new(house.fake.clone())).counted(sessions)
}

async fn create(machines: &Commands, user: &str) -> Result<SandboxId, MachineError> {
    Ok(machines.create(&by(user), CreateSandbox::default()).await?.made.sandbox_id)
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
        let in_a_hurry = machines.clone().with_patience(Duration::ZERO);
        assert_eq!(code(in_a_hurry.exec_once(&by("a"), once, None).await), "limit_sandboxes");
        let waits = house.session(&sessions, Some("hello")).await.id;
        until_reason(&sessions, &waits, "limit_sandboxes").await;
        match end {
            "stop" => drop(machines.stop(&sandbox).await.unwrap()),
            "delete" => machines.delete(&sandbox, false).await.unwrap(),
            _ => house.fake.crash(&sandbox, "by itself"),
        }
        until(&sessions, &waits, ended).await;
        if end == "stop" {
            assert_eq!(
                code(machines.start(&sandbox).await),
                "limit_sandboxes",
                "its place is another's now"
            );
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
async fn commands_wait_for_a_place_and_all_of_them_run() {
    let house = limited(2, None).await;
    let sessions = house.serve().await;
    let machines = machines(&house, &sessions).with_patience(Duration::from_secs(3600));
    let kept = create(&machines, "a").await.unwrap();
    let all: Vec<_> = (0..8)
        .map(|_| {
            let machines = machines.clone();
            tokio::spawn(async move {
                let once =
                    ExecOnce { argv: vec!["echo".into(), "hi".into()], ..ExecOnce::default() };
                machines.exec_once(&by("a"), once, None).await.unwrap().collect::<Vec<_>>().await
            })
        })
        .collect();
    for one in all {
        let lines = one.await.unwrap();
        assert!(matches!(lines.last(), Some(ExecLine::Exited { .. })), "{lines:?}");
    }
    machines.delete(&kept, false).await.unwrap();
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
    let kept = machines.snapshot(&Asker::default(), &sandbox).await.unwrap().id;
    machines.restore(&sandbox, &kept).await.unwrap();
    assert_eq!(code(create(&machines, "a").await), "limit_sandboxes");
    house.fake.crash(&sandbox, "by itself");
    while machines.machines().sandbox_ended(&sandbox).await.is_err()
        || create(&machines, "a").await.is_err()
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

/// A request under a key that a server has claimed.
async fn claimed(sessions: &Sessions, key: &str) -> Asker {
    let meant = match sessions.idempotency_claim(key, b"the same").await.unwrap() {
        Claim::New => Vec::new(),
        Claim::Made { ids } => ids,
        other => panic!("{other:?}"),
    };
    Asker { key: Some(key.to_owned()), meant, ..Asker::default() }
}

#[tokio::test]
async fn what_a_dead_server_made_under_a_key_is_found_and_what_it_meant_to_make_is_made() {
    let house = limited(9, None).await;
    let (mut sessions, order) = (house.serve().await, CreateSandbox::default);
    let first = claimed(&sessions, "k").await;
    let made = machines(&house, &sessions).create(&first, order()).await.unwrap();
    let meant = made.made.sandbox_id.clone();
    for made_before in [true, false] {
        // Nothing was answered.
        sessions.close().await;
        sessions = house.serve().await;
        let again = claimed(&sessions, "k").await;
        assert_eq!(again.meant, [meant.to_string()]);
        let machines = machines(&house, &sessions);
        let found = machines.create(&again, order()).await.unwrap();
        assert_eq!((found.made.sandbox_id, found.again), (meant.clone(), made_before));
        assert_eq!(house.fake.sandbox_list().await.unwrap().items.len(), 1, "one sandbox, not two");
        machines.delete(&meant, false).await.unwrap();
    }
}

#[tokio::test]
async fn forks_that_a_dead_server_made_half_of_are_made_to_their_number() {
    let house = limited(9, None).await;
    let mut sessions = house.serve().await;
    let source = create(&machines(&house, &sessions), "a").await.unwrap();
    let first = claimed(&sessions, "k").await;
    let forks = machines(&house, &sessions).fork(&first, &source, 3).await.unwrap().made.forks;
    machines(&house, &sessions).delete(&forks[1], false).await.unwrap();
    for made_before in [false, true] {
        sessions.close().await;
        sessions = house.serve().await;
        let again = claimed(&sessions, "k").await;
        let found = machines(&house, &sessions).fork(&again, &source, 3).await.unwrap();
        assert_eq!((&found.made.forks, found.again), (&forks, made_before));
        assert_eq!(house.fake.sandbox_list().await.unwrap().items.len(), 4);
    }
    assert_eq!(house.fake.kept(), [], "what they began as is gone");
}

#[tokio::test]
async fn forks_that_run_keep_their_places_when_the_others_cannot_be_made() {
    let house = limited(4, None).await;
    let mut sessions = house.serve().await;
    let source = create(&machines(&house, &sessions), "a").await.unwrap();
    let first = claimed(&sessions, "k").await;
    let forks = machines(&house, &sessions).fork(&first, &source, 3).await.unwrap().made.forks;
    machines(&house, &sessions).delete(&forks[2], false).await.unwrap();
    sessions.close().await;
    sessions = house.serve().await;
    let (again, machines) = (claimed(&sessions, "k").await, machines(&house, &sessions));
    machines.delete(&source, true).await.unwrap();
    assert!(machines.fork(&again, &source, 3).await.is_err());
    // Two of four run.
    assert!(create(&machines, "a").await.is_ok() && create(&machines, "a").await.is_ok());
    assert_eq!(code(create(&machines, "a").await), "limit_sandboxes");
}

#[tokio::test]
async fn a_server_that_ends_lets_no_command_wait() {
    let house = limited(1, None).await;
    let sessions = house.serve().await;
    let machines = machines(&house, &sessions).with_patience(Duration::from_secs(3600));
    create(&machines, "a").await.unwrap();
    let waits = machines.clone();
    let waits = tokio::spawn(async move {
        let once = ExecOnce { argv: vec!["true".into()], ..ExecOnce::default() };
        code(waits.exec_once(&by("a"), once, None).await)
    });
    tokio::task::yield_now().await;
    sessions.close().await;
    assert_eq!(waits.await.unwrap(), "server_busy");
}

#[tokio::test]
async fn a_key_under_which_nothing_could_be_made_is_free_again() {
    let house = limited(9, None).await;
    let sessions = house.serve().await;
    let asker = claimed(&sessions, "k").await;
    house.fake.set_failing(Act::Start, true);
    assert!(machines(&house, &sessions).create(&asker, CreateSandbox::default()).await.is_err());
    sessions.idempotency_release("k").await.unwrap();
    assert_eq!(sessions.idempotency_claim("k", b"another").await.unwrap(), Claim::New);
}
