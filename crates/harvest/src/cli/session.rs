//! The verbs about sessions: what they are given, what is asked of them, what is seen of them.

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};

use super::{One, units};

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// What to do
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) prompt: String,
    /// What to work on: a folder, which is copied and stays as it is, a git URL, or a registered
    /// repository's name; several lie side by side in /workspace, and the agent works in the first. Without
    /// any, the git repository around the current folder
    #[arg(short, long = "repository", value_name = "FOLDER|URL|NAME")]
    pub(crate) repositories: Vec<String>,
    /// The branch the first repository starts from
    #[arg(short, long, requires = "repositories")]
    pub(crate) base: Option<String>,
    /// The agent: `claude` or `scripted`, which plays the script in the prompt [default: claude]
    #[arg(short, long, value_name = "NAME", value_parser = harvest_proto::agents::NAMES)]
    pub(crate) agent: Option<String>,
    /// The model to ask for; `scripted` needs neither account nor key
    #[arg(short, long)]
    pub(crate) model: Option<String>,
    /// What the sandbox may reach: `none` or `trusted`
    #[arg(long, value_name = "POLICY", value_parser = ["none", "trusted"])]
    pub(crate) net: Option<String>,
    /// A variable for hooks, agent and commands; NAME alone passes this environment's own. Never a secret:
    /// whatever runs inside reads it
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// A snapshot to start from, of any session or sandbox; what is checked out in it stays as it is
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) from: Option<String>,
    /// A name of your own for the session, which no other session has
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Print the id and leave it running
    #[arg(short, long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// Only those in this state, such as running or idle
    #[arg(short, long)]
    pub(crate) state: Option<String>,
    /// Only those that work on this repository
    #[arg(short, long, value_name = "NAME")]
    pub(crate) repository: Option<String>,
    /// Only those with this in their title
    #[arg(long, value_name = "TEXT")]
    pub(crate) title: Option<String>,
    /// Only the one with this key
    #[arg(long)]
    pub(crate) key: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Send {
    /// The session: an id, the beginning of one, or `-` for the newest
    pub(crate) session: String,
    /// What to do next; the answer, when the agent asked
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) text: String,
    /// Stop the turn in progress and do this next
    #[arg(long)]
    pub(crate) now: bool,
    /// Follow the session
    #[arg(short, long)]
    pub(crate) follow: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Queue {
    /// List a session's prompts
    Ls(One),
    /// Take a waiting prompt out of the queue
    Rm {
        /// The session
        session: String,
        /// The prompt: an id or the beginning of one
        prompt: String,
    },
    /// Move a waiting prompt
    Mv {
        /// The session
        session: String,
        /// The prompt: an id or the beginning of one
        prompt: String,
        /// Its new place, 1 being the next
        position: u32,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Fork {
    /// The session, or `SESSION@TURN`; `-@2` is turn 2 of the newest, `@0` what a session began as
    #[arg(value_name = "SESSION[@TURN]")]
    pub(crate) session: String,
    /// The first prompt of every fork; with several, each makes a fork of its own
    #[arg(value_name = "PROMPT")]
    pub(crate) prompts: Vec<String>,
    /// How many forks to make, at most 16
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) number: Option<u32>,
    /// The turn to go on from; where the session stands when absent
    #[arg(short, long, value_name = "NUMBER")]
    pub(crate) turn: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct Diff {
    /// The session: an id, the beginning of one, or `-` for the newest
    pub(crate) session: String,
    /// One turn's own changes, or those from the end of one turn to the end of another; 0 is the beginning,
    /// and without an end it is to where the session stands
    #[arg(short, long, value_name = "N|N..M")]
    pub(crate) turn: Option<units::Turns>,
    /// Only which files, and how many lines
    #[arg(long)]
    pub(crate) stat: bool,
    /// Every file of the machine, checkout or not; with --stat how many
    #[arg(long)]
    pub(crate) machine: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Restore {
    /// The session and the turn; `-@2` is turn 2 of the newest
    #[arg(value_name = "SESSION@TURN")]
    pub(crate) session: String,
}

#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// The sessions
    #[arg(required = true)]
    pub(crate) sessions: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// The session: an id, the beginning of one, or `-` for the newest
    pub(crate) session: String,
    /// Go on as it happens
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only what came after this event
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    pub(crate) after: u64,
    /// All that tools said, not only the last line of it
    #[arg(long)]
    pub(crate) full: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Events {
    /// The session: an id, the beginning of one, or `-` for the newest
    pub(crate) session: String,
    /// Only what came after this event
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    pub(crate) after: u64,
    /// Only these types, such as `tool_ended,turn_ended`
    #[arg(long, value_name = "TYPE", value_delimiter = ',')]
    pub(crate) types: Vec<String>,
    /// Go on as it happens
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Long inputs and outputs of tools in full, not only their ends
    #[arg(long)]
    pub(crate) full: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Pr {
    /// Show it, with what the platform itself saw
    Show(One),
}
