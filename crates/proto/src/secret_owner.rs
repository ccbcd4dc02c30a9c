//! What a secret belongs to, which decides who may use it.

use std::{fmt, str::FromStr};

use crate::{RepositoryName, SessionId, text::word_enum};

word_enum!(
    /// Where a secret may be used.
    SecretScope, "scope of a secret" {
        /// In one session.
        Session = "session",
        /// In the sessions and builds of one repository.
        Repository = "repository",
        /// In the sessions of one user.
        User = "user",
        /// In all sessions and builds.
        Global = "global",
    }
);

/// What a secret belongs to. Of several secrets with one name, that of the narrowest scope is used:
/// session, then repository, then user, then global.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SecretOwner {
    /// A session; deleted with it.
    Session(SessionId),
    /// A repository; deleted with it.
    Repository(RepositoryName),
    /// A user, by the email address in lower case.
    User(String),
    /// The whole server.
    Global,
}

impl SecretOwner {
    /// The user with this email address, in any case.
    #[must_use]
    pub fn user(email: &str) -> Self {
        Self::User(email.to_ascii_lowercase())
    }

    /// Where the owner's secrets may be used.
    #[must_use]
    pub const fn scope(&self) -> SecretScope {
        match self {
            Self::Session(_) => SecretScope::Session,
            Self::Repository(_) => SecretScope::Repository,
            Self::User(_) => SecretScope::User,
            Self::Global => SecretScope::Global,
        }
    }

    /// The session's id, the repository's name or the user's address; `None` for the server.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        match self {
            Self::Session(session) => Some(session.to_string()),
            Self::Repository(name) => Some(name.to_string()),
            Self::User(email) => Some(email.clone()),
            Self::Global => None,
        }
    }
}

/// The form that is stored, and that a sealed value is bound to.
impl fmt::Display for SecretOwner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(out, "{} {name}", self.scope()),
            None => write!(out, "{}", self.scope()),
        }
    }
}

/// The text is not the stored form of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the owner of a secret")]
pub struct UnknownSecretOwner;

impl FromStr for SecretOwner {
    type Err = UnknownSecretOwner;

    fn from_str(text: &str) -> Result<Self, UnknownSecretOwner> {
        let (scope, name) = text.split_once(' ').unwrap_or((text, ""));
        let owner = match scope.parse().map_err(|_| UnknownSecretOwner)? {
            SecretScope::Session => name.parse().ok().map(Self::Session),
            SecretScope::Repository => name.to_owned().try_into().ok().map(Self::Repository),
            SecretScope::User => Some(Self::User(name.to_owned())),
            SecretScope::Global => name.is_empty().then_some(Self::Global),
        };
        owner.ok_or(UnknownSecretOwner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_form_reads_back() {
        for owner in [
            SecretOwner::Session(SessionId::random()),
            SecretOwner::Repository("acme/shop".parse().unwrap()),
            SecretOwner::user("Ada@Example.org"),
            SecretOwner::Global,
        ] {
            assert_eq!(owner.to_string().parse(), Ok(owner));
        }
        for bad in ["", "global x", "session", "repository shop", "team x"] {
            assert!(bad.parse::<SecretOwner>().is_err(), "{bad}");
        }
    }
}
