//! `/v1/schedule`: the job that looks at every repository and rebuilds what has moved.

use axum::{Json, extract::State};
use harvest_proto::api::{Page, Schedule, ScheduleRun};

use crate::{
    ServerState,
    authorization::Access::{Administer, Read},
    problem::JsonResult,
    routes::route::{Routes, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        schedule_get: Read,
        schedule_runs: Read,
        schedule_run: Administer,
        schedule_pause: Administer,
        schedule_resume: Administer,
    ]
}

/// Returns the schedule and its newest run.
#[utoipa::path(get, path = "/v1/schedule", tag = "repositories",
    responses((status = 200, body = Schedule, description = "The schedule")))]
async fn schedule_get(State(state): State<ServerState>) -> JsonResult<Schedule> {
    Ok(Json(state.repositories.schedule().await?))
}

/// Lists the runs of the last ten days, newest first.
#[utoipa::path(get, path = "/v1/schedule/runs", tag = "repositories",
    responses((status = 200, body = Page<ScheduleRun>, description = "The runs")))]
async fn schedule_runs(State(state): State<ServerState>) -> JsonResult<Page<ScheduleRun>> {
    Ok(page(state.repositories.schedule_runs().await?))
}

/// Looks at every repository now, builds what has moved, and returns the run once it is over.
#[utoipa::path(post, path = "/v1/schedule/run", tag = "repositories",
    responses((status = 200, body = ScheduleRun, description = "The run")))]
async fn schedule_run(State(state): State<ServerState>) -> JsonResult<ScheduleRun> {
    Ok(Json(state.repositories.schedule_run().await?))
}

/// Pauses the schedule, across restarts.
#[utoipa::path(post, path = "/v1/schedule/pause", tag = "repositories",
    responses((status = 200, body = Schedule, description = "The paused schedule")))]
async fn schedule_pause(State(state): State<ServerState>) -> JsonResult<Schedule> {
    Ok(Json(state.repositories.schedule_pause(true).await?))
}

/// Resumes the schedule.
#[utoipa::path(post, path = "/v1/schedule/resume", tag = "repositories",
    responses((status = 200, body = Schedule, description = "The schedule")))]
async fn schedule_resume(State(state): State<ServerState>) -> JsonResult<Schedule> {
    Ok(Json(state.repositories.schedule_pause(false).await?))
}
