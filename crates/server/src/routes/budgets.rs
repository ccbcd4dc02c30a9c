//! `/v1/budgets`, the budgets of sessions, repositories and users, and `/v1/stats`: what model
//! calls may cost, and what they and sandboxes have used.

use axum::{Json, extract::State};
use harvest_proto::{
    SessionId, SpendingScope, Timestamp,
    api::{Budget, Page, Session, SetBudget, Spending},
};
use harvest_session::BudgetOwner;
use serde::Deserialize;

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::Access::{Administer, Change, Read},
    extract::{Body, Path, Query},
    problem::JsonResult,
    routes::{
        repositories::named,
        route::{Routes, page, routes},
    },
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        stats: Read,
        budget_list: Read,
        budget_set_session: Change,
        budget_set_repository: Administer,
        budget_set_user: Administer,
        budget_set_day: Administer,
    ]
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StatsQuery {
    /// `session`, `repository`, `user` or `day` (default)
    by: Option<SpendingScope>,
    /// Only calls that began at this time or later
    since: Option<Timestamp>,
}

/// Returns what model calls used and cost, and what sandboxes used: at most 1000 sums, the most
/// expensive first.
#[utoipa::path(get, path = "/v1/stats", tag = "budgets", params(StatsQuery),
    responses((status = 200, body = Page<Spending>, description = "The sums")))]
async fn stats(
    State(state): State<ServerState>,
    Query(query): Query<StatsQuery>,
) -> JsonResult<Page<Spending>> {
    let since = query.since.unwrap_or(Timestamp::from_millis(0));
    Ok(page(state.sessions.spending(query.by.unwrap_or(SpendingScope::Day), since).await?))
}

/// Returns the budget of today, and those of repositories and users that have a limit.
#[utoipa::path(get, path = "/v1/budgets", tag = "budgets",
    responses((status = 200, body = Page<Budget>, description = "The budgets")))]
async fn budget_list(State(state): State<ServerState>) -> JsonResult<Page<Budget>> {
    Ok(page(state.sessions.budgets().await?))
}

/// Sets what a session may spend, with those that its agent creates. A session that waits because
/// this budget was used up continues.
#[utoipa::path(put, path = "/v1/sessions/{session}/budget", tag = "budgets",
    request_body = SetBudget,
    responses((status = 200, body = Session, description = "The session")))]
async fn budget_set_session(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Path(session): Path<SessionId>,
    Body(set): Body<SetBudget>,
) -> JsonResult<Session> {
    state.sessions.set_session_budget(&session, set.budget_micros, token.user).await?;
    Ok(Json(state.sessions.get(&session).await?))
}

/// Sets what all sessions may spend whose first repository this is.
#[utoipa::path(put, path = "/v1/repositories/{owner}/{name}/budget", tag = "budgets",
    request_body = SetBudget,
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = Budget, description = "The budget")))]
async fn budget_set_repository(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
    Body(set): Body<SetBudget>,
) -> JsonResult<Budget> {
    let owner = BudgetOwner::Repository(named(&owner, &name)?);
    Ok(Json(state.sessions.set_budget(&owner, set.budget_micros).await?))
}

/// Sets what all sessions of a user may spend.
#[utoipa::path(put, path = "/v1/users/{email}/budget", tag = "budgets",
    request_body = SetBudget,
    params(("email" = String, Path, description = "The user's e-mail address")),
    responses((status = 200, body = Budget, description = "The budget")))]
async fn budget_set_user(
    State(state): State<ServerState>,
    Path(email): Path<String>,
    Body(set): Body<SetBudget>,
) -> JsonResult<Budget> {
    let owner = BudgetOwner::User(email);
    Ok(Json(state.sessions.set_budget(&owner, set.budget_micros).await?))
}

/// Sets what all sessions together may spend on each day (UTC).
#[utoipa::path(put, path = "/v1/budgets/day", tag = "budgets", request_body = SetBudget,
    responses((status = 200, body = Budget, description = "The budget of today")))]
async fn budget_set_day(
    State(state): State<ServerState>,
    Body(set): Body<SetBudget>,
) -> JsonResult<Budget> {
    Ok(Json(state.sessions.set_budget(&BudgetOwner::Day, set.budget_micros).await?))
}
