//! Deliveries of webhooks of the last week: each is taken once. The payloads of events that tell of
//! checks and reviews are kept.

use std::time::Duration;

use harvest_proto::Timestamp;

use crate::{DbRow, Store, StoreError, row};

/// How long a delivery is remembered.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// A webhook that was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookDelivery {
    /// The sender's id of the delivery.
    pub id: String,
    pub event: String,
    /// Empty when the event has none.
    pub action: String,
    /// URL of the repository; empty when the event is of none.
    pub repository: String,
    /// The JSON text, of events whose content is used later.
    pub payload: Option<String>,
    pub at: Timestamp,
}

impl Store {
    /// Records a delivery, and forgets those that are older than a week. False when it was received
    /// before.
    pub async fn webhook_record(&self, delivery: WebhookDelivery) -> Result<bool, StoreError> {
        let week = i64::try_from(KEPT.as_millis()).unwrap_or(i64::MAX);
        let old = sqlx::query("DELETE FROM webhook_deliveries WHERE received_at <= $1")
            .bind(delivery.at.as_millis().saturating_sub(week));
        self.writer.execute(None, old).await?;
        let query = sqlx::query(
            "INSERT INTO webhook_deliveries (id, event, action, repository, payload, received_at)
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (id) DO NOTHING",
        )
        .bind(delivery.id)
        .bind(delivery.event)
        .bind(delivery.action)
        .bind(delivery.repository)
        .bind(delivery.payload)
        .bind(delivery.at.as_millis());
        Ok(self.writer.execute(None, query).await? > 0)
    }

    /// The deliveries with a payload, oldest first.
    pub async fn webhook_list(&self) -> Result<Vec<WebhookDelivery>, StoreError> {
        let query = sqlx::query(
            "SELECT * FROM webhook_deliveries WHERE payload IS NOT NULL ORDER BY received_at, id",
        );
        self.all(query, read).await
    }
}

fn read(row: &DbRow) -> Result<WebhookDelivery, StoreError> {
    Ok(WebhookDelivery {
        id: row::text(row, "id")?,
        event: row::text(row, "event")?,
        action: row::text(row, "action")?,
        repository: row::text(row, "repository")?,
        payload: row::optional(row, "payload")?,
        at: row::time(row, "received_at")?,
    })
}
