//! The verb `image`.

use std::path::PathBuf;

use clap::Subcommand;

use super::units;

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Build an image from a recipe
    Build {
        /// A recipe that comes along, or a file
        #[arg(default_value = "claude")]
        recipe: String,
        /// Make every step again
        #[arg(long)]
        force: bool,
    },
    /// Pull an image from a registry; a login is taken from ~/.docker/config.json
    Pull {
        /// Such as registry.example.com/debian:12, or with @sha256:… behind the name
        reference: String,
        /// What to call it; the last part of its own name when absent
        #[arg(long)]
        name: Option<String>,
        /// The most one layer may become unpacked
        #[arg(long, value_name = "SIZE", default_value = "64g")]
        max_size: units::Size,
    },
    /// Make an image from an archive or a folder with a root file system
    Import {
        /// What to call it
        name: String,
        /// A tar (plain, gzip or zstd), a folder, or `-` for a tar on standard input
        #[arg(value_name = "FILE|FOLDER|-")]
        from: PathBuf,
        /// The most an archive may become unpacked
        #[arg(long, value_name = "SIZE", default_value = "64g")]
        max_size: units::Size,
    },
    /// List images
    Ls,
    /// Show an image: its layers with their sizes, what it was made from, what commands get
    Inspect {
        /// Its name or id
        name: String,
    },
    /// Forget images; their layers go with the next `harvest gc`, if nothing uses them
    Rm {
        /// Names or ids
        #[arg(required = true)]
        names: Vec<String>,
    },
}
