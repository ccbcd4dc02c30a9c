//! The verbs that are about machines rather than sessions: `exec`, `sandbox`, `snapshot`, `volume`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand, ValueEnum};
use harvest_engine::VolumeName;
use harvest_proto::api::machines::{self, SandboxLimits, SandboxNetwork, VolumeMount};

use super::{
    inside::Shell,
    units::{Cores, Size},
};

/// What a new sandbox may use.
#[derive(Debug, Clone, Args)]
pub(crate) struct LimitFlags {
    /// Memory, swap included, such as `512m` or `2g` [default: 4g]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Processor cores, such as `2` or `0.5` [default: 2]
    #[arg(long, value_name = "CORES")]
    cpus: Option<Cores>,
    /// Processes and threads [default: 4096]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pids: Option<u32>,
    /// What it may write to its own disk, volumes apart [default: 10g]
    #[arg(long, value_name = "SIZE")]
    disk: Option<Size>,
}

/// What a new sandbox has besides its own disk.
#[derive(Debug, Clone, Args)]
pub(crate) struct VolumeFlags {
    /// A volume, and where it is inside; with `:ro` nobody inside can write to it
    #[arg(long = "volume", value_name = "NAME:/PATH[:ro]", value_parser = volume_mount)]
    pub(crate) volumes: Vec<VolumeMount>,
    /// Without /mnt/state, where one run finds what another has left
    #[arg(long)]
    pub(crate) no_state: bool,
}

impl VolumeFlags {
    /// Whether any was given.
    pub(crate) fn any(&self) -> bool {
        !self.volumes.is_empty() || self.no_state
    }
}

/// `NAME:/path` or `NAME:/path:ro`.
fn volume_mount(text: &str) -> Result<VolumeMount, String> {
    let wrong = || format!("`{text}` is no volume; write it as NAME:/path or NAME:/path:ro");
    let (name, rest) = text.split_once(':').ok_or_else(wrong)?;
    let (inside, read_only) = match rest.strip_suffix(":ro") {
        Some(inside) => (inside, true),
        None => (rest.strip_suffix(":rw").unwrap_or(rest), false),
    };
    let name: VolumeName =
        name.parse().map_err(|error: harvest_engine::EngineError| error.to_string())?;
    if !inside.starts_with('/') {
        return Err(wrong());
    }
    Ok(VolumeMount { name: name.to_string(), inside: inside.to_owned(), read_only })
}

impl LimitFlags {
    /// These; the host has its own for the rest.
    pub(crate) fn limits(&self) -> SandboxLimits {
        SandboxLimits {
            memory_bytes: self.memory.map(|size| size.0),
            cpu_millis_per_second: self.cpus.map(|cores| cores.millis()),
            pids: self.pids,
            writable_bytes: self.disk.map(|size| size.0),
            lifetime_secs: None,
        }
    }

    /// Whether any was given.
    pub(crate) fn any(&self) -> bool {
        self.memory.is_some() || self.cpus.is_some() || self.pids.is_some() || self.disk.is_some()
    }
}

/// What a sandbox of one's own can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Net {
    /// Nothing: names are refused at once
    None,
    /// UNSAFE: all that this machine reaches, its loopback included
    Host,
}

impl Net {
    pub(crate) fn network(self) -> SandboxNetwork {
        match self {
            Self::None => SandboxNetwork::None,
            Self::Host => SandboxNetwork::Host,
        }
    }
}

/// What `--code` is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Language {
    Python,
    Node,
    Bash,
}

impl From<Language> for machines::Language {
    fn from(language: Language) -> Self {
        match language {
            Language::Python => Self::Python,
            Language::Node => Self::Node,
            Language::Bash => Self::Bash,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// `sbx_…` for a sandbox, else a session: an id, the beginning of one, or `-` for the newest session.
    /// Without it, in a fresh sandbox that is gone afterwards
    #[arg(value_name = "SANDBOX|SESSION")]
    pub(crate) place: Option<String>,
    /// The image of a fresh sandbox; built first when it is missing and a recipe has its name
    #[arg(long, value_name = "NAME", default_value = "base")]
    pub(crate) image: String,
    /// A variable for the command; NAME alone passes this environment's own
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Working folder; the image's, or a session's checkout, when absent
    #[arg(short = 'w', long, value_name = "FOLDER")]
    pub(crate) workdir: Option<String>,
    /// `harvest`, `root` or a number; the image's when absent
    #[arg(short, long)]
    pub(crate) user: Option<String>,
    /// Kill it and all it started after this, such as `30s` or `5m`; `0s` is never [default: 30m]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// Give it what comes on standard input
    #[arg(short = 'i', long = "stdin", alias = "interactive")]
    pub(crate) stdin: bool,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) volumes: VolumeFlags,
    /// What a fresh sandbox can reach
    #[arg(long, value_name = "NETWORK", value_enum, default_value = "none")]
    pub(crate) net: Net,
    /// Run this text instead of a command; what follows `--` are its arguments
    #[arg(long, value_name = "TEXT", requires = "lang")]
    pub(crate) code: Option<String>,
    /// What the text is written in
    #[arg(long, value_name = "LANGUAGE", value_enum, requires = "code")]
    pub(crate) lang: Option<Language>,
    /// The command and its arguments
    #[arg(required_unless_present = "code", last = true)]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Sandbox {
    /// Start a sandbox that stays until it is removed; prints its id
    Create(Create),
    /// List sandboxes, newest first
    Ls,
    /// Show what a sandbox was asked to be and what became of it
    Inspect(SandboxOne),
    /// Copy a file or a tree into or out of a sandbox; modes and links are kept, owners are not
    Cp {
        /// What to copy: a path here, `SANDBOX:/path`, or `-` for standard input
        #[arg(value_name = "FROM", allow_hyphen_values = true)]
        from: String,
        /// Where to: a path here, `SANDBOX:/path`, or `-` for standard output. A folder takes the copy in
        #[arg(value_name = "TO", allow_hyphen_values = true)]
        to: String,
        /// Whose the copies inside are; the image's user when absent
        #[arg(short, long)]
        user: Option<String>,
    },
    /// Open a terminal in a sandbox; ends with what runs in it
    Shell(SandboxShell),
    /// Keep the disk of a sandbox, which goes on; prints the snapshot's id
    Snapshot(SandboxOne),
    /// Start a new sandbox from a snapshot; or, with a sandbox first, put that one back to it. What was on
    /// its disk is kept as another snapshot
    Restore {
        /// The sandbox to put back, then the snapshot; or the snapshot alone
        #[arg(required = true, num_args = 1..=2, value_names = ["SANDBOX", "SNAPSHOT"])]
        what: Vec<String>,
    },
    /// Start others from a sandbox's disk as it is now; prints their ids
    Fork {
        /// The sandbox: an id, the beginning of one, or `-` for the newest
        sandbox: String,
        /// How many
        #[arg(short = 'n', long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
        count: u16,
    },
    /// End a sandbox's processes and keep its disk; `harvest sandbox start` goes on with it
    Stop(SandboxMany),
    /// Start stopped or dead sandboxes again, each with the disk it left
    Start(SandboxMany),
    /// Print every step from nothing to a running supervisor; nothing is started
    Plan {
        /// The image it starts from; the configured one when absent
        #[arg(long, value_name = "NAME")]
        image: Option<String>,
    },
    /// End sandboxes and throw their disks away
    Rm {
        /// The sandboxes: ids, the beginnings of them, or `-` for the newest
        #[arg(value_name = "SANDBOX", required_unless_present = "all")]
        sandboxes: Vec<String>,
        /// All but those of sessions
        #[arg(long, conflicts_with = "sandboxes")]
        all: bool,
        /// Also one that belongs to a session, which then goes on from its last snapshot
        #[arg(long, conflicts_with = "all")]
        force: bool,
    },
}

/// Names one sandbox.
#[derive(Debug, Args)]
pub(crate) struct SandboxOne {
    /// The sandbox: an id, the beginning of one, or `-` for the newest
    pub(crate) sandbox: String,
}

/// A terminal in a sandbox.
#[derive(Debug, Args)]
pub(crate) struct SandboxShell {
    /// The sandbox: an id, the beginning of one, or `-` for the newest
    sandbox: String,
    /// Who it runs as: `harvest`, `root` or a number; the image's user when absent
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// Where it runs; where the image says when absent
    #[arg(short, long, value_name = "FOLDER")]
    workdir: Option<String>,
    /// What to run instead of a shell, and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl From<SandboxShell> for Shell {
    fn from(SandboxShell { sandbox, user, workdir, command }: SandboxShell) -> Self {
        Self { session: sandbox, user, workdir, command }
    }
}

/// Names sandboxes.
#[derive(Debug, Args)]
pub(crate) struct SandboxMany {
    /// The sandboxes: ids, the beginnings of them, or `-` for the newest
    #[arg(value_name = "SANDBOX", required = true)]
    pub(crate) sandboxes: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// The image it starts from; built first when it is missing and a recipe has its name
    #[arg(long, value_name = "NAME", default_value = "base")]
    pub(crate) image: String,
    /// The snapshot it starts from, instead of an image
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image")]
    pub(crate) from: Option<String>,
    /// A variable for every command in it; NAME alone passes this environment's own
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) volumes: VolumeFlags,
    /// End it after this, such as `24h`, and keep its disk; never when absent
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) lifetime: Option<Duration>,
    /// What it can reach
    #[arg(long, value_name = "NETWORK", value_enum, default_value = "none")]
    pub(crate) net: Net,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Snapshot {
    /// List snapshots, newest first
    Ls,
    /// Keep a session's snapshot whatever the rules of retention say
    Pin {
        /// The session and the turn; without a turn where the session stands
        #[arg(value_name = "SESSION[@TURN]")]
        at: String,
    },
    /// Keep it no longer than the rules of retention say
    Unpin {
        /// The session and the turn; without a turn where the session stands
        #[arg(value_name = "SESSION[@TURN]")]
        at: String,
    },
    /// Forget snapshots; what only they held goes with the next `harvest gc`
    Rm {
        /// The snapshots: ids or the beginnings of them
        #[arg(value_name = "SNAPSHOT", required = true)]
        snapshots: Vec<String>,
        /// Also one that a session may go on from
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Volume {
    /// Make a volume: a place that outlives sandboxes. Its room is taken on the disk at once
    Create {
        /// Its name: letters, digits, `_` and `-`
        name: VolumeName,
        /// How large it is
        #[arg(long, value_name = "SIZE", default_value = "2g")]
        size: Size,
        /// How many files it can hold [default: 500000, fewer where it is small]
        #[arg(long, value_name = "NUMBER")]
        files: Option<u64>,
    },
    /// List volumes
    Ls,
    /// Throw volumes away with everything in them
    Rm {
        /// Their names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<VolumeName>,
    },
}

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Side {
    Here(PathBuf),
    Inside { sandbox: String, path: String },
}

impl Side {
    /// `SANDBOX:/path` is inside; everything else is here. `./a:/b` is how to name such a file here.
    pub(crate) fn parse(text: &str) -> Self {
        match text.split_once(':') {
            Some((sandbox, path)) if !sandbox.contains('/') && path.starts_with('/') => {
                // `-:/path` reaches us as `:/path`: see `arguments`.
                let sandbox = if sandbox.is_empty() { "-" } else { sandbox };
                Self::Inside { sandbox: sandbox.to_owned(), path: path.to_owned() }
            }
            _ => Self::Here(text.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_a_name_and_a_place() {
        let mount = volume_mount("cache:/var/cache:ro").unwrap();
        assert_eq!(
            (mount.name.as_str(), mount.inside.as_str(), mount.read_only),
            ("cache", "/var/cache", true)
        );
        assert!(!volume_mount("cache:/a:b").unwrap().read_only);
        for text in ["cache", "cache:relative", ":/a", "../x:/a", "/etc:/etc"] {
            assert!(volume_mount(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_path_inside_has_its_sandbox_before_a_colon() {
        let inside =
            |sandbox: &str, path: &str| Side::Inside { sandbox: sandbox.into(), path: path.into() };
        assert_eq!(Side::parse("sbx_4kq:/etc"), inside("sbx_4kq", "/etc"));
        assert_eq!(Side::parse(":/a:b"), inside("-", "/a:b"));
        for here in ["a:b", "./a:/b", "/x/a:/b", "plain"] {
            assert_eq!(Side::parse(here), Side::Here(here.into()), "{here}");
        }
    }
}
