//! Arguments of `harvest backup`.

use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Save sessions, secrets, repositories and snapshots to a file; the server may run
    Create {
        /// The file to write [default: harvest-TIME.tar.gz]
        file: Option<PathBuf>,
        /// Leave out snapshots: sessions keep their history, but not their disks
        #[arg(long)]
        without_snapshots: bool,
        /// Leave out layers of images: for a machine that has them
        #[arg(long)]
        without_images: bool,
    },
    /// Make the home from a backup; it must be empty or new
    Load {
        /// The file that `harvest backup create` wrote
        file: PathBuf,
    },
}
