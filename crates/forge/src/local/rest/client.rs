//! Who sends a request, what they may do, and which page of a list they want.

use std::{collections::HashMap, convert::Infallible, path::PathBuf};

use axum::{
    Json,
    body::Bytes,
    extract::{FromRequestParts, Query},
    http::{HeaderMap, HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use harvest_proto::{Secret, repository_name::LOCAL_OWNER};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    PATH,
    error::RestError,
    json::{Urls, encode},
};
use crate::local::{
    LocalForge,
    apps::{App, InstallationToken},
    credentials::token_of,
    jwt::{UnverifiedJwt, is_jwt},
    permissions::PermissionLevel,
};

const PER_PAGE: usize = 30;
const MAX_PER_PAGE: usize = 100;

/// The sender of a request. Nothing is checked before a route asks for it.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) forge: LocalForge,
    token: Option<Secret<String>>,
    /// The repository that the server itself reads.
    in_process: Option<InProcessRead>,
    pub(super) query: HashMap<String, String>,
    path: String,
    accept: String,
}

impl FromRequestParts<LocalForge> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, forge: &LocalForge) -> Result<Self, Infallible> {
        let query = Query::try_from_uri(&parts.uri).map(|Query(query)| query).unwrap_or_default();
        let accept = parts.headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
        Ok(Self {
            forge: forge.clone(),
            token: token_of(&parts.headers),
            in_process: parts.extensions.get().cloned(),
            query,
            path: parts.uri.path().to_owned(),
            accept: accept.unwrap_or_default().to_owned(),
        })
    }
}

/// A repository, opened for a client that may use it.
#[derive(Debug)]
pub(super) struct RepositoryAccess {
    pub(super) forge: LocalForge,
    pub(super) name: String,
    pub(super) git: PathBuf,
    pub(super) urls: Urls,
    /// The author of what the client creates.
    pub(super) login: String,
}

/// Marks a request of the server itself, which may read this repository and nothing else.
#[derive(Debug, Clone)]
pub(super) struct InProcessRead(pub(super) String);

/// Which part of a list is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Page {
    number: usize,
    size: usize,
}

impl Page {
    /// As GitHub does, wrong numbers are replaced by the default.
    pub(super) fn parse(query: &HashMap<String, String>) -> Self {
        let number = |name| query.get(name).and_then(|text| text.parse::<usize>().ok());
        let size = number("per_page").filter(|size| *size > 0).unwrap_or(PER_PAGE);
        let page = number("page").filter(|page| *page > 0).unwrap_or(1);
        Self { number: page, size: size.min(MAX_PER_PAGE) }
    }

    /// How many entries are skipped, and how many follow.
    pub(super) fn range(self) -> (usize, usize) {
        ((self.number - 1).saturating_mul(self.size), self.size)
    }

    /// The relations of a `Link` header and their pages.
    fn links(self, total: usize) -> Vec<(&'static str, usize)> {
        let last = total.div_ceil(self.size).max(1);
        let mut links = Vec::new();
        if self.number > 1 {
            links.extend([("prev", (self.number - 1).min(last)), ("first", 1)]);
        }
        if self.number < last {
            links.extend([("next", self.number + 1), ("last", last)]);
        }
        links
    }
}

impl Client {
    /// Whether the server itself reads, for a program in a sandbox, and holds the whole answer.
    pub(super) fn is_in_process(&self) -> bool {
        self.in_process.is_some()
    }

    pub(super) fn urls(&self) -> Urls {
        self.forge.urls()
    }

    /// Opens a repository if the client has one of these permissions.
    pub(super) fn open(
        &self,
        (owner, name): (&str, &str),
        permissions: &[&str],
        level: PermissionLevel,
    ) -> Result<RepositoryAccess, RestError> {
        if let Some(InProcessRead(own)) = &self.in_process {
            let fits = (owner, name, level) == (LOCAL_OWNER, own.as_str(), PermissionLevel::Read);
            return if fits {
                self.opened(name, LOCAL_OWNER.to_owned())
            } else {
                Err(RestError::not_found())
            };
        }
        let token = self.token()?;
        let login = if owner == LOCAL_OWNER && self.forge.accepts_token(name, token) {
            LOCAL_OWNER.to_owned()
        } else if let Some((app, rights)) = self.forge.installation_token(token)? {
            let known = owner == LOCAL_OWNER && self.forge.existing_folder(name).is_ok();
            if !known || !rights.has_repository(name) {
                return Err(RestError::not_found());
            }
            if !permissions.iter().any(|name| rights.permissions.allow(name, level)) {
                return Err(RestError::no_permission());
            }
            format!("{}[bot]", app.slug())
        } else {
            return Err(self.refused(token)?);
        };
        self.opened(name, login)
    }

    fn opened(&self, name: &str, login: String) -> Result<RepositoryAccess, RestError> {
        let git = self.forge.repository_path(name)?;
        let name = name.to_owned();
        Ok(RepositoryAccess { forge: self.forge.clone(), name, git, urls: self.urls(), login })
    }

    /// The App whose JSON web token the request carries.
    pub(super) fn app(&self) -> Result<App, RestError> {
        let token = self.token()?;
        let malformed = "A JSON web token could not be decoded";
        if !is_jwt(token) {
            return Err(RestError::unauthorized(malformed));
        }
        let failed =
            |error: crate::local::jwt::JwtError| RestError::unauthorized(&error.to_string());
        let jwt = UnverifiedJwt::parse(token).map_err(failed)?;
        let app = jwt.issuer().map(|id| self.forge.app(id)).transpose()?.flatten();
        let app =
            app.ok_or_else(|| RestError::new(StatusCode::NOT_FOUND, "Integration not found"))?;
        jwt.verify(&app.key(), self.forge.now()).map_err(failed)?;
        Ok(app)
    }

    /// The installation token that the request carries.
    pub(super) fn installation(&self) -> Result<(App, InstallationToken), RestError> {
        let token = self.token()?;
        match self.forge.installation_token(token)? {
            Some(found) => Ok(found),
            None if self.forge.repository_of_token(token)?.is_some() => {
                Err(RestError::forbidden("You must authenticate with an installation access token"))
            }
            None => Err(RestError::unauthorized("Bad credentials")),
        }
    }

    /// Checks that the request carries the token of a repository, which acts as its owner.
    pub(super) fn owner(&self) -> Result<(), RestError> {
        let token = self.token()?;
        if self.forge.repository_of_token(token)?.is_some() {
            return Ok(());
        }
        match self.forge.installation_token(token)? {
            Some(_) => Err(RestError::no_permission()),
            None => Err(RestError::unauthorized("Bad credentials")),
        }
    }

    pub(super) fn revoke(&self) -> Result<(), RestError> {
        self.installation()?;
        Ok(self.forge.revoke_token(self.token()?)?)
    }

    /// Whether the client asks for this form of an answer: `raw`, `diff`.
    pub(super) fn wants(&self, form: &str) -> bool {
        let ends =
            [format!("application/vnd.github.{form}"), format!("application/vnd.github.v3.{form}")];
        self.accept.split(',').any(|kind| {
            let kind = kind.split(['+', ';']).next().unwrap_or_default().trim();
            ends.iter().any(|end| end == kind)
        })
    }

    pub(super) fn parameter(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(super) fn page(&self) -> Page {
        Page::parse(&self.query)
    }

    /// One page of a complete list.
    pub(super) fn paginate<T>(&self, all: Vec<T>) -> (Vec<T>, HeaderMap) {
        let (skip, count) = self.page().range();
        let links = self.links(all.len());
        (all.into_iter().skip(skip).take(count).collect(), links)
    }

    /// The `Link` header of a list with `total` entries.
    pub(super) fn links(&self, total: usize) -> HeaderMap {
        let page = self.page();
        let mut others: Vec<_> = self.query.iter().filter(|(name, _)| *name != "page").collect();
        others.sort();
        let others: String = others
            .iter()
            .map(|(name, value)| format!("{}={}&", encode(name), encode(value)))
            .collect();
        let base = format!("{}{}", self.urls().api(""), self.path);
        let link = |(relation, page)| format!("<{base}?{others}page={page}>; rel=\"{relation}\"");
        let links: Vec<String> = page.links(total).into_iter().map(link).collect();
        let value = HeaderValue::from_str(&links.join(", ")).ok().filter(|_| !links.is_empty());
        value.into_iter().map(|value| (header::LINK, value)).collect()
    }

    fn token(&self) -> Result<&str, RestError> {
        let token = self.token.as_ref().map(|token| token.expose().as_str());
        token.ok_or_else(|| RestError::unauthorized("Requires authentication"))
    }

    // As on GitHub, a valid token does not learn which repositories it lacks exist.
    fn refused(&self, token: &str) -> Result<RestError, RestError> {
        let known = !is_jwt(token) && self.forge.repository_of_token(token)?.is_some();
        Ok(if known { RestError::not_found() } else { RestError::unauthorized("Bad credentials") })
    }
}

/// The JSON body of a request; an empty one is an empty object.
pub(super) fn body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, RestError> {
    let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { bytes };
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|_| RestError::new(StatusCode::BAD_REQUEST, "Problems parsing JSON"))?;
    serde_json::from_value(value)
        .map_err(|error| RestError::unprocessable(format!("Invalid request.\n\n{error}")))
}

pub(super) fn list(entries: Vec<Value>, links: HeaderMap) -> Response {
    (links, Json(entries)).into_response()
}

impl LocalForge {
    pub(super) fn urls(&self) -> Urls {
        Urls::new(&self.shared.public, PATH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_linked_at_both_ends() {
        let page = |number, size| Page { number, size };
        assert_eq!(page(1, 30).links(30), []);
        assert_eq!(page(1, 30).links(31), [("next", 2), ("last", 2)]);
        let middle = [("prev", 1), ("first", 1), ("next", 3), ("last", 4)];
        assert_eq!(page(2, 10).links(31), middle);
        assert_eq!(page(9, 10).links(31), [("prev", 4), ("first", 1)]);
        assert_eq!(page(usize::MAX, 100).range().1, 100);
    }

    #[test]
    fn wrong_page_numbers_are_replaced() {
        let query = |text: &str| {
            let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
            pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
        };
        assert_eq!(Page::parse(&query("")).range(), (0, 30));
        assert_eq!(Page::parse(&query("page=3&per_page=200")).range(), (200, 100));
        assert_eq!(Page::parse(&query("page=0&per_page=-1")).range(), (0, 30));
        assert_eq!(Page::parse(&query("page=x&per_page=0")).range(), (0, 30));
    }
}
