//! Arguments of `harvest shell` and `harvest cp`, which work in any sandbox.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// `sbx_…` for a standalone sandbox, else a session: an id, an id prefix, or `-` for the newest
    /// session
    #[arg(value_name = "SANDBOX|SESSION")]
    pub(crate) session: String,
    /// The user to run as, such as `harvest` or `root` [default: `harvest`; the image's user in a
    /// standalone sandbox]
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// The working folder [default: the first checkout; the image's folder in a standalone sandbox]
    #[arg(short, long, value_name = "FOLDER")]
    pub(crate) workdir: Option<String>,
    /// The command to run instead of a shell, with its arguments
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    /// The source: a local path, `SESSION:/path`, `SANDBOX:/path`, or `-` for standard input
    #[arg(value_name = "FROM", allow_hyphen_values = true)]
    pub(crate) from: String,
    /// The target: a local path, `SESSION:/path`, `SANDBOX:/path`, or `-` for standard output. The
    /// copy goes into a target that is a folder
    #[arg(value_name = "TO", allow_hyphen_values = true)]
    pub(crate) to: String,
    /// Copy folders with their contents
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Copy with this user's access in the sandbox: `root`, `harvest` or a number [default:
    /// `harvest`; the image's user in a standalone sandbox]
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
}
