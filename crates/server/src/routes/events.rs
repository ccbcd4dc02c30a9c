//! `/v1/sessions/{session}/events`: a session's events, as a live stream from a cursor or as a
//! page.

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
    authorization::Access::Read,
    extract::{self, Path, Query},
    problem::ApiError,
    routes::route::{Routes, routes},
    stream,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        event_list: Read,
    ]
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EventQuery {
    after: Option<u64>,
    limit: Option<u32>,
}

/// Reads events: as server-sent events with `Accept: text/event-stream`, otherwise as a page.
#[utoipa::path(get, path = "/v1/sessions/{session}/events", tag = "events",
    params(("after" = Option<u64>, Query, description = "The last event seen; from the beginning by default"),
           ("limit" = Option<u32>, Query, description = "JSON only: 1 to 1000; 200 by default. A page of large events ends earlier",
            minimum = 1, maximum = 1000),
           ("Last-Event-ID" = Option<u64>, Header, description = "Same as `after`; browsers send it when they reconnect")),
    responses(
        (status = 200, description = "A page; or `event: snapshot` with the session, then every event with \
            its seq as id, then new events as they happen", content((Page<Event> = "application/json"),
            (Event = "text/event-stream"))),
        (status = 410, body = harvest_proto::api::Problem, content_type = "application/problem+json",
            description = "The cursor is beyond the newest event")))]
async fn event_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<EventQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let after = stream::cursor(query.after, &headers)?;
    if stream::wants_events(&headers) {
        let (now, events) = state.sessions.follow(&session, after).await?;
        check_cursor(&now, after)?;
        return Ok(stream::events(&now, events, state.shutdown.clone()));
    }
    let now = state.sessions.get(&session).await?;
    check_cursor(&now, after)?;
    let limit = extract::limit(query.limit, 200, 1000)?;
    let items = state.sessions.events(&session, after, limit).await?;
    let next = items.last().map(|event| event.seq).filter(|last| *last < now.seq);
    Ok(Json(Page { items, next_cursor: next.map(|seq| seq.to_string()) }).into_response())
}

/// A cursor beyond the newest event comes from another database, or from before a backup was
/// restored.
fn check_cursor(now: &Session, after: u64) -> Result<(), ApiError> {
    if after <= now.seq {
        return Ok(());
    }
    let detail = format!("invalid cursor: there is no event {after}; the newest is {}", now.seq);
    Err(ApiError::new(StatusCode::GONE, "cursor_gone", detail)
        .hint("omit the cursor to read from the beginning"))
}
