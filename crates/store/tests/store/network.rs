//! Network rules and the network log.

use std::time::Duration;

use harvest_proto::{
    NetworkVerdict, PromptId, RepositoryName, RuleScope, RuleVerdict, SessionId, TrafficCount,
    TurnId, api::NetworkRule, event::TurnOutcome,
};
use harvest_store::{RuleOwner, Write};

use crate::test_store::{NOW, TestStore, on_both, prompt};

on_both! {
    rules_of_an_owner_include_the_wider_ones,
    ports_are_added_to_a_rule,
    log_adds_up_and_is_bounded,
    counts_belong_to_the_turn_of_their_time,
}

fn rule(name: &str, scope: RuleScope) -> NetworkRule {
    let (name, verdict, ports) = (name.to_owned(), RuleVerdict::Allow, vec![80, 443]);
    NetworkRule { name, verdict, ports, private: false, scope }
}

async fn rules_of_an_owner_include_the_wider_ones(test: TestStore) {
    let [session, other] = [test.session().await, test.session().await];
    let own = RuleOwner::Session(session.clone());
    test.store.network_rule_set(&own, &rule("a.org", RuleScope::Session)).await.unwrap();
    let everywhere = rule("b.org", RuleScope::Everywhere);
    test.store.network_rule_set(&RuleOwner::Everywhere, &everywhere).await.unwrap();
    test.store.network_rule_set(&RuleOwner::Everywhere, &everywhere).await.unwrap();
    let names = async |owner: &RuleOwner| {
        let mut rules = test.store.network_rule_list(owner).await.unwrap();
        rules.sort_by(|one, other| one.name.cmp(&other.name));
        rules.into_iter().map(|rule| (rule.name, rule.scope)).collect::<Vec<_>>()
    };
    let both = [("a.org".to_owned(), RuleScope::Session), ("b.org".to_owned(), everywhere.scope)];
    assert_eq!(names(&own).await, both);
    assert_eq!(names(&RuleOwner::Everywhere).await, both[1..]);
    // A copy is the other session's own.
    test.commit(&other, vec![Write::NetworkRulesOf(session.clone())]).await.unwrap();
    assert!(test.store.network_rule_remove(&own, "a.org").await.unwrap());
    assert!(!test.store.network_rule_remove(&own, "a.org").await.unwrap());
    assert_eq!(names(&RuleOwner::Session(other.clone())).await, both);
    test.store.session_delete(&other, test.lease, Vec::new(), NOW).await.unwrap();
    let absent = RuleOwner::Session(SessionId::random());
    assert!(
        test.store.network_rule_set(&absent, &rule("a.org", RuleScope::Session)).await.is_err()
    );
    let absent = RuleOwner::Repository("a/b".parse::<RepositoryName>().unwrap());
    assert!(
        test.store.network_rule_set(&absent, &rule("a.org", RuleScope::Repository)).await.is_err()
    );
}

async fn ports_are_added_to_a_rule(test: TestStore) {
    let owner = RuleOwner::Session(test.session().await);
    let web = rule("a.org", RuleScope::Session);
    let ssh = NetworkRule { ports: vec![22], ..web.clone() };
    let deny = NetworkRule { verdict: RuleVerdict::Deny, ports: Vec::new(), ..web.clone() };
    test.store.network_rule_set(&owner, &web).await.unwrap();
    let both = test.store.network_rule_set(&owner, &ssh).await.unwrap();
    assert_eq!(both.ports, [22, 80, 443]);
    // A rule that denies stands beside the one that allows.
    test.store.network_rule_set(&owner, &deny).await.unwrap();
    let denied = NetworkRule { ports: vec![22], ..deny.clone() };
    assert_eq!(test.store.network_rule_set(&owner, &denied).await.unwrap(), deny);
    assert_eq!(test.store.network_rule_list(&owner).await.unwrap(), [both, deny]);
    assert!(test.store.network_rule_remove(&owner, "a.org").await.unwrap());
    assert_eq!(test.store.network_rule_list(&owner).await.unwrap(), []);
}

async fn log_adds_up_and_is_bounded(test: TestStore) {
    let session = test.session().await;
    let count = |name: &str, sent| TrafficCount {
        name: name.to_owned(),
        port: 443,
        verdict: NetworkVerdict::Allowed,
        at: NOW,
        connections: 1,
        sent,
        received: 2 * sent,
    };
    let add = async |counts| {
        test.commit(&session, vec![Write::Traffic { at: NOW, counts }]).await.unwrap();
    };
    add(vec![count("a.org", 5)]).await;
    add(vec![count("a.org", 7), count("b.org", 1)]).await;
    let log = test.store.network_log(&session).await.unwrap();
    let numbers: Vec<_> = log
        .iter()
        .map(|entry| (entry.name.as_str(), entry.connections, entry.sent, entry.received))
        .collect();
    assert_eq!(numbers, [("a.org", 2, 12, 24), ("b.org", 1, 1, 2)]);
    add((0..2010).map(|number| count(&format!("n{number}.org"), 1)).collect()).await;
    add(vec![count("a.org", 1)]).await;
    let log = test.store.network_log(&session).await.unwrap();
    let of = |name: &str| log.iter().find(|entry| entry.name == name).unwrap();
    assert_eq!(log.len(), 1501);
    assert_eq!((of("*").connections, of("a.org").sent), (512, 13));
}

async fn counts_belong_to_the_turn_of_their_time(test: TestStore) {
    let session = test.session().await;
    let at = |seconds| NOW.after(Duration::from_secs(seconds));
    let mut turns = Vec::new();
    for (number, from, to) in [(1, 10, Some(20)), (2, 30, None)] {
        let (id, turn) = (PromptId::random(), TurnId::random());
        turns.push(prompt(&id));
        turns.push(Write::TurnInsert { turn: turn.clone(), number, prompt: id, at: at(from) });
        let outcome = TurnOutcome::Completed;
        turns.extend(to.map(|to| Write::TurnEnd { turn, outcome, reason: None, at: at(to) }));
    }
    test.commit(&session, turns).await.unwrap();
    // All are stored after the second turn has begun.
    let count = |seconds| TrafficCount {
        name: format!("at-{seconds}.org"),
        port: 443,
        verdict: NetworkVerdict::Refused,
        at: at(seconds),
        connections: 1,
        sent: 0,
        received: 0,
    };
    let counts = [5, 10, 19, 25, 31].map(count).to_vec();
    test.commit(&session, vec![Write::Traffic { at: at(32), counts }]).await.unwrap();
    let log = test.store.network_log(&session).await.unwrap();
    let turns: Vec<_> = log.iter().map(|entry| (entry.turn, entry.name.as_str())).collect();
    let expected =
        [(0, "at-25.org"), (0, "at-5.org"), (1, "at-10.org"), (1, "at-19.org"), (2, "at-31.org")];
    assert_eq!(turns, expected);
    assert_eq!((log[2].first_at, log[2].last_at), (at(10), at(32)));
}
