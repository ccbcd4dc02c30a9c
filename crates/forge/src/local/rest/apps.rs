//! Routes of Apps: who the App is, where it is installed, and its tokens.

use axum::{
    Json,
    body::Bytes,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use harvest_proto::repository_name::LOCAL_OWNER;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    client::{Client, RepositoryAccess, body, list},
    error::RestError,
    json,
};
use crate::local::{apps::App, permissions::Permissions};

pub(super) async fn app(client: Client) -> Result<Json<Value>, RestError> {
    let app = client.app()?;
    let urls = client.urls();
    let created = json::time(app.created_at);
    Ok(Json(json!({
        "id": app.id,
        "slug": app.slug(),
        "node_id": json::node_id("App", app.id),
        "owner": json::user(&urls, LOCAL_OWNER),
        "name": app.name,
        "description": null,
        "external_url": urls.html(""),
        "html_url": urls.html(&format!("/apps/{}", app.slug())),
        "created_at": created,
        "updated_at": created,
        "permissions": app.permissions,
        "events": [],
        "installations_count": 1,
    })))
}

pub(super) async fn installations(client: Client) -> Result<Response, RestError> {
    let app = client.app()?;
    let (page, links) = client.paginate(vec![installation_json(&client, &app)]);
    Ok(list(page, links))
}

pub(super) async fn installation(
    client: Client,
    Path(id): Path<String>,
) -> Result<Json<Value>, RestError> {
    let app = client.app()?;
    if id != app.id.to_string() {
        return Err(RestError::not_found());
    }
    Ok(Json(installation_json(&client, &app)))
}

pub(super) async fn repository_installation(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Json<Value>, RestError> {
    let app = client.app()?;
    let exists = owner == LOCAL_OWNER && client.forge.existing_folder(&name).is_ok();
    if !exists || !app.has_repository(&name) {
        return Err(RestError::not_found());
    }
    Ok(Json(installation_json(&client, &app)))
}

fn installation_json(client: &Client, app: &App) -> Value {
    let urls = client.urls();
    let mut account = json::user(&urls, LOCAL_OWNER);
    let created = json::time(app.created_at);
    for (field, value) in [
        ("name", LOCAL_OWNER),
        ("slug", LOCAL_OWNER),
        ("created_at", &created),
        ("updated_at", &created),
    ] {
        account[field] = value.into();
    }
    json!({
        "id": app.id,
        "app_id": app.id,
        "app_slug": app.slug(),
        "target_id": account["id"],
        "target_type": "User",
        "account": account,
        "single_file_name": null,
        "repository_selection": selection(app.repositories.as_deref()),
        "access_tokens_url": urls.api(&format!("/app/installations/{}/access_tokens", app.id)),
        "repositories_url": urls.api("/installation/repositories"),
        "html_url": urls.html(&format!("/settings/installations/{}", app.id)),
        "permissions": app.permissions,
        "events": [],
        "created_at": created,
        "updated_at": created,
        "suspended_at": app.suspended_at.map(json::time),
        "suspended_by": app.suspended_at.map(|_| json::user(&urls, LOCAL_OWNER)),
    })
}

fn selection(repositories: Option<&[String]>) -> &'static str {
    if repositories.is_some() { "selected" } else { "all" }
}

#[derive(Deserialize)]
struct TokenRequest {
    repositories: Option<Vec<String>>,
    repository_ids: Option<Vec<u64>>,
    permissions: Option<Permissions>,
}

pub(super) async fn create_token(
    client: Client,
    Path(id): Path<String>,
    bytes: Bytes,
) -> Result<Response, RestError> {
    let app = client.app()?;
    if id != app.id.to_string() {
        return Err(RestError::not_found());
    }
    if app.suspended_at.is_some() {
        return Err(RestError::forbidden("This installation has been suspended"));
    }
    let request: TokenRequest = body(&bytes)?;
    let repositories = wanted_repositories(&client, &app, &request)?;
    let permissions = request.permissions.unwrap_or_else(|| app.permissions.clone());
    // As GitHub does.
    let permissions = permissions.with_metadata();
    if !app.permissions.contain(&permissions) {
        let message = "The permissions requested are not granted to this installation.";
        return Err(RestError::unprocessable(message));
    }
    let (value, token) = client.forge.create_token(&app, repositories, permissions)?;
    let mut answer = json!({
        "token": value.expose(),
        "expires_at": json::time(token.expires_at),
        "permissions": token.permissions,
        "repository_selection": selection(token.repositories.as_deref()),
    });
    if let Some(names) = &token.repositories {
        answer["repositories"] = repositories_json(&client, names).await?.into();
    }
    Ok((StatusCode::CREATED, Json(answer)).into_response())
}

/// The repositories of a new token: those of the request, if the installation has them, or else
/// those of the installation.
fn wanted_repositories(
    client: &Client,
    app: &App,
    request: &TokenRequest,
) -> Result<Option<Vec<String>>, RestError> {
    let missing = || {
        RestError::unprocessable(
            "There is at least one repository that does not exist or is not accessible to the \
             parent installation.",
        )
    };
    if request.repositories.is_none() && request.repository_ids.is_none() {
        return Ok(app.repositories.clone());
    }
    let mut wanted = request.repositories.clone().unwrap_or_default();
    let all = client.forge.names()?;
    for id in request.repository_ids.iter().flatten() {
        let named = all.iter().find(|name| json::id_of("Repository", name.name()) == *id);
        wanted.push(named.ok_or_else(missing)?.name().to_owned());
    }
    let exists = |wanted: &String| all.iter().any(|name| name.name() == wanted);
    if wanted.is_empty() || !wanted.iter().all(|name| app.has_repository(name) && exists(name)) {
        return Err(missing());
    }
    Ok(Some(wanted))
}

async fn repositories_json(client: &Client, names: &[String]) -> Result<Vec<Value>, RestError> {
    let mut all = Vec::with_capacity(names.len());
    for name in names {
        // A repository may have been removed since.
        let Ok(git) = client.forge.repository_path(name) else { continue };
        let (forge, name) = (client.forge.clone(), name.clone());
        let (urls, login) = (client.urls(), String::new());
        all.push(json::repository(&RepositoryAccess { forge, name, git, urls, login }).await?);
    }
    Ok(all)
}

pub(super) async fn repositories(client: Client) -> Result<Response, RestError> {
    let (_, token) = client.installation()?;
    let all = client.forge.names()?;
    let names = all.iter().map(|name| name.name().to_owned());
    let names: Vec<String> = names.filter(|name| token.has_repository(name)).collect();
    let total = names.len();
    let (names, links) = client.paginate(names);
    let repositories = repositories_json(&client, &names).await?;
    let answer = json!({
        "total_count": total,
        "repository_selection": selection(token.repositories.as_deref()),
        "repositories": repositories,
    });
    Ok((links, Json(answer)).into_response())
}

pub(super) async fn revoke_token(client: Client) -> Result<StatusCode, RestError> {
    client.revoke()?;
    Ok(StatusCode::NO_CONTENT)
}
