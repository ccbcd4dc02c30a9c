//! Streamed responses: server-sent events and JSON lines. Both end when the server shuts down; a
//! client resumes with its cursor.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, header},
    response::{
        IntoResponse, Response, Sse,
        sse::{Event as Frame, KeepAlive},
    },
};
use futures_util::{Stream, StreamExt, stream};
use harvest_proto::{Event, api::Session};
use harvest_session::sandboxes::ExecLines;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::problem::ApiError;

// Shorter than the idle timeouts of common proxies, the strictest of which is 30 s.
const HEARTBEAT: Duration = Duration::from_secs(15);

// Bounds how long a command outlives a client that disappeared.
const KEEPALIVE: Duration = Duration::from_secs(2);

// The reconnection delay suggested to clients.
const RETRY: Duration = Duration::from_secs(1);

// Streams stay open this long during shutdown, so that followers receive the final events, such as
// the pause of their session.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(300);

async fn shutdown_with_grace(shutdown: CancellationToken) {
    shutdown.cancelled().await;
    tokio::time::sleep(SHUTDOWN_GRACE).await;
}

/// The last event the client has seen: `after`, else `Last-Event-ID`, else 0.
pub(crate) fn cursor(after: Option<u64>, headers: &HeaderMap) -> Result<u64, ApiError> {
    if let Some(after) = after {
        return Ok(after);
    }
    let Some(value) = headers.get("last-event-id") else { return Ok(0) };
    value.to_str().ok().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
        ApiError::invalid("invalid_cursor", "invalid cursor: `Last-Event-ID` is not a number")
            .hint("omit it to read from the beginning")
    })
}

/// Whether the client asked for server-sent events rather than a page of JSON.
pub(crate) fn wants_events(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    accept.split(',').any(|kind| kind.trim().to_ascii_lowercase().starts_with("text/event-stream"))
}

/// First the session's current state, without an id because it is not an event; then the events
/// with their `seq` as id.
pub(crate) fn events(
    session: &Session,
    events: impl Stream<Item = Event> + Send + 'static,
    shutdown: CancellationToken,
) -> Response {
    let first = Frame::default().event("snapshot").retry(RETRY).data(json(session));
    let rest = events
        .map(|event| Frame::default().id(event.seq.to_string()).data(json(&event)))
        .take_until(shutdown_with_grace(shutdown));
    let frames = stream::iter([first]).chain(rest).map(Ok::<_, Infallible>);
    let mut response = Sse::new(frames)
        .keep_alive(KeepAlive::new().interval(HEARTBEAT).text("heartbeat"))
        .into_response();
    // Disables buffering in proxies, which would delay events.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The output of a command. A silent one gets empty lines, so that proxies keep the connection and
/// a failed write reveals that the client is gone. With input they are more frequent: hyper does
/// not notice a closed connection while an unread request body is pending.
pub(crate) fn exec_lines(
    lines: ExecLines,
    has_input: bool,
    shutdown: CancellationToken,
) -> Response {
    let interval = if has_input { KEEPALIVE } else { HEARTBEAT };
    let lines = stream::unfold(lines, move |mut lines| async move {
        match tokio::time::timeout(interval, lines.next()).await {
            Ok(line) => Some((json(&line?) + "\n", lines)),
            Err(_) => Some(("\n".to_owned(), lines)),
        }
    });
    ndjson(lines, shutdown)
}

/// One JSON object per line.
pub(crate) fn lines<T: Serialize>(
    items: impl Stream<Item = T> + Send + 'static,
    shutdown: CancellationToken,
) -> Response {
    ndjson(items.map(|item| json(&item) + "\n"), shutdown)
}

fn ndjson(
    lines: impl Stream<Item = String> + Send + 'static,
    shutdown: CancellationToken,
) -> Response {
    let lines = lines.map(Ok::<_, Infallible>).take_until(shutdown_with_grace(shutdown));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("API bodies hold only maps with text keys")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_static(value))])
    }

    #[test]
    fn query_cursor_takes_precedence_over_header() {
        assert_eq!(cursor(None, &HeaderMap::new()).unwrap(), 0);
        assert_eq!(cursor(None, &headers("last-event-id", "7")).unwrap(), 7);
        assert_eq!(cursor(Some(3), &headers("last-event-id", "7")).unwrap(), 3);
        assert_eq!(
            cursor(None, &headers("last-event-id", "yesterday")).unwrap_err().code,
            "invalid_cursor"
        );
    }

    #[test]
    fn wildcard_accept_header_gets_json() {
        assert!(!wants_events(&headers("accept", "*/*")));
        assert!(wants_events(&headers("accept", "application/json;q=0.5, Text/Event-Stream")));
    }
}
