//! `/v1/secrets` and the secrets of users, sessions and repositories: write, list, remove. No route
//! returns a value.

use std::collections::HashMap;

use axum::{extract::State, http::StatusCode};
use harvest_proto::{
    RuleVerdict, SecretOwner, SessionId,
    api::{Page, Role, SecretUse, SetNetworkRule, SetSecret, StoredSecret, Token},
};
use harvest_session::{RuleOwner, secret_binding};

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::{
        self,
        Access::{Administer, Change, Create, Read},
    },
    extract::{Body, Path},
    problem::{ApiError, JsonResult},
    routes::{
        repositories::named,
        route::{Routes, page, routes},
    },
    validate,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        // Members list only what they may change.
        secret_list: Read,
        secret_uses: Read,
        secret_set: Administer,
        secret_delete: Administer,
        // A user's own.
        user_secret_set: Create,
        user_secret_delete: Create,
        session_secret_set: Change,
        session_secret_delete: Change,
        repository_secret_set: Administer,
        repository_secret_delete: Administer,
    ]
}

/// Lists secrets by name: all of them for admins, otherwise the user's own and those of the user's
/// sessions.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets",
    responses((status = 200, body = Page<StoredSecret>, description = "The secrets, without their values")))]
async fn secret_list(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
) -> JsonResult<Page<StoredSecret>> {
    let mut viewer = Viewer::new(&state, &token);
    let mut seen = Vec::new();
    for (owner, secret) in state.accounts.secret_list().await? {
        let is_own = match &owner {
            SecretOwner::Session(session) => viewer.may_see(session).await,
            owner => viewer.is_admin() || *owner == SecretOwner::user(&token.user.email),
        };
        if is_own {
            seen.push(secret);
        }
    }
    Ok(page(seen))
}

/// Lists the requests to which a secret of this name was added, newest first: of all sessions for
/// admins, otherwise of the user's own.
#[utoipa::path(get, path = "/v1/secrets/{name}/uses", tag = "secrets",
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 200, body = Page<SecretUse>, description = "The newest 1,000 uses")))]
async fn secret_uses(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Path(name): Path<String>,
) -> JsonResult<Page<SecretUse>> {
    let mut viewer = Viewer::new(&state, &token);
    let mut seen = Vec::new();
    for one in state.accounts.secret_uses(&name).await? {
        let is_own = match &one.session {
            Some(session) => viewer.may_see(session).await,
            None => viewer.is_admin(),
        };
        if is_own {
            seen.push(one);
        }
    }
    Ok(page(seen))
}

/// Who lists secrets, with what is known about the authors of sessions.
struct Viewer<'a> {
    state: &'a ServerState,
    token: &'a Token,
    own: HashMap<SessionId, bool>,
}

impl<'a> Viewer<'a> {
    fn new(state: &'a ServerState, token: &'a Token) -> Self {
        Self { state, token, own: HashMap::new() }
    }

    fn is_admin(&self) -> bool {
        self.token.role == Role::Admin
    }

    async fn may_see(&mut self, session: &SessionId) -> bool {
        if self.is_admin() {
            return true;
        }
        if let Some(known) = self.own.get(session) {
            return *known;
        }
        let author = self.state.sessions.author(session).await;
        let own = author.is_ok_and(|author| authorization::is_same(&author, &self.token.user));
        self.own.insert(session.clone(), own);
        own
    }
}

/// Stores a secret for all sessions and builds, replacing one with the same name.
#[utoipa::path(put, path = "/v1/secrets/{name}", tag = "secrets", request_body = SetSecret,
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Stored")))]
async fn secret_set(
    State(state): State<ServerState>,
    Path(name): Path<String>,
    Body(body): Body<SetSecret>,
) -> Result<StatusCode, ApiError> {
    set(&state, SecretOwner::Global, &name, body).await
}

/// Removes a secret for all sessions and builds.
#[utoipa::path(delete, path = "/v1/secrets/{name}", tag = "secrets",
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Removed")))]
async fn secret_delete(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    remove(&state, &SecretOwner::Global, &name).await
}

/// Stores a secret for the sessions of the token's user, replacing one with the same name.
#[utoipa::path(put, path = "/v1/me/secrets/{name}", tag = "secrets", request_body = SetSecret,
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Stored")))]
async fn user_secret_set(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Path(name): Path<String>,
    Body(body): Body<SetSecret>,
) -> Result<StatusCode, ApiError> {
    let user = authorization::user_of(&token, None)?;
    set(&state, SecretOwner::user(&user.email), &name, body).await
}

/// Removes a secret of the token's user.
#[utoipa::path(delete, path = "/v1/me/secrets/{name}", tag = "secrets",
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Removed")))]
async fn user_secret_delete(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    remove(&state, &SecretOwner::user(&token.user.email), &name).await
}

/// Stores a secret for a session, replacing one with the same name. It is deleted with the session.
#[utoipa::path(put, path = "/v1/sessions/{session}/secrets/{name}", tag = "secrets",
    request_body = SetSecret,
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Stored")))]
async fn session_secret_set(
    State(state): State<ServerState>,
    Path((session, name)): Path<(SessionId, String)>,
    Body(body): Body<SetSecret>,
) -> Result<StatusCode, ApiError> {
    set(&state, SecretOwner::Session(session), &name, body).await
}

/// Removes a secret of a session.
#[utoipa::path(delete, path = "/v1/sessions/{session}/secrets/{name}", tag = "secrets",
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Removed")))]
async fn session_secret_delete(
    State(state): State<ServerState>,
    Path((session, name)): Path<(SessionId, String)>,
) -> Result<StatusCode, ApiError> {
    remove(&state, &SecretOwner::Session(session), &name).await
}

/// Stores a secret for the sessions and builds of a repository, replacing one with the same name.
#[utoipa::path(put, path = "/v1/repositories/{owner}/{name}/secrets/{secret}", tag = "secrets",
    request_body = SetSecret,
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name"),
           ("secret" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Stored")))]
async fn repository_secret_set(
    State(state): State<ServerState>,
    Path((owner, name, secret)): Path<(String, String, String)>,
    Body(body): Body<SetSecret>,
) -> Result<StatusCode, ApiError> {
    set(&state, SecretOwner::Repository(named(&owner, &name)?), &secret, body).await
}

/// Removes a secret of a repository.
#[utoipa::path(delete, path = "/v1/repositories/{owner}/{name}/secrets/{secret}", tag = "secrets",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name"),
           ("secret" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Removed")))]
async fn repository_secret_delete(
    State(state): State<ServerState>,
    Path((owner, name, secret)): Path<(String, String, String)>,
) -> Result<StatusCode, ApiError> {
    remove(&state, &SecretOwner::Repository(named(&owner, &name)?), &secret).await
}

async fn set(
    state: &ServerState,
    owner: SecretOwner,
    name: &str,
    body: SetSecret,
) -> Result<StatusCode, ApiError> {
    validate::secret(body.value.expose())?;
    let header = body.header.as_deref();
    let binding = match &body.hosts {
        Some(hosts) => Some(secret_binding(hosts, header)?),
        None if header.is_some() => {
            return Err(ApiError::invalid("invalid_header", "`header` needs `hosts`"));
        }
        None => None,
    };
    let hosts = binding.as_ref().map(|binding| binding.hosts.clone()).unwrap_or_default();
    allow(state, &owner, &hosts).await?;
    state.accounts.secret_set(&owner, name, body.value, binding).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Allows the hosts of a secret where it is used, as far as there is such a rule: users have none.
async fn allow(state: &ServerState, owner: &SecretOwner, hosts: &[String]) -> Result<(), ApiError> {
    let owner = match owner {
        SecretOwner::Session(session) => RuleOwner::Session(session.clone()),
        SecretOwner::Repository(name) => RuleOwner::Repository(name.clone()),
        SecretOwner::Global => RuleOwner::Everywhere,
        SecretOwner::User(_) => return Ok(()),
    };
    for host in hosts {
        let (verdict, ports) = (RuleVerdict::Allow, vec![443]);
        let rule = SetNetworkRule { verdict, ports, private: false };
        state.repositories.network_rule_set(&owner, host, &rule).await?;
    }
    Ok(())
}

async fn remove(
    state: &ServerState,
    owner: &SecretOwner,
    name: &str,
) -> Result<StatusCode, ApiError> {
    state.accounts.secret_delete(owner, name).await?;
    Ok(StatusCode::NO_CONTENT)
}
