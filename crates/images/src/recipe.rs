//! Recipes: TOML files that describe images. Builds nothing.
//!
//! ```toml
//! name = "tools"
//! allow = ["downloads.example.org"] # besides package registries
//! from = { debian = "bookworm", include = ["git"] }
//! # or "another-image", { folder = "rootfs" }, { tar = "rootfs.tar.gz" },
//! # { oci = "registry.example.com/name:tag" }
//!
//! [[step]]
//! apt = ["jq"]
//!
//! [[step]]
//! run = "useradd --uid 10001 harvest"
//! ```

mod parse;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Serialize;

/// A description of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// The image's name.
    pub name: String,
    /// The base that the image starts from.
    pub from: Base,
    /// The steps on top of the base, in order.
    pub steps: Vec<RecipeStep>,
    /// The steps use the host's network instead of a door.
    pub host_network: bool,
    /// Names that the steps may reach besides package registries.
    pub allow: Vec<String>,
    /// The recipe's folder: relative paths start here.
    pub folder: PathBuf,
}

/// The base of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Base {
    /// Another image.
    Image(String),
    /// A Debian, bootstrapped from the mirror that the host uses.
    Debian {
        /// The suite, such as `bookworm`.
        suite: String,
        /// Packages in addition to the essential ones.
        include: Vec<String>,
    },
    /// A folder with a root file system.
    Folder(PathBuf),
    /// An archive of a root file system, plain or compressed with gzip or zstd.
    Tar(PathBuf),
    /// An image in a registry.
    Oci(String),
}

/// One step of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecipeStep {
    /// Install Debian packages.
    Apt(Vec<String>),
    /// Install npm packages globally.
    Npm(Vec<String>),
    /// Install Python packages globally.
    Pip(Vec<String>),
    /// Run a shell command.
    Run(String),
    /// Copy a file, or the content of a folder.
    Copy {
        /// The source, relative to the recipe's folder.
        from: PathBuf,
        /// The absolute target path in the image.
        to: PathBuf,
    },
    /// Set environment variables, for later steps and for commands in sandboxes.
    Env(BTreeMap<String, String>),
    /// Set the user that commands run as.
    User(String),
    /// Set the working directory of commands.
    Workdir(String),
}

/// Why a recipe is invalid.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("cannot read the recipe {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The text is not TOML.
    #[error("the recipe is not valid TOML")]
    Toml(#[from] toml::de::Error),
    /// A key is unknown.
    #[error("unknown key `{key}` in {section}; did you mean `{nearest}`?")]
    UnknownKey { section: String, key: String, nearest: String },
    /// A required key is missing.
    #[error("`{key}` is missing in {section}")]
    MissingKey { section: String, key: &'static str },
    /// A value is invalid.
    #[error("`{key}` in {section} must be {expected}")]
    Value { section: String, key: String, expected: &'static str },
}

impl Recipe {
    /// Reads a recipe from a file.
    ///
    /// # Errors
    /// When the file cannot be read or the recipe is invalid.
    pub fn read(path: &Path) -> Result<Self, RecipeError> {
        let failed = |source| RecipeError::Read { path: path.to_owned(), source };
        let text = fs::read_to_string(path).map_err(failed)?;
        let folder =
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Self::parse(&text, folder)
    }
}

#[cfg(test)]
mod tests;
