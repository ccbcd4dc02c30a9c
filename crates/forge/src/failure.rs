//! Why a call to a forge failed, and what to do about it. No message contains a credential.

use std::{borrow::Cow, error::Error};

use harvest_proto::Hint;

#[derive(Debug, thiserror::Error)]
pub enum ForgeFailure {
    #[error("GitHub refused the key of App {id}: {message}")]
    WrongKey { id: u64, message: String },
    #[error("GitHub knows no App with the id {id}")]
    UnknownApp { id: u64 },
    #[error("the GitHub App has no access to {repository}")]
    NotInstalled { repository: String },
    #[error("the GitHub App has no permission to {doing} {repository}")]
    MissingPermission { repository: String, doing: &'static str },
    #[error("the installation of the GitHub App for {repository} is suspended")]
    Suspended { repository: String },
    #[error("there is no sign-in to GitHub for {repository}")]
    NotSignedIn { repository: String },
    #[error("GitHub refused the token for {repository}")]
    TokenRefused { repository: String },
    #[error("the token may not {doing} {repository}")]
    TokenForbidden { repository: String, doing: &'static str },
    #[error("GitHub's limit of requests is used up")]
    RateLimited {
        /// Seconds until the next attempt, if GitHub says so.
        seconds: Option<u64>,
    },
    #[error("{repository} does not exist, or the token cannot see it")]
    NoRepository { repository: String },
    #[error("the repository has no pull request {number}")]
    NoPullRequest { number: u64 },
    #[error("cannot {doing} {repository}: {message}")]
    Rejected { repository: String, doing: &'static str, message: String },
    #[error("cannot {doing} {repository}: GitHub answered {status}")]
    Unexpected { repository: String, doing: &'static str, status: u16 },
    #[error("cannot reach GitHub")]
    Unreachable(#[source] Box<dyn Error + Send + Sync>),
    #[error("{url} is at no forge with an API for pull requests")]
    NoApi { url: String },
    #[error("pull requests at GitHub are merged there: {url}")]
    MergedElsewhere { url: String },
    #[error("pull request {number} is a draft")]
    Draft { number: u64 },
    #[error("pull request {number} cannot be merged: {reason}")]
    NotMergeable { number: u64, reason: &'static str },
    #[error("the forge failed")]
    Other(#[source] Box<dyn Error + Send + Sync>),
}

impl ForgeFailure {
    pub(crate) fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }

    /// Whether the same request may succeed later, although nothing is changed.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        self.is_brief() || matches!(self, Self::RateLimited { .. })
    }

    /// Whether the same request may succeed within seconds.
    #[must_use]
    pub const fn is_brief(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Other(_) => true,
            Self::Unexpected { status, .. } => *status >= 500,
            _ => false,
        }
    }
}

impl Hint for ForgeFailure {
    fn hint(&self) -> Option<Cow<'_, str>> {
        if let Self::RateLimited { seconds: Some(seconds) } = self {
            return Some(format!("GitHub takes requests again in {seconds} s").into());
        }
        Some(Cow::Borrowed(match self {
            Self::WrongKey { .. } => {
                "set GITHUB_APP_PRIVATE_KEY to a key that the App's settings list, and compare the \
                 machine's clock"
            }
            Self::UnknownApp { .. } => {
                "set GITHUB_APP_ID to the App ID of the App's settings, not to its client ID"
            }
            Self::NotInstalled { .. } => {
                "install the App for this repository; GITHUB_APP_INSTALLATION_ID, if set, names the \
                 installation that has it"
            }
            Self::MissingPermission { .. } => {
                "give the App write access to contents, pull requests and commit statuses, and \
                 accept the change in the installation"
            }
            Self::Suspended { .. } => {
                "an owner of the account ends the suspension in the settings of the installation"
            }
            Self::NotSignedIn { .. } => {
                "`harvest secret set GITHUB_TOKEN --user` stores your own token; GITHUB_APP_ID \
                 and GITHUB_APP_PRIVATE_KEY sign in for all"
            }
            Self::TokenRefused { .. } => "renew it with `harvest secret set GITHUB_TOKEN`",
            Self::TokenForbidden { .. } => {
                "the token needs write access to contents, pull requests and commit statuses"
            }
            Self::MergedElsewhere { .. } => "open the page to merge it",
            Self::Draft { .. } => "`harvest pr update SESSION --ready` marks it as ready",
            Self::NotMergeable { .. } => "`harvest pr show SESSION` shows its state",
            Self::NoApi { .. } => "the branch is pushed; open the pull request on the host's page",
            Self::Unreachable(_) => "check the network and the key `github.url`",
            _ => return None,
        }))
    }
}
