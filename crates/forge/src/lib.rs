//! Where repositories and pull requests live: one trait of forges, and its implementors. The local
//! forge is for people without an account anywhere; it answers in the form of GitHub's REST API.
#![forbid(unsafe_code)]

mod failure;
mod forges;
mod github;
pub mod graphql;
pub mod local;
mod pem;
mod read_route;
mod slug;
mod traits;
mod webhook;

pub use failure::ForgeFailure;
pub use forges::Forges;
pub use github::{AppKey, GitHub, GitHubSettings, InvalidGitHubUrl, SignIn};
pub use local::{
    App, Clock, FolderSummary, ForgeError, ImportError, ImportedFolder, LocalForge, NewApp,
    PermissionLevel, Permissions,
};
pub use pem::InvalidKey;
pub use read_route::{ReadAnswer, ReadForm, ReadRoute, RouteRefusal};
pub use slug::slug;
pub use traits::{
    CheckState, CheckStatus, Forge, Operation, PullRequestChange, PullRequestSpec, RemoteRepository,
};
pub use webhook::{Webhook, WebhookError, WebhookHeaders, WebhookNews, read_webhook, sign_webhook};
