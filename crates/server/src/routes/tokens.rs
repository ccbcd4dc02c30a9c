//! `/v1/tokens` and `/v1/me`: who may ask. A token's value is shown once, when it is made.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::api::{CreateToken, CreatedToken, Me, Page, Role, Token};

use crate::{
    ServerState,
    auth::Holder,
    extract::{Body, Path},
    policy,
    problem::ApiError,
    valid,
};

/// Says who asks.
#[utoipa::path(get, path = "/v1/me", tag = "tokens",
    responses((status = 200, body = Me, description = "The user of the token")))]
pub(crate) async fn me_get(Holder(token): Holder) -> Json<Me> {
    Json(Me { user: token.user, role: token.role, token: token.name })
}

/// Lists tokens by name: all of them to an admin, to others their own.
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens",
    responses((status = 200, body = Page<Token>, description = "The tokens, without their values")))]
pub(crate) async fn token_list(
    State(state): State<ServerState>,
    Holder(asker): Holder,
) -> Result<Json<Page<Token>>, ApiError> {
    let mut items = state.sessions.token_list().await?;
    items.retain(|token| asker.role == Role::Admin || policy::is_same(&token.user, &asker.user));
    Ok(Json(Page { items, next_cursor: None }))
}

/// Makes a token. Only admins make one for somebody else, or one that may do more than the asker's.
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = CreateToken,
    responses((status = 201, body = CreatedToken, description = "Made; its value is shown this once")))]
pub(crate) async fn token_create(
    State(state): State<ServerState>,
    Holder(asker): Holder,
    Body(body): Body<CreateToken>,
) -> Result<(StatusCode, Json<CreatedToken>), ApiError> {
    valid::author(body.user.as_ref())?;
    let role = role_of(&asker, &body)?;
    let user = body.user.unwrap_or(asker.user);
    let (token, value) = state.sessions.token_create(&body.name, user, role).await?;
    Ok((StatusCode::CREATED, Json(CreatedToken { token, value: value.expose().clone() })))
}

/// The role a new token gets, if the asker may make it.
fn role_of(asker: &Token, body: &CreateToken) -> Result<Role, ApiError> {
    let own = body.user.as_ref().is_none_or(|user| *user == asker.user);
    let otherwise = if own { asker.role } else { Role::Member };
    let role = body.role.unwrap_or(otherwise);
    match asker.role == Role::Admin || (own && role == Role::Member) {
        true => Ok(role),
        false => Err(policy::forbidden(policy::Action::Administer)),
    }
}

/// Revokes a token; whoever follows a stream with it is cut off.
#[utoipa::path(delete, path = "/v1/tokens/{token}", tag = "tokens",
    params(("token" = String, Path, description = "What it is called")),
    responses((status = 204, description = "Gone; it opens nothing any more")))]
pub(crate) async fn token_delete(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    let token = state.sessions.token_get(&name).await?;
    state.sessions.token_delete(&name).await?;
    state.revoked.revoke(&token);
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{Timestamp, bridge::Author};

    #[test]
    fn nobody_makes_a_token_that_may_do_more_than_their_own() {
        let ada = || Author { name: "Ada".into(), email: "ada@example.org".into() };
        let bob = || Author { name: "Bob".into(), email: "bob@example.org".into() };
        let role = |asker: Role, user: Option<Author>, role| {
            let created_at = Timestamp::from_millis(0);
            let asker =
                Token { name: "t".into(), user: ada(), role: asker, created_at, last_used: None };
            role_of(&asker, &CreateToken { name: "n".into(), user, role }).ok()
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
