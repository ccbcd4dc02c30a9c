//! The command line: every verb, argument and flag. Contains no behaviour.

mod backup;
pub(crate) mod help;
mod image;
mod inside;
mod repo;
mod sandbox;
mod server;
mod session;
pub(crate) mod units;

use std::{error::Error, ffi::OsString, net::SocketAddr, path::PathBuf, str::FromStr};

use clap::{
    Args, FromArgMatches, Parser, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use harvest_proto::RepositoryRef;

pub(crate) use backup::BackupCommand;
pub(crate) use image::ImageCommand;
pub(crate) use inside::{CpArgs, ShellArgs};
pub(crate) use repo::{RepoCommand, RepoSetting, ScheduleCommand};
pub(crate) use sandbox::{
    CopySide, CreateArgs, ExecArgs, Net, NetFlags, SandboxCommand, SnapshotCommand, VolumeCommand,
};
pub(crate) use server::{
    ApiArgs, CompletionArgs, ConfigArgs, CreateTokenArgs, SetUserArgs, TokenCommand, UserCommand,
};
pub(crate) use session::{
    ArtifactsArgs, BudgetArgs, CreatePrArgs, DiffArgs, EventsArgs, ForkArgs, LogsArgs, LsArgs,
    MergePrArgs, PrCommand, PrTextArgs, PromptArgs, PullArgs, QueueCommand, RestoreArgs, RmArgs,
    RunArgs, SendArgs, StatsArgs, UpdatePrArgs,
};

/// Background coding agents on machines you own: a prompt goes in, a tested pull request comes out.
#[derive(Debug, Parser)]
#[command(
    name = "harvest",
    version,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_help = "A session is named by its id, an id prefix, its key, or `-` for the newest one.\n\
                 `harvest help VERB` explains a verb with examples. Start here: `harvest quickstart`\n\
                 runs a full demo on this machine, without an account."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalFlags,
    /// Without a verb, `harvest` prints the status and the next useful command.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// Parses the arguments; prints help or an error and exits if that is what they ask for.
pub(crate) fn parse(args: impl Iterator<Item = OsString>) -> Cli {
    let mut command = help::command();
    let parsed = command
        .try_get_matches_from_mut(arguments(args))
        .and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| help::suggest(error).exit())
}

/// The session `-` in `-@2`, once `-@2` is rewritten. No id and no prefix of one contains a `-`.
pub(crate) const NEWEST_SESSION: &str = "ses_-";

/// Rewrites `-@2` (turn 2 of the newest session), which clap would take for a flag. Arguments after
/// `--` belong to the command and stay as they are.
fn arguments(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut before_separator = true;
    let number = |turn: &str| !turn.is_empty() && turn.bytes().all(|byte| byte.is_ascii_digit());
    let rewrite = |argument: OsString| {
        before_separator &= argument != "--";
        match argument.to_str().and_then(|text| text.strip_prefix("-@")) {
            Some(turn) if before_separator && number(turn) => {
                format!("{NEWEST_SESSION}@{turn}").into()
            }
            _ => argument,
        }
    };
    args.map(rewrite).collect()
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct GlobalFlags {
    /// Print JSON: one document, or one line per item for streams
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// More output
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) verbose: bool,
    /// Only results and errors
    #[arg(short, long, global = true, help_heading = "Global options", conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// The server to talk to [env: HARVEST_URL]
    #[arg(long, global = true, help_heading = "Global options", value_name = "URL")]
    pub(crate) url: Option<String>,
    /// The folder with this installation's state [env: HARVEST_HOME]
    #[arg(long, global = true, help_heading = "Global options", value_name = "FOLDER")]
    pub(crate) home: Option<PathBuf>,
    /// The configuration file [env: HARVEST_CONFIG]
    #[arg(long, global = true, help_heading = "Global options", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a full demo: sample repository, agent, pull request, fork
    Quickstart(QuickstartArgs),
    /// Start the server
    Up(UpArgs),
    /// Stop the server
    Down,
    /// Check this machine
    Doctor,
    /// Explain a verb, with examples
    Help(HelpArgs),
    /// Print the version
    Version,
    /// Start a session and follow it
    Run(RunArgs),
    /// List sessions, newest first
    Ls(LsArgs),
    /// Show a session
    Show(SessionArg),
    /// Follow a session live; Ctrl-C detaches
    Attach(SessionArg),
    /// List the files that the agent handed over, or download one
    Artifacts(ArtifactsArgs),
    /// Queue a prompt, or answer the agent's question
    Send(SendArgs),
    /// List, move and remove queued prompts
    #[command(subcommand)]
    Queue(QueueCommand),
    /// Stop the current turn
    Stop(SessionArg),
    /// Save a session's disk and stop its sandbox
    Pause(SessionArg),
    /// Start a paused session's sandbox and wait for it
    Resume(SessionArg),
    /// Start new sessions from a turn: files and conversation
    Fork(ForkArgs),
    /// Take a session back to a turn: files and conversation
    Restore(RestoreArgs),
    /// Commit a session's work and rebase it onto its base
    Sync(SessionArg),
    /// Stop a session's sandbox at once; its disk is saved
    Terminate(SessionArg),
    /// Archive a session; it can still be read and forked
    Archive(SessionArg),
    /// Remove sessions with their snapshots and history
    Rm(RmArgs),
    /// List a session's turns: prompt, outcome and changes
    Turns(SessionArg),
    /// Show a session's changes: all, one turn's, or between two turns
    Diff(DiffArgs),
    /// Print a session's history
    Logs(LogsArgs),
    /// Print a session's events: one JSON object per line
    Events(EventsArgs),
    /// Run a command in a fresh sandbox, or in that of a session
    Exec(Box<ExecArgs>),
    /// Open a terminal in a sandbox
    Shell(ShellArgs),
    /// Copy files into or out of a sandbox
    Cp(CpArgs),
    /// Bring a session's branch into a folder, as a branch
    Pull(PullArgs),
    /// Show, open, change and merge a session's pull requests
    #[command(subcommand)]
    Pr(PrCommand),
    /// Check a commit, a branch, a pull request or what a session pushed
    Verify(VerifyArgs),
    /// Register and prebuild repositories
    #[command(subcommand)]
    Repo(RepoCommand),
    /// Rebuild repositories that have moved, every half hour
    #[command(subcommand)]
    Schedule(ScheduleCommand),
    /// Show, move and clear what agents remembered about a repository
    #[command(subcommand)]
    Memory(MemoryCommand),
    /// Store secrets that only the gateway uses
    #[command(subcommand)]
    Secret(SecretCommand),
    /// List the models that sessions can use
    Models,
    /// Show and set what model calls may cost
    Budget(BudgetArgs),
    /// Show what model calls used and cost, and what sandboxes used
    Stats(StatsArgs),
    /// Show which names sandboxes may connect to
    #[command(subcommand)]
    Net(NetCommand),
    /// Manage access tokens
    #[command(subcommand)]
    Token(TokenCommand),
    /// Show users, and limit members' own sandboxes
    #[command(subcommand)]
    User(UserCommand),
    /// Send any request to the server and print its response
    Api(ApiArgs),
    /// Offer sessions as MCP tools to an agent: standard input and output
    Mcp,
    /// Print shell completions
    Completion(CompletionArgs),
    /// Show settings and where each comes from
    Config(ConfigArgs),
    /// Build, pull, import and list images of sandboxes
    #[command(subcommand)]
    Image(ImageCommand),
    /// Create and use standalone sandboxes; needs no server
    #[command(subcommand)]
    Sandbox(SandboxCommand),
    /// List, pin and remove snapshots
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Create, list and remove volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Save an installation to a file, or load one
    #[command(subcommand)]
    Backup(BackupCommand),
    /// Show disk usage; with -v of every item
    Df,
    /// Remove unused data
    Gc(GcArgs),
    /// The parent process of every sandbox; started on demand
    #[command(hide = true)]
    Zygote(ZygoteArgs),
}

#[derive(Debug, Args)]
pub(crate) struct HelpArgs {
    /// The verb, such as `run` or `repo add` [default: all verbs]
    #[arg(value_name = "VERB")]
    pub(crate) path: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SessionArg {
    /// The session: an id, an id prefix, or `-` for the newest
    pub(crate) session: String,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// A session, or OWNER/NAME[@BRANCH|@COMMIT|#NUMBER]: the base by default
    #[arg(value_name = "ID|REPO[@COMMIT|#NUMBER]")]
    pub(crate) target: String,
}

#[derive(Debug, Args)]
pub(crate) struct QuickstartArgs {
    /// The agent [default: claude]
    #[arg(short, long, value_parser = ["claude", "opencode", "codex"], conflicts_with = "clean")]
    pub(crate) agent: Option<String>,
    /// Remove the data of an earlier quickstart
    #[arg(long)]
    pub(crate) clean: bool,
    /// Keep the server running at the end
    #[arg(long, conflicts_with = "clean")]
    pub(crate) keep: bool,
}

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// The address and port to listen on [env: HARVEST_LISTEN] [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// Another host name this server accepts; may be repeated [env: HARVEST_HOSTS]
    #[arg(long = "host", value_name = "NAME")]
    pub(crate) hosts: Vec<String>,
    /// Leave sandboxes running on shutdown; the next `harvest up` adopts them
    #[arg(long)]
    pub(crate) keep: bool,
    /// Run in the background: return once ready, log to `server.log` in the home
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// Set for the background process itself
    #[arg(long, hide = true, conflicts_with = "detach")]
    pub(crate) detached: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MemoryCommand {
    /// Print what agents remembered
    Show {
        /// The repository: OWNER/NAME, or NAME if only one has it
        repository: RepositoryRef,
    },
    /// Replace the memory by a file of the MCP memory server
    Import {
        /// The repository: OWNER/NAME, or NAME if only one has it
        repository: RepositoryRef,
        /// The JSONL file, or `-` for standard input
        file: PathBuf,
        /// Replace what is there without asking
        #[arg(short, long)]
        yes: bool,
    },
    /// Print the memory as a file of the MCP memory server (JSONL)
    Export {
        /// The repository: OWNER/NAME, or NAME if only one has it
        repository: RepositoryRef,
    },
    /// Remove everything that agents remembered
    Clear {
        /// The repository: OWNER/NAME, or NAME if only one has it
        repository: RepositoryRef,
        /// Remove without asking
        #[arg(short, long)]
        yes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum SecretCommand {
    /// Store a secret; its value is read from standard input, or typed without echo
    Set {
        /// Its name, such as ANTHROPIC_API_KEY
        name: String,
        #[command(flatten)]
        owner: SecretOwnerArgs,
        /// A host to whose requests over TLS the gateway adds it [default: hosts stay as they are]
        #[arg(long = "host", value_name = "NAME")]
        hosts: Vec<String>,
        /// The header to add, with {} for the value [default: Authorization: Bearer {}]
        #[arg(long, requires = "hosts")]
        header: Option<String>,
    },
    /// List secrets, and where each may be used
    Ls,
    /// Remove a secret
    Rm {
        /// The secret's name
        name: String,
        #[command(flatten)]
        owner: SecretOwnerArgs,
    },
    /// List the requests to which a secret was added
    Uses {
        /// The secret's name
        name: String,
    },
}

/// What a secret belongs to; the whole server without any of these.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct SecretOwnerArgs {
    /// For this repository's sessions and builds: OWNER/NAME, or NAME if only one has it
    #[arg(short, long, value_name = "REPOSITORY")]
    pub(crate) repository: Option<RepositoryRef>,
    /// For this session: an id, an id prefix, or `-` for the newest
    #[arg(long)]
    pub(crate) session: Option<String>,
    /// For your own sessions
    #[arg(long)]
    pub(crate) user: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetCommand {
    /// List the names sandboxes may connect to, and where each name comes from
    Ls {
        /// The session: an id, an id prefix, or `-` for the newest [default: new sessions]
        session: Option<String>,
        /// The repository whose builds are meant: OWNER/NAME, or NAME if only one has it
        #[arg(short, long, value_name = "REPOSITORY", conflicts_with = "session")]
        repository: Option<RepositoryRef>,
    },
    /// List a session's connections, and those that were refused
    Log {
        /// The session: an id, an id prefix, or `-` for the newest
        session: String,
    },
    /// Allow connections to a name, in a running session too
    Allow {
        #[command(flatten)]
        rule: NetRuleArgs,
        /// The name may have an address of a private network or of the server's machine: only with
        /// --repository or --everywhere
        #[arg(long)]
        private: bool,
    },
    /// Deny connections to a name and cut those that are open; wins over every allowed name
    Deny(NetRuleArgs),
    /// Remove the rules for a name
    Rm(NetRuleArgs),
}

#[derive(Debug, Args)]
pub(crate) struct NetRuleArgs {
    /// The session, then host names; only names with --repository or --everywhere.
    /// NAME:PORT,PORT for ports other than 80 and 443; '*.example.org' for all names below it
    #[arg(required = true, value_name = "SESSION|NAME")]
    pub(crate) arguments: Vec<String>,
    /// A rule for all sessions and builds of this repository: OWNER/NAME, or NAME if only one has
    /// it
    #[arg(short, long, value_name = "REPOSITORY", conflicts_with = "everywhere")]
    pub(crate) repository: Option<RepositoryRef>,
    /// A rule for all sessions and builds
    #[arg(long)]
    pub(crate) everywhere: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Only print what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Also remove every sandbox of this home with its disk; no server may be running
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) all: bool,
    /// Remove all sandboxes without asking
    #[arg(short, long, requires = "all")]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ZygoteArgs {
    /// Check the host's sandbox features and print the findings
    #[arg(long)]
    pub(crate) probe: bool,

    /// The installation's home
    pub(crate) at: PathBuf,
}

/// A value that is one of these words, which the help lists.
fn words<T>(words: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: Error + Send + Sync> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| word.parse::<T>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_session_shorthand_is_rewritten_before_separator() {
        let typed = ["harvest", "fork", "-@12", "-t", "-@x", "--", "-@3"].map(OsString::from);
        let expected =
            ["harvest", "fork", "ses_-@12", "-t", "-@x", "--", "-@3"].map(OsString::from);
        assert_eq!(arguments(typed.into_iter()), expected);
    }

    #[test]
    fn clap_accepts_the_command_definition() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
