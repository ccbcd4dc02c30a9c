//! Long answers: server-sent events and JSON lines. Both end when the server shuts down, so that a
//! follower cannot hold it up; a follower comes back with its cursor.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, header},
    response::{
        IntoResponse, Response, Sse,
        sse::{Event as Frame, KeepAlive},
    },
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use harvest_proto::{Event, api::Session};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::problem::ApiError;

/// Shorter than the idle limits of common proxies, the strictest of which is 30 s.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// How long a command may outlive a client that went away without a word.
const FEEL: Duration = Duration::from_secs(2);

/// How long a client waits before it comes back.
const RETRY: Duration = Duration::from_secs(1);

/// How long a stream goes on once the server ends: who follows a session should read that it was paused.
const LAST_WORDS: Duration = Duration::from_millis(300);

async fn ending(shutdown: CancellationToken) {
    shutdown.cancelled().await;
    tokio::time::sleep(LAST_WORDS).await;
}

/// The last event a client has seen: `after=`, else `Last-Event-ID`, else none.
pub(crate) fn cursor(after: Option<u64>, headers: &HeaderMap) -> Result<u64, ApiError> {
    if let Some(after) = after {
        return Ok(after);
    }
    let Some(value) = headers.get("last-event-id") else { return Ok(0) };
    value.to_str().ok().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
        ApiError::invalid("invalid_cursor", "`Last-Event-ID` is not the number of an event")
            .hint("leave it out to read from the beginning")
    })
}

/// Whether the client asked for server-sent events rather than a page of JSON.
pub(crate) fn wants_events(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    accept.split(',').any(|kind| kind.trim().to_ascii_lowercase().starts_with("text/event-stream"))
}

/// The session as it stands, without an id because it is no event; then events, their `seq` as id.
pub(crate) fn events(
    session: &Session,
    events: impl Stream<Item = Event> + Send + 'static,
    shutdown: CancellationToken,
) -> Response {
    let first = Frame::default().event("snapshot").retry(RETRY).data(json(session));
    let rest = events
        .map(|event| Frame::default().id(event.seq.to_string()).data(json(&event)))
        .take_until(ending(shutdown));
    let frames = stream::iter([first]).chain(rest).map(Ok::<_, Infallible>);
    let mut response = Sse::new(frames)
        .keep_alive(KeepAlive::new().interval(HEARTBEAT).text("heartbeat"))
        .into_response();
    // Proxies that collect an answer before they pass it on would make a live stream a dead one.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// One JSON object per line.
pub(crate) fn lines<T: Serialize>(
    items: impl Stream<Item = T> + Send + 'static,
    shutdown: CancellationToken,
) -> Response {
    let bytes = items
        .map(|item| Ok::<_, Infallible>(Bytes::from(json(&item) + "\n")))
        .take_until(ending(shutdown));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(bytes)).into_response()
}

/// The same, with an empty line when there was nothing to say for a while: what cannot be written tells that
/// the client is gone. One that is sending its own body is not heard to hang up while nobody reads that.
pub(crate) fn lines_felt<T: Serialize>(
    items: impl Stream<Item = T> + Send + Unpin + 'static,
    shutdown: CancellationToken,
) -> Response {
    let felt = stream::unfold(items, |mut items| async move {
        let line = match tokio::time::timeout(FEEL, items.next()).await {
            Ok(Some(item)) => json(&item) + "\n",
            Ok(None) => return None,
            Err(_) => "\n".to_owned(),
        };
        Some((Ok::<_, Infallible>(Bytes::from(line)), items))
    });
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    (kind, Body::from_stream(felt.take_until(ending(shutdown)))).into_response()
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
    fn the_query_goes_before_the_header_and_nonsense_is_refused() {
        assert_eq!(cursor(None, &HeaderMap::new()).unwrap(), 0);
        assert_eq!(cursor(None, &headers("last-event-id", "7")).unwrap(), 7);
        assert_eq!(cursor(Some(3), &headers("last-event-id", "7")).unwrap(), 3);
        assert_eq!(
            cursor(None, &headers("last-event-id", "yesterday")).unwrap_err().code,
            "invalid_cursor"
        );
    }

    #[test]
    fn a_browser_that_takes_anything_gets_json() {
        assert!(!wants_events(&headers("accept", "*/*")));
        assert!(wants_events(&headers("accept", "application/json;q=0.5, Text/Event-Stream")));
    }
}
