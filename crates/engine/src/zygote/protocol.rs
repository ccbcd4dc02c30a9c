//! The protocol between the engine and its zygote: one JSON packet per request and one per answer,
//! with the descriptors a start needs attached. `Wait` is answered when the sandbox has ended.

use std::{
    fs::Metadata,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use harvest_proto::SandboxId;
use serde::{Deserialize, Serialize};

use crate::{sandbox_record::Record, spec::VolumeName};

/// A request to the zygote.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Start the recorded sandbox. Attached: the supervisor's file, the layers bottom first, the
    /// binds, the volumes.
    Start {
        record: Box<Record>,
        /// Paths of the layers; only shown in the plan.
        layers: Vec<PathBuf>,
        /// The host's `resolv.conf`, for sandboxes on the host's network.
        resolv_conf: String,
        /// The program that a new zygote would run.
        build: Option<BuildId>,
        /// The sandbox ran before and continues with its disk.
        restart: bool,
    },
    /// Answer when the sandbox has ended.
    Wait { id: SandboxId },
    /// Kill the sandbox and answer when all its processes are dead.
    Kill { id: SandboxId },
    /// Freeze until `Thaw`, or until `hold_millis` pass without another `Freeze`; default five
    /// seconds.
    Freeze { id: SandboxId, hold_millis: Option<u64> },
    /// End a freeze.
    Thaw { id: SandboxId },
    /// Unmount a volume if it is cached.
    Release { volume: VolumeName },
    /// Report standby counts. A client that sends only this does not keep the zygote alive.
    StandbyCounts,
    /// Liveness check. When it is answered, every sandbox's state is up to date on disk.
    Ping,
    /// Exit unless sandboxes or owners need the zygote.
    ExitIfIdle,
}

/// An answer of the zygote.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Pid 1 runs; `pid` is its pid on the host.
    Started { pid: u32 },
    /// The sandbox has ended.
    Ended { reason: String },
    /// Counts of standby processes.
    StandbyCounts(StandbyCounts),
    /// The request succeeded.
    Done,
    /// No such sandbox, or it is not running.
    Unknown,
    /// The request failed.
    Failed { reason: String },
    /// This zygote is another build and idle: it exits, and the client asks the next one.
    Outdated,
}

/// Standby processes of a zygote since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyCounts {
    /// Ready for a start now.
    pub ready: u64,
    /// Preforked in advance.
    pub preforked: u64,
    /// Starts that used a standby.
    pub used: u64,
    /// Starts that ran every step on demand, because no suitable standby was ready.
    pub missed: u64,
}

/// Identifies the file a program was started from; every upgrade changes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BuildId {
    file: (u64, u64),
    size: u64,
    modified: (i64, i64),
}

impl BuildId {
    /// The program at this path; `None` if it cannot be read.
    pub(crate) fn of(program: &Path) -> Option<Self> {
        std::fs::metadata(program).ok().as_ref().map(Self::from)
    }
}

impl From<&Metadata> for BuildId {
    fn from(about: &Metadata) -> Self {
        Self {
            file: (about.dev(), about.ino()),
            size: about.size(),
            modified: (about.mtime(), about.mtime_nsec()),
        }
    }
}
