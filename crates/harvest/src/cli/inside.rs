//! The verbs that reach into a session's sandbox, or into one of one's own: `shell` and `cp`.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct Shell {
    /// `sbx_…` for a sandbox, else a session: an id, the beginning of one, or `-` for the newest session
    #[arg(value_name = "SANDBOX|SESSION")]
    pub(crate) session: String,
    /// Who it runs as: `harvest` or `root`; in a sandbox of your own whom the image says when absent
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Where it runs; the primary checkout, or where the image says, when absent
    #[arg(short, long, value_name = "FOLDER")]
    pub(crate) workdir: Option<String>,
    /// What to run instead of a shell, and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Cp {
    /// What to copy: a path here, `SESSION:/path`, `SANDBOX:/path`, or `-` for standard input
    #[arg(value_name = "FROM", allow_hyphen_values = true)]
    pub(crate) from: String,
    /// Where to: a path here, `SESSION:/path`, `SANDBOX:/path`, or `-` for standard output. A folder takes the
    /// copy in
    #[arg(value_name = "TO", allow_hyphen_values = true)]
    pub(crate) to: String,
    /// Also folders, with all that is in them
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Whose the copies inside are: `root`, `harvest` or a number; `harvest`, or the image's user in a sandbox of
    /// your own, when absent
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
}
