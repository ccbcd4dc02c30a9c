//! Integration tests of the engine on the real kernel with the real supervisor. Need root, a static
//! `/bin/busybox` for the file tree, and the supervisor (`cargo supervisor`).
#![expect(unsafe_code, reason = "probes try system calls that have no safe wrapper")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "engine/bridge_files.rs"]
mod bridge_files;
#[path = "engine/btrfs.rs"]
mod btrfs;
#[path = "engine/disks.rs"]
mod disks;
#[path = "engine/doctor.rs"]
mod doctor;
#[path = "engine/door.rs"]
mod door;
#[path = "engine/fallbacks.rs"]
mod fallbacks;
#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/leftovers.rs"]
mod leftovers;
#[path = "engine/lifecycle.rs"]
mod lifecycle;
#[path = "engine/limits.rs"]
mod limits;
#[path = "engine/probes.rs"]
mod probes;
#[path = "engine/rootless.rs"]
mod rootless;
#[path = "engine/standbys.rs"]
mod standbys;
#[path = "engine/supervisor_client.rs"]
mod supervisor_client;
#[path = "engine/upgrades.rs"]
mod upgrades;
#[path = "engine/visible_limits.rs"]
mod visible_limits;
#[path = "engine/volumes.rs"]
mod volumes;
#[path = "engine/world.rs"]
mod world;

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::{
        fs::{MetadataExt, symlink},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command as HostCommand},
    thread,
    time::{Duration, Instant},
};

use harvest_engine::{
    Bind, Config, Driver, Engine, EngineError, ImageConfig, Limits, Network, Origin, Owner,
    Running, SandboxState, Spec, Threshold, Thresholds,
    supervisor_client::{Output, SupervisorClient},
};
use harvest_proto::{
    SandboxId,
    bridge::{Command, Exit},
    door::{DoorReply, DoorRequest},
};

use world::*;
