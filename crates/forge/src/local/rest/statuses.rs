//! Routes of commit statuses. The forge runs no checks and no workflows of its own, so their lists
//! are empty.

use axum::{
    Json,
    body::Bytes,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    client::{Client, RepositoryAccess, body, list as list_answer},
    commits,
    error::RestError,
    json::{self as objects, node_id},
};
use crate::local::{
    history::{self, is_object_id},
    permissions::PermissionLevel::{Read, Write},
    statuses::{CommitState, CommitStatus, NewStatus, combined as combine},
};

// GitHub's limits.
const MAX_DESCRIPTION: usize = 140;
const MAX_CONTEXT: usize = 255;
const DEFAULT_CONTEXT: &str = "default";

#[derive(Deserialize)]
struct StatusRequest {
    state: Option<String>,
    context: Option<String>,
    description: Option<String>,
    target_url: Option<String>,
}

pub(super) async fn create(
    client: Client,
    Path((owner, name, sha)): Path<(String, String, String)>,
    bytes: Bytes,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), &["statuses"], Write)?;
    let request: StatusRequest = body(&bytes)?;
    let found = if is_object_id(&sha) { history::resolve(&access.git, &sha).await? } else { None };
    if found.is_none() {
        return Err(RestError::unprocessable(format!("No commit found for SHA: {sha}")));
    }
    let state = request.state.unwrap_or_default();
    let state: CommitState = serde_json::from_value(state.into())
        .map_err(|_| RestError::field("Status", "state", "inclusion"))?;
    let context = request.context.unwrap_or_else(|| DEFAULT_CONTEXT.to_owned());
    let too_long = |text: &Option<String>| {
        text.as_ref().is_some_and(|text| text.chars().count() > MAX_DESCRIPTION)
    };
    if too_long(&request.description) {
        let message = format!("description is too long (maximum is {MAX_DESCRIPTION} characters)");
        return Err(RestError::custom("Status", &message));
    }
    if context.is_empty() || context.chars().count() > MAX_CONTEXT {
        return Err(RestError::field("Status", "context", "invalid"));
    }
    let target_url = request.target_url.filter(|url| !url.is_empty());
    if target_url.as_ref().is_some_and(|url| !is_http(url)) {
        return Err(RestError::custom("Status", "target_url must use http(s) scheme"));
    }
    let (description, author) = (request.description, access.login.clone());
    let new = NewStatus { state, context, description, target_url, author };
    let added = access.forge.add_status(&access.name, &sha, new).await?;
    let message = "This SHA and context has reached the maximum number of statuses.";
    let added = added.ok_or_else(|| RestError::custom("Status", message))?;
    Ok((StatusCode::CREATED, Json(status(&access, &sha, &added, true))).into_response())
}

fn is_http(url: &str) -> bool {
    let uri = url.parse::<axum::http::Uri>().ok();
    uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")))
}

/// The picture of a user.
pub(super) fn avatar(access: &RepositoryAccess, login: &str) -> Value {
    objects::user(&access.urls, login)["avatar_url"].take()
}

fn status(
    access: &RepositoryAccess,
    sha: &str,
    status: &CommitStatus,
    with_creator: bool,
) -> Value {
    let creator = objects::user(&access.urls, &status.author);
    let created = objects::time(status.created_at);
    let mut object = json!({
        "url": access.urls.repository(&access.name, &format!("/statuses/{sha}")),
        "avatar_url": creator["avatar_url"],
        "id": status.id,
        "node_id": node_id("Status", status.id),
        "state": status.state,
        "description": status.description,
        "target_url": status.target_url,
        "context": status.context,
        "created_at": created,
        "updated_at": created,
    });
    if with_creator {
        object["creator"] = creator;
    }
    object
}

pub(super) async fn list(
    client: &Client,
    repository: (&str, &str),
    reference: &str,
) -> Result<Response, RestError> {
    let access = client.open(repository, &["statuses"], Read)?;
    let sha = commits::resolve(&access, reference).await?;
    let all = access.forge.statuses(&access.name, &sha)?;
    let (page, links) = client.paginate(all);
    Ok(list_answer(page.iter().map(|one| status(&access, &sha, one, true)).collect(), links))
}

pub(super) async fn combined(
    client: &Client,
    repository: (&str, &str),
    reference: &str,
) -> Result<Response, RestError> {
    let access = client.open(repository, &["statuses"], Read)?;
    let sha = commits::resolve(&access, reference).await?;
    let (state, latest) = combine(access.forge.statuses(&access.name, &sha)?);
    let total = latest.len();
    let (page, links) = client.paginate(latest);
    let path = format!("/commits/{sha}");
    let commit_url = access.urls.repository(&access.name, &path);
    let answer = json!({
        "state": state,
        "sha": sha,
        "total_count": total,
        "statuses": page.iter().map(|one| status(&access, &sha, one, false)).collect::<Vec<_>>(),
        "repository": objects::repository(&access).await?,
        "commit_url": commit_url,
        "url": format!("{commit_url}/status"),
    });
    Ok((links, Json(answer)).into_response())
}

pub(super) async fn check_runs(
    client: &Client,
    repository: (&str, &str),
    reference: &str,
) -> Result<Response, RestError> {
    let access = client.open(repository, &["checks"], Read)?;
    commits::resolve(&access, reference).await?;
    Ok(Json(json!({"total_count": 0, "check_runs": []})).into_response())
}

pub(super) async fn workflow_runs(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Json<Value>, RestError> {
    client.open((&owner, &name), &["actions"], Read)?;
    Ok(Json(json!({"total_count": 0, "workflow_runs": []})))
}
