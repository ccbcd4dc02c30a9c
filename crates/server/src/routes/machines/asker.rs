//! Who asks for a machine, and under which key: the user of the token that was shown; nobody where the routes answer
//! without a server.

use std::convert::Infallible;

use axum::{extract::FromRequestParts, http::request::Parts};
use harvest_session::machines::Asker;

use crate::{
    auth::Holder,
    idempotency::{Meant, Once},
};

/// Whoever asks.
pub(crate) struct By(pub(crate) Asker);

impl<S: Send + Sync> FromRequestParts<S> for By {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let user = parts.extensions.get::<Holder>().map(|holder| holder.0.user.email.clone());
        let key = parts.extensions.get::<Once>().and_then(|once| once.key().map(str::to_owned));
        let meant = parts.extensions.get::<Meant>().cloned().unwrap_or_default().0;
        Ok(Self(Asker { user, key, meant }))
    }
}
