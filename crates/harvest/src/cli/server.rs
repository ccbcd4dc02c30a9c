//! The verbs about the server itself: who may ask it, and how.

use clap::{Args, Subcommand};

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
