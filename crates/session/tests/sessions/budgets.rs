//! Budgets: what the ledger refuses, and how a session goes on after it.

use harvest_gateway::ledger::PlannedCall;
use harvest_proto::{Money, TurnReason};
use harvest_session::{BudgetOwner, Price, Prices};

use super::*;

fn dollars(text: &str) -> Money {
    text.parse().unwrap()
}

/// Any model costs a dollar for a million tokens.
fn prices() -> Prices {
    let one = dollars("1");
    let (upstream, model) = (None, "*".to_owned());
    let (context, max_output) = (1_000_000, 1_000_000);
    Prices(vec![Price {
        upstream,
        model,
        input: one,
        output: one,
        cache_read: one,
        cache_write: one,
        context,
        max_output,
    }])
}

/// A call that costs a dollar at most.
fn dear_call() -> PlannedCall {
    let plain = planned_call();
    let most = harvest_gateway::ledger::MostTokens {
        input: Some(500_000),
        output: Some(500_000),
        responses: 1,
    };
    PlannedCall { keyed: true, most, ..plain }
}

fn used(tokens: u64) -> Usage {
    Usage { input_tokens: tokens, ..Usage::default() }
}

fn final_refusal(result: Result<(), Refusal>) -> String {
    match result {
        Err(Refusal::Final(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

async fn ledger(harness: &Harness, lease: Lease) -> StoreLedger {
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    ledger.with_prices(prices())
}

#[tokio::test]
async fn call_is_refused_before_it_exceeds_a_budget() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let ledger = ledger(&harness, lease).await;
    let create = CreateSession {
        repository: Some("demo".into()),
        budget_micros: Some(dollars("1.50")),
        ..CreateSession::default()
    };
    let id = sessions.create(create, ada()).await.unwrap().id;
    let first = dear_call();
    ledger.reserve(&id, &first).await.unwrap();
    let held = ledger.reserve(&id, &dear_call()).await;
    assert!(matches!(&held, Err(Refusal::Retry(why)) if why.contains("$1.00 held")), "{held:?}");
    ledger.settle(&id, &first, Used::Counted(used(600_000))).await;
    let reason = final_refusal(ledger.reserve(&id, &dear_call()).await);
    let command = format!("`harvest budget {id} AMOUNT`");
    assert!(reason.contains("budget reached: $1.50 for this session: $0.60 spent"), "{reason}");
    assert!(reason.contains("may cost $1.00") && reason.contains(&command), "{reason}");
    let shown = sessions.get(&id).await.unwrap();
    assert_eq!((shown.budget_micros, shown.spent_micros), (Some(dollars("1.50")), dollars("0.60")));
    sessions.set_session_budget(&id, None, ada()).await.unwrap();
    for (owner, command) in [
        (BudgetOwner::Repository(demo()), "`harvest budget --repository local/demo AMOUNT`"),
        (BudgetOwner::User(ada().email), "`harvest budget --user ada@example.org AMOUNT`"),
        (BudgetOwner::Day, "`harvest budget --day AMOUNT`"),
    ] {
        sessions.set_budget(&owner, Some(dollars("1"))).await.unwrap();
        let reason = final_refusal(ledger.reserve(&id, &dear_call()).await);
        assert!(reason.contains(command), "{reason}");
        let unknown = PlannedCall { model: String::new(), ..dear_call() };
        let without = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
        let reason = final_refusal(without.reserve(&id, &unknown).await);
        assert!(
            reason.contains("the price of the model") && reason.contains("`prices`"),
            "{reason}"
        );
        sessions.set_budget(&owner, None).await.unwrap();
    }
    assert_eq!(ledger.reserve(&id, &dear_call()).await, Ok(()));
}

#[tokio::test]
async fn unread_response_is_charged_as_held() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let id = harness.session(&sessions, None).await.id;
    let (ledger, call) = (ledger(&harness, lease).await, dear_call());
    ledger.reserve(&id, &call).await.unwrap();
    let charged = ledger.settle(&id, &call, Used::AtLeast(used(7))).await;
    assert_eq!((charged.input_tokens, charged.output_tokens), (500_000, 500_000));
    let shown = sessions.get(&id).await.unwrap();
    assert_eq!((shown.spent_micros, shown.usage), (dollars("1"), charged));
}

#[tokio::test]
async fn next_server_charges_what_was_held() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let sessions = harness.serve_with(lease).await;
    let id = harness.session(&sessions, None).await.id;
    ledger(&harness, lease).await.reserve(&id, &dear_call()).await.unwrap();
    assert_eq!(sessions.get(&id).await.unwrap().spent_micros, Money::ZERO);
    sessions.close().await;
    let sessions = harness.serve().await;
    assert_eq!(sessions.get(&id).await.unwrap().spent_micros, dollars("1"));
}

#[tokio::test]
async fn raised_budget_continues_the_session() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let refused = "fail API Error: 400 budget reached: $1.00 for this session";
    let id = harness.session(&sessions, Some(refused)).await.id;
    until_state(&sessions, &id, SessionState::NeedsInput).await;
    assert_eq!(sessions.get(&id).await.unwrap().reason, StateReason::Budget);
    let turns = sessions.turns(&id).await.unwrap();
    assert_eq!(turns[0].reason, Some(TurnReason::Budget));
    // No money to go on with.
    sessions.set_session_budget(&id, Some(Money::ZERO), ada()).await.unwrap();
    assert_eq!(sessions.prompts(&id).await.unwrap().len(), 1);
    sessions.set_session_budget(&id, Some(dollars("5")), ada()).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
    let prompts = sessions.prompts(&id).await.unwrap();
    assert_eq!(prompts[1].text, "The budget was raised. Continue where you stopped.");
    let shown = sessions.get(&id).await.unwrap();
    assert_eq!((shown.turns, shown.budget_micros), (2, Some(dollars("5"))));
    sessions.set_session_budget(&id, Some(dollars("6")), ada()).await.unwrap();
    assert_eq!(sessions.prompts(&id).await.unwrap().len(), 2, "it does not wait any more");
}

/// A session that a budget of this command has stopped.
async fn stopped(harness: &Harness, sessions: &Sessions, command: &str) -> SessionId {
    let refused = format!("fail 400 budget reached: $1.00, to go on, raise it: `{command} AMOUNT`");
    let id = harness.session(sessions, Some(&refused)).await.id;
    until_state(sessions, &id, SessionState::NeedsInput).await;
    id
}

#[tokio::test]
async fn raised_shared_budget_continues_its_sessions() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let of = async |command| stopped(&harness, &sessions, command).await;
    let repository = [
        of("harvest budget --repository local/demo").await,
        of("harvest budget --repository local/demo").await,
    ];
    let user = of("harvest budget --user ada@example.org").await;
    let day = of("harvest budget --day").await;
    let own = of("harvest budget ses_other").await;
    let prompts = async |id: &SessionId| sessions.prompts(id).await.unwrap().len();
    // A paused session waits as well.
    sessions.pause(&repository[0]).await.unwrap();
    sessions.set_budget(&BudgetOwner::Repository(demo()), Some(Money::ZERO)).await.unwrap();
    assert_eq!(prompts(&repository[0]).await, 1, "there is no money to go on with");
    sessions.set_budget(&BudgetOwner::Repository(demo()), Some(dollars("5"))).await.unwrap();
    for id in &repository {
        until_state(&sessions, id, SessionState::Idle).await;
    }
    let [first, second] = [0, 1].map(|index| &repository[index]);
    let continued =
        [sessions.prompts(first).await.unwrap(), sessions.prompts(second).await.unwrap()];
    assert!(continued[0][1].created_at <= continued[1][1].created_at, "{continued:#?}");
    assert_eq!(continued[0][1].text, "The budget was raised. Continue where you stopped.");
    assert_eq!((prompts(&user).await, prompts(&day).await, prompts(&own).await), (1, 1, 1));
    let address = "Ada@Example.org".to_owned();
    sessions.set_budget(&BudgetOwner::User(address), None).await.unwrap();
    sessions.set_budget(&BudgetOwner::Day, Some(dollars("9"))).await.unwrap();
    for id in [&user, &day] {
        until_state(&sessions, id, SessionState::Idle).await;
    }
    assert_eq!(prompts(&own).await, 1, "another budget has stopped it");
    sessions.set_budget(&BudgetOwner::Day, Some(dollars("10"))).await.unwrap();
    assert_eq!(prompts(&day).await, 2, "it does not wait any more");
}

#[tokio::test]
async fn fork_gets_a_budget_of_its_own() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("go")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.set_session_budget(&id, Some(dollars("5")), ada()).await.unwrap();
    let fork = sessions.fork(&id, ForkSession::default(), ada()).await.unwrap().remove(0);
    assert_eq!((fork.budget_micros, fork.spent_micros), (Some(dollars("5")), Money::ZERO));
}
