//! Arguments of `harvest image`.

use std::path::PathBuf;

use clap::Subcommand;

use super::units;

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Build an image from a recipe
    Build {
        /// A built-in recipe or a recipe file
        #[arg(default_value = "claude")]
        recipe: String,
        /// Run every step again, ignoring the cache
        #[arg(long)]
        force: bool,
        /// The network of its steps: package registries and the recipe's names, or the host's
        /// (UNSAFE)
        #[arg(long, value_name = "NETWORK", value_parser = ["trusted", "host"], default_value = "trusted")]
        net: String,
    },
    /// Pull an image from a registry; credentials come from ~/.docker/config.json
    Pull {
        /// The reference, such as registry.example.com/debian:12 or …/debian@sha256:…
        reference: String,
        /// Its name [default: the last part of the reference]
        #[arg(long)]
        name: Option<String>,
        /// The largest size of one unpacked layer
        #[arg(long, value_name = "SIZE", default_value = "64g")]
        max_size: units::Size,
    },
    /// Import an image from an archive or a folder with a root file system
    Import {
        /// The image's name
        name: String,
        /// A tar archive (plain, gzip or zstd), a folder, or `-` for a tar on standard input
        #[arg(value_name = "FILE|FOLDER|-")]
        from: PathBuf,
        /// The largest size of the unpacked archive
        #[arg(long, value_name = "SIZE", default_value = "64g")]
        max_size: units::Size,
    },
    /// List images
    Ls,
    /// Show an image: source, layers with their sizes, and the environment of its commands
    Inspect {
        /// The image's name or id
        name: String,
    },
    /// Remove images; the next `harvest gc` frees layers that nothing else uses
    Rm {
        /// The images' names or ids
        #[arg(required = true)]
        names: Vec<String>,
    },
}
