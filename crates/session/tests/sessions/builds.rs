//! Builds of repositories: what they start from, and how they end.

use super::*;

use harvest_proto::{BranchName, api::BuildLine};

#[tokio::test]
async fn rebuilds_continue_up_to_eight_layers() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let build = async |force| {
        let order = BuildRepository { force, ..BuildRepository::default() };
        let lines = parts.repositories.build(&demo(), order, &ada()).await.unwrap();
        let lines: Vec<_> = lines.collect().await;
        let built = parts.repositories.get(&demo()).await.unwrap().build.unwrap();
        // A build is proven by a second sandbox.
        let created = harness.fake.created();
        (created[created.len() - 2].from.clone(), built, lines)
    };
    let (mut last, mut from_image) = (None, Vec::new());
    for number in 1..=9 {
        let (from, built, _) = build(false).await;
        match (&from, &last) {
            (StartFrom::Image(_), _) => from_image.push(number),
            (from, last) => assert_eq!(Some(from), last.as_ref(), "build {number}"),
        }
        last = Some(StartFrom::Snapshot(built.snapshot_id));
    }
    assert_eq!(from_image, [1, 9]);
    assert!(matches!(build(false).await.0, StartFrom::Snapshot(_)));
    assert!(matches!(build(true).await.0, StartFrom::Image(_)), "forced");
    harness.fake.set_boot_failing(true);
    assert!(matches!(build(false).await.2.last(), Some(BuildLine::Failed { .. })));
    harness.fake.set_boot_failing(false);
    assert!(matches!(build(false).await.0, StartFrom::Image(_)), "after a failure");
}

#[tokio::test]
async fn build_of_a_branch_serves_its_sessions() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let branch: BranchName = "next".parse().unwrap();
    let mut built = Vec::new();
    for branch in [None, Some(branch.clone())] {
        let order = BuildRepository { branch, ..BuildRepository::default() };
        let lines = parts.repositories.build(&demo(), order, &ada()).await.unwrap();
        let lines: Vec<_> = lines.collect().await;
        let Some(BuildLine::Built { build }) = lines.last() else { panic!("{lines:?}") };
        built.push(build.snapshot_id.clone());
    }
    assert_eq!(parts.repositories.get(&demo()).await.unwrap().build.unwrap().snapshot_id, built[0]);
    for (base, build) in [(None, 0), (Some(branch), 1), (Some("other".parse().unwrap()), 0)] {
        let create = CreateSession {
            repository: Some("demo".into()),
            base,
            prompt: Some("hello".parse().unwrap()),
            ..CreateSession::default()
        };
        let id = parts.sessions.create(create, ada()).await.unwrap().id;
        until_state(&parts.sessions, &id, SessionState::Idle).await;
        let from = harness.fake.created().last().unwrap().from.clone();
        assert_eq!(from, StartFrom::Snapshot(built[build].clone()));
    }
}

#[tokio::test]
async fn second_build_waits_for_the_first_if_asked() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let order = |wait| BuildRepository { wait, ..BuildRepository::default() };
    let first = parts.repositories.build(&demo(), order(false), &ada()).await.unwrap();
    let refused = parts.repositories.build(&demo(), order(false), &ada()).await;
    assert_eq!(refused.err().unwrap().code(), "building");
    let second = parts.repositories.build(&demo(), order(true), &ada()).await.unwrap();
    for lines in [first, second] {
        let lines: Vec<_> = lines.collect().await;
        assert!(matches!(lines.last(), Some(BuildLine::Built { .. })), "{lines:?}");
    }
}

#[tokio::test]
async fn timed_out_build_keeps_the_earlier_one() {
    let mut harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let order = BuildRepository::default;
    let lines = parts.repositories.build(&demo(), order(), &ada()).await.unwrap();
    let _lines: Vec<_> = lines.collect().await;
    let before = parts.repositories.get(&demo()).await.unwrap().build;
    assert!(before.is_some());
    // The 30 minutes of a build, as they pass in a test.
    harness.config.timeouts.build = Duration::from_millis(200);
    let parts = harness.serve_parts(harness.lease().await).await;
    harness.fake.set_boot_hanging();
    let lines = parts.repositories.build(&demo(), order(), &ada()).await.unwrap();
    let lines: Vec<_> = lines.collect().await;
    let Some(BuildLine::Failed { message, .. }) = lines.last() else { panic!("{lines:?}") };
    assert!(message.contains("timed out"), "{message}");
    assert_eq!(parts.repositories.get(&demo()).await.unwrap().build, before);
    assert!(harness.fake.sandboxes().is_empty(), "its sandbox is removed");
}

#[tokio::test]
async fn many_builds_never_pass_the_limit() {
    let mut harness = Harness::new().await;
    harness.config.limits.checks = 2;
    let parts = harness.serve_parts(harness.lease().await).await;
    let mut builds = Vec::new();
    for name in 0..6 {
        let url = format!("https://example.org/me/r{name}.git");
        let add = AddRepository { url, ..AddRepository::default() };
        let name = parts.repositories.add(add, &ada()).await.unwrap().name;
        let user = Author { name: "A".into(), email: format!("{}@example.org", builds.len()) };
        let order = BuildRepository::default();
        builds.push(parts.repositories.build(&name, order, &user).await.unwrap());
    }
    let most = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let watch = |mut lines: futures_util::stream::BoxStream<'static, BuildLine>| {
        let (most, fake) = (Arc::clone(&most), harness.fake.clone());
        async move {
            let mut last = None;
            while let Some(line) = lines.next().await {
                most.fetch_max(fake.sandboxes().len(), std::sync::atomic::Ordering::SeqCst);
                last = Some(line);
            }
            last
        }
    };
    for last in futures_util::future::join_all(builds.into_iter().map(watch)).await {
        assert!(matches!(last, Some(BuildLine::Built { .. })), "{last:?}");
    }
    let most = most.load(std::sync::atomic::Ordering::SeqCst);
    assert!((1..=2).contains(&most), "{most} sandboxes at once");
}
