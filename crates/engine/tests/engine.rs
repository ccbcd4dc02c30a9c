//! The sandbox's promises, kept on the real kernel with the real supervisor. Needs root, a static
//! `/bin/busybox` for the file tree, and the supervisor (`cargo supervisor`).
#![expect(unsafe_code, reason = "probes try system calls that have no safe wrapper")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

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
#[path = "engine/guests.rs"]
mod guests;
#[path = "engine/images.rs"]
mod images;
#[path = "engine/leftovers.rs"]
mod leftovers;
#[path = "engine/limits.rs"]
mod limits;
#[path = "engine/lives.rs"]
mod lives;
#[path = "engine/probes.rs"]
mod probes;
#[path = "engine/rootless.rs"]
mod rootless;
#[path = "engine/seeds.rs"]
mod seeds;
#[path = "engine/upgrades.rs"]
mod upgrades;
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
    guest::{Guest, Output},
};
use harvest_proto::{
    SandboxId,
    bridge::{Command, Exit},
    door::{Answer, Ask},
};

use world::*;
