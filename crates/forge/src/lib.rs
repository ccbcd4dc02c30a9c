//! Where repositories and pull requests live. Today that is the local forge, for people without an
//! account anywhere.
#![forbid(unsafe_code)]

pub mod local;
mod slug;

pub use local::{
    FolderSummary, ForgeError, ImportError, ImportedFolder, LocalForge, NewPullRequest,
};
pub use slug::slug;
