//! The verbs about the server itself: who may ask it, and how.

use clap::{Args, Subcommand};
use clap_complete::Shell;

#[derive(Debug, Args)]
pub(crate) struct Api {
    /// GET, POST, PUT, PATCH or DELETE
    pub(crate) method: String,
    /// Such as /v1/sessions, or `sessions` for short
    pub(crate) path: String,
    /// The body: a text, `@FILE`, or `-` for standard input; JSON unless a header says otherwise
    #[arg(short, long, value_name = "BODY", allow_hyphen_values = true)]
    pub(crate) data: Option<String>,
    /// A header, as `Name: value`; may be given more than once
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    pub(crate) headers: Vec<String>,
    /// Show the status and the headers of the answer as well
    #[arg(short, long)]
    pub(crate) include: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Completion {
    /// The shell
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// Only the value of this key
    pub(crate) key: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Token {
    /// Make a token; its value is printed this once
    Create(CreateToken),
    /// List tokens: all of them to an admin, to others their own
    Ls,
    /// Revoke tokens at once
    Rm {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateToken {
    /// What to call it
    pub(crate) name: String,
    /// Whose it is; your own when absent
    #[arg(long, value_name = "NAME", requires = "email")]
    pub(crate) user_name: Option<String>,
    /// Their e-mail address, by which people are told apart
    #[arg(long, value_name = "ADDRESS", requires = "user_name")]
    pub(crate) email: Option<String>,
    /// What they may do: `admin` everything, `member` change their own sessions [default: member for
    /// others, your own for yourself]
    #[arg(long, value_parser = ["admin", "member"])]
    pub(crate) role: Option<String>,
}
