//! Recipes: what an image is made of, written in TOML, and the keys by which its steps are known.
//! Reads and names; builds nothing.
//!
//! ```toml
//! name = "tools"
//! from = { debian = "bookworm", include = ["git"] }
//! # or "another-image", { folder = "rootfs" }, { tar = "rootfs.tar.gz" }, { oci = "registry.example.com/name:tag" }
//!
//! [[step]]
//! apt = ["jq"]
//!
//! [[step]]
//! run = "useradd --uid 10001 harvest"
//! ```

mod key;
mod parse;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Serialize;

pub(crate) use key::{content_key, key};
pub(crate) use parse::is_image_name;

/// What an image is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// The image's name.
    pub name: String,
    /// What it starts from.
    pub from: Base,
    /// What is done to that, in order.
    pub steps: Vec<Make>,
    /// Where the recipe is: paths in it start here.
    pub folder: PathBuf,
}

/// What an image starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Base {
    /// Another image.
    Image(String),
    /// A Debian of this suite with these packages, off the host's own mirror.
    Debian {
        /// `bookworm`.
        suite: String,
        /// Packages besides the essential ones.
        include: Vec<String>,
    },
    /// A folder with a root file system.
    Folder(PathBuf),
    /// An archive of a root file system, plain or compressed with gzip or zstd.
    Tar(PathBuf),
    /// An image in a registry.
    Oci(String),
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Make {
    /// Install Debian packages.
    Apt(Vec<String>),
    /// Install npm packages for everyone.
    Npm(Vec<String>),
    /// Install Python packages for everyone.
    Pip(Vec<String>),
    /// Run a shell command.
    Run(String),
    /// Copy a file, or what is in a folder.
    Copy {
        /// Where from, beginning at the recipe's folder.
        from: PathBuf,
        /// Where to, inside.
        to: PathBuf,
    },
    /// Set variables, for later steps and for whoever uses the image.
    Env(BTreeMap<String, String>),
    /// Who commands run as.
    User(String),
    /// Where commands run.
    Workdir(String),
}

/// Why a text is no recipe.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// It cannot be read.
    #[error("cannot read the recipe {}", path.display())]
    Read {
        /// Its file.
        path: PathBuf,
        /// What the file said.
        source: io::Error,
    },
    /// It is not TOML.
    #[error("the recipe is not TOML")]
    Toml(#[from] toml::de::Error),
    /// A key nobody knows.
    #[error("{place} has the unknown key `{key}`; did you mean `{nearest}`?")]
    UnknownKey {
        /// Where.
        place: String,
        /// The key.
        key: String,
        /// The known key most like it.
        nearest: String,
    },
    /// A key that must be there is not.
    #[error("{place} lacks `{key}`")]
    MissingKey {
        /// Where.
        place: String,
        /// The key.
        key: &'static str,
    },
    /// A value that makes no sense.
    #[error("`{key}` in {place} must be {wanted}")]
    Value {
        /// Where.
        place: String,
        /// The key.
        key: String,
        /// What it must be.
        wanted: &'static str,
    },
}

impl Recipe {
    /// Reads a recipe from its file.
    ///
    /// # Errors
    /// When the file cannot be read or is no recipe.
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
