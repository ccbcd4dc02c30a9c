//! Who asks: a bearer token for everything under `/v1`. What its user may do is `policy`'s.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
};

use axum::{
    body::{Body, HttpBody as _},
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use harvest_proto::{Timestamp, api::Token, bridge::Author};
use tokio_util::sync::CancellationToken;

use crate::{
    ServerState, limit,
    policy::{self, Asked},
    problem::ApiError,
};

/// The token that was shown.
#[derive(Debug, Clone)]
pub(crate) struct Holder(pub(crate) Token);

impl<S: Send + Sync> FromRequestParts<S> for Holder {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| unauthorized("no token was checked"))
    }
}

/// The person behind the token.
#[derive(Debug, Clone)]
pub(crate) struct Caller(pub(crate) Author);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        Holder::from_request_parts(parts, state).await.map(|holder| Self(holder.0.user))
    }
}

/// Cancelled when the server ends or the token of the request at hand is revoked: for sockets, which are
/// no answers any more.
#[derive(Debug, Clone)]
pub(crate) struct Ending(pub(crate) CancellationToken);

impl<S: Send + Sync> FromRequestParts<S> for Ending {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| unauthorized("no token was checked"))
    }
}

/// The tokens in use, each with what ends its streams and its sockets.
#[derive(Debug)]
pub(crate) struct Revocations {
    shutdown: CancellationToken,
    known: Mutex<HashMap<(String, Timestamp), (CancellationToken, Ending)>>,
}

impl Revocations {
    pub(crate) fn new(shutdown: CancellationToken) -> Self {
        Self { shutdown, known: Mutex::default() }
    }

    /// Cancelled once the token is revoked; the second also when the server ends.
    fn of(&self, token: &Token) -> (CancellationToken, Ending) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = || (CancellationToken::new(), Ending(self.shutdown.child_token()));
        known.entry((token.name.clone(), token.created_at)).or_insert_with(fresh).clone()
    }

    /// Cuts off whoever uses this token. The entry stays: a request may have been let in just before.
    pub(crate) fn revoke(&self, token: &Token) {
        let (revoked, Ending(ending)) = self.of(token);
        revoked.cancel();
        ending.cancel();
    }
}

/// Lets only requests pass that show a known token and ask for what its user may do.
pub(crate) async fn require_token(
    State(state): State<ServerState>,
    mut request: Request,
    next: Next,
) -> Response {
    let (asked, peer) = (Asked::of(&request), limit::peer(&request));
    let Some(shown) = bearer(request.headers()) else {
        return refuse(&state, peer, "the request has no bearer token");
    };
    match state.sessions.token_check(shown).await {
        Ok(Some(token)) => {
            if let Err(error) = state.rates.token(&token.name) {
                return error.into_response();
            }
            if let Err(error) = policy::check(&state.sessions, &token, &asked).await {
                return error.into_response();
            }
            let (revoked, ending) = state.revoked.of(&token);
            request.extensions_mut().insert(ending);
            request.extensions_mut().insert(Holder(token));
            until(revoked, next.run(request).await)
        }
        Ok(None) => refuse(&state, peer, "the bearer token is not known here"),
        Err(error) => ApiError::from(error).into_response(),
    }
}

/// Ends an answer of unknown length, which may be a stream, with the token it was given for.
fn until(revoked: CancellationToken, response: Response) -> Response {
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    response.map(|body| {
        Body::from_stream(body.into_data_stream().take_until(revoked.cancelled_owned()))
    })
}

/// The token a request shows.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

fn unauthorized(detail: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
        .hint("send `authorization: Bearer TOKEN`; `harvest up` prints the first one once, `harvest token create` makes more")
}

fn refuse(state: &ServerState, peer: Option<SocketAddr>, detail: &str) -> Response {
    if let Err(error) = state.rates.stranger(peer) {
        return error.into_response();
    }
    let mut response = unauthorized(detail).into_response();
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}
