//! Who may ask: a bearer token for everything under `/v1`, and a Host header that names this machine.
//!
//! The host check is against DNS rebinding: a page in somebody's browser can make its own name point
//! at 127.0.0.1, but it cannot make the browser send another name than its own.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

use axum::{
    body::{Body, HttpBody as _},
    extract::{FromRequestParts, Request, State},
    http::{HeaderValue, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use harvest_proto::{Timestamp, api::Token, bridge::Author};
use tokio_util::sync::CancellationToken;

use crate::{
    ServerState,
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

/// The tokens in use, each with what ends its streams.
#[derive(Debug, Default)]
pub(crate) struct Revocations(Mutex<HashMap<(String, Timestamp), CancellationToken>>);

impl Revocations {
    /// Cancelled once the token is revoked.
    fn of(&self, token: &Token) -> CancellationToken {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry((token.name.clone(), token.created_at)).or_default().clone()
    }

    /// Cuts off whoever uses this token. The entry stays: a request may have been let in just before.
    pub(crate) fn revoke(&self, token: &Token) {
        self.of(token).cancel();
    }
}

/// Lets only requests pass that show a known token and ask for what its user may do.
pub(crate) async fn require_token(
    State(state): State<ServerState>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(shown) = bearer(&request) else {
        return refuse("the request has no bearer token");
    };
    let asked = Asked::of(&request);
    match state.sessions.token_check(shown).await {
        Ok(Some(token)) => {
            if let Err(error) = policy::check(&state.sessions, &token, &asked).await {
                return error.into_response();
            }
            let revoked = state.revoked.of(&token);
            request.extensions_mut().insert(Holder(token));
            until(revoked, next.run(request).await)
        }
        Ok(None) => refuse("the bearer token is not known here"),
        Err(error) => ApiError::from(error).into_response(),
    }
}

/// Ends an answer of unknown length, which may be a stream, with the token it was given for.
fn until(revoked: CancellationToken, response: Response) -> Response {
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    response.map(|body| Body::from_stream(body.into_data_stream().take_until(revoked.cancelled_owned())))
}

/// Lets only requests pass that were sent to a name of this machine.
pub(crate) async fn require_host(State(state): State<ServerState>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|value| value.to_str().ok());
    if host.is_some_and(|host| state.hosts.allow(host)) {
        return next.run(request).await;
    }
    ApiError::new(
        StatusCode::MISDIRECTED_REQUEST,
        "host_not_allowed",
        format!("`{}` is not a name of this server", host.unwrap_or("")),
    )
    .hint("use 127.0.0.1 or localhost, or start the server with `--host NAME`")
    .into_response()
}

/// The names this server answers to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hosts(Vec<String>);

impl Hosts {
    pub(crate) fn new(names: &[String]) -> Self {
        Self(names.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// Addresses always pass: rebinding works with names only.
    fn allow(&self, host: &str) -> bool {
        let name = without_port(host).to_ascii_lowercase();
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost"
            || name.ends_with(".localhost")
            || address.parse::<IpAddr>().is_ok()
            || self.0.contains(&name)
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // The colons of a bare `[::1]` are not a port's.
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.is_empty() => name,
        _ => host,
    }
}

fn bearer(request: &Request) -> Option<&str> {
    let value = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

fn unauthorized(detail: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
        .hint("send `authorization: Bearer TOKEN`; `harvest up` prints the first one once, `harvest token create` makes more")
}

fn refuse(detail: &str) -> Response {
    let mut response = unauthorized(detail).into_response();
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_loopback_names_and_configured_names_pass() {
        let hosts = Hosts::new(&["Agents.Example.org".into()]);
        for good in
            ["localhost:7070", "127.0.0.1", "[::1]:80", "[::1]", "10.0.0.5:7070", "agents.example.org:443"]
        {
            assert!(hosts.allow(good), "{good}");
        }
        for bad in ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7070", ":7070"] {
            assert!(!hosts.allow(bad), "{bad}");
        }
    }
}
