//! CPU time and memory of sandboxes.

use std::time::Duration;

use harvest_proto::{SandboxId, SpendingScope, Timestamp, api::Spending, event::Usage};
use harvest_store::{ComputeOwner, ComputeReading, StoreError};

use crate::test_store::{NOW, TestStore, on_both};

on_both! {
    later_server_continues_the_count,
    sandboxes_add_up_by_scope_and_hour,
    calls_and_compute_are_in_one_list,
    superseded_server_cannot_count,
    unread_meters_are_forgotten,
}

const MIB: u64 = 1 << 20;

async fn owner(test: &TestStore) -> ComputeOwner {
    ComputeOwner {
        session: Some(test.session().await),
        repository: Some("o/r".parse().unwrap()),
        user: Some("ada@example.org".to_owned()),
    }
}

fn reading(sandbox: &SandboxId, owner: &ComputeOwner, cpu_millis: u64) -> ComputeReading {
    ComputeReading {
        sandbox: sandbox.clone(),
        owner: owner.clone(),
        since: NOW,
        cpu_micros: cpu_millis * 1000,
        memory_bytes: 8 * MIB,
    }
}

fn after(seconds: u64) -> Timestamp {
    NOW.after(Duration::from_secs(seconds))
}

/// Names, CPU milliseconds and MiB seconds.
async fn sums(test: &TestStore, by: SpendingScope, since: Timestamp) -> Vec<(String, u64, u64)> {
    let short = |sum: Spending| (sum.name, sum.cpu_millis, sum.memory_mib_seconds);
    test.store.spending(by, since, 10).await.unwrap().into_iter().map(short).collect()
}

async fn later_server_continues_the_count(test: TestStore) {
    let (sandbox, owner) = (SandboxId::random(), owner(&test).await);
    let add = async |lease, cpu, at| {
        test.store.compute_add(lease, vec![reading(&sandbox, &owner, cpu)], at, at).await
    };
    add(test.lease, 100, after(10)).await.unwrap();
    // This server is killed; the sandbox works on.
    let next = test.store.server_lease(NOW).await.unwrap();
    add(next, 350, after(40)).await.unwrap();
    add(next, 350, after(50)).await.unwrap();
    let session = owner.session.as_ref().unwrap().to_string();
    let expected = [(session, 350, 8 * 50)];
    assert_eq!(sums(&test, SpendingScope::Session, NOW).await, expected);
}

async fn sandboxes_add_up_by_scope_and_hour(test: TestStore) {
    let (first, owner) = (SandboxId::random(), owner(&test).await);
    let build = ComputeOwner { session: None, user: None, ..owner.clone() };
    let later = after(3600);
    let add = async |reading, at| {
        test.store.compute_add(test.lease, vec![reading], at, at).await.unwrap();
    };
    add(reading(&first, &owner, 100), after(0)).await;
    add(reading(&first, &owner, 300), later).await;
    add(ComputeReading { since: later, ..reading(&SandboxId::random(), &build, 7) }, later).await;
    let memory = 8 * 3600;
    let of = |name: &str, cpu, memory| (name.to_owned(), cpu, memory);
    assert_eq!(sums(&test, SpendingScope::Repository, NOW).await, [of("o/r", 307, memory)]);
    assert_eq!(sums(&test, SpendingScope::Day, later).await, [of("1970-01-01", 207, memory)]);
    let users = [of("ada@example.org", 300, memory), of("", 7, 0)];
    assert_eq!(sums(&test, SpendingScope::User, NOW).await, users);
}

async fn calls_and_compute_are_in_one_list(test: TestStore) {
    let owner = owner(&test).await;
    let session = owner.session.clone().unwrap();
    test.spend(&session, Usage { input_tokens: 3, ..Usage::default() }, 5).await;
    let readings = vec![reading(&SandboxId::random(), &owner, 9)];
    test.store.compute_add(test.lease, readings, NOW, NOW).await.unwrap();
    let [sum] = &test.store.spending(SpendingScope::Session, NOW, 10).await.unwrap()[..] else {
        panic!("one session, one sum")
    };
    let numbers = (sum.calls, sum.usage.input_tokens, sum.spent_micros.micros(), sum.cpu_millis);
    assert_eq!((sum.name.clone(), numbers), (session.to_string(), (1, 3, 5, 9)));
}

async fn superseded_server_cannot_count(test: TestStore) {
    let owner = owner(&test).await;
    test.store.server_lease(NOW).await.unwrap();
    let readings = vec![reading(&SandboxId::random(), &owner, 9)];
    let refused = test.store.compute_add(test.lease, readings, NOW, NOW).await;
    assert!(matches!(refused, Err(StoreError::LeaseLost)), "{refused:?}");
    assert_eq!(sums(&test, SpendingScope::Day, NOW).await, []);
}

async fn unread_meters_are_forgotten(test: TestStore) {
    let owner = owner(&test).await;
    let add = async |at| {
        let readings = vec![reading(&SandboxId::random(), &owner, 9)];
        test.store.compute_add(test.lease, readings, at, at).await.unwrap();
    };
    add(NOW).await;
    add(after(60)).await;
    assert_eq!(test.database.count("compute_meters").await, 2);
    add(after(30 * 24 * 3600)).await;
    assert_eq!(test.database.count("compute_meters").await, 1);
    assert_eq!(test.database.count("compute").await, 2, "what was used stays");
}
