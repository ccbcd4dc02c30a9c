//! Standalone sandboxes of members.

use harvest_proto::api::SetUserLimits;
use harvest_session::{
    Sandboxes,
    sandboxes::{Requester, SandboxError},
};
use tokio::task::JoinSet;

use super::{
    standalone::{code, create, limited, serve},
    *,
};

/// A member's request.
fn member(user: &str) -> Requester {
    Requester { user: Some(user.to_owned()), limited: true, ..Requester::default() }
}

async fn create_as(sandboxes: &Sandboxes, user: &str) -> Result<SandboxId, SandboxError> {
    let created = sandboxes.create(&member(user), CreateSandbox::default()).await?;
    Ok(created.created.sandbox_id)
}

#[tokio::test]
async fn stopped_sandboxes_count_against_members_limit() {
    let harness = limited(9, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let first = create_as(&sandboxes, "bob@example.org").await.unwrap();
    let second = create_as(&sandboxes, "Bob@Example.org").await.unwrap();
    assert_eq!(code(create_as(&sandboxes, "bob@example.org").await), "limit_user");
    sandboxes.stop(&first).await.unwrap();
    let refused = create_as(&sandboxes, "bob@example.org").await.unwrap_err();
    assert_eq!(refused.to_string(), "sandbox limit of this user reached: 2");
    let once = ExecRequest { argv: vec!["true".into()], ..ExecRequest::default() };
    let refused = sandboxes.exec_once(&member("bob@example.org"), once, None).await;
    assert_eq!(code(refused), "limit_user");
    assert!(sandboxes.start(&member("bob@example.org"), &first).await.is_ok(), "it is counted");
    assert!(create_as(&sandboxes, "eve@example.org").await.is_ok(), "only for one user");
    assert!(create(&sandboxes, "bob@example.org").await.is_ok(), "admins have no such limit");
    sandboxes.delete(&second, false).await.unwrap();
    assert_eq!(code(create_as(&sandboxes, "bob@example.org").await), "limit_user", "the admin's");
}

#[tokio::test]
async fn commands_of_member_wait_for_their_own_limit() {
    let harness = limited(9, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let sandboxes = sandboxes.with_slot_timeout(Duration::from_secs(3600));
    let commands = (0..6).map(|_| async {
        let argv = vec!["echo".into(), "hi".into()];
        let once = ExecRequest { argv, ..ExecRequest::default() };
        let lines = sandboxes.exec_once(&member("bob@example.org"), once, None).await.unwrap();
        lines.collect::<Vec<_>>().await
    });
    for lines in futures_util::future::join_all(commands).await {
        assert!(matches!(lines.last(), Some(ExecLine::Exited { .. })), "{lines:?}");
    }
}

#[tokio::test]
async fn limits_of_one_member_are_set_and_reset() {
    let harness = limited(9, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let set = async |sandboxes_at_once| {
        let sandboxes_at_once = Some(sandboxes_at_once);
        let change = SetUserLimits { sandboxes: sandboxes_at_once, ..SetUserLimits::default() };
        sandboxes.user_limits_set("bob@example.org", change).await.unwrap()
    };
    let none = set(Some(0)).await;
    assert_eq!(none.sandboxes, 0);
    let refused = create_as(&sandboxes, "bob@example.org").await;
    assert_eq!(code(refused), "sandboxes_not_allowed");
    assert_eq!(set(None).await.sandboxes, 2);
    let sandbox = create_as(&sandboxes, "bob@example.org").await.unwrap();
    let created = harness.fake.created();
    let limits = created.iter().find(|spec| spec.id == sandbox).unwrap().limits;
    assert_eq!(limits.memory_bytes, Some(none.memory_bytes));
    // A smaller limit holds from the next start on.
    sandboxes.stop(&sandbox).await.unwrap();
    let memory_bytes = Some(Some(1 << 20));
    let change = SetUserLimits { memory_bytes, ..SetUserLimits::default() };
    sandboxes.user_limits_set("bob@example.org", change).await.unwrap();
    let started = sandboxes.start(&member("bob@example.org"), &sandbox).await;
    assert_eq!(code(started), "over_limit");
}

/// As many requests as may wait for a slot, all of which wait, and one more, which was refused.
async fn waiting_creates(sandboxes: &Sandboxes) -> JoinSet<Result<SandboxId, SandboxError>> {
    let mut creating = JoinSet::new();
    for _ in 0..65 {
        let sandboxes = sandboxes.clone();
        creating.spawn(async move { create_as(&sandboxes, "bob@example.org").await });
    }
    assert_eq!(code(creating.join_next().await.unwrap().unwrap()), "limit_user");
    creating
}

#[tokio::test]
async fn waiting_creates_count_sandboxes_stopped_meanwhile() {
    let harness = limited(99, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let sandboxes = sandboxes.with_slot_timeout(Duration::from_secs(3600));
    let first = create_as(&sandboxes, "bob@example.org").await.unwrap();
    let second = create_as(&sandboxes, "bob@example.org").await.unwrap();
    let mut creating = waiting_creates(&sandboxes).await;
    sandboxes.stop(&first).await.unwrap();
    sandboxes.stop(&second).await.unwrap();
    while let Some(refused) = creating.join_next().await {
        assert_eq!(code(refused.unwrap()), "limit_user", "only deleting helps");
    }
    assert_eq!(harness.fake.sandboxes().len(), 2);
}

#[tokio::test]
async fn deleted_stopped_sandbox_admits_waiting_create() {
    let harness = limited(99, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let sandboxes = sandboxes.with_slot_timeout(Duration::from_secs(3600));
    let first = create_as(&sandboxes, "bob@example.org").await.unwrap();
    create_as(&sandboxes, "bob@example.org").await.unwrap();
    sandboxes.stop(&first).await.unwrap();
    let mut creating = waiting_creates(&sandboxes).await;
    sandboxes.delete(&first, false).await.unwrap();
    assert!(creating.join_next().await.unwrap().unwrap().is_ok());
    assert_eq!(harness.fake.sandboxes().len(), 2);
}

#[tokio::test]
async fn stopped_sandboxes_within_the_limit_all_start() {
    let harness = limited(9, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    let bob = member("bob@example.org");
    let first = create_as(&sandboxes, "bob@example.org").await.unwrap();
    let second = create_as(&sandboxes, "bob@example.org").await.unwrap();
    sandboxes.stop(&first).await.unwrap();
    sandboxes.stop(&second).await.unwrap();
    let (first, second) =
        tokio::join!(sandboxes.start(&bob, &first), sandboxes.start(&bob, &second));
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
}

#[tokio::test]
async fn member_does_not_start_sandbox_without_bounds() {
    let harness = limited(9, None).await;
    let (_sessions, sandboxes) = serve(&harness).await;
    // An admin with the same address created it.
    let unbounded = create(&sandboxes, "bob@example.org").await.unwrap();
    sandboxes.stop(&unbounded).await.unwrap();
    let started = sandboxes.start(&member("bob@example.org"), &unbounded).await;
    assert_eq!(code(started), "over_limit");
}
