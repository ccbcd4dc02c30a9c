//! Session keys in paths. Wherever a path has the id of a session, the user who created the session
//! may write its key: `/v1/sessions/task-42/prompts`. The key is replaced by the id before the
//! request is routed, so that permissions, idempotency and handlers see ids only.

use axum::{
    extract::{Request, State},
    http::{Uri, uri::PathAndQuery},
    middleware::Next,
    response::Response,
};
use harvest_proto::{SessionId, api::Token};
use harvest_session::SessionKey;

use crate::{
    ServerState,
    auth::{self, Identified},
    host_check,
    problem::ApiError,
    rate_limit,
};

const PREFIX: &str = "/v1/sessions/";

/// Replaces the key of a session in the path by its id. A key that the token's user has not given
/// stays: its route refuses it. The token is checked once, and its rate limit applies before the
/// key is looked up; the outcome goes with the request to `auth::require_token`.
pub(crate) async fn resolve(
    State(state): State<ServerState>,
    mut request: Request,
    next: Next,
) -> Response {
    let allowed = host_check::check(&state.hosts, request.headers()).is_ok();
    if let Some(key) = key_in(request.uri().path()).filter(|_| allowed) {
        let peer = rate_limit::peer(&request);
        let checked = match auth::identify(&state, request.headers(), peer).await {
            Ok(token) => find(&state, token, key).await,
            Err(refused) => Err(refused),
        };
        let found = checked.as_ref().ok().and_then(|(_, session)| session.as_ref());
        if let Some(uri) = found.and_then(|session| with_id(request.uri(), session)) {
            *request.uri_mut() = uri;
        }
        request.extensions_mut().insert(Identified(checked.map(|(token, _)| token)));
    }
    next.run(request).await
}

async fn find(
    state: &ServerState,
    token: Token,
    text: String,
) -> Result<(Token, Option<SessionId>), ApiError> {
    let key = SessionKey { owner: token.user.email.clone(), text };
    let session = state.sessions.by_key(&key).await?;
    Ok((token, session))
}

/// The key in a path; `None` for an id, for the route `counts`, and for paths that have none.
fn key_in(path: &str) -> Option<String> {
    let segment = path.strip_prefix(PREFIX)?.split('/').next()?;
    let key = decode(segment)?;
    let is_key = !key.is_empty() && key != "counts" && key.parse::<SessionId>().is_err();
    is_key.then_some(key)
}

fn with_id(uri: &Uri, session: &SessionId) -> Option<Uri> {
    let rest = uri.path().strip_prefix(PREFIX)?.split_once('/').map_or("", |(_, rest)| rest);
    let slash = if rest.is_empty() { "" } else { "/" };
    let query = uri.query().map_or_else(String::new, |query| format!("?{query}"));
    let path: PathAndQuery = format!("{PREFIX}{session}{slash}{rest}{query}").parse().ok()?;
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).ok()
}

/// A segment of a path without its percent escapes; `None` when they are not UTF-8.
fn decode(segment: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(segment.len()), segment.as_bytes());
    while let [first, after @ ..] = rest {
        let escaped = match (first, after) {
            (b'%', [high, low, ..]) => hex_digit(*high).zip(hex_digit(*low)),
            _ => None,
        };
        match escaped {
            Some((high, low)) => {
                bytes.push(high * 16 + low);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_found_and_decoded() {
        let key = |path| key_in(path);
        assert_eq!(key("/v1/sessions/task-42").as_deref(), Some("task-42"));
        assert_eq!(key("/v1/sessions/issue%20%2312/prompts").as_deref(), Some("issue #12"));
        assert_eq!(key("/v1/sessions/a%2Fb/events").as_deref(), Some("a/b"));
        assert_eq!(key("/v1/sessions/100%").as_deref(), Some("100%"));
        for none in [
            "/v1/sessions",
            "/v1/sessions/",
            "/v1/sessions/ses_0123456789ab/prompts",
            "/v1/sessions/%73es_0123456789ab",
            "/v1/sessions/%ff",
            "/v1/sessions/counts",
            "/v1/sandboxes/task-42",
        ] {
            assert_eq!(key(none), None, "{none}");
        }
    }

    #[test]
    fn path_keeps_its_rest_and_query() {
        let session: SessionId = "ses_0123456789ab".parse().unwrap();
        let replaced = |uri: &str| with_id(&uri.parse().unwrap(), &session).unwrap().to_string();
        assert_eq!(replaced("/v1/sessions/a%2Fb"), "/v1/sessions/ses_0123456789ab");
        assert_eq!(
            replaced("/v1/sessions/a/files?path=x%20y"),
            "/v1/sessions/ses_0123456789ab/files?path=x%20y"
        );
    }
}
