//! Arguments of the verbs about sandboxes: `exec`, `sandbox`, `snapshot`, `volume`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand, ValueEnum};
use harvest_engine::VolumeName;
use harvest_proto::api::{SandboxLimits, VolumeMount};

use super::{
    inside::ShellArgs,
    units::{Cores, Size},
};

/// Resource limits of a new sandbox.
#[derive(Debug, Clone, Args)]
pub(crate) struct LimitFlags {
    /// Memory including swap, such as `512m` or `2g` [default: 4g]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// CPU cores, such as `2` or `0.5` [default: 2]
    #[arg(long, value_name = "CORES")]
    cpus: Option<Cores>,
    /// Processes and threads [default: the setting `limits.processes`]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pids: Option<u32>,
    /// Disk space it may write, without volumes [default: the setting `limits.disk`]
    #[arg(long, value_name = "SIZE")]
    disk: Option<Size>,
}

/// Volumes of a new sandbox.
#[derive(Debug, Clone, Args)]
pub(crate) struct VolumeFlags {
    /// A volume and its mount path; `:ro` mounts it read-only
    #[arg(long = "volume", value_name = "NAME:/PATH[:ro]", value_parser = volume_mount)]
    pub(crate) volumes: Vec<VolumeMount>,
    /// Do not mount /mnt/state, the volume that keeps files between runs
    #[arg(long)]
    pub(crate) no_state: bool,
}

impl VolumeFlags {
    pub(crate) fn is_any_set(&self) -> bool {
        !self.volumes.is_empty() || self.no_state
    }
}

/// `NAME:/path` or `NAME:/path:ro`.
fn volume_mount(text: &str) -> Result<VolumeMount, String> {
    let wrong = || format!("`{text}` is not a volume; write it as NAME:/path or NAME:/path:ro");
    let (name, rest) = text.split_once(':').ok_or_else(wrong)?;
    let (inside, read_only) = match rest.strip_suffix(":ro") {
        Some(inside) => (inside, true),
        None => (rest.strip_suffix(":rw").unwrap_or(rest), false),
    };
    let name: VolumeName =
        name.parse().map_err(|error: harvest_engine::ParseVolumeNameError| error.to_string())?;
    if !inside.starts_with('/') {
        return Err(wrong());
    }
    Ok(VolumeMount { name: name.to_string(), inside: inside.to_owned(), read_only })
}

impl LimitFlags {
    /// The limits that were given; the server's defaults apply to the others.
    pub(crate) fn limits(&self) -> SandboxLimits {
        SandboxLimits {
            memory_bytes: self.memory.map(|size| size.0),
            cpu_millis_per_second: self.cpus.map(|cores| cores.millis()),
            pids: self.pids,
            writable_bytes: self.disk.map(|size| size.0),
            lifetime_secs: None,
        }
    }
}

/// The network of a standalone sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Net {
    /// No network, besides the names of `--allow`
    None,
    /// Package registries, by name through the gateway
    Trusted,
    /// Every name with a public address, through the gateway
    Full,
    /// UNSAFE: everything this machine can reach, including its loopback
    Host,
}

/// What a standalone sandbox reaches.
#[derive(Debug, Clone, Args)]
pub(crate) struct NetFlags {
    /// The network
    #[arg(long, value_name = "NETWORK", value_enum, default_value = "none")]
    pub(crate) net: Net,
    /// A name that it may reach besides: `NAME`, `*.NAME` or `NAME:PORT`
    #[arg(long, value_name = "NAME")]
    pub(crate) allow: Vec<String>,
}

impl NetFlags {
    pub(crate) fn is_any_set(&self) -> bool {
        self.net != Net::None || !self.allow.is_empty()
    }
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// `sbx_…` for a standalone sandbox, else a session: an id, an id prefix, or `-` for the newest
    /// session [default: a fresh sandbox that is removed afterwards]
    #[arg(value_name = "SANDBOX|SESSION")]
    pub(crate) target: Option<String>,
    /// The image of a fresh sandbox; built first if it is missing and a recipe has its name
    #[arg(long, value_name = "NAME", default_value = "base")]
    pub(crate) image: String,
    /// A variable for the command; NAME alone passes the value of this environment
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// The working folder [default: the image's, or the session's checkout]
    #[arg(short = 'w', long, value_name = "FOLDER")]
    pub(crate) workdir: Option<String>,
    /// The user to run as: `harvest`, `root` or a number [default: the image's user]
    #[arg(short, long)]
    pub(crate) user: Option<String>,
    /// Kill the command and its children after this time, such as `30s` or `5m`; `0s` is never
    /// [default: 30m]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// Pass standard input to the command
    #[arg(short = 'i', long = "stdin", alias = "interactive")]
    pub(crate) stdin: bool,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) volumes: VolumeFlags,
    #[command(flatten)]
    pub(crate) net: NetFlags,
    /// Run this code instead of a command; arguments after `--` are passed to it
    #[arg(long, value_name = "TEXT", requires = "lang")]
    pub(crate) code: Option<String>,
    /// The language of the code
    #[arg(long, value_name = "LANGUAGE", value_parser = ["python", "node", "bash"], requires = "code")]
    pub(crate) lang: Option<String>,
    /// The command and its arguments
    #[arg(required_unless_present = "code", last = true)]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SandboxCommand {
    /// Create a sandbox that runs until it is removed, and print its id
    Create(CreateArgs),
    /// List sandboxes, newest first
    Ls,
    /// Show a sandbox's settings and state
    Inspect(SandboxArg),
    /// Copy files or folders to or from a sandbox; modes and links are kept, owners are not
    Cp {
        /// The source: a local path, `SANDBOX:/path`, or `-` for standard input
        #[arg(value_name = "FROM", allow_hyphen_values = true)]
        from: String,
        /// The target: a local path, `SANDBOX:/path`, or `-` for standard output. The copy goes
        /// into a target that is a folder
        #[arg(value_name = "TO", allow_hyphen_values = true)]
        to: String,
        /// Copy with this user's access in the sandbox [default: the image's user]
        #[arg(short, long)]
        user: Option<String>,
    },
    /// Open a terminal in a sandbox
    Shell(SandboxShellArgs),
    /// Save a snapshot of a running sandbox's disk and print its id
    Snapshot(SandboxArg),
    /// Start a new sandbox from a snapshot, or reset a sandbox to one; the disk it had is saved as
    /// another snapshot
    Restore {
        /// The sandbox to reset and the snapshot, or only the snapshot
        #[arg(required = true, num_args = 1..=2, value_names = ["SANDBOX", "SNAPSHOT"])]
        what: Vec<String>,
    },
    /// Start copies of a sandbox from its current disk and print their ids
    Fork {
        /// The sandbox: an id, an id prefix, or `-` for the newest
        sandbox: String,
        /// The number of copies
        #[arg(short = 'n', long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
        count: u16,
    },
    /// Stop sandboxes and keep their disks; `harvest sandbox start` starts them again
    Stop(SandboxArgs),
    /// Start stopped or dead sandboxes again with their disks
    Start(SandboxArgs),
    /// Print every step of a sandbox's start without starting it
    Plan {
        /// The image [default: the configured one]
        #[arg(long, value_name = "NAME")]
        image: Option<String>,
    },
    /// Remove sandboxes with their disks
    Rm {
        /// The sandboxes: ids, id prefixes, or `-` for the newest
        #[arg(value_name = "SANDBOX", required_unless_present = "all")]
        sandboxes: Vec<String>,
        /// Remove all sandboxes except those of sessions
        #[arg(long, conflicts_with = "sandboxes")]
        all: bool,
        /// Also remove a sandbox of a session, which then continues from its last snapshot
        #[arg(long, conflicts_with = "all")]
        force: bool,
        /// Do not ask before --all or --force
        #[arg(short, long)]
        yes: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct SandboxArg {
    /// The sandbox: an id, an id prefix, or `-` for the newest
    pub(crate) sandbox: String,
}

#[derive(Debug, Args)]
pub(crate) struct SandboxShellArgs {
    /// The sandbox: an id, an id prefix, or `-` for the newest
    sandbox: String,
    /// The user to run as: `harvest`, `root` or a number [default: the image's user]
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// The working folder [default: the image's]
    #[arg(short, long, value_name = "FOLDER")]
    workdir: Option<String>,
    /// The command to run instead of a shell, with its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl From<SandboxShellArgs> for ShellArgs {
    fn from(SandboxShellArgs { sandbox, user, workdir, command }: SandboxShellArgs) -> Self {
        Self { session: sandbox, user, workdir, command }
    }
}

#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    /// The sandboxes: ids, id prefixes, or `-` for the newest
    #[arg(value_name = "SANDBOX", required = true)]
    pub(crate) sandboxes: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The image; built first if it is missing and a recipe has its name
    #[arg(long, value_name = "NAME", default_value = "base")]
    pub(crate) image: String,
    /// The snapshot to start from instead of an image
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image")]
    pub(crate) from: Option<String>,
    /// A variable for every command; NAME alone passes the value of this environment
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) volumes: VolumeFlags,
    /// Stop it after this time, such as `24h`, and keep its disk [default: never]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) lifetime: Option<Duration>,
    #[command(flatten)]
    pub(crate) net: NetFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Take a snapshot of a session, which goes on; prints its id
    Create {
        /// The session: an id, an id prefix, a key, or `-` for the newest
        session: String,
        /// A name for it; retention keeps named snapshots
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// List snapshots: all of this machine, newest first, or those of a session
    Ls {
        /// The session whose snapshots are listed, oldest first
        session: Option<String>,
    },
    /// Protect a session's snapshot from retention
    Pin {
        /// The session and the turn [default: the current state]
        #[arg(value_name = "SESSION[@TURN]")]
        at: String,
    },
    /// Make a session's snapshot subject to retention again
    Unpin {
        /// The session and the turn [default: the current state]
        #[arg(value_name = "SESSION[@TURN]")]
        at: String,
    },
    /// Remove snapshots; the next `harvest gc` frees their data
    Rm {
        /// The snapshots: ids or id prefixes
        #[arg(value_name = "SNAPSHOT", required = true)]
        snapshots: Vec<String>,
        /// Also remove a snapshot that a session or repository may need
        #[arg(long)]
        force: bool,
        /// Remove without asking
        #[arg(short, long)]
        yes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume: storage that outlives sandboxes. Its disk space is allocated at once
    Create {
        /// The volume's name: letters, digits, `_` and `-`
        name: VolumeName,
        /// The volume's size
        #[arg(long, value_name = "SIZE", default_value = "2g")]
        size: Size,
        /// The number of files it can hold [default: 500000, fewer for a small volume]
        #[arg(long, value_name = "NUMBER")]
        files: Option<u64>,
    },
    /// List volumes
    Ls,
    /// Remove volumes with their contents
    Rm {
        /// The volumes' names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<VolumeName>,
        /// Remove without asking
        #[arg(short, long)]
        yes: bool,
    },
}

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CopySide {
    Local(PathBuf),
    Sandbox { sandbox: String, path: String },
}

impl CopySide {
    /// `SANDBOX:/path` is in a sandbox, everything else is local. `./a:/b` names a local file with
    /// a colon. In a script, `$box:/path` is `:/path` when the variable is not set; the caller
    /// refuses an empty name.
    pub(crate) fn parse(text: &str) -> Self {
        match text.split_once(':') {
            Some((sandbox, path)) if !sandbox.contains('/') && path.starts_with('/') => {
                Self::Sandbox { sandbox: sandbox.to_owned(), path: path.to_owned() }
            }
            _ => Self::Local(text.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_mounts_need_name_and_absolute_path() {
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
    fn sandbox_paths_have_a_prefix_before_the_colon() {
        let inside = |sandbox: &str, path: &str| CopySide::Sandbox {
            sandbox: sandbox.into(),
            path: path.into(),
        };
        assert_eq!(CopySide::parse("sbx_4kq:/etc"), inside("sbx_4kq", "/etc"));
        assert_eq!(CopySide::parse("-:/a:b"), inside("-", "/a:b"));
        assert_eq!(CopySide::parse(":/a"), inside("", "/a"));
        for local in ["a:b", "./a:/b", "/x/a:/b", "plain"] {
            assert_eq!(CopySide::parse(local), CopySide::Local(local.into()), "{local}");
        }
    }
}
