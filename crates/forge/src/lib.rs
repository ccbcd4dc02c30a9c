//! Where repositories and pull requests live. Today that is the local forge, for people without an
//! account anywhere; it answers in the form of GitHub's REST API.
#![forbid(unsafe_code)]

pub mod local;
mod pem;
mod slug;

pub use local::{
    App, Clock, FolderSummary, ForgeError, ImportError, ImportedFolder, LocalForge, NewApp,
    NewPullRequest, PermissionLevel, Permissions,
};
pub use pem::InvalidKey;
pub use slug::slug;
