//! Arguments of `harvest repo` and `harvest schedule`.

use clap::{Subcommand, ValueEnum};
use harvest_proto::{BranchName, RepositoryRef, SnapshotId};

#[derive(Debug, Subcommand)]
pub(crate) enum RepoCommand {
    /// Register a repository
    Add {
        /// A URL, OWNER/NAME (GitHub), git@HOST:OWNER/NAME, or a folder, which is copied to the
        /// local forge
        // Not named `url`: clap would confuse it with the global flag.
        #[arg(value_name = "ADDRESS|FOLDER")]
        location: String,
        /// Its name, NAME or OWNER/NAME [default: the last two parts of the URL]
        #[arg(long)]
        name: Option<RepositoryRef>,
        /// The branch sessions start from
        #[arg(short, long)]
        base: Option<BranchName>,
        /// The secret with the repository's access token
        #[arg(long)]
        secret: Option<String>,
        /// The image sandboxes start from
        #[arg(long)]
        image: Option<String>,
        /// Copy the files of a folder without git without asking
        #[arg(long)]
        all: bool,
    },
    /// Change what a repository starts from
    Set {
        /// The repository: OWNER/NAME, or NAME if only one has it
        name: RepositoryRef,
        /// The branch sessions start from
        #[arg(short, long)]
        base: Option<BranchName>,
        /// The secret with the repository's access token
        #[arg(long)]
        secret: Option<String>,
        /// The image sandboxes start from
        #[arg(long)]
        image: Option<String>,
        /// Back to the default; may be repeated
        #[arg(long, value_name = "WHAT")]
        unset: Vec<RepoSetting>,
    },
    /// Show a repository and its newest build
    Show {
        /// The repository: OWNER/NAME, or NAME if only one has it
        name: RepositoryRef,
    },
    /// Prebuild the snapshot sessions start from; a folder is copied again before
    Build {
        /// The repository: OWNER/NAME, NAME if only one has it, or a folder
        #[arg(required_unless_present = "all")]
        name: Option<String>,
        /// Every repository, one after another
        #[arg(long, conflicts_with = "name")]
        all: bool,
        /// Build this branch instead of the base, for sessions that start from it
        #[arg(short, long, conflicts_with = "all")]
        branch: Option<BranchName>,
        /// Begin with the image, even if an earlier build could be continued
        #[arg(short, long)]
        force: bool,
        /// Wait for a running build of the repository first
        #[arg(short, long)]
        wait: bool,
    },
    /// List the builds of a repository, failed ones included
    Builds {
        /// The repository: OWNER/NAME, or NAME if only one has it
        name: RepositoryRef,
    },
    /// Print the log of a build
    Logs {
        /// The repository: OWNER/NAME, or NAME if only one has it
        name: RepositoryRef,
        /// The build, as `repo builds` lists it [default: the newest that ended]
        build: Option<SnapshotId>,
    },
    /// List repositories
    Ls,
    /// Register an App on the local forge, for programs that work with GitHub's REST API
    App {
        /// Its name, such as `My bot`
        name: String,
        /// The file with its RSA key (PEM), private or public; only the public half is stored
        #[arg(long, value_name = "FILE")]
        key: std::path::PathBuf,
        /// A repository of the local forge it may use [default: all]
        #[arg(short, long = "repository", value_name = "NAME")]
        repositories: Vec<RepositoryRef>,
    },
    /// Remove a repository and its builds
    Rm {
        /// The repository: OWNER/NAME, or NAME if only one has it
        name: RepositoryRef,
        /// Remove without asking
        #[arg(short, long)]
        yes: bool,
    },
}

/// A setting of a repository that has a default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepoSetting {
    Base,
    Secret,
    Image,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ScheduleCommand {
    /// Show the job and its last run
    Ls,
    /// List its runs
    Runs,
    /// Run it now and wait until it is over
    Run,
    /// Pause it until it is resumed, across restarts
    Pause,
    /// Resume it
    Resume,
}
