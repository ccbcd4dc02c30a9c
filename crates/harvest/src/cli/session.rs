//! Arguments of the verbs about sessions.

use std::path::PathBuf;

use clap::{Args, Subcommand, builder::PossibleValuesParser};

use harvest_proto::{
    AgentName, BranchName, Effort, ModelRef, Money, NetworkPolicy, RepositoryRef, SpendingScope,
    api::{PullRequestMode, SessionState},
};

use super::{SessionArg, units, words};

/// The one prompt of a verb.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// The task, in quotes; `-` reads standard input, `@FILE` a file [default: standard input, if
    /// it is not a terminal]
    pub(crate) prompt: Option<String>,
    // Only to tell the user that quotes are missing.
    #[arg(hide = true, value_name = "WORD")]
    pub(crate) more: Vec<String>,
    /// Write the prompt in your editor: $VISUAL, $EDITOR or vi
    #[arg(short = 'i', long)]
    pub(crate) editor: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// The repository: a folder, which is copied and not changed, a git URL, or a registered name
    /// (OWNER/NAME, or NAME if only one has it).
    /// May be repeated: all are checked out in /workspace, and the agent works in the first
    /// [default: the git repository around the current folder]
    #[arg(short, long = "repository", value_name = "FOLDER|URL|NAME")]
    pub(crate) repositories: Vec<String>,
    /// Copy the files of a folder without git without asking
    #[arg(long, requires = "repositories")]
    pub(crate) all: bool,
    /// The branch the first repository starts from
    #[arg(short, long, requires = "repositories")]
    pub(crate) base: Option<BranchName>,
    /// The agent: `claude`, `opencode`, `codex`, one that the server's configuration adds, or
    /// `scripted`, which runs the script in the prompt [default: claude]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) agent: Option<AgentName>,
    /// The model: NAME, SERVICE/NAME as `harvest models` lists them, or `scripted`, which needs
    /// no account and no key
    #[arg(short, long)]
    pub(crate) model: Option<ModelRef>,
    /// How much the model thinks: `low`, `medium` or `high` [default: the agent's]
    #[arg(long, value_name = "LEVEL", value_parser = words::<Effort>(Effort::WORDS))]
    pub(crate) effort: Option<Effort>,
    /// An image for the agent: PNG, JPEG, GIF or WebP, at most 5 MB. May be repeated, up to eight
    /// times
    #[arg(long, value_name = "FILE")]
    pub(crate) attach: Vec<std::path::PathBuf>,
    /// The network policy: `none`, `trusted`, or `full` for every name with a public address
    #[arg(long, value_name = "POLICY", value_parser = words::<NetworkPolicy>(NetworkPolicy::WORDS))]
    pub(crate) net: Option<NetworkPolicy>,
    /// A name that the session may connect to besides: NAME, or NAME:PORT,PORT
    #[arg(long, value_name = "NAME")]
    pub(crate) allow: Vec<String>,
    /// What the session's model calls may cost in dollars, at list prices, with those of sessions
    /// that its agent creates; `harvest budget` raises it
    #[arg(long, value_name = "AMOUNT")]
    pub(crate) budget: Option<Money>,
    /// A variable for hooks, agent and commands; NAME alone passes the value of this environment.
    /// Not for secrets: every process in the sandbox can read it
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// A secret of the session, which only the gateway uses: NAME alone takes the value from this
    /// environment, from standard input, or asks for it; NAME=VALUE is visible in `ps`. Deleted
    /// with the session
    #[arg(long = "secret", value_name = "NAME[=VALUE]")]
    pub(crate) secrets: Vec<String>,
    /// The snapshot to start from, of any session or sandbox; its checkouts are kept unchanged
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) from: Option<String>,
    /// A unique name for the session
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Take away the agent's tool for asking questions
    #[arg(long)]
    pub(crate) no_questions: bool,
    /// What is opened for the branch once it is pushed [default: the setting `pr`, which is ready]
    #[arg(long, value_name = "WHAT", value_parser = PossibleValuesParser::new(PullRequestMode::WORDS))]
    pub(crate) pr: Option<String>,
    /// Print the session's id and do not follow it
    #[arg(short, long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// Only sessions in this state
    #[arg(short, long, value_parser = PossibleValuesParser::new(SessionState::ALL.map(SessionState::as_str)))]
    pub(crate) state: Option<String>,
    /// Only sessions on this repository: OWNER/NAME, or NAME if only one has it
    #[arg(short, long, value_name = "NAME")]
    pub(crate) repository: Option<RepositoryRef>,
    /// Only sessions with this text in the title
    #[arg(long, value_name = "TEXT")]
    pub(crate) title: Option<String>,
    /// Only the session with this key
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Show at most this many sessions
    #[arg(short, long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) number: u32,
    /// Show all sessions, also archived ones
    #[arg(long, conflicts_with = "number")]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// The session: an id, an id prefix, or `-` for the newest
    pub(crate) session: String,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Stop the current turn and run this prompt next
    #[arg(long)]
    pub(crate) now: bool,
    /// Continue the session with this agent, from the next turn on. It gets the last messages
    #[arg(short, long, value_name = "NAME")]
    pub(crate) agent: Option<AgentName>,
    /// The model of this prompt, as for `harvest run`; with --agent, of the session from now on
    /// [default: the session's]
    #[arg(short, long)]
    pub(crate) model: Option<ModelRef>,
    /// How much the model thinks about this prompt: `low`, `medium` or `high`; with --agent, from
    /// now on [default: the session's]
    #[arg(long, value_name = "LEVEL", value_parser = words::<Effort>(Effort::WORDS))]
    pub(crate) effort: Option<Effort>,
    /// An image for the agent: PNG, JPEG, GIF or WebP, at most 5 MB. May be repeated, up to eight
    /// times
    #[arg(long, value_name = "FILE")]
    pub(crate) attach: Vec<std::path::PathBuf>,
    /// Follow the session
    #[arg(short, long)]
    pub(crate) follow: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum QueueCommand {
    /// List a session's prompts
    Ls(SessionArg),
    /// Remove a queued prompt
    Rm {
        /// The session
        session: String,
        /// The prompt: an id or an id prefix
        prompt: String,
    },
    /// Move a queued prompt
    Mv {
        /// The session
        session: String,
        /// The prompt: an id or an id prefix
        prompt: String,
        /// Its new position; 1 is next
        position: u32,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    /// The session, or `SESSION@TURN`; `-@2` is turn 2 of the newest, `@0` the start of a session
    #[arg(value_name = "SESSION[@TURN]")]
    pub(crate) session: String,
    /// The first prompt of every fork, in quotes; with several prompts, one fork per prompt. `-`
    /// reads standard input, `@FILE` a file
    #[arg(value_name = "PROMPT")]
    pub(crate) prompts: Vec<String>,
    /// Write the prompt in your editor: $VISUAL, $EDITOR or vi
    #[arg(short = 'i', long)]
    pub(crate) editor: bool,
    /// The number of forks, at most 16
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) number: Option<u32>,
    /// The turn to fork from [default: the current state]
    #[arg(short, long, value_name = "NUMBER")]
    pub(crate) turn: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// The session: an id, an id prefix, or `-` for the newest
    pub(crate) session: String,
    /// The changes of one turn, or from the end of one turn to the end of another. 0 is the start
    /// of the session; without an end, the range goes to the current state
    #[arg(short, long, value_name = "N|N..M")]
    pub(crate) turn: Option<units::TurnRange>,
    /// Print only file names and line counts
    #[arg(long)]
    pub(crate) stat: bool,
    /// Every file of the sandbox, not only of checkouts; with --stat only counts
    #[arg(long)]
    pub(crate) sandbox: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The session and the turn; `-@2` is turn 2 of the newest, `@0` the start
    #[arg(value_name = "SESSION[@TURN]")]
    pub(crate) session: String,
    /// A snapshot of the session instead of a turn, by name or id
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) snapshot: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ArtifactsArgs {
    /// The session: an id, an id prefix, or `-` for the newest
    pub(crate) session: String,
    /// The artifact to download [default: list them]
    pub(crate) name: Option<String>,
    /// Where to save it; `-` prints it [default: a file of its name in the current folder]
    #[arg(short, long, value_name = "FILE", requires = "name")]
    pub(crate) output: Option<std::path::PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// The sessions
    #[arg(required = true)]
    pub(crate) sessions: Vec<String>,
    /// Remove without asking
    #[arg(short, long)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// The session: an id, an id prefix, or `-` for the newest
    pub(crate) session: String,
    /// Keep following new events
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only events after this one
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    pub(crate) after: u64,
    /// Print the full output of tools, not only what came of them
    #[arg(long)]
    pub(crate) full: bool,
    /// Begin each line with its time
    #[arg(short, long)]
    pub(crate) times: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// The session: an id, an id prefix, or `-` for the newest
    pub(crate) session: String,
    /// Only events after this one
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    pub(crate) after: u64,
    /// Only events of these types, such as `tool_ended,turn_ended`
    #[arg(long, value_name = "TYPE", value_delimiter = ',')]
    pub(crate) types: Vec<String>,
    /// Keep following new events
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Include long tool inputs and outputs in full, not only their first and last part
    #[arg(long)]
    pub(crate) full: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    #[command(flatten)]
    pub(crate) session: SessionArg,
    /// The clone that gets the branch [default: the folder that the repository was added from]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) into: Option<PathBuf>,
    /// The name of the branch there [default: that of the session's branch]
    #[arg(long = "as", value_name = "NAME")]
    pub(crate) r#as: Option<BranchName>,
    /// One of the session's repositories: OWNER/NAME, or NAME
    #[arg(short, long, value_name = "REPOSITORY")]
    pub(crate) repository: Option<RepositoryRef>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PrCommand {
    /// Show the pull request with the result of Harvest's own check
    Show(SessionArg),
    /// Open a pull request of what the session has pushed, or update the open one
    Create(CreatePrArgs),
    /// Change an open pull request: title, description, draft or ready for review
    Update(UpdatePrArgs),
    /// Merge a pull request on the local forge
    Merge(MergePrArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CreatePrArgs {
    #[command(flatten)]
    pub(crate) text: PrTextArgs,
    /// Open it as a draft
    #[arg(long, conflicts_with = "ready")]
    pub(crate) draft: bool,
    /// Open it ready for review, whatever the session was created with
    #[arg(long)]
    pub(crate) ready: bool,
}

#[derive(Debug, Args)]
pub(crate) struct UpdatePrArgs {
    #[command(flatten)]
    pub(crate) text: PrTextArgs,
    /// Turn it into a draft
    #[arg(long, conflicts_with = "ready")]
    pub(crate) draft: bool,
    /// Mark a draft as ready for review
    #[arg(long)]
    pub(crate) ready: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PrTextArgs {
    #[command(flatten)]
    pub(crate) session: SessionArg,
    /// One of the session's repositories: OWNER/NAME, or NAME
    #[arg(short, long, value_name = "REPOSITORY")]
    pub(crate) repository: Option<RepositoryRef>,
    /// The title
    #[arg(long, value_name = "TEXT")]
    pub(crate) title: Option<String>,
    /// The description above the part that Harvest writes
    #[arg(long, value_name = "TEXT")]
    pub(crate) body: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct MergePrArgs {
    #[command(flatten)]
    pub(crate) session: SessionArg,
    /// One of the session's repositories: OWNER/NAME, or NAME
    #[arg(short, long, value_name = "REPOSITORY")]
    pub(crate) repository: Option<RepositoryRef>,
}

#[derive(Debug, Args)]
pub(crate) struct BudgetArgs {
    /// The session, and the new amount in dollars, or `none`; only an amount with --repository,
    /// --user or --day [default: list the budgets besides those of sessions]
    #[arg(value_name = "SESSION|AMOUNT")]
    pub(crate) arguments: Vec<String>,
    /// The budget of all sessions whose first repository this is: OWNER/NAME, or NAME if only one
    /// has it
    #[arg(short, long, value_name = "REPOSITORY")]
    pub(crate) repository: Option<RepositoryRef>,
    /// The budget of all sessions of the user with this e-mail address
    #[arg(long, value_name = "EMAIL", conflicts_with = "repository")]
    pub(crate) user: Option<String>,
    /// The budget of each day (UTC) of the server
    #[arg(long, conflicts_with_all = ["repository", "user"])]
    pub(crate) day: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// Only calls of this time, such as `24h` or `7d`; CPU and memory from the full hour on
    #[arg(long, value_name = "TIME", default_value = "30d")]
    pub(crate) since: humantime::Duration,
    /// Add up by `session`, `repository`, `user` or `day`
    #[arg(
        long, value_name = "SCOPE", default_value = "day",
        value_parser = words::<SpendingScope>(SpendingScope::WORDS)
    )]
    pub(crate) by: SpendingScope,
}
