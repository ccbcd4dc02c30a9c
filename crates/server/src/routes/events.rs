//! `/v1/sessions/{session}/events`: everything that happened, replayed from a cursor and followed live,
//! or a page of it.

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use harvest_proto::{
    Event, SessionId,
    api::{Page, Session},
};
use serde::Deserialize;

use crate::{
    ServerState,
    extract::{self, Path, Query},
    problem::ApiError,
    stream,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Range {
    #[serde(default)]
    after: Option<u64>,
    #[serde(default)]
    limit: Option<u32>,
}

/// Reads events: as server-sent events when asked for (`Accept: text/event-stream`), else as a page.
#[utoipa::path(get, path = "/v1/sessions/{session}/events", tag = "events",
    params(("session" = SessionId, Path, description = "The session"),
           ("after" = Option<u64>, Query, description = "The last event seen; from the beginning when absent"),
           ("limit" = Option<u32>, Query, description = "JSON only: 1 to 1000; 200 when absent",
            minimum = 1, maximum = 1000),
           ("Last-Event-ID" = Option<u64>, Header, description = "The same as `after`, as browsers send it")),
    responses(
        (status = 200, description = "A page; or `event: snapshot` with the session, then every event with its \
            seq as id, then those to come", content((Page<Event> = "application/json"),
            (Event = "text/event-stream"))),
        (status = 410, body = harvest_proto::api::Problem, content_type = "application/problem+json",
            description = "The cursor names an event that is not kept, or never was")))]
pub(crate) async fn event_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(range): Query<Range>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let after = stream::cursor(range.after, &headers)?;
    let now = state.sessions.get(&session).await?;
    known(&now, after)?;
    if stream::wants_events(&headers) {
        let events = state.sessions.follow(&session, after).await?;
        return Ok(stream::events(&now, events, state.shutdown.clone()));
    }
    let limit = extract::limit(range.limit, 200, 1000)?;
    let items = state.sessions.events(&session, after, limit).await?;
    let next = items.last().map(|event| event.seq).filter(|last| *last < now.seq);
    Ok(Json(Page { items, next_cursor: next.map(|seq| seq.to_string()) }).into_response())
}

/// A cursor beyond the newest event comes from another store, or from before a restore of this one.
fn known(now: &Session, after: u64) -> Result<(), ApiError> {
    if after <= now.seq {
        return Ok(());
    }
    let detail = format!("there is no event {after}; the newest is {}", now.seq);
    Err(ApiError::new(StatusCode::GONE, "cursor_gone", detail)
        .hint("read again from the beginning, without a cursor"))
}
