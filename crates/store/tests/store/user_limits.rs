//! Limits of single users.

use harvest_proto::api::SetUserLimits;
use harvest_store::GivenLimits;

use crate::test_store::{TestStore, on_both};

on_both!(changed_limits_stay_until_they_are_reset, user_without_limits_has_no_row);

async fn changed_limits_stay_until_they_are_reset(test: TestStore) {
    let set = async |change| test.store.user_limits_set("Ada@Example.org", change).await.unwrap();
    set(SetUserLimits { sandboxes: Some(Some(4)), ..SetUserLimits::default() }).await;
    let memory = Some(Some(1 << 40));
    set(SetUserLimits { memory_bytes: memory, ..SetUserLimits::default() }).await;
    let expected = GivenLimits {
        email: "ada@example.org".into(),
        sandboxes: Some(4),
        memory_bytes: Some(1 << 40),
        ..GivenLimits::default()
    };
    assert_eq!(test.store.user_limits_get("ada@EXAMPLE.org").await.unwrap(), expected);
    let listed = test.store.user_limits_list().await.unwrap();
    assert_eq!(listed, std::slice::from_ref(&expected));
    let reset = SetUserLimits { sandboxes: Some(None), ..SetUserLimits::default() };
    assert_eq!(set(reset).await, GivenLimits { sandboxes: None, ..expected });
}

async fn user_without_limits_has_no_row(test: TestStore) {
    let set = async |memory| {
        let change = SetUserLimits { memory_bytes: Some(memory), ..SetUserLimits::default() };
        test.store.user_limits_set("ada@example.org", change).await.unwrap()
    };
    set(Some(1 << 30)).await;
    let reset = set(None).await;
    assert_eq!(test.store.user_limits_get("ada@example.org").await.unwrap(), reset);
    assert_eq!(test.store.user_limits_list().await.unwrap(), []);
}
