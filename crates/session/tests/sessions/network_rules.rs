//! Network rules of sessions, repositories and the server, as the doors get them.

use harvest_proto::{
    NetworkPolicy, RuleScope, RuleVerdict,
    api::{ForkSession, NetworkRules, SetNetworkRule},
};
use harvest_session::RuleOwner;

use super::*;

fn set(verdict: RuleVerdict) -> SetNetworkRule {
    SetNetworkRule { verdict, ports: Vec::new(), private: false }
}

fn rules(rules: &[harvest_proto::api::NetworkRule]) -> Vec<(String, RuleVerdict, RuleScope)> {
    rules.iter().map(|rule| (rule.name.clone(), rule.verdict, rule.scope)).collect()
}

fn of_door(harness: &Harness, session: &SessionId) -> Vec<(String, RuleVerdict, RuleScope)> {
    let doors = harness.doors.0.lock().unwrap();
    let newest = doors.iter().rfind(|door| door.session == *session).expect("a door is open");
    rules(&newest.network.borrow().rules)
}

#[tokio::test]
async fn rules_reach_open_doors_at_once() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let (sessions, repositories) = (&parts.sessions, &parts.repositories);
    let session = harness.session(sessions, None).await.id;
    until_state(sessions, &session, SessionState::Idle).await;
    removal::eventually("the door to open", || !harness.doors.0.lock().unwrap().is_empty()).await;
    let own = RuleOwner::Session(session.clone());
    let repository = RuleOwner::Repository(demo());
    let [allow, deny] = [RuleVerdict::Allow, RuleVerdict::Deny].map(set);
    let rule = repositories.network_rule_set(&own, "API.example.org.", &allow).await.unwrap();
    assert_eq!((rule.name.as_str(), rule.ports.as_slice()), ("api.example.org", &[80, 443][..]));
    repositories.network_rule_set(&RuleOwner::Everywhere, "*.evil.org", &deny).await.unwrap();
    repositories.network_rule_set(&repository, "lib.org", &allow).await.unwrap();
    let expected = [
        ("*.evil.org".to_owned(), RuleVerdict::Deny, RuleScope::Everywhere),
        ("api.example.org".to_owned(), RuleVerdict::Allow, RuleScope::Session),
        ("lib.org".to_owned(), RuleVerdict::Allow, RuleScope::Repository),
    ];
    let mut found = of_door(&harness, &session);
    found.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found, expected);
    repositories.network_rule_set(&own, "api.example.org", &deny).await.unwrap();
    assert_eq!(of_door(&harness, &session).len(), 4);
    let again = repositories.network_rule_set(&own, "api.example.org", &allow).await.unwrap_err();
    assert_eq!(again.code(), "denied");
    let private = SetNetworkRule { private: true, ..allow };
    for (owner, name) in [(&own, "b.org"), (&RuleOwner::Everywhere, "*.b.org")] {
        let refused = repositories.network_rule_set(owner, name, &private).await.unwrap_err();
        assert_eq!(refused.code(), "private_not_allowed");
    }
    repositories.network_rule_remove(&own, "api.example.org").await.unwrap();
    assert_eq!(of_door(&harness, &session).len(), 2);
    let missing = repositories.network_rule_remove(&own, "api.example.org").await.unwrap_err();
    assert_eq!(missing.code(), "not_found");
}

#[tokio::test]
async fn forks_and_new_sessions_have_their_rules() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let (sessions, repositories) = (&parts.sessions, &parts.repositories);
    let create = CreateSession {
        network: Some(NetworkPolicy::Full),
        allow: vec!["db.example.org:5432".to_owned()],
        prompt: Some("write /kept yes".parse().unwrap()),
        ..CreateSession::default()
    };
    let session = sessions.create(create.clone(), ada()).await.unwrap().id;
    let NetworkRules { policy, rules: stored, .. } =
        repositories.session_network(&session).await.unwrap();
    assert_eq!(policy, NetworkPolicy::Full);
    assert_eq!(
        (stored[0].name.as_str(), stored[0].ports.as_slice()),
        ("db.example.org", &[5432][..])
    );
    for (wrong, code) in [("db.example.org:http", "invalid_port"), ("10.0.0.1", "invalid_name")] {
        let create = CreateSession { allow: vec![wrong.to_owned()], ..create.clone() };
        assert_eq!(sessions.create(create, ada()).await.unwrap_err().code(), code);
    }
    until_state(sessions, &session, SessionState::Idle).await;
    let forks = sessions.fork(&session, ForkSession::default(), ada()).await.unwrap();
    let copied = repositories.session_network(&forks[0].id).await.unwrap();
    assert_eq!((copied.policy, copied.rules), (policy, stored));
    sessions.delete(&session).await.unwrap();
    assert_eq!(repositories.session_network(&session).await.unwrap_err().code(), "not_found");
}
