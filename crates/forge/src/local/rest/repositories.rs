//! The route of a repository.

use axum::{Json, extract::Path};
use serde_json::Value;

use super::{client::Client, error::RestError, json};
use crate::local::permissions::PermissionLevel;

pub(super) async fn get(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), &["metadata"], PermissionLevel::Read)?;
    Ok(Json(json::repository(&access).await?))
}
