//! Makes layers: recipes, OCI, archives, bootstrap, unpacking.
//!
//! [`build`], [`import`] and [`pull`] turn a recipe, a root file system or a registry's image into
//! an [`Image`](harvest_engine::Image) of the engine's cache. Synchronous. Build steps run in
//! sandboxes that the engine starts; this crate itself needs no unsafe code.
#![forbid(unsafe_code)]

mod archive;
mod build;
mod debian_mirror;
mod error;
mod host_settings;
mod import;
mod layer_key;
mod oci;
mod recipe;
mod stream;
mod tree_archive;
mod unpack;

pub use archive::ArchiveError;
pub use build::{BuildOptions, StepDoors, build};
pub use debian_mirror::DebianMirrors;
pub use error::ImageError;
pub use host_settings::host_settings;
pub use import::{Import, import, pull};
pub use oci::{PullError, PullOptions};
pub use recipe::{Base, Recipe, RecipeError, RecipeStep};
pub use tree_archive::{PackError, TreeArchive, check_archive, unpack_trees};
pub use unpack::{UnpackError, UnpackLimits};
