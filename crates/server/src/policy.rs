//! Who may do what: one table of routes, one table of roles.
//!
//! Admins may do everything. Members create and see all sessions, and change and delete their own; what
//! is the machine's or everybody's (secrets, images, raw sandboxes, other people's tokens) is the admins'.
//! A route that is missing from the table is the admins' too, and fails a test.

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

/// What a request does to what it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Looks.
    See,
    /// Makes something of the asker's own.
    Create,
    /// Changes something that belongs to somebody.
    Change,
    /// Changes what is everybody's.
    Administer,
}

/// Whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The asker's.
    Asker,
    /// Somebody else's.
    Other,
    /// Nobody's, or everybody's.
    Nobody,
}

/// The whole of the policy.
pub(crate) const fn allowed(role: Role, owner: Owner, action: Action) -> bool {
    match (role, action, owner) {
        (Role::Admin, _, _) => true,
        (Role::Member, Action::See | Action::Create, _) => true,
        (Role::Member, Action::Change, Owner::Asker) => true,
        (Role::Member, Action::Change, Owner::Other | Owner::Nobody) => false,
        (Role::Member, Action::Administer, _) => false,
    }
}

use Action::{Administer, Change, Create, See};

/// Every route that asks for a token, in the order of `routes/`.
#[rustfmt::skip]
const ROUTES: &[(&str, &str, Action)] = &[
    ("GET",    "/v1/me", See),
    ("GET",    "/v1/sessions", See),
    ("POST",   "/v1/sessions", Create),
    ("GET",    "/v1/sessions/{session}", See),
    ("DELETE", "/v1/sessions/{session}", Change),
    ("POST",   "/v1/sessions/{session}/stop", Change),
    ("POST",   "/v1/sessions/{session}/pause", Change),
    ("POST",   "/v1/sessions/{session}/resume", Change),
    ("POST",   "/v1/sessions/{session}/terminate", Change),
    ("POST",   "/v1/sessions/{session}/restore", Change),
    ("POST",   "/v1/sessions/{session}/archive", Change),
    // A fork has all files of the machine, and the variables the session was given.
    ("POST",   "/v1/sessions/{session}/fork", Change),
    ("GET",    "/v1/sessions/{session}/prompts", See),
    ("POST",   "/v1/sessions/{session}/prompts", Change),
    ("DELETE", "/v1/sessions/{session}/prompts/{prompt}", Change),
    ("PATCH",  "/v1/sessions/{session}/prompts/{prompt}", Change),
    ("GET",    "/v1/sessions/{session}/turns", See),
    ("GET",    "/v1/sessions/{session}/turns/{turn}", See),
    ("GET",    "/v1/sessions/{session}/snapshots", See),
    ("PUT",    "/v1/sessions/{session}/snapshots/{snapshot}", Change),
    ("GET",    "/v1/sessions/{session}/events", See),
    ("GET",    "/v1/sessions/{session}/blobs/{blob}", See),
    ("GET",    "/v1/sessions/{session}/diff", See),
    ("GET",    "/v1/sessions/{session}/diff/files", See),
    ("GET",    "/v1/sessions/{session}/diff/machine", See),
    // Whoever looks inside may have to wake the machine first, and sees more than the session shows.
    ("POST",   "/v1/sessions/{session}/exec", Change),
    ("GET",    "/v1/sessions/{session}/exec", Change),
    ("GET",    "/v1/sessions/{session}/pty", Change),
    ("GET",    "/v1/sessions/{session}/files", Change),
    ("PUT",    "/v1/sessions/{session}/files", Change),
    ("DELETE", "/v1/sessions/{session}/files", Change),
    ("GET",    "/v1/sessions/{session}/pull", See),
    ("GET",    "/v1/retention", See),
    ("POST",   "/v1/retention", Administer),
    ("GET",    "/v1/repositories", See),
    // With a secret it is an admin's: see `names_secret`.
    ("POST",   "/v1/repositories", Create),
    ("GET",    "/v1/repositories/{name}", See),
    ("DELETE", "/v1/repositories/{name}", Administer),
    ("POST",   "/v1/repositories/{name}/build", Administer),
    ("GET",    "/v1/secrets", Administer),
    ("PUT",    "/v1/secrets/{name}", Administer),
    ("DELETE", "/v1/secrets/{name}", Administer),
    // Members see and make tokens of their own only: see `routes/tokens.rs`.
    ("GET",    "/v1/tokens", See),
    ("POST",   "/v1/tokens", Create),
    ("DELETE", "/v1/tokens/{token}", Change),
    // Machines without a session: whoever has one can fill this host.
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

/// What a request to this route does.
fn action(method: &Method, route: &str) -> Option<Action> {
    // HEAD is answered by the handlers of GET.
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    ROUTES.iter().find(|entry| (entry.0, entry.1) == (method, route)).map(|entry| entry.2)
}

/// What is asked for.
pub(crate) struct Asked {
    method: Method,
    /// The route as it is written down, its parts in braces.
    route: String,
    path: String,
}

impl Asked {
    pub(crate) fn of(request: &Request) -> Self {
        let route =
            request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str).to_owned();
        Self { method: request.method().clone(), route, path: request.uri().path().to_owned() }
    }

    /// The part of the path in this place of the route.
    fn part(&self, name: &str) -> Option<&str> {
        let at = self.route.split('/').position(|segment| segment == name)?;
        self.path.split('/').nth(at)
    }
}

/// Refuses what the token's user may not do.
pub(crate) async fn check(
    sessions: &Sessions,
    token: &Token,
    asked: &Asked,
) -> Result<(), ApiError> {
    if token.role == Role::Admin {
        return Ok(());
    }
    let action = action(&asked.method, &asked.route).unwrap_or(Administer);
    let owner = match action {
        Change => owner(sessions, token, asked).await?,
        _ => Owner::Nobody,
    };
    match allowed(token.role, owner, action) {
        true => Ok(()),
        false => Err(forbidden(action)),
    }
}

/// Whose the thing is that the path names.
async fn owner(sessions: &Sessions, token: &Token, asked: &Asked) -> Result<Owner, ApiError> {
    let owner = if let Some(session) = asked.part("{session}") {
        // As it was sent: an id with escapes in it, which mean the same further in, is nobody's here.
        let Ok(session) = session.parse::<SessionId>() else { return Err(not_found()) };
        sessions.get(&session).await?.author
    } else if let Some(name) = asked.part("{token}") {
        sessions.token_get(name).await?.user
    } else {
        return Ok(Owner::Nobody);
    };
    Ok(if is_same(&owner, &token.user) { Owner::Asker } else { Owner::Other })
}

/// People are told apart by their address; names change and repeat.
pub(crate) fn is_same(one: &Author, other: &Author) -> bool {
    one.email.eq_ignore_ascii_case(&other.email)
}

/// Only admins speak in somebody else's name.
pub(crate) fn speaks_for(token: &Token, author: Option<&Author>) -> Result<(), ApiError> {
    match author {
        Some(author) if token.role != Role::Admin && *author != token.user => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "author_not_allowed",
            "only admins may name another author",
        )
        .hint("leave `author` out: it is the user of your token")),
        _ => Ok(()),
    }
}

/// Who says which secret opens a URL could have any secret sent to a host of their own.
pub(crate) fn names_secret(token: &Token, secret: Option<&String>) -> Result<(), ApiError> {
    match secret {
        Some(_) if token.role != Role::Admin => Err(forbidden(Administer)),
        _ => Ok(()),
    }
}

/// Who starts from a snapshot sees every file in it: members start from those of their own sessions.
pub(crate) async fn starts_from(
    sessions: &Sessions,
    token: &Token,
    snapshot: Option<&SnapshotId>,
) -> Result<(), ApiError> {
    let Some(snapshot) = snapshot.filter(|_| token.role != Role::Admin) else { return Ok(()) };
    let authors = sessions.snapshot_authors(snapshot).await?;
    match authors.iter().any(|author| is_same(author, &token.user)) {
        true => Ok(()),
        false => Err(forbidden(Change)),
    }
}

/// The gateway asks for a repository from this machine's own place in the network: members name hosts, never
/// this machine or an address. What a name leads to is its owner's word.
pub(crate) fn names_host(token: &Token, url: Option<&String>) -> Result<(), ApiError> {
    match url {
        Some(url) if token.role != Role::Admin && !has_public_name(url) => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "forbidden",
            "only admins may register a repository at an address or on this machine",
        )
        .hint("use a URL with the host's name, or ask an admin for `harvest repo add`")),
        _ => Ok(()),
    }
}

fn has_public_name(url: &str) -> bool {
    let rest = url.trim().split_once("://").map_or("", |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host).trim_end_matches('.');
    // The resolver takes `127.1`, `0x7f000001` and `2130706433` for addresses, too.
    let last = host.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
    last.starts_with(|first: char| first.is_ascii_alphabetic()) && last != "localhost"
}

fn not_found() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is no such session")
        .hint("`harvest ls` lists sessions")
}

pub(crate) fn forbidden(action: Action) -> ApiError {
    let (detail, hint) = match action {
        Change => (
            "that belongs to somebody else",
            "ask them or an admin; `harvest run` makes one of your own",
        ),
        _ => ("only admins may do that", "ask an admin, or use a token of one"),
    };
    ApiError::new(StatusCode::FORBIDDEN, "forbidden", detail).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Owner::{Asker, Nobody, Other};

    #[test]
    fn every_cell_of_the_policy() {
        let cells = |role, action| [Asker, Other, Nobody].map(|owner| allowed(role, owner, action));
        for action in [See, Create, Change, Administer] {
            assert_eq!(cells(Role::Admin, action), [true, true, true], "{action:?}");
        }
        assert_eq!(cells(Role::Member, See), [true, true, true]);
        assert_eq!(cells(Role::Member, Create), [true, true, true]);
        assert_eq!(cells(Role::Member, Change), [true, false, false]);
        assert_eq!(cells(Role::Member, Administer), [false, false, false]);
    }

    #[test]
    fn every_route_with_a_token_is_in_the_table_and_nothing_else_is() {
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
            assert!(routes.contains(&entry), "{method} {path} is in ROUTES, but no route is");
        }
    }

    #[test]
    fn what_is_changed_says_whose_it_is() {
        for (method, path, action) in ROUTES.iter().filter(|entry| entry.2 == Change) {
            assert!(
                path.contains("{session}") || path.contains("{token}"),
                "{method} {path} is {action:?}, but nobody owns what it names"
            );
        }
    }

    #[test]
    fn an_address_is_no_name_however_it_is_written() {
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
    fn people_are_told_apart_by_their_address() {
        let author = |name: &str, email: &str| Author { name: name.into(), email: email.into() };
        assert!(is_same(&author("Ada", "ada@example.org"), &author("A. L.", "Ada@Example.org")));
        assert!(!is_same(&author("Ada", "ada@example.org"), &author("Ada", "ada@example.com")));
    }
}
