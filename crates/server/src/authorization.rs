//! Authorisation: the access that a route declares (`routes![session_get: Read]`), and a table of
//! roles.
//!
//! Admins may do everything. Members see all sessions, create sessions, and change and delete their
//! own. They have standalone sandboxes within their limits, and see only those. Shared resources
//! (secrets, images, volumes, the tokens of others) are for admins.

use axum::http::StatusCode;
use harvest_proto::{
    SandboxId, SessionId, SnapshotId,
    api::{Role, Token},
    bridge::Author,
};
use harvest_session::Sessions;

use crate::{ServerState, problem::ApiError, route_path::RoutePath, validate};

/// The effect of a route's requests on the resource in its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Requires no token.
    Open,
    Read,
    /// Creates a resource owned by the requester.
    Create,
    /// Changes an owned resource.
    Change,
    /// Reads or changes a shared resource.
    Administer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Requester,
    Other,
    /// A shared resource.
    None,
}

/// The permissions of each role.
pub(crate) const fn allowed(role: Role, owner: Owner, access: Access) -> bool {
    match (role, access, owner) {
        (Role::Admin, _, _) => true,
        (Role::Member, Access::Open | Access::Read | Access::Create, _) => true,
        (Role::Member, Access::Change, Owner::Requester) => true,
        (Role::Member, Access::Change, Owner::Other | Owner::None) => false,
        (Role::Member, Access::Administer, _) => false,
    }
}

/// Rejects requests that the token's user is not allowed to make.
pub(crate) async fn check(
    state: &ServerState,
    token: &Token,
    access: Access,
    path: &RoutePath,
) -> Result<(), ApiError> {
    if token.role == Role::Admin {
        return Ok(());
    }
    let owner = match access {
        Access::Change => owner(state, token, path).await?,
        _ => Owner::None,
    };
    if allowed(token.role, owner, access) { Ok(()) } else { Err(forbidden(access, path)) }
}

/// The owner of the resource in the path.
async fn owner(state: &ServerState, token: &Token, path: &RoutePath) -> Result<Owner, ApiError> {
    if let Some(sandbox) = path.parameter("{sandbox}") {
        let Ok(sandbox) = sandbox.parse::<SandboxId>() else { return Err(no_sandbox()) };
        let own = state.sandboxes.is_of_member(&sandbox, &token.user.email).await?;
        return Ok(if own { Owner::Requester } else { Owner::Other });
    }
    let owner = if let Some(session) = path.parameter("{session}") {
        // The raw path: an id with percent escapes, which the router would decode, is rejected
        // here.
        let Ok(session) = session.parse::<SessionId>() else { return Err(not_found()) };
        state.sessions.author(&session).await?
    } else if let Some(name) = path.parameter("{token}") {
        state.accounts.token_get(name).await?.user
    } else {
        return Ok(Owner::None);
    };
    Ok(if is_same(&owner, &token.user) { Owner::Requester } else { Owner::Other })
}

/// Users are identified by their email address; names change and repeat.
pub(crate) fn is_same(one: &Author, other: &Author) -> bool {
    one.email.eq_ignore_ascii_case(&other.email)
}

/// The user of a request that creates work: the token's user, else the author that the request
/// names. An author is never made up.
pub(crate) fn user_of(token: &Token, named: Option<&Author>) -> Result<Author, ApiError> {
    validate::author(named)?;
    check_author(token, named)?;
    let known = [Some(&token.user), named].into_iter().flatten().find(|one| one.is_known());
    known.cloned().ok_or_else(|| {
        let detail = "commits need an author: neither the request nor its token names one";
        ApiError::new(StatusCode::CONFLICT, "no_author", detail).hint(
            "`git config --global user.name NAME` and `git config --global user.email EMAIL` \
             name you to `harvest`; a program sends `author`",
        )
    })
}

/// Only admins may set an author other than themselves.
fn check_author(token: &Token, author: Option<&Author>) -> Result<(), ApiError> {
    match author {
        Some(author) if token.role != Role::Admin && *author != token.user => {
            let detail = "only admins may name another author";
            Err(ApiError::new(StatusCode::FORBIDDEN, "author_not_allowed", detail)
                .hint("omit `author`: it defaults to the user of your token"))
        }
        _ => Ok(()),
    }
}

/// Only admins may attach a secret to a URL: a member could have it sent to their own host.
pub(crate) fn check_secret(token: &Token, secret: Option<&String>) -> Result<(), ApiError> {
    match secret {
        Some(_) if token.role != Role::Admin => Err(admins_only()),
        _ => Ok(()),
    }
}

/// A snapshot reveals all its files: members start only from snapshots of their own sessions.
pub(crate) async fn check_snapshot(
    sessions: &Sessions,
    token: &Token,
    snapshot: Option<&SnapshotId>,
) -> Result<(), ApiError> {
    let Some(snapshot) = snapshot.filter(|_| token.role != Role::Admin) else { return Ok(()) };
    let authors = sessions.snapshot_authors(snapshot).await?;
    let own = authors.iter().any(|author| is_same(author, &token.user));
    if own { Ok(()) } else { Err(not_owner("snapshot")) }
}

fn not_found() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is no such session")
        .hint("`harvest ls` lists sessions")
}

fn no_sandbox() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is no such sandbox")
        .hint("`harvest sandbox ls` lists your sandboxes")
}

fn forbidden(access: Access, path: &RoutePath) -> ApiError {
    match access {
        Access::Change if path.parameter("{token}").is_some() => not_owner("token"),
        Access::Change if path.parameter("{sandbox}").is_some() => not_owner("sandbox"),
        Access::Change => not_owner("session"),
        _ => admins_only(),
    }
}

fn not_owner(what: &str) -> ApiError {
    let detail = format!("this {what} belongs to somebody else");
    ApiError::new(StatusCode::FORBIDDEN, "forbidden", detail)
        .hint("ask its owner or an admin; `harvest run` creates a session of your own")
}

pub(crate) fn admins_only() -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, "forbidden", "only admins may do this")
        .hint("ask an admin, or use an admin's token")
}

#[cfg(test)]
mod tests {
    use super::*;
    use Access::{Administer, Change, Create, Read};
    use Owner::{Other, Requester};

    #[test]
    fn permissions_of_every_role_action_and_owner() {
        let cells = |role, access| {
            [Requester, Other, Owner::None].map(|owner| allowed(role, owner, access))
        };
        for access in [Read, Create, Change, Administer] {
            assert_eq!(cells(Role::Admin, access), [true, true, true], "{access:?}");
        }
        assert_eq!(cells(Role::Member, Read), [true, true, true]);
        assert_eq!(cells(Role::Member, Create), [true, true, true]);
        assert_eq!(cells(Role::Member, Change), [true, false, false]);
        assert_eq!(cells(Role::Member, Administer), [false, false, false]);
    }

    #[test]
    fn every_changed_resource_has_an_owner() {
        let routes = crate::routes::routes();
        for (method, path, _) in routes.rules().filter(|(.., rule)| rule.access == Change) {
            assert!(
                ["{session}", "{sandbox}", "{token}"].iter().any(|name| path.contains(name)),
                "{method:?} {path} is `Change`, but its resource has no owner"
            );
        }
    }

    #[test]
    fn users_are_identified_by_email() {
        let author = |name: &str, email: &str| Author { name: name.into(), email: email.into() };
        assert!(is_same(&author("Ada", "ada@example.org"), &author("A. L.", "Ada@Example.org")));
        assert!(!is_same(&author("Ada", "ada@example.org"), &author("Ada", "ada@example.com")));
    }
}
