//! The user and idempotency key of a request for a standalone sandbox; no user for in-process
//! requests.

use std::convert::Infallible;

use axum::{extract::FromRequestParts, http::request::Parts};
use harvest_proto::api::Role;
use harvest_session::sandboxes::Requester;

use crate::{
    auth::Authenticated,
    idempotency::{IdempotencyKey, PlannedIds},
};

pub(crate) struct RequestedBy(pub(crate) Requester);

impl<S: Send + Sync> FromRequestParts<S> for RequestedBy {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let token = parts.extensions.get::<Authenticated>().map(|token| &token.0);
        let limited = token.is_some_and(|token| token.role == Role::Member);
        let user = token.map(|token| token.user.email.clone());
        let key =
            parts.extensions.get::<IdempotencyKey>().and_then(|key| key.key().map(str::to_owned));
        let planned = parts.extensions.get::<PlannedIds>().cloned().unwrap_or_default().0;
        Ok(Self(Requester { user, limited, key, planned }))
    }
}
