//! Deliveries of webhooks.

use harvest_proto::Timestamp;
use harvest_store::WebhookDelivery;

use crate::test_store::{TestStore, on_both};

on_both!(delivery_is_taken_once_in_a_week, only_payloads_are_listed);

const DAY: i64 = 24 * 3600 * 1000;

fn delivery(id: &str, at: i64, payload: Option<&str>) -> WebhookDelivery {
    WebhookDelivery {
        id: id.to_owned(),
        event: "check_run".to_owned(),
        action: "completed".to_owned(),
        repository: "https://h/a/b.git".to_owned(),
        payload: payload.map(str::to_owned),
        at: Timestamp::from_millis(at),
    }
}

async fn delivery_is_taken_once_in_a_week(test: TestStore) {
    let take =
        async |id: &str, at| test.store.webhook_record(delivery(id, at, None)).await.unwrap();
    assert!(take("a", 0).await);
    assert!(!take("a", 7 * DAY - 1).await);
    assert!(take("b", 7 * DAY - 1).await);
    assert!(take("a", 7 * DAY).await, "the first one is forgotten");
    assert_eq!(test.database.count("webhook_deliveries").await, 2);
}

async fn only_payloads_are_listed(test: TestStore) {
    let kept = delivery("b", 2, Some("{}"));
    for delivery in [delivery("a", 1, None), kept.clone()] {
        test.store.webhook_record(delivery).await.unwrap();
    }
    assert_eq!(test.store.webhook_list().await.unwrap(), [kept]);
}
