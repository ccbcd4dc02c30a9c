//! Access tokens: lookup by value, last use, revocation.

use harvest_proto::api::Role;
use harvest_session::{Claim, ServerParts};

use crate::{Harness, ada};

#[tokio::test]
async fn token_is_found_by_value_only() {
    let harness = Harness::new().await;
    let ServerParts { accounts, sessions, .. } = harness.serve_parts(harness.lease().await).await;
    let (token, value) = accounts.token_create("laptop", ada(), Role::Admin).await.unwrap();
    assert_eq!(accounts.token_check(value.expose()).await.unwrap(), Some(token.clone()));
    assert_eq!(accounts.token_check("hvt_wrong").await.unwrap(), None);
    assert_eq!(
        accounts.token_create("laptop", ada(), Role::Admin).await.unwrap_err().code(),
        "exists"
    );
    assert_eq!(
        accounts.token_create("a/b", ada(), Role::Admin).await.unwrap_err().code(),
        "invalid_name"
    );
    // The last admin token cannot be revoked.
    assert_eq!(accounts.token_delete("laptop").await.unwrap_err().code(), "last_admin");
    accounts.token_create("other", ada(), Role::Admin).await.unwrap();
    accounts.token_delete("laptop").await.unwrap();
    assert_eq!(accounts.token_check(value.expose()).await.unwrap(), None);
    assert_eq!(accounts.token_delete("laptop").await.unwrap_err().code(), "not_found");
    assert_eq!(sessions.idempotency_claim("k", b"body").await.unwrap(), Claim::New);
}

#[tokio::test]
async fn token_use_updates_last_used() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let (token, value) = parts.accounts.token_create("laptop", ada(), Role::Member).await.unwrap();
    assert_eq!(token.last_used, None);
    parts.accounts.token_check(value.expose()).await.unwrap();
    while parts.accounts.token_get("laptop").await.unwrap().last_used.is_none() {
        tokio::task::yield_now().await;
    }
}
