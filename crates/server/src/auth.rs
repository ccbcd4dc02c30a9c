//! Authentication: everything under `/v1` requires a bearer token. `authorization` decides what the
//! token's user may do.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
};

use axum::{
    body::{Body, HttpBody as _},
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    middleware::Next,
    response::Response,
};
use futures_util::StreamExt;
use harvest_proto::{Timestamp, api::Token};
use tokio_util::sync::CancellationToken;

use crate::{
    ServerState,
    authorization::{self, Access},
    connections::TokenAccepted,
    problem::ApiError,
    rate_limit,
    route_path::RoutePath,
};

/// The request's valid token.
#[derive(Debug, Clone)]
pub(crate) struct Authenticated(pub(crate) Token);

impl<S: Send + Sync> FromRequestParts<S> for Authenticated {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| unauthorized("no token was checked"))
    }
}

/// The outcome of [`identify`] for a request whose token was checked before it was routed.
#[derive(Debug, Clone)]
pub(crate) struct Identified(pub(crate) Result<Token, ApiError>);

/// Cancelled when the server shuts down or the request's token is revoked. For WebSockets, which
/// outlive their response.
#[derive(Debug, Clone)]
pub(crate) struct RevokedOrShutdown(pub(crate) CancellationToken);

impl<S: Send + Sync> FromRequestParts<S> for RevokedOrShutdown {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| unauthorized("no token was checked"))
    }
}

// Revoked tokens are forgotten when there are this many entries.
const PURGE_AT: usize = 1000;

/// The tokens in use, each with the cancellation tokens of its streams and WebSockets.
#[derive(Debug)]
pub(crate) struct Revocations {
    shutdown: CancellationToken,
    by_token: Mutex<HashMap<(String, Timestamp), (CancellationToken, RevokedOrShutdown)>>,
}

impl Revocations {
    pub(crate) fn new(shutdown: CancellationToken) -> Self {
        Self { shutdown, by_token: Mutex::default() }
    }

    /// The first is cancelled when the token is revoked, the second also when the server shuts
    /// down.
    fn cancellations(&self, token: &Token) -> (CancellationToken, RevokedOrShutdown) {
        let mut by_token = self.by_token.lock().unwrap_or_else(PoisonError::into_inner);
        if by_token.len() >= PURGE_AT {
            by_token.retain(|_, (revoked, _)| !revoked.is_cancelled());
        }
        let new = || (CancellationToken::new(), RevokedOrShutdown(self.shutdown.child_token()));
        by_token.entry((token.name.clone(), token.created_at)).or_insert_with(new).clone()
    }

    /// Closes the streams opened with this token. The entry stays for a while, because a request
    /// may have been authenticated just before.
    pub(crate) fn revoke(&self, token: &Token) {
        let (revoked, RevokedOrShutdown(closing)) = self.cancellations(token);
        revoked.cancel();
        closing.cancel();
    }
}

/// The server and the access that the route declares.
#[derive(Clone)]
pub(crate) struct Guard {
    pub(crate) state: ServerState,
    pub(crate) access: Access,
}

/// Rejects requests without a known token, and those its user is not allowed to make.
pub(crate) async fn require_token(
    State(Guard { state, access }): State<Guard>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (path, peer) = (RoutePath::of(&request), rate_limit::peer(&request));
    let token = match request.extensions_mut().remove::<Identified>() {
        Some(Identified(checked)) => checked?,
        None => identify(&state, request.headers(), peer).await?,
    };
    authorization::check(&state, &token, access, &path).await?;
    let (revoked, closing) = state.revocations.cancellations(&token);
    request.extensions_mut().insert(closing);
    request.extensions_mut().insert(Authenticated(token));
    let mut response = close_when_revoked(revoked, next.run(request).await);
    response.extensions_mut().insert(TokenAccepted);
    Ok(response)
}

/// The token of a request, which counts against the token's rate limit; a request without a valid
/// one counts against its address.
pub(crate) async fn identify(
    state: &ServerState,
    headers: &HeaderMap,
    peer: Option<SocketAddr>,
) -> Result<Token, ApiError> {
    let reject = |detail| state.rate_limits.anonymous(peer).err().unwrap_or(unauthorized(detail));
    let Some(value) = bearer(headers) else {
        return Err(reject("no bearer token was sent"));
    };
    let Some(token) = state.accounts.token_check(value).await? else {
        return Err(reject("the bearer token is unknown or revoked"));
    };
    state.rate_limits.token(&token.name)?;
    Ok(token)
}

/// Closes a response of unknown length, which may be a stream, when its token is revoked.
fn close_when_revoked(revoked: CancellationToken, response: Response) -> Response {
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    response.map(|body| {
        Body::from_stream(body.into_data_stream().take_until(revoked.cancelled_owned()))
    })
}

/// The bearer token of a request.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

fn unauthorized(detail: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", detail).hint(
        "send `authorization: Bearer TOKEN`; `harvest up` prints the first token once, `harvest \
             token create` makes more",
    )
}

#[cfg(test)]
mod tests {
    use harvest_proto::{api::Role, bridge::Author};

    use super::*;

    #[test]
    fn revoked_tokens_are_forgotten_in_time() {
        let revocations = Revocations::new(CancellationToken::new());
        for at in 0..3 * PURGE_AT as i64 {
            let token = Token {
                name: "bot".to_owned(),
                user: Author { name: "Bot".to_owned(), email: "bot@example.org".to_owned() },
                role: Role::Member,
                created_at: Timestamp::from_millis(at),
                last_used: None,
            };
            revocations.cancellations(&token);
            revocations.revoke(&token);
        }
        assert!(revocations.by_token.lock().unwrap().len() <= PURGE_AT);
    }
}
