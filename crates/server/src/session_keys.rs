//! Session keys in paths. Wherever a path has the id of a session, the user who created the session
//! may write its key: `/v1/sessions/task-42/prompts`. The key is replaced by the id before the
//! request is routed, so that permissions, idempotency and handlers see ids only.

use axum::{
    extract::{Request, State},
    http::{Uri, uri::PathAndQuery},
    middleware::Next,
    response::Response,
};
use harvest_proto::SessionId;
use harvest_session::{SessionError, SessionKey, error_chain};

use crate::{ServerState, auth};

const PREFIX: &str = "/v1/sessions/";

/// Replaces the key of a session in the path by its id. A request without a valid token, or with a
/// key that its user has not given, stays as it is: its route refuses it.
pub(crate) async fn resolve(
    State(state): State<ServerState>,
    mut request: Request,
    next: Next,
) -> Response {
    if let Some(key) = key_in(request.uri().path()) {
        // The body is not `Sync`, so no reference to the request is held across an await.
        let token = auth::bearer(request.headers()).map(str::to_owned);
        match find(&state, token, key).await {
            Ok(Some(session)) => {
                if let Some(uri) = with_id(request.uri(), &session) {
                    *request.uri_mut() = uri;
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(error = error_chain(&error), "cannot look up the key of a session");
            }
        }
    }
    next.run(request).await
}

async fn find(
    state: &ServerState,
    token: Option<String>,
    text: String,
) -> Result<Option<SessionId>, SessionError> {
    let Some(value) = token else { return Ok(None) };
    let Some(token) = state.accounts.token_check(&value).await? else { return Ok(None) };
    state.sessions.by_key(&SessionKey { owner: token.user.email, text }).await
}

/// The key in a path; `None` for an id, and for paths that have none.
fn key_in(path: &str) -> Option<String> {
    let segment = path.strip_prefix(PREFIX)?.split('/').next()?;
    let key = decode(segment)?;
    (!key.is_empty() && key.parse::<SessionId>().is_err()).then_some(key)
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
