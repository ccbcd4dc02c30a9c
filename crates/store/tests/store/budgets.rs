//! Budgets and the holds of model calls.

use harvest_proto::{
    CallId, Money, SessionId, SpendingScope, Timestamp, TurnId,
    api::{Budget, Spending},
    event::{TurnOutcome, Usage},
};
use harvest_store::{BudgetOwner, Lineage, NewCall, OverBudget, Write};

use crate::test_store::{NOW, TestStore, dispatch, on_both, prompt};

on_both! {
    concurrent_calls_never_exceed_a_budget,
    settled_call_frees_what_it_held,
    killed_server_is_charged_what_it_held,
    superseded_server_can_neither_hold_nor_settle,
    every_scope_can_refuse_a_call,
    spawned_sessions_share_the_budget_of_their_root,
    call_without_session_counts_for_the_day,
    deleted_session_leaves_its_calls,
    calls_that_cost_nothing_leave_no_row,
    turn_and_session_add_up_their_calls,
    tokens_are_a_second_limit,
    sums_are_by_scope_and_time,
}

const MOST: Usage =
    Usage { input_tokens: 10, output_tokens: 20, cache_read_tokens: 0, cache_write_tokens: 0 };

pub(crate) fn micros(micros: u64) -> Money {
    Money::from_micros(micros)
}

pub(crate) fn call(session: &SessionId, cost: Option<u64>) -> NewCall {
    NewCall {
        id: CallId::random(),
        session: session.clone(),
        upstream: "anthropic".parse().unwrap(),
        model: "claude".into(),
        most: MOST,
        cost: cost.map(micros),
        at: NOW,
    }
}

impl TestStore {
    /// Begins a call that may cost this much.
    async fn begin(&self, session: &SessionId, cost: u64) -> Result<CallId, OverBudget> {
        let new = call(session, Some(cost));
        let id = new.id.clone();
        self.store.call_begin(self.lease, new, None).await.unwrap().map(|()| id)
    }

    /// Makes a call that costs this much.
    pub(crate) async fn spend(&self, session: &SessionId, usage: Usage, cost: u64) {
        let id = self.begin(session, cost).await.unwrap();
        self.store.call_end(self.lease, &id, usage, micros(cost)).await.unwrap();
    }

    async fn limit(&self, owner: &BudgetOwner, limit: u64) -> Budget {
        self.store.budget_set(owner, Some(micros(limit)), NOW).await.unwrap()
    }

    /// What a session has spent, and what is held for its calls.
    async fn account(&self, session: &SessionId) -> (u64, u64) {
        let owner = BudgetOwner::Session(session.clone());
        let shown = self.store.session_get(session).await.unwrap().session;
        let set = self.store.budget_set(&owner, shown.budget_micros, NOW).await.unwrap();
        assert_eq!(set.spent_micros, shown.spent_micros);
        (set.spent_micros.micros(), set.held_micros.micros())
    }
}

async fn concurrent_calls_never_exceed_a_budget(test: TestStore) {
    let session = test.session().await;
    // Room for one, and for three.
    for (limit, fit) in [(100, 1), (390, 3)] {
        let set = Write::Budget(Some(micros(limit)));
        test.commit(&session, vec![set]).await.unwrap();
        let calls = (0..200).map(|_| {
            let (store, lease, call) = (test.store.clone(), test.lease, call(&session, Some(100)));
            tokio::spawn(async move {
                let id = call.id.clone();
                store.call_begin(lease, call, None).await.unwrap().map(|()| id)
            })
        });
        let mut begun = Vec::new();
        for task in calls.collect::<Vec<_>>() {
            match task.await.unwrap() {
                Ok(id) => begun.push(id),
                Err(over) => assert!(over.may_fit_later(), "{over:?}"),
            }
        }
        assert_eq!(begun.len(), fit);
        for id in begun {
            test.store.call_end(test.lease, &id, MOST, Money::ZERO).await.unwrap();
        }
        assert_eq!(test.account(&session).await, (0, 0));
    }
}

async fn settled_call_frees_what_it_held(test: TestStore) {
    let session = test.session().await;
    test.limit(&BudgetOwner::Session(session.clone()), 100).await;
    let first = test.begin(&session, 60).await.unwrap();
    assert_eq!(test.account(&session).await, (0, 60));
    assert!(test.begin(&session, 60).await.unwrap_err().may_fit_later());
    for _twice in 0..2 {
        test.store.call_end(test.lease, &first, MOST, micros(30)).await.unwrap();
        assert_eq!(test.account(&session).await, (30, 0));
    }
    test.spend(&session, MOST, 70).await;
    let over = test.begin(&session, 1).await.unwrap_err();
    assert!(!over.may_fit_later(), "{over:?}");
    test.limit(&BudgetOwner::Session(session.clone()), 101).await;
    test.begin(&session, 1).await.unwrap();
}

async fn killed_server_is_charged_what_it_held(test: TestStore) {
    let session = test.session().await;
    let (held, settled) =
        (test.begin(&session, 60).await.unwrap(), test.begin(&session, 7).await.unwrap());
    test.store.call_end(test.lease, &settled, MOST, micros(5)).await.unwrap();
    // The next server: another connection, so that the first one is as good as killed.
    let store = test.database.store().await;
    let next = store.server_lease(NOW).await.unwrap();
    let own = call(&session, Some(3));
    store.call_begin(next, own.clone(), None).await.unwrap().unwrap();
    for expected in [1, 0] {
        assert_eq!(store.call_charge_unsettled(next).await.unwrap(), expected);
        let shown = store.session_get(&session).await.unwrap().session;
        assert_eq!(shown.spent_micros, micros(65));
        assert_eq!(shown.usage.output_tokens, 40, "the settled one, and the held one");
    }
    // Its own calls are not touched.
    store.call_end(next, &own.id, MOST, micros(2)).await.unwrap();
    store.call_end(next, &held, MOST, micros(1)).await.unwrap();
    let shown = store.session_get(&session).await.unwrap().session;
    assert_eq!(shown.spent_micros, micros(67), "a charged call is not settled again");
}

async fn superseded_server_can_neither_hold_nor_settle(test: TestStore) {
    let session = test.session().await;
    let id = test.begin(&session, 60).await.unwrap();
    test.store.server_lease(NOW).await.unwrap();
    let begun = test.store.call_begin(test.lease, call(&session, Some(1)), None).await;
    assert!(matches!(begun, Err(harvest_store::StoreError::LeaseLost)), "{begun:?}");
    let ended = test.store.call_end(test.lease, &id, MOST, Money::ZERO).await;
    assert!(matches!(ended, Err(harvest_store::StoreError::LeaseLost)), "{ended:?}");
}

async fn every_scope_can_refuse_a_call(test: TestStore) {
    let session = test.session().await;
    test.spend(&session, MOST, 10).await;
    for (owner, scope, name) in [
        (BudgetOwner::Repository("o/r".parse().unwrap()), SpendingScope::Repository, "o/r"),
        (BudgetOwner::User("Ada@example.org".into()), SpendingScope::User, "ada@example.org"),
        (BudgetOwner::Day, SpendingScope::Day, "1970-01-01"),
    ] {
        let set = test.limit(&owner, 15).await;
        let spent = (set.scope, set.name.as_str(), set.spent_micros);
        assert_eq!(spent, (scope, name, micros(10)));
        let listed = test.store.budget_list(NOW).await.unwrap();
        assert!(listed.contains(&set), "{listed:?}");
        let over = test.begin(&session, 6).await.unwrap_err();
        let expected = OverBudget::Money { budget: set, call: micros(6) };
        assert_eq!(over, expected);
        let unpriced = test.store.call_begin(test.lease, call(&session, None), None).await;
        assert!(matches!(unpriced, Ok(Err(OverBudget::Unpriced { .. }))), "{unpriced:?}");
        test.store.budget_set(&owner, None, NOW).await.unwrap();
    }
    test.limit(&BudgetOwner::Day, 15).await;
    let tomorrow = Timestamp::from_millis(24 * 60 * 60 * 1000);
    let later = NewCall { at: tomorrow, ..call(&session, Some(15)) };
    assert_eq!(test.store.call_begin(test.lease, later, None).await.unwrap(), Ok(()));
}

async fn spawned_sessions_share_the_budget_of_their_root(test: TestStore) {
    let [root, child, other] = [test.session().await, test.session().await, test.session().await];
    let lineage = Lineage { parent: root.clone(), root: root.clone() };
    test.commit(&child, vec![Write::ChildOf(lineage)]).await.unwrap();
    test.limit(&BudgetOwner::Session(root.clone()), 100).await;
    test.spend(&child, MOST, 60).await;
    test.spend(&root, MOST, 30).await;
    assert!(test.begin(&child, 20).await.is_err());
    assert!(test.begin(&root, 20).await.is_err());
    assert!(test.begin(&other, 20).await.is_ok());
    let spent = [test.account(&root).await.0, test.account(&child).await.0];
    assert_eq!(spent, [90, 60]);
    let limited = async |session| {
        let new = call(session, Some(1));
        test.store.call_begin(test.lease, new, Some(60)).await.unwrap()
    };
    let over = OverBudget::Tokens { used: 60, limit: 60 };
    assert_eq!([limited(&root).await, limited(&child).await], [Err(over.clone()), Err(over)]);
    // The budget outlives its session as long as a session is below it.
    for (deleted, left) in [(&root, true), (&child, false)] {
        test.store.session_delete(deleted, test.lease, Vec::new(), NOW).await.unwrap();
        let rows = test.database.count("budgets WHERE budget IS NOT NULL").await;
        assert_eq!(rows > 0, left, "{rows}");
    }
}

async fn call_without_session_counts_for_the_day(test: TestStore) {
    test.limit(&BudgetOwner::Day, 100).await;
    let build = SessionId::random();
    test.spend(&build, MOST, 60).await;
    assert!(test.begin(&build, 60).await.is_err());
    assert_eq!(test.store.budget_list(NOW).await.unwrap()[0].spent_micros, micros(60));
    let new = call(&build, Some(0));
    assert_eq!(test.store.call_begin(test.lease, new, Some(1)).await.unwrap(), Ok(()));
}

async fn deleted_session_leaves_its_calls(test: TestStore) {
    let session = test.session().await;
    test.spend(&session, MOST, 60).await;
    let open = test.begin(&session, 5).await.unwrap();
    test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    test.store.call_end(test.lease, &open, MOST, micros(5)).await.unwrap();
    assert_eq!(test.database.count("calls").await, 2);
    assert_eq!(test.database.count("budgets WHERE owner LIKE 'session:%'").await, 0);
    assert_eq!(test.store.budget_list(NOW).await.unwrap()[0].spent_micros, micros(65));
}

async fn calls_that_cost_nothing_leave_no_row(test: TestStore) {
    let session = test.session().await;
    test.spend(&session, MOST, 0).await;
    for (usage, rows) in [(Usage::default(), 0), (MOST, 1)] {
        let unpriced = call(&session, None);
        let id = unpriced.id.clone();
        test.store.call_begin(test.lease, unpriced, None).await.unwrap().unwrap();
        test.store.call_end(test.lease, &id, usage, Money::ZERO).await.unwrap();
        assert_eq!(test.database.count("calls").await, rows, "{usage:?}");
    }
    let used = test.store.session_get(&session).await.unwrap().session.usage;
    assert_eq!(used.output_tokens, 40, "the session counts them nevertheless");
}

async fn turn_and_session_add_up_their_calls(test: TestStore) {
    let (session, turn) = (test.session().await, TurnId::random());
    let id = harvest_proto::PromptId::random();
    let start = Write::TurnInsert { turn: turn.clone(), number: 1, prompt: id.clone(), at: NOW };
    test.commit(&session, vec![prompt(&id), dispatch(&id), start]).await.unwrap();
    test.spend(&session, MOST, 3).await;
    // A call that outlives its turn still belongs to it.
    let open = test.begin(&session, 5).await.unwrap();
    let outcome = TurnOutcome::Completed;
    let end = Write::TurnEnd { turn, outcome, reason: None, at: NOW };
    test.commit(&session, vec![end]).await.unwrap();
    test.store.call_end(test.lease, &open, MOST, micros(4)).await.unwrap();
    let turns = test.store.turn_list(&session).await.unwrap();
    assert_eq!((turns[0].spent_micros, turns[0].usage.input_tokens), (micros(7), 20));
    let shown = test.store.session_get(&session).await.unwrap().session;
    assert_eq!((shown.spent_micros, shown.usage), (micros(7), turns[0].usage));
}

async fn tokens_are_a_second_limit(test: TestStore) {
    let session = test.session().await;
    let begin = async || {
        let new = call(&session, Some(0));
        let id = new.id.clone();
        test.store.call_begin(test.lease, new, Some(60)).await.unwrap().map(|()| id)
    };
    for _ in 0..2 {
        let id = begin().await.unwrap();
        test.store.call_end(test.lease, &id, MOST, Money::ZERO).await.unwrap();
    }
    assert_eq!(begin().await, Err(OverBudget::Tokens { used: 60, limit: 60 }));
}

async fn sums_are_by_scope_and_time(test: TestStore) {
    let [one, two] = [test.session().await, test.session().await];
    test.spend(&one, MOST, 5).await;
    test.spend(&two, MOST, 7).await;
    let unpriced = call(&two, None);
    test.store.call_begin(test.lease, unpriced.clone(), None).await.unwrap().unwrap();
    test.store.call_end(test.lease, &unpriced.id, MOST, Money::ZERO).await.unwrap();
    let later =
        NewCall { at: NOW.after(std::time::Duration::from_secs(86_400)), ..call(&one, Some(2)) };
    test.store.call_begin(test.lease, later.clone(), None).await.unwrap().unwrap();
    let sums = async |by, since| {
        let sums = test.store.spending(by, since, 10).await.unwrap();
        let short = |sum: Spending| (sum.name, sum.calls, sum.spent_micros.micros());
        sums.into_iter().map(short).collect::<Vec<_>>()
    };
    let of = |name: &str, calls, spent| (name.to_owned(), calls, spent);
    let begin = Timestamp::from_millis(0);
    let sessions = [of(&two.to_string(), 2, 7), of(&one.to_string(), 1, 5)];
    assert_eq!(sums(SpendingScope::Session, begin).await, sessions, "a call is in progress");
    test.store.call_end(test.lease, &later.id, MOST, micros(2)).await.unwrap();
    let days = [of("1970-01-01", 3, 12), of("1970-01-02", 1, 2)];
    assert_eq!(sums(SpendingScope::Day, begin).await, days);
    assert_eq!(sums(SpendingScope::Repository, later.at).await, [of("o/r", 1, 2)]);
    assert_eq!(sums(SpendingScope::User, begin).await, [of("ada@example.org", 4, 14)]);
    let first = test.store.spending(SpendingScope::User, begin, 1).await.unwrap().remove(0);
    assert_eq!((first.unpriced_calls, first.usage.input_tokens), (1, 40));
}
