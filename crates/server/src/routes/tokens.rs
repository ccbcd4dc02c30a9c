//! `/v1/tokens` and `/v1/me`: access tokens. A token's value is shown once, when it is created.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use harvest_proto::api::{CreateToken, CreatedToken, Me, Page, Role, Token};

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::{
        self,
        Access::{Change, Create, Read},
    },
    extract::{Body, Path},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, created, page, routes},
    validate,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        me_get: Read,
        // Members list and create only their own tokens.
        token_list: Read,
        token_create: Create,
        token_delete: Change,
    ]
}

/// Returns the user of the token in use.
#[utoipa::path(get, path = "/v1/me", tag = "tokens",
    responses((status = 200, body = Me, description = "The user, role and token")))]
async fn me_get(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
) -> JsonResult<Me> {
    let limits = match token.role {
        Role::Admin => None,
        Role::Member => Some(state.sandboxes.user_limits(&token.user.email).await?),
    };
    Ok(Json(Me { user: token.user, role: token.role, token: token.name, limits }))
}

/// Lists tokens, ordered by name: all of them for admins, otherwise the user's own.
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens",
    responses((status = 200, body = Page<Token>, description = "The tokens, without their values")))]
async fn token_list(
    State(state): State<ServerState>,
    Authenticated(requester): Authenticated,
) -> JsonResult<Page<Token>> {
    let mut items = state.accounts.token_list().await?;
    items.retain(|token| {
        requester.role == Role::Admin || authorization::is_same(&token.user, &requester.user)
    });
    Ok(page(items))
}

/// Creates a token. Only admins create tokens for other users or with the role `admin`.
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = CreateToken,
    responses((status = 201, body = CreatedToken, description = "Created; its value is shown only now")))]
async fn token_create(
    State(state): State<ServerState>,
    Authenticated(requester): Authenticated,
    Body(body): Body<CreateToken>,
) -> Result<Response, ApiError> {
    validate::author(body.user.as_ref())?;
    let role = role_of(&requester, &body)?;
    let user = match body.user {
        Some(user) => user,
        None => authorization::user_of(&requester, None)?,
    };
    let (token, value) = state.accounts.token_create(&body.name, user, role).await?;
    let path = format!("/v1/tokens/{}", token.name);
    Ok(created(&path, &CreatedToken { token, value: value.expose().clone() }))
}

/// The role of a new token, if the requester is allowed to create it.
fn role_of(requester: &Token, body: &CreateToken) -> Result<Role, ApiError> {
    let own = body.user.as_ref().is_none_or(|user| *user == requester.user);
    let default = if own { requester.role } else { Role::Member };
    let role = body.role.unwrap_or(default);
    let allowed = requester.role == Role::Admin || (own && role == Role::Member);
    if allowed { Ok(role) } else { Err(authorization::admins_only()) }
}

/// Revokes a token and closes the streams opened with it.
#[utoipa::path(delete, path = "/v1/tokens/{token}", tag = "tokens",
    params(("token" = String, Path, description = "The token's name")),
    responses((status = 204, description = "Revoked")))]
async fn token_delete(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    let token = state.accounts.token_get(&name).await?;
    state.accounts.token_delete(&name).await?;
    state.revocations.revoke(&token);
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{Timestamp, bridge::Author};

    #[test]
    fn members_cannot_create_more_powerful_tokens() {
        let ada = || Author { name: "Ada".into(), email: "ada@example.org".into() };
        let bob = || Author { name: "Bob".into(), email: "bob@example.org".into() };
        let role = |requester: Role, user: Option<Author>, role| {
            let created_at = Timestamp::from_millis(0);
            let requester = Token {
                name: "t".into(),
                user: ada(),
                role: requester,
                created_at,
                last_used: None,
            };
            role_of(&requester, &CreateToken { name: "n".into(), user, role }).ok()
        };
        assert_eq!(role(Role::Admin, None, None), Some(Role::Admin));
        assert_eq!(role(Role::Admin, Some(bob()), None), Some(Role::Member));
        assert_eq!(role(Role::Admin, Some(bob()), Some(Role::Admin)), Some(Role::Admin));
        assert_eq!(role(Role::Member, None, None), Some(Role::Member));
        assert_eq!(role(Role::Member, Some(ada()), Some(Role::Member)), Some(Role::Member));
        assert_eq!(role(Role::Member, None, Some(Role::Admin)), None);
        assert_eq!(role(Role::Member, Some(bob()), None), None);
    }
}
