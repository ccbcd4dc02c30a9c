//! What can be typed: every verb, argument and flag. Says nothing about what happens then.

mod image;
mod inside;
mod machine;
mod server;
mod session;
pub(crate) mod units;

use std::{ffi::OsString, net::SocketAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand};

pub(crate) use image::Image;
pub(crate) use inside::{Cp, Shell};
pub(crate) use machine::{Create, Exec, Sandbox, Side, Snapshot, Volume};
pub(crate) use server::{Api, Completion, ConfigArgs, CreateToken, Token};
pub(crate) use session::{Diff, Events, Fork, Logs, Ls, Pr, Queue, Restore, Rm, Run, Send};

/// Background coding agents on machines you own: a prompt goes in, a tested pull request comes out.
#[derive(Debug, Parser)]
#[command(
    name = "harvest",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    after_help = "A session is named by its id, the beginning of it, its key, or `-` for the newest one.\n\
                  Start here: `harvest quickstart` shows everything on this machine, without an account."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    /// Without one, what is going on and what to do next is printed.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// The arguments as clap understands them: `-@2`, the newest session at turn 2, would be a flag to it, and
/// so would `-:/path`, a path in the newest sandbox.
pub(crate) fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut ours = true;
    let number = |turn: &str| !turn.is_empty() && turn.bytes().all(|byte| byte.is_ascii_digit());
    let plain = |argument: OsString| {
        ours &= argument != "--";
        match argument.to_str().and_then(|text| text.strip_prefix("-@")) {
            Some(turn) if ours && number(turn) => format!("@{turn}").into(),
            None if ours && argument.as_encoded_bytes().starts_with(b"-:/") => {
                argument.to_string_lossy()[1..].to_owned().into()
            }
            _ => argument,
        }
    };
    given.map(plain).collect()
}

/// Flags of every verb.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Global {
    /// Print JSON: one document, or one line per item where there is a stream
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Say more
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
    /// Say nothing but results and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// The server to talk to [env: HARVEST_URL]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Where this installation keeps its state [env: HARVEST_HOME]
    #[arg(long, global = true, value_name = "FOLDER")]
    pub(crate) home: Option<PathBuf>,
    /// The configuration file [env: HARVEST_CONFIG]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show everything once on this machine: sample repository, agent, pull request, fork
    Quickstart(Quickstart),
    /// Start the server
    Up(Up),
    /// End the server of this home, as ctrl-c would
    Down,
    /// See what this machine lacks
    Doctor,
    /// Start a session and follow it
    Run(Run),
    /// List sessions
    Ls(Ls),
    /// Show a session
    Show(One),
    /// Follow a session live; ctrl-c detaches
    Attach(One),
    /// Queue a prompt, or answer the agent's question
    Send(Send),
    /// See and change the queue of a session
    #[command(subcommand)]
    Queue(Queue),
    /// Stop the turn in progress
    Stop(One),
    /// Keep a session on disk and end its sandbox
    Pause(One),
    /// Start the sandbox of a paused session again and wait until it takes prompts
    Resume(One),
    /// Go on from the end of a turn in another session: files and conversation
    Fork(Fork),
    /// Go back to the end of a turn in the same session: files and conversation
    Restore(Restore),
    /// End the sandbox of a session at once, whatever it is doing; its disk is kept
    Terminate(One),
    /// Put a session away; it can be read and forked still
    Archive(One),
    /// Delete a session with its snapshots and its history
    Rm(Rm),
    /// List a session's turns: what was asked, how it ended, what it changed
    Turns(One),
    /// Show what a session has changed, in one turn, or between two
    Diff(Diff),
    /// Print what happened in a session
    Logs(Logs),
    /// Print a session's events for programs: one JSON object per line
    Events(Events),
    /// Run a command: in a fresh sandbox, in a sandbox of yours, or in a session's
    Exec(Box<Exec>),
    /// Open a terminal in a session's sandbox, or in one of yours
    Shell(Shell),
    /// Copy files into a sandbox or out of it: a session's, or one of yours
    Cp(Cp),
    /// Show a session's pull request
    #[command(subcommand)]
    Pr(Pr),
    /// Register and prebuild repositories
    #[command(subcommand)]
    Repo(Repo),
    /// Keep secrets that only the gateway uses
    #[command(subcommand)]
    Secret(Secret),
    /// Make and revoke the tokens by which people and programs ask
    #[command(subcommand)]
    Token(Token),
    /// Send any request to the server and print its answer
    Api(Api),
    /// Print what a shell needs to complete verbs and flags
    Completion(Completion),
    /// Show what is configured, and who said so
    Config(ConfigArgs),
    /// Build, import, pull and list the images sandboxes start from
    #[command(subcommand)]
    Image(Image),
    /// Make and use sandboxes of your own; needs no server
    #[command(subcommand)]
    Sandbox(Sandbox),
    /// List and forget snapshots
    #[command(subcommand)]
    Snapshot(Snapshot),
    /// Make and remove volumes
    #[command(subcommand)]
    Volume(Volume),
    /// Show what takes how much room; with -v each thing by itself
    Df,
    /// Remove what nothing uses any more
    Gc(Gc),
    /// The parent of every sandbox; started on demand
    #[command(hide = true)]
    Zygote(Zygote),
}

/// Names one session.
#[derive(Debug, Args)]
pub(crate) struct One {
    /// The session: an id, the beginning of one, or `-` for the newest
    pub(crate) session: String,
}

#[derive(Debug, Args)]
pub(crate) struct Quickstart {
    /// Remove what an earlier quickstart made
    #[arg(long)]
    pub(crate) clean: bool,
    /// Go on serving at the end
    #[arg(long, conflicts_with = "clean")]
    pub(crate) keep: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Up {
    /// Address and port [env: HARVEST_LISTEN] [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// Another name this server answers to [env: HARVEST_HOSTS]
    #[arg(long = "host", value_name = "NAME")]
    pub(crate) hosts: Vec<String>,
    /// Leave sandboxes running at the end; the next `harvest up` adopts them
    #[arg(long)]
    pub(crate) keep: bool,
    /// Go on in the background: return when it is ready, log to `server.log` in the home
    #[arg(short, long)]
    pub(crate) detach: bool,
    /// In the background already
    #[arg(long, hide = true, conflicts_with = "detach")]
    pub(crate) detached: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Repo {
    /// Register a repository
    Add {
        /// An http or https URL; or a folder, which is put on the local forge
        // Not `url`: clap would take the global flag of that name for it.
        #[arg(value_name = "URL|FOLDER")]
        location: String,
        /// What to call it; the URL's last part when absent
        #[arg(long)]
        name: Option<String>,
        /// The branch work starts from
        #[arg(short, long)]
        base: Option<String>,
        /// The secret that opens it
        #[arg(long)]
        secret: Option<String>,
        /// The image sandboxes start from
        #[arg(long)]
        image: Option<String>,
    },
    /// Build the state sessions start from
    Build {
        /// The repository
        name: String,
    },
    /// List repositories
    Ls,
    /// Forget a repository and its builds
    Rm {
        /// The repository
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Secret {
    /// Store a secret; its value is read from standard input, or typed without being shown
    Set {
        /// Its name, such as ANTHROPIC_API_KEY
        name: String,
    },
    /// List the names
    Ls,
    /// Forget a secret
    Rm {
        /// Its name
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Gc {
    /// Only say what would go
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// End every sandbox of this home as well and throw its disk away; no server may be running
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Zygote {
    /// Try what sandboxes need of this host and say what was found
    #[arg(long)]
    pub(crate) probe: bool,

    /// Its installation
    pub(crate) at: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_session_at_a_turn_is_no_flag_but_a_commands_own_arguments_stay() {
        let given = ["harvest", "fork", "-@12", "-:/a", "-t", "-@x", "--", "-@3", "-:/"]
            .map(OsString::from);
        let expected =
            ["harvest", "fork", "@12", ":/a", "-t", "-@x", "--", "-@3", "-:/"].map(OsString::from);
        assert_eq!(arguments(given.into_iter()), expected);
    }

    #[test]
    fn the_command_line_is_sound() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
