//! Routes of webhooks.

use axum::{
    Json,
    body::Bytes,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::Value;

use super::{
    client::{Client, body, list as list_answer},
    error::RestError,
    payloads,
    pulls::number,
};
use crate::local::{
    hooks::{EVENTS, Hook, send_soon},
    permissions::PermissionLevel::{Read, Write},
};

const HOOKS: &[&str] = &["repository_hooks"];
// Enough for every receiver; each delivery goes to all of them.
const MAX_HOOKS: usize = 20;

#[derive(Deserialize)]
struct NewHook {
    config: Option<HookConfig>,
    #[serde(default)]
    events: Vec<String>,
    active: Option<bool>,
}

#[derive(Deserialize)]
struct HookConfig {
    url: Option<String>,
    content_type: Option<String>,
    secret: Option<String>,
}

pub(super) async fn create(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
    bytes: Bytes,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), HOOKS, Write)?;
    let NewHook { config, mut events, active } = body(&bytes)?;
    let config = config.ok_or_else(|| RestError::field("Hook", "config", "missing_field"))?;
    let url = config.url.unwrap_or_default();
    let uri = url.parse::<axum::http::Uri>().ok();
    if !uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https"))) {
        return Err(RestError::custom("Hook", "url must be an http or https URL"));
    }
    if config.content_type.is_some_and(|kind| kind != "json") {
        return Err(RestError::custom("Hook", "content_type must be json"));
    }
    if events.is_empty() {
        events.push("push".to_owned());
    }
    if !events.iter().all(|event| event == "*" || EVENTS.contains(&event.as_str())) {
        return Err(RestError::field("Hook", "events", "invalid"));
    }
    let known = access.forge.hooks(&access.name)?;
    if known.iter().any(|hook| hook.url == url && hook.events == events) {
        return Err(RestError::custom("Hook", "Hook already exists on this repository"));
    }
    if known.len() >= MAX_HOOKS {
        let message = format!("The repository has {MAX_HOOKS} hooks, which is the maximum");
        return Err(RestError::custom("Hook", &message));
    }
    let secret = config.secret.filter(|secret| !secret.is_empty());
    let wanted = (events, active.unwrap_or(true));
    let hook = access.forge.add_hook(&access.name, url, secret, wanted).await?;
    let shown = payloads::hook(&access, &hook);
    let ping = payloads::ping(&access.forge, &access.name, &access.login, shown.clone()).await?;
    send_soon(hook, "ping", &ping);
    Ok((StatusCode::CREATED, Json(shown)).into_response())
}

pub(super) async fn list(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), HOOKS, Read)?;
    let (page, links) = client.paginate(access.forge.hooks(&access.name)?);
    Ok(list_answer(page.iter().map(|hook| payloads::hook(&access, hook)).collect(), links))
}

pub(super) async fn get(
    client: Client,
    Path((owner, name, id)): Path<(String, String, String)>,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), HOOKS, Read)?;
    let hook: Option<Hook> = access.forge.hook(&access.name, number(&id)?)?;
    Ok(Json(payloads::hook(&access, &hook.ok_or_else(RestError::not_found)?)))
}

pub(super) async fn ping(
    client: Client,
    Path((owner, name, id)): Path<(String, String, String)>,
) -> Result<StatusCode, RestError> {
    let access = client.open((&owner, &name), HOOKS, Read)?;
    let hook = access.forge.hook(&access.name, number(&id)?)?;
    let hook = hook.ok_or_else(RestError::not_found)?;
    let shown = payloads::hook(&access, &hook);
    let ping = payloads::ping(&access.forge, &access.name, &access.login, shown).await?;
    send_soon(hook, "ping", &ping);
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn delete(
    client: Client,
    Path((owner, name, id)): Path<(String, String, String)>,
) -> Result<StatusCode, RestError> {
    let access = client.open((&owner, &name), HOOKS, Write)?;
    match access.forge.remove_hook(&access.name, number(&id)?).await? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(RestError::not_found()),
    }
}
