//! Tokens in requests. They are compared by hash and never printed.

use axum::http::{HeaderMap, header};
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::{Secret, Timestamp};

use super::{ForgeError, LocalForge};

/// The token of a request: the password of basic authentication, whatever the user name, or the
/// value after `Bearer` or `token`.
pub(super) fn token_of(headers: &HeaderMap) -> Option<Secret<String>> {
    let (scheme, value) =
        headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim().split_once(' ')?;
    let value = value.trim();
    if scheme.eq_ignore_ascii_case("bearer") || scheme.eq_ignore_ascii_case("token") {
        return Some(Secret::new(value.to_owned()));
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(BASE64_STANDARD.decode(value).ok()?).ok()?;
    decoded.split_once(':').map(|(_user, password)| Secret::new(password.to_owned()))
}

impl LocalForge {
    pub(super) fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    /// The repository that this token opens. Reads the token of every repository.
    pub(super) fn repository_of_token(&self, token: &str) -> Result<Option<String>, ForgeError> {
        let names = self.names()?;
        let found = names.iter().find(|name| self.accepts_token(name.name(), token));
        Ok(found.map(|name| name.name().to_owned()))
    }
}
