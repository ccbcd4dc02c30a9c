//! Authorisation: a table of routes with their actions, and a table of roles.
//!
//! Admins may do everything. Members see all sessions, create sessions, and change and delete their
//! own. Shared resources (secrets, images, standalone sandboxes, the tokens of others) are for
//! admins. A route missing from the table is for admins only, and fails a test.

use axum::{
    extract::{MatchedPath, Request},
    http::{Method, StatusCode},
};
use harvest_proto::{
    SessionId, SnapshotId,
    api::{Role, Token},
    bridge::Author,
};
use harvest_session::Sessions;

use crate::problem::ApiError;

/// The effect of a request on the resource in its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
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
pub(crate) const fn allowed(role: Role, owner: Owner, action: Action) -> bool {
    match (role, action, owner) {
        (Role::Admin, _, _) => true,
        (Role::Member, Action::Read | Action::Create, _) => true,
        (Role::Member, Action::Change, Owner::Requester) => true,
        (Role::Member, Action::Change, Owner::Other | Owner::None) => false,
        (Role::Member, Action::Administer, _) => false,
    }
}

use Action::{Administer, Change, Create, Read};

/// Every route that requires a token, in the order of `routes/`.
#[rustfmt::skip]
const ROUTES: &[(&str, &str, Action)] = &[
    ("GET",    "/v1/me", Read),
    ("GET",    "/v1/sessions", Read),
    ("POST",   "/v1/sessions", Create),
    ("GET",    "/v1/sessions/{session}", Read),
    ("DELETE", "/v1/sessions/{session}", Change),
    ("POST",   "/v1/sessions/{session}/stop", Change),
    ("POST",   "/v1/sessions/{session}/pause", Change),
    ("POST",   "/v1/sessions/{session}/resume", Change),
    ("POST",   "/v1/sessions/{session}/terminate", Change),
    ("POST",   "/v1/sessions/{session}/restore", Change),
    ("POST",   "/v1/sessions/{session}/archive", Change),
    // A fork contains all files of the sandbox and the session's environment variables.
    ("POST",   "/v1/sessions/{session}/fork", Change),
    ("GET",    "/v1/sessions/{session}/prompts", Read),
    ("POST",   "/v1/sessions/{session}/prompts", Change),
    ("DELETE", "/v1/sessions/{session}/prompts/{prompt}", Change),
    ("PATCH",  "/v1/sessions/{session}/prompts/{prompt}", Change),
    ("GET",    "/v1/sessions/{session}/turns", Read),
    ("GET",    "/v1/sessions/{session}/turns/{turn}", Read),
    ("GET",    "/v1/sessions/{session}/snapshots", Read),
    ("PUT",    "/v1/sessions/{session}/snapshots/{snapshot}", Change),
    ("GET",    "/v1/sessions/{session}/events", Read),
    ("GET",    "/v1/sessions/{session}/blobs/{blob}", Read),
    ("GET",    "/v1/sessions/{session}/diff", Read),
    ("GET",    "/v1/sessions/{session}/diff/files", Read),
    ("GET",    "/v1/sessions/{session}/diff/machine", Read),
    // Access to the sandbox may resume the session, and reveals more than the session's events.
    ("POST",   "/v1/sessions/{session}/exec", Change),
    ("GET",    "/v1/sessions/{session}/exec", Change),
    ("GET",    "/v1/sessions/{session}/pty", Change),
    ("GET",    "/v1/sessions/{session}/files", Change),
    ("PUT",    "/v1/sessions/{session}/files", Change),
    ("DELETE", "/v1/sessions/{session}/files", Change),
    ("GET",    "/v1/sessions/{session}/pull", Read),
    ("GET",    "/v1/retention", Read),
    ("POST",   "/v1/retention", Administer),
    ("GET",    "/v1/repositories", Read),
    // With a secret it is for admins: see `check_secret`.
    ("POST",   "/v1/repositories", Create),
    ("GET",    "/v1/repositories/{name}", Read),
    ("DELETE", "/v1/repositories/{name}", Administer),
    ("POST",   "/v1/repositories/{name}/build", Administer),
    ("GET",    "/v1/secrets", Administer),
    ("PUT",    "/v1/secrets/{name}", Administer),
    ("DELETE", "/v1/secrets/{name}", Administer),
    // Members list and create only their own tokens: see `routes/tokens.rs`.
    ("GET",    "/v1/tokens", Read),
    ("POST",   "/v1/tokens", Create),
    ("DELETE", "/v1/tokens/{token}", Change),
    // Standalone sandboxes can exhaust the host.
    ("GET",    "/v1/sandboxes", Administer),
    ("POST",   "/v1/sandboxes", Administer),
    ("GET",    "/v1/sandboxes/{sandbox}", Administer),
    ("DELETE", "/v1/sandboxes/{sandbox}", Administer),
    ("POST",   "/v1/sandboxes/{sandbox}/exec", Administer),
    ("GET",    "/v1/sandboxes/{sandbox}/pty", Administer),
    ("GET",    "/v1/sandboxes/{sandbox}/files", Administer),
    ("PUT",    "/v1/sandboxes/{sandbox}/files", Administer),
    ("DELETE", "/v1/sandboxes/{sandbox}/files", Administer),
    ("POST",   "/v1/sandboxes/{sandbox}/stop", Administer),
    ("POST",   "/v1/sandboxes/{sandbox}/start", Administer),
    ("POST",   "/v1/sandboxes/{sandbox}/snapshot", Administer),
    ("POST",   "/v1/sandboxes/{sandbox}/fork", Administer),
    ("POST",   "/v1/sandboxes/{sandbox}/restore", Administer),
    ("POST",   "/v1/exec", Administer),
    ("GET",    "/v1/images", Administer),
    ("POST",   "/v1/images", Administer),
    ("GET",    "/v1/images/{name}", Administer),
    ("PUT",    "/v1/images/{name}", Administer),
    ("DELETE", "/v1/images/{name}", Administer),
    ("GET",    "/v1/images/{name}/usage", Administer),
    ("GET",    "/v1/volumes", Administer),
    ("POST",   "/v1/volumes", Administer),
    ("DELETE", "/v1/volumes/{name}", Administer),
    ("GET",    "/v1/snapshots", Administer),
    ("DELETE", "/v1/snapshots/{snapshot}", Administer),
    ("GET",    "/v1/df", Administer),
    ("POST",   "/v1/gc", Administer),
    ("GET",    "/v1/doctor", Administer),
];

fn action(method: &Method, route: &str) -> Option<Action> {
    // HEAD uses the handlers of GET.
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    ROUTES.iter().find(|entry| (entry.0, entry.1) == (method, route)).map(|entry| entry.2)
}

/// The method, route template and path of a request.
pub(crate) struct RouteRequest {
    method: Method,
    /// The template, with parameters in braces.
    route: String,
    path: String,
}

impl RouteRequest {
    pub(crate) fn new(request: &Request) -> Self {
        let route =
            request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str).to_owned();
        Self { method: request.method().clone(), route, path: request.uri().path().to_owned() }
    }

    /// The path segment of this parameter.
    fn parameter(&self, name: &str) -> Option<&str> {
        let at = self.route.split('/').position(|segment| segment == name)?;
        self.path.split('/').nth(at)
    }
}

/// Rejects requests that the token's user is not allowed to make.
pub(crate) async fn check(
    sessions: &Sessions,
    token: &Token,
    request: &RouteRequest,
) -> Result<(), ApiError> {
    if token.role == Role::Admin {
        return Ok(());
    }
    let action = action(&request.method, &request.route).unwrap_or(Administer);
    let owner = match action {
        Change => owner(sessions, token, request).await?,
        _ => Owner::None,
    };
    match allowed(token.role, owner, action) {
        true => Ok(()),
        false => Err(forbidden(action, request)),
    }
}

/// The owner of the resource in the path.
async fn owner(
    sessions: &Sessions,
    token: &Token,
    request: &RouteRequest,
) -> Result<Owner, ApiError> {
    let owner = if let Some(session) = request.parameter("{session}") {
        // The raw path: an id with percent escapes, which the router would decode, is rejected
        // here.
        let Ok(session) = session.parse::<SessionId>() else { return Err(not_found()) };
        sessions.get(&session).await?.author
    } else if let Some(name) = request.parameter("{token}") {
        sessions.token_get(name).await?.user
    } else {
        return Ok(Owner::None);
    };
    Ok(if is_same(&owner, &token.user) { Owner::Requester } else { Owner::Other })
}

/// Users are identified by their email address; names change and repeat.
pub(crate) fn is_same(one: &Author, other: &Author) -> bool {
    one.email.eq_ignore_ascii_case(&other.email)
}

/// Only admins may set an author other than themselves.
pub(crate) fn check_author(token: &Token, author: Option<&Author>) -> Result<(), ApiError> {
    match author {
        Some(author) if token.role != Role::Admin && *author != token.user => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "author_not_allowed",
            "only admins may name another author",
        )
        .hint("omit `author`: it defaults to the user of your token")),
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
    match authors.iter().any(|author| is_same(author, &token.user)) {
        true => Ok(()),
        false => Err(not_owner("snapshot")),
    }
}

/// The gateway fetches repositories from this machine's position in the network, so members may use
/// host names only, never this machine or an IP address. DNS may still resolve a name to either.
pub(crate) fn check_repository_url(token: &Token, url: Option<&String>) -> Result<(), ApiError> {
    match url {
        Some(url) if token.role != Role::Admin && !has_public_name(url) => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "forbidden",
            "only admins may use a repository at an IP address or on this machine",
        )
        .hint("use a URL with a host name, or ask an admin to run `harvest repo add`")),
        _ => Ok(()),
    }
}

fn has_public_name(url: &str) -> bool {
    let rest = url.trim().split_once("://").map_or("", |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host).trim_end_matches('.');
    // The resolver also accepts `127.1`, `0x7f000001` and `2130706433` as addresses.
    let last = host.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
    last.starts_with(|first: char| first.is_ascii_alphabetic()) && last != "localhost"
}

fn not_found() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is no such session")
        .hint("`harvest ls` lists sessions")
}

fn forbidden(action: Action, request: &RouteRequest) -> ApiError {
    match action {
        Change if request.parameter("{token}").is_some() => not_owner("token"),
        Change => not_owner("session"),
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
    use Owner::{Other, Requester};

    #[test]
    fn permissions_of_every_role_action_and_owner() {
        let cells = |role, action| {
            [Requester, Other, Owner::None].map(|owner| allowed(role, owner, action))
        };
        for action in [Read, Create, Change, Administer] {
            assert_eq!(cells(Role::Admin, action), [true, true, true], "{action:?}");
        }
        assert_eq!(cells(Role::Member, Read), [true, true, true]);
        assert_eq!(cells(Role::Member, Create), [true, true, true]);
        assert_eq!(cells(Role::Member, Change), [true, false, false]);
        assert_eq!(cells(Role::Member, Administer), [false, false, false]);
    }

    #[test]
    fn table_matches_the_routes_that_require_tokens() {
        let page = serde_json::to_value(crate::openapi::document()).unwrap();
        let mut routes = Vec::new();
        for (path, item) in page["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                if operation["security"].is_array() && method != "head" {
                    routes.push((method.to_uppercase(), path.clone()));
                }
            }
        }
        for (method, path) in &routes {
            let method = method.parse().unwrap();
            assert!(action(&method, path).is_some(), "{method} {path} has no entry in ROUTES");
        }
        for (method, path, _) in ROUTES {
            let entry = ((*method).to_owned(), (*path).to_owned());
            assert!(routes.contains(&entry), "{method} {path} is in ROUTES but is not a route");
        }
    }

    #[test]
    fn every_changed_resource_has_an_owner() {
        for (method, path, action) in ROUTES.iter().filter(|entry| entry.2 == Change) {
            assert!(
                path.contains("{session}") || path.contains("{token}"),
                "{method} {path} is {action:?}, but its resource has no owner"
            );
        }
    }

    #[test]
    fn ip_addresses_are_not_accepted_as_names() {
        for url in
            ["https://github.com/a/b", "http://gitlab/a.git", "https://git.example.org:8443/a"]
        {
            assert!(has_public_name(url), "{url}");
        }
        for url in [
            "http://127.0.0.1:1/a",
            "http://127.1/a",
            "http://2130706433/a",
            "http://0x7f000001/a",
            "http://[::1]/a",
            "http://[fd00::a]:80/a",
            "http://localhost/a",
            "http://LOCALHOST.:80/a",
            "http://x.localhost/a",
            "http://169.254.169.254/a",
            "http:///a",
            "nonsense",
        ] {
            assert!(!has_public_name(url), "{url}");
        }
    }

    #[test]
    fn users_are_identified_by_email() {
        let author = |name: &str, email: &str| Author { name: name.into(), email: email.into() };
        assert!(is_same(&author("Ada", "ada@example.org"), &author("A. L.", "Ada@Example.org")));
        assert!(!is_same(&author("Ada", "ada@example.org"), &author("Ada", "ada@example.com")));
    }
}
