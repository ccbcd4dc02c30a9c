//! Routes of comments on pull requests. The forge has no other issues.

use axum::{
    Json,
    body::Bytes,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use harvest_proto::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    client::{Client, RepositoryAccess, body, list as list_answer},
    error::RestError,
    json::{self as objects, node_id},
    pulls::{MAX_TEXT, number},
};
use crate::local::{
    LocalForge,
    comments::Comment,
    permissions::PermissionLevel::{Read, Write},
};

const ISSUES: &[&str] = &["issues", "pull_requests"];

/// The URL of a comment's page.
pub(in crate::local) fn comment_page(forge: &LocalForge, name: &str, comment: &Comment) -> String {
    forge.urls().page(name, &format!("/pr/{}#issuecomment-{}", comment.number, comment.id))
}

fn comment_json(access: &RepositoryAccess, comment: &Comment) -> Value {
    let (urls, name, id) = (&access.urls, access.name.as_str(), comment.id);
    json!({
        "id": id,
        "node_id": node_id("IssueComment", id),
        "url": urls.repository(name, &format!("/issues/comments/{id}")),
        "html_url": comment_page(&access.forge, name, comment),
        "issue_url": urls.repository(name, &format!("/issues/{}", comment.number)),
        "body": comment.body,
        "user": objects::user(urls, &comment.author),
        "created_at": objects::time(comment.created_at),
        "updated_at": objects::time(comment.updated_at),
        "author_association": "COLLABORATOR",
        "performed_via_github_app": null,
    })
}

pub(super) async fn list(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), ISSUES, Read)?;
    let record = access.forge.pull_record(&access.name, number(&pull)?).await?;
    let mut all = access.forge.comments(&access.name, record.pull.number)?;
    if let Some(since) = client.parameter("since").and_then(|text| text.parse::<Timestamp>().ok()) {
        all.retain(|comment| comment.updated_at >= since);
    }
    let (page, links) = client.paginate(all);
    Ok(list_answer(page.iter().map(|one| comment_json(&access, one)).collect(), links))
}

#[derive(Deserialize)]
struct CommentBody {
    body: Option<String>,
}

/// The text of a request's comment.
fn text(bytes: &Bytes) -> Result<String, RestError> {
    let CommentBody { body } = body(bytes)?;
    let text = body.filter(|text| !text.trim().is_empty());
    let text = text.ok_or_else(|| RestError::field("IssueComment", "body", "missing_field"))?;
    if text.chars().count() > MAX_TEXT {
        let message = format!("body is too long (maximum is {MAX_TEXT} characters)");
        return Err(RestError::custom("IssueComment", &message));
    }
    Ok(text)
}

pub(super) async fn create(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
    bytes: Bytes,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), ISSUES, Write)?;
    let text = text(&bytes)?;
    let pull = access.forge.pull_record(&access.name, number(&pull)?).await?.pull.number;
    let comment = access.forge.add_comment(&access.name, pull, &access.login, text).await?;
    Ok((StatusCode::CREATED, Json(comment_json(&access, &comment))).into_response())
}

pub(super) async fn get(
    client: Client,
    Path((owner, name, id)): Path<(String, String, String)>,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), ISSUES, Read)?;
    let comment = access.forge.comment(&access.name, number(&id)?)?;
    Ok(Json(comment_json(&access, &comment.ok_or_else(RestError::not_found)?)))
}

pub(super) async fn update(
    client: Client,
    Path((owner, name, id)): Path<(String, String, String)>,
    bytes: Bytes,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), ISSUES, Write)?;
    let comment = access.forge.edit_comment(&access.name, number(&id)?, text(&bytes)?).await?;
    Ok(Json(comment_json(&access, &comment.ok_or_else(RestError::not_found)?)))
}

pub(super) async fn delete(
    client: Client,
    Path((owner, name, id)): Path<(String, String, String)>,
) -> Result<StatusCode, RestError> {
    let access = client.open((&owner, &name), ISSUES, Write)?;
    match access.forge.remove_comment(&access.name, number(&id)?).await? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(RestError::not_found()),
    }
}
