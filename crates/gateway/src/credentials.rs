//! Headers that the gateway adds to requests for certain hosts. Pure.

use std::{fmt, str::FromStr};

use harvest_proto::Secret;
use hyper::header::{self, HeaderName, HeaderValue};

use crate::policy;

/// What stands for the value of the secret.
const PLACE: &str = "{}";

// Headers of the connection and of the request's target.
const NOT_ALLOWED: [HeaderName; 9] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::HOST,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::CONTENT_ENCODING,
];

/// A header with a place for a secret: `Authorization: Bearer {}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTemplate {
    name: HeaderName,
    /// As it was written; header names have no case.
    text: String,
    before: String,
    after: String,
}

/// The text is no header with a place for a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid header `{0}`: write NAME: VALUE with `{{}}` for the secret, such as `{DEFAULT}`", DEFAULT = HeaderTemplate::DEFAULT)]
pub struct HeaderTemplateError(String);

impl HeaderTemplate {
    /// The header of most services.
    pub const DEFAULT: &str = "Authorization: Bearer {}";

    pub(crate) fn name(&self) -> &HeaderName {
        &self.name
    }

    /// The value of the header; `None` when the secret has characters that no header can have.
    pub(crate) fn fill(&self, secret: &Secret<String>) -> Option<HeaderValue> {
        let text = format!("{}{}{}", self.before, secret.expose().trim(), self.after);
        let mut value = HeaderValue::from_str(&text).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl FromStr for HeaderTemplate {
    type Err = HeaderTemplateError;

    fn from_str(text: &str) -> Result<Self, HeaderTemplateError> {
        let parsed = || {
            let (name, value) = text.split_once(':')?;
            let (before, after) = value.trim().split_once(PLACE)?;
            let name: HeaderName = name.trim().parse().ok()?;
            let valid = !NOT_ALLOWED.contains(&name)
                && !after.contains(PLACE)
                && HeaderValue::from_str(&format!("{before}{after}")).is_ok();
            let (before, after) = (before.to_owned(), after.to_owned());
            valid.then(|| Self { name, text: text.trim().to_owned(), before, after })
        };
        parsed().ok_or_else(|| HeaderTemplateError(text.chars().take(100).collect()))
    }
}

impl fmt::Display for HeaderTemplate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

/// A whole host name in the form in which names are compared; `None` for everything else.
#[must_use]
pub fn normalize_host(name: &str) -> Option<String> {
    let is_host = |name: &String| name.contains('.') && !policy::is_own_name(name);
    policy::normalize(name).filter(is_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_is_placed_in_header_value() {
        let filled = |text: &str, secret: &str| {
            let template: HeaderTemplate = text.parse().unwrap();
            let value = template.fill(&Secret::new(secret.to_owned()));
            (template.name().to_string(), value.map(|value| value.to_str().unwrap().to_owned()))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            filled(HeaderTemplate::DEFAULT, "k\n"),
            ("authorization".into(), some("Bearer k"))
        );
        assert_eq!(filled("X-Key:a{}b", "k"), ("x-key".into(), some("akb")));
        assert_eq!(filled("X-Key: {}", "two\r\nX-Other: lines").1, None);
    }

    #[test]
    fn header_without_place_or_of_connection_is_refused() {
        for bad in [
            "",
            "X-Key",
            "X-Key: abc",
            "X Key: {}",
            ": {}",
            "X: {}{}",
            "X: a\nb{}",
            "Host: {}",
            "content-length: {}",
            "Transfer-Encoding: {}",
            "{}: x",
        ] {
            assert!(bad.parse::<HeaderTemplate>().is_err(), "{bad}");
        }
    }

    #[test]
    fn secrets_are_for_whole_names_only() {
        assert_eq!(normalize_host("API.Example.com.").as_deref(), Some("api.example.com"));
        for bad in ["*.example.com", "localhost", "127.0.0.1", "git.harvest.internal", "a.org:443"]
        {
            assert_eq!(normalize_host(bad), None, "{bad}");
        }
    }
}
