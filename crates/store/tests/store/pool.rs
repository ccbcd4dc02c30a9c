//! The warm pool: a sandbox belongs to a member or to a session, never to both.

use harvest_proto::{SandboxId, SessionId, Timestamp};
use harvest_store::{AgentChoice, NewSession, PoolMember, StoreError, Write};

use crate::test_store::{NOW, TestStore, new_session, on_both};

on_both! {
    member_becomes_one_session,
    failed_claim_leaves_member,
    ended_member_cannot_be_claimed,
    newest_session_chooses_the_agent,
}

async fn member(test: &TestStore, ready: bool) -> PoolMember {
    let member = PoolMember {
        session: SessionId::random(),
        sandbox: SandboxId::random(),
        repository: "o/r".parse().unwrap(),
        conversation: "c0ffee".to_owned(),
        spec: "{}".to_owned(),
        ready: false,
        warnings: Vec::new(),
        created_at: NOW,
    };
    test.store.pool_insert(test.lease, &member).await.unwrap();
    if !ready {
        return member;
    }
    let warnings = vec!["without its caches".to_owned()];
    assert!(test.store.pool_ready(test.lease, &member.session, &warnings).await.unwrap());
    PoolMember { ready, warnings, ..member }
}

async fn claim(test: &TestStore, member: &PoolMember) -> Result<(), StoreError> {
    let new = NewSession { id: member.session.clone(), ..new_session() };
    test.store.session_insert_all(test.lease, vec![(new, vec![Write::PoolClaim])]).await
}

async fn member_becomes_one_session(test: TestStore) {
    let member = member(&test, true).await;
    assert_eq!(test.store.pool_list().await.unwrap(), std::slice::from_ref(&member));
    claim(&test, &member).await.unwrap();
    assert!(test.store.session_exists(&member.session).await.unwrap());
    assert_eq!(test.store.pool_list().await.unwrap(), []);
    assert!(claim(&test, &member).await.is_err());
    let ended = test.store.pool_delete(test.lease, &member.session).await;
    assert!(!ended.unwrap(), "its sandbox is the session's");
}

async fn failed_claim_leaves_member(test: TestStore) {
    let member = member(&test, true).await;
    let new = NewSession { id: member.session.clone(), ..new_session() };
    let repository = "o/none".parse().unwrap();
    let unknown = Write::Pushed { repository, commit: "c0ffee".to_owned() };
    let again = vec![(new.clone(), vec![Write::PoolClaim]), (new, vec![unknown])];
    assert!(test.store.session_insert_all(test.lease, again).await.is_err());
    assert!(!test.store.session_exists(&member.session).await.unwrap());
    assert_eq!(test.store.pool_list().await.unwrap(), [member]);
}

async fn ended_member_cannot_be_claimed(test: TestStore) {
    let (ended, starting) = (member(&test, true).await, member(&test, false).await);
    assert!(test.store.pool_delete(test.lease, &ended.session).await.unwrap());
    for gone in [&ended, &starting] {
        let refused = claim(&test, gone).await;
        assert!(matches!(refused, Err(StoreError::NotFound { .. })), "{refused:?}");
        assert!(!test.store.session_exists(&gone.session).await.unwrap());
    }
    test.store.server_lease(NOW).await.unwrap();
    let outdated = test.store.pool_delete(test.lease, &starting.session).await;
    assert!(matches!(outdated, Err(StoreError::LeaseLost)), "{outdated:?}");
}

async fn newest_session_chooses_the_agent(test: TestStore) {
    let insert = async |agent: &str, millis: i64| {
        let (agent, at) = (agent.parse().unwrap(), Timestamp::from_millis(millis));
        let new = NewSession { agent, at, no_questions: millis == 20, ..new_session() };
        test.store.session_insert_all(test.lease, vec![(new, Vec::new())]).await.unwrap();
    };
    insert("codex", 20).await;
    insert("claude", 10).await;
    let choices = test.store.pool_choices(Timestamp::from_millis(10)).await.unwrap();
    let repository = new_session().checkouts[0].repository.clone();
    let model = new_session().model;
    let effort = new_session().effort;
    let newest = AgentChoice { agent: "codex".parse().unwrap(), model, effort, no_questions: true };
    assert_eq!(choices, [(repository, newest)].into());
    assert_eq!(test.store.pool_choices(Timestamp::from_millis(21)).await.unwrap(), [].into());
}
