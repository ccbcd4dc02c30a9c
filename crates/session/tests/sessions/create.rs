//! Creating sessions from several repositories or none, variables, a snapshot and a key.

use harvest_proto::{
    AgentName, Hint,
    api::UseRepository,
    bridge::{BootStart, Checkout},
};
use harvest_session::{Repositories, SessionFilter};

use super::*;

fn named(name: &str) -> UseRepository {
    UseRepository { name: Some(name.parse().unwrap()), ..UseRepository::default() }
}

/// A session on `demo` and `lib`.
async fn on_two(sessions: &Sessions, prompt: &str) -> Session {
    let url = Some("https://example.org/lib.git".to_owned());
    let lib =
        UseRepository { url, base: Some("next".parse().unwrap()), ..UseRepository::default() };
    let create = CreateSession {
        repositories: vec![named("demo"), lib],
        prompt: Some(prompt.parse().unwrap()),
        env: [("MODE".to_owned(), "fast".to_owned())].into(),
        ..CreateSession::default()
    };
    sessions.create(create, ada()).await.unwrap()
}

#[tokio::test]
async fn session_can_push_to_each_repository() {
    let harness = Harness::new().await;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    let session = on_two(&sessions, "hello").await;
    let shown: Vec<_> =
        session.repositories.iter().map(|one| (one.name.as_str(), one.url.as_str())).collect();
    assert_eq!(
        shown,
        [
            ("local/demo", "https://example.org/demo.git"),
            ("local/lib", "https://example.org/lib.git")
        ]
    );
    assert_eq!((&session.repository, &session.env), (&Some(demo()), &vec!["MODE".to_owned()]));
    until(&sessions, &session.id, ended).await;
    let boot = harness.fake.boot(&sandbox(&sessions, &session.id).await).unwrap();
    let checkouts: Vec<_> =
        boot.repositories.iter().map(|one| (one.name.as_str(), one.base.as_deref())).collect();
    assert_eq!(checkouts, [("local/demo", None), ("local/lib", Some("next"))]);
    assert_eq!(boot.env["MODE"], "fast");
    let pass = harness.doors.0.lock().unwrap().last().unwrap().clone();
    assert_eq!(pass.repositories.len(), 2);
    assert!(
        pass.repositories.iter().all(|access| access.branch.as_deref() == Some(&session.branch))
    );
    let state = StateVolume::Repository(demo());
    assert_eq!(harness.fake.created().last().unwrap().state, Some(state));
    let refused = repositories.delete(&"local/lib".parse().unwrap()).await.unwrap_err();
    assert_eq!(refused.code(), "in_use", "the second repository is in use too");
}

#[tokio::test]
async fn each_pushed_repository_gets_own_pull_request() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let session = on_two(&sessions, "hold").await;
    let id = session.id;
    until(&sessions, &id, started).await;
    for repository in ["local/lib", "local/demo"] {
        let (repository, branch) = (repository.parse().unwrap(), session.branch.clone());
        let pushed = EventBody::Pushed { repository, branch, commit: "c0ffee".into() };
        ledger.log(&id, pushed).await;
    }
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    let mut checked = 0;
    until(&sessions, &id, |event| {
        checked += usize::from(matches!(event.body, EventBody::Evidence(_)));
        checked == 2
    })
    .await;
    let session = sessions.get(&id).await.unwrap();
    assert!(
        session
            .repositories
            .iter()
            .all(|one| one.pr.as_ref().is_some_and(|pull| pull.evidence.is_some()))
    );
    assert_eq!((session.pr_number, session.pr_url.as_deref()), (Some(7), Some("http://forge/7")));
    let opened = harness.pulls.opened.lock().unwrap().clone();
    let orders: Vec<_> = opened.into_iter().map(|(url, spec)| (url, spec.base)).collect();
    assert!(
        orders.contains(&("https://example.org/lib.git".into(), "next".parse().unwrap())),
        "{orders:?}"
    );
    // The next server has nothing left to review.
    sessions.close().await;
    let again = harness.serve().await;
    assert_eq!(again.get(&id).await.unwrap().repositories, session.repositories);
}

/// Registers `a/app` and `b/app`, each with a secret of its own.
async fn two_apps(repositories: &Repositories) {
    for owner in ["a", "b"] {
        let url = format!("https://example.org/{owner}/app.git");
        let secret = Some(format!("KEY_{owner}"));
        let add = AddRepository { url, secret, ..AddRepository::default() };
        let added = repositories.add(add, &ada()).await.unwrap();
        assert_eq!(added.name, format!("{owner}/app").as_str());
    }
}

#[tokio::test]
async fn equal_names_of_two_owners_are_checked_out() {
    let harness = Harness::new().await;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    two_apps(&repositories).await;
    let create = CreateSession {
        repositories: vec![named("b/app"), named("a/app")],
        prompt: Some("hello".parse().unwrap()),
        ..CreateSession::default()
    };
    let session = sessions.create(create, ada()).await.unwrap();
    assert_eq!(session.repo_owner.as_deref(), Some("b"));
    assert_eq!(session.repo_name.as_deref(), Some("app"));
    let folders: Vec<_> = session.repositories.iter().map(|one| one.folder.as_str()).collect();
    assert_eq!(folders, ["/workspace/app", "/workspace/a-app"]);
    until(&sessions, &session.id, ended).await;
    let boot = harness.fake.boot(&sandbox(&sessions, &session.id).await).unwrap();
    let shown = |one: &Checkout| (one.folder.to_string(), one.remote.clone());
    let checkouts: Vec<_> = boot.repositories.iter().map(shown).collect();
    let at_door = |path: &str| format!("http://git.harvest.internal/{path}.git");
    let expected = [("app".into(), at_door("b/app")), ("a-app".into(), at_door("a/app"))];
    assert_eq!(checkouts, expected);
    let pass = harness.doors.0.lock().unwrap().last().unwrap().clone();
    let secrets: Vec<_> = pass.repositories.iter().map(|one| one.secret.as_deref()).collect();
    assert_eq!(secrets, [Some("KEY_b"), Some("KEY_a")]);
    let state = StateVolume::Repository("b/app".parse().unwrap());
    assert_eq!(harness.fake.created().last().unwrap().state, Some(state));
}

#[tokio::test]
async fn name_of_two_owners_is_ambiguous() {
    let harness = Harness::new().await;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    two_apps(&repositories).await;
    let create = |repository: &str| CreateSession {
        repository: Some(repository.to_owned()),
        ..CreateSession::default()
    };
    let refused = sessions.create(create("app"), ada()).await.unwrap_err();
    assert_eq!(refused.code(), "ambiguous_name");
    assert!(refused.to_string().contains("a/app, b/app"), "{refused}");
    let session = sessions.create(create("a/app"), ada()).await.unwrap();
    for (owner, expected) in [("a", vec![session.id]), ("b", Vec::new())] {
        let repository = Some(format!("{owner}/app").parse().unwrap());
        let filter = SessionFilter { repository, ..SessionFilter::default() };
        let found = sessions.find(&filter, None, 10).await.unwrap().items;
        assert_eq!(found.into_iter().map(|one| one.id).collect::<Vec<_>>(), expected);
    }
    repositories.delete(&"b/app".parse().unwrap()).await.unwrap();
    assert_eq!(harness.fake.states_removed(), ["b/app"]);
    assert!(sessions.create(create("app"), ada()).await.is_ok(), "only `a/app` is left");
}

#[tokio::test]
async fn session_without_repository_gets_empty_folder() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let create =
        CreateSession { prompt: Some("hello".parse().unwrap()), ..CreateSession::default() };
    let session = sessions.create(create, ada()).await.unwrap();
    assert_eq!((session.repository, session.repositories.len()), (None, 0));
    until(&sessions, &session.id, ended).await;
    let boot = harness.fake.boot(&sandbox(&sessions, &session.id).await).unwrap();
    assert_eq!((boot.start, boot.repositories.len()), (BootStart::Fresh, 0));
    let order = harness.fake.created().last().unwrap().clone();
    assert_eq!((order.from, order.state), (StartFrom::Image("agents".into()), None));
    assert_eq!(sessions.diff(&session.id).await.unwrap(), "");
    let snapshot = sessions.pause(&session.id).await.unwrap();
    assert_eq!(sessions.get(&session.id).await.unwrap().snapshot_id, Some(snapshot));
}

#[tokio::test]
async fn fork_keeps_repositories_variables_and_turn_number() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let source = on_two(&sessions, "hello").await;
    until(&sessions, &source.id, |event| matches!(event.body, EventBody::SnapshotTaken { .. }))
        .await;
    let fork = sessions.fork(&source.id, ForkSession::default(), ada()).await.unwrap().remove(0);
    assert_eq!((fork.forked_from, fork.forked_turn), (Some(source.id), Some(1)));
    assert_eq!((fork.repositories.len(), &fork.env), (2, &source.env));
    until_state(&sessions, &fork.id, SessionState::Idle).await;
    let boot = harness.fake.boot(&sandbox(&sessions, &fork.id).await).unwrap();
    assert_eq!((boot.start, boot.env["MODE"].as_str()), (BootStart::Restore, "fast"));
    assert!(
        boot.repositories.iter().all(|one| !one.clone_missing),
        "checkouts deleted by the source stay deleted"
    );
}

#[tokio::test]
async fn session_from_snapshot_outlives_its_source() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let source = harness.session(&sessions, Some("write /note hi")).await.id;
    until(&sessions, &source, |event| matches!(event.body, EventBody::SnapshotTaken { .. })).await;
    let from = sessions.get(&source).await.unwrap().snapshot_id;
    let create = CreateSession {
        repository: Some("demo".into()),
        from: from.clone(),
        ..CreateSession::default()
    };
    let session = sessions.create(create, ada()).await.unwrap();
    sessions.delete(&source).await.unwrap();
    assert!(
        harness.fake.snapshots_taken().iter().any(|(kept, _)| Some(kept) == from.as_ref()),
        "the snapshot is in use"
    );
    until_state(&sessions, &session.id, SessionState::Idle).await;
    let sandbox = sandbox(&sessions, &session.id).await;
    assert_eq!(harness.fake.file(&sandbox, "/note").as_deref(), Some(&b"hi"[..]));
    let boot = harness.fake.boot(&sandbox).unwrap();
    assert!(boot.start == BootStart::Restore && boot.repositories[0].clone_missing);
    assert!(!boot.agent.unwrap().resume, "the conversation is new");
    let unknown = CreateSession {
        from: Some(harvest_proto::SnapshotId::random()),
        ..CreateSession::default()
    };
    assert_eq!(sessions.create(unknown, ada()).await.unwrap_err().code(), "not_found");
}

#[tokio::test]
async fn standalone_snapshot_survives_session_started_from_it() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    // A snapshot of a standalone sandbox.
    let (sandbox, snapshot) = (SandboxId::random(), harvest_proto::SnapshotId::random());
    let (by_user, order) = (SandboxOwner::Standalone, CreateSandbox::default());
    let spec = SandboxSpec::standalone(sandbox.clone(), by_user, None, order).unwrap();
    harness.fake.create(spec).await.unwrap();
    harness.fake.snapshot_and_remove(&sandbox, &snapshot, SnapshotKind::Pause).await.unwrap();
    let create = CreateSession { from: Some(snapshot.clone()), ..CreateSession::default() };
    let session = sessions.create(create, ada()).await.unwrap();
    until_state(&sessions, &session.id, SessionState::Idle).await;
    sessions.delete(&session.id).await.unwrap();
    let left = harness.fake.can_start_from(&StartFrom::Snapshot(snapshot)).await.unwrap();
    assert!(left, "the user's snapshot stays");
}

#[tokio::test]
async fn session_key_is_unique() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let create = || CreateSession { key: Some("issue-12".into()), ..CreateSession::default() };
    let session = sessions.create(create(), ada()).await.unwrap();
    assert_eq!(session.key.as_deref(), Some("issue-12"));
    let taken = sessions.create(create(), ada()).await.unwrap_err();
    assert_eq!(taken.code(), "key_taken");
    assert!(taken.to_string().contains(session.id.to_string().as_str()), "{taken}");
    let both = tokio::join!(
        sessions
            .create(CreateSession { key: Some("race".into()), ..CreateSession::default() }, ada()),
        sessions
            .create(CreateSession { key: Some("race".into()), ..CreateSession::default() }, ada()),
    );
    let codes: Vec<_> =
        [both.0, both.1].into_iter().filter_map(Result::err).map(|error| error.code()).collect();
    assert_eq!(codes, ["key_taken"]);
    let eve = Author { name: "Eve".into(), email: "eve@example.org".into() };
    let other = sessions.create(create(), eve).await.unwrap();
    assert_eq!(other.key, session.key, "another user's key");
    sessions.delete(&session.id).await.unwrap();
    assert!(sessions.create(create(), ada()).await.is_ok(), "the key is free again");
}

#[tokio::test]
async fn duplicate_or_unknown_repositories_are_refused() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let twice = CreateSession {
        repositories: vec![named("demo"), named("demo")],
        ..CreateSession::default()
    };
    assert_eq!(sessions.create(twice, ada()).await.unwrap_err().code(), "invalid_repositories");
    let unknown = CreateSession {
        repositories: vec![named("demo"), named("nope")],
        ..CreateSession::default()
    };
    assert_eq!(sessions.create(unknown, ada()).await.unwrap_err().code(), "not_found");
    let url = Some("https://elsewhere.example.org/demo.git".to_owned());
    let taken = UseRepository { url, ..UseRepository::default() };
    let taken = CreateSession { repositories: vec![taken], ..CreateSession::default() };
    let refused = sessions.create(taken, ada()).await.unwrap_err();
    assert!(refused.code() == "exists" && refused.hint().unwrap().contains("--name"), "{refused}");
    assert_eq!(sessions.list(None, 10).await.unwrap().items, []);
}

#[tokio::test]
async fn repository_with_missing_image_is_refused() {
    let harness = Harness::new().await;
    let repositories = harness.serve_parts(harness.lease().await).await.repositories;
    let add = |image: &str| AddRepository {
        url: format!("https://example.org/{image}.git"),
        image: Some(image.to_owned()),
        ..AddRepository::default()
    };
    assert_eq!(
        repositories.add(add("no-such-image"), &ada()).await.unwrap_err().code(),
        "not_found"
    );
    assert!(repositories.get(&"local/no-such-image".parse().unwrap()).await.is_err());
    assert!(repositories.add(add("claude"), &ada()).await.is_ok());
}

#[tokio::test]
async fn wrong_url_or_branch_is_refused_at_once() {
    let harness = Harness::new().await;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    let url = "https://example.org/nowhere/app.git".to_owned();
    let add = AddRepository { url: url.clone(), ..AddRepository::default() };
    let refused = repositories.add(add, &ada()).await.unwrap_err();
    assert_eq!(refused.code(), "remote_unavailable");
    assert!(refused.to_string().contains("no such remote"), "{refused}");
    let create = CreateSession { repository: Some(url), ..CreateSession::default() };
    assert_eq!(sessions.create(create, ada()).await.unwrap_err().code(), "remote_unavailable");
    let create = CreateSession {
        repository: Some("demo".into()),
        base: Some("nobranch".parse().unwrap()),
        ..CreateSession::default()
    };
    let refused = sessions.create(create, ada()).await.unwrap_err();
    assert_eq!(refused.code(), "no_branch");
    assert_eq!(refused.to_string(), "branch nobranch does not exist in local/demo");
    let hint = refused.hint().unwrap_or_default().into_owned();
    assert!(hint.contains("git ls-remote --heads"), "{hint}");
    let names: Vec<_> = repositories.list().await.unwrap();
    assert_eq!(names.len(), 1, "only the demo is registered: {names:?}");
    assert!(harness.fake.created().is_empty());
}

#[tokio::test]
async fn agent_and_its_forks_may_not_ask() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    for no_questions in [true, false] {
        let prompt = Some("hello".parse().unwrap());
        let create = CreateSession { prompt, no_questions, ..CreateSession::default() };
        let source = sessions.create(create, ada()).await.unwrap().id;
        until(&sessions, &source, |event| matches!(event.body, EventBody::SnapshotTaken { .. }))
            .await;
        let fork = sessions.fork(&source, ForkSession::default(), ada()).await.unwrap().remove(0);
        until_state(&sessions, &fork.id, SessionState::Idle).await;
        for session in [&source, &fork.id] {
            let boot = harness.fake.boot(&sandbox(&sessions, session).await).unwrap();
            assert_eq!(boot.agent.unwrap().questions, !no_questions);
        }
    }
}

#[tokio::test]
async fn agent_missing_in_image_is_refused_at_creation() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let agent = |agent| CreateSession { agent: Some(agent), ..CreateSession::default() };
    let built = sessions.create(agent(AgentName::Claude), ada()).await.unwrap();
    until_state(&sessions, &built.id, SessionState::Idle).await;
    let snapshot = sessions.pause(&built.id).await.unwrap();
    harness.fake.remove_agent("claude");
    let refused = sessions.create(agent(AgentName::Claude), ada()).await.unwrap_err();
    assert_eq!(refused.code(), "agent_missing");
    assert!(refused.to_string().starts_with("image `agents` has no agent `claude`"), "{refused}");
    assert!(refused.hint().unwrap().contains("`harvest image build agents`"));
    let from = CreateSession { from: Some(snapshot), ..agent(AgentName::Claude) };
    let refused = sessions.create(from, ada()).await.unwrap_err();
    assert!(refused.to_string().starts_with("snapshot snp_"), "{refused}");
    assert!(sessions.create(agent(AgentName::Scripted), ada()).await.is_ok());
    assert_eq!(sessions.list(None, 10).await.unwrap().items.len(), 2);
}

#[tokio::test]
async fn small_image_is_used_until_agents_is_built() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.fake.remove_image("agents");
    let session = sessions.create(CreateSession::default(), ada()).await.unwrap();
    until_state(&sessions, &session.id, SessionState::Idle).await;
    let order = harness.fake.created().last().unwrap().clone();
    assert_eq!(order.from, StartFrom::Image("claude".into()));
    harness.fake.remove_image("claude");
    let refused = sessions.create(CreateSession::default(), ada()).await.unwrap_err();
    assert_eq!(refused.code(), "image_missing");
    assert_eq!(refused.hint().unwrap(), "`harvest image build claude` builds it");
}

#[tokio::test]
async fn missing_state_volume_is_an_event() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.fake.set_warnings(&["without /mnt/state: no space left"]);
    let id = harness.session(&sessions, Some("hello")).await.id;
    let warned = |event: &Event| match &event.body {
        EventBody::Warning { message } => message.contains("without /mnt/state"),
        _ => false,
    };
    until(&sessions, &id, warned).await;
    until_state(&sessions, &id, SessionState::Idle).await;
}
