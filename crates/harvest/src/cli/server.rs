//! Arguments of the verbs about the server: `api`, `completion`, `config`, `token`, `user`.

use std::time::Duration;

use clap::{Args, Subcommand};
use clap_complete::Shell;

use super::units::{Cores, Size};

#[derive(Debug, Args)]
pub(crate) struct ApiArgs {
    /// The method: GET, POST, PUT, PATCH or DELETE
    pub(crate) method: String,
    /// The path, such as /v1/sessions, or `sessions` for short
    pub(crate) path: String,
    /// The body: text, `@FILE`, or `-` for standard input; sent as JSON unless a header sets
    /// another content type
    #[arg(short, long, value_name = "BODY", allow_hyphen_values = true)]
    pub(crate) data: Option<String>,
    /// A header, as `Name: value`; may be repeated
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    pub(crate) headers: Vec<String>,
    /// Also print the status and headers of the response
    #[arg(short, long)]
    pub(crate) include: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// Print only the value of this key
    pub(crate) key: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token; its value is printed only once
    Create(CreateTokenArgs),
    /// List tokens: an admin sees all, others see their own
    Ls,
    /// Revoke tokens immediately
    Rm {
        /// The tokens' names
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateTokenArgs {
    /// The token's name
    pub(crate) name: String,
    /// The owner's name [default: your own]
    #[arg(long, value_name = "NAME", requires = "email")]
    pub(crate) user_name: Option<String>,
    /// The owner's e-mail address, which identifies a user
    #[arg(long, value_name = "ADDRESS", requires = "user_name")]
    pub(crate) email: Option<String>,
    /// The role: an `admin` may do everything, a `member` may change their own sessions [default:
    /// `member` for others, your own role for yourself]
    #[arg(long, value_parser = ["admin", "member"])]
    pub(crate) role: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// List users and what members may use for standalone sandboxes
    Ls,
    /// Set what a member may use for standalone sandboxes; without a limit, show it
    Set(SetUserArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SetUserArgs {
    /// The user's e-mail address
    pub(crate) email: String,
    /// Sandboxes at once, stopped ones included; 0 allows none
    #[arg(long, value_name = "NUMBER")]
    pub(crate) sandboxes: Option<u32>,
    /// Memory of each
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// CPU cores of each
    #[arg(long, value_name = "NUMBER")]
    pub(crate) cpus: Option<Cores>,
    /// What each may write to its disk
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk: Option<Size>,
    /// Stop each after this time, such as `8h`
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) lifetime: Option<Duration>,
    /// Restore the defaults of all limits that are not given
    #[arg(long)]
    pub(crate) defaults: bool,
}
