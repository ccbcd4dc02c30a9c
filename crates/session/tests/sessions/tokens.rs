//! Access tokens: lookup by value, last use, revocation.

use harvest_proto::api::Role;
use harvest_session::Claim;

use crate::{Harness, ada};

#[tokio::test]
async fn token_is_found_by_value_only() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let (token, value) = sessions.token_create("laptop", ada(), Role::Admin).await.unwrap();
    assert_eq!(sessions.token_check(value.expose()).await.unwrap(), Some(token.clone()));
    assert_eq!(sessions.token_check("hvt_wrong").await.unwrap(), None);
    assert_eq!(
        sessions.token_create("laptop", ada(), Role::Admin).await.unwrap_err().code(),
        "exists"
    );
    assert_eq!(
        sessions.token_create("a/b", ada(), Role::Admin).await.unwrap_err().code(),
        "invalid_name"
    );
    // The last admin token cannot be revoked.
    assert_eq!(sessions.token_delete("laptop").await.unwrap_err().code(), "last_admin");
    sessions.token_create("other", ada(), Role::Admin).await.unwrap();
    sessions.token_delete("laptop").await.unwrap();
    assert_eq!(sessions.token_check(value.expose()).await.unwrap(), None);
    assert_eq!(sessions.token_delete("laptop").await.unwrap_err().code(), "not_found");
    assert_eq!(sessions.idempotency_claim("k", b"body").await.unwrap(), Claim::New);
}

#[tokio::test]
async fn token_use_updates_last_used() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let (token, value) = sessions.token_create("laptop", ada(), Role::Member).await.unwrap();
    assert_eq!(token.last_used, None);
    sessions.token_check(value.expose()).await.unwrap();
    while sessions.token_get("laptop").await.unwrap().last_used.is_none() {
        tokio::task::yield_now().await;
    }
}
