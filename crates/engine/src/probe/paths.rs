//! Checks of an installation's paths and their file systems. Only reads; safe in a process with
//! threads.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use rustix::fs::{statfs, statvfs};

use super::{Finding, fail, ok, warn};
use crate::home::Config;

// Room for an image and a few sandboxes; below the lower value the first build fails.
const RECOMMENDED_BYTES: u64 = 5 << 30;
const REQUIRED_BYTES: u64 = 512 << 20;

// From the kernel's `magic.h`.
const BTRFS: u64 = 0x9123_683e;
const FILE_SYSTEMS: [(u64, &str); 8] = [
    (BTRFS, "btrfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x0102_1994, "tmpfs"),
    (0x794c_7630, "overlay"),
    (0x6969, "nfs"),
    (0xf2f5_2010, "f2fs"),
    (0x2fc1_2fc1, "zfs"),
];

pub(super) fn findings(config: &Config) -> Vec<Finding> {
    vec![
        supervisor(&config.supervisor),
        store(&config.home),
        room("disk_home", &config.home),
        room("disk_cache", &config.cache),
    ]
}

fn supervisor(path: &Path) -> Finding {
    let fix = "reinstall harvest, or run `make build` in a checkout";
    match fs::metadata(path) {
        Ok(about) if about.is_file() && about.permissions().mode() & 0o111 != 0 => {
            ok("supervisor", format!("{} KiB", about.len() >> 10))
        }
        Ok(_) => fail("supervisor", format!("{} is not executable", path.display()), fix),
        Err(error) => fail("supervisor", format!("{}: {error}", path.display()), fix),
    }
}

fn store(home: &Path) -> Finding {
    let Ok(about) = statfs(home) else {
        let fix = "make the home a readable folder";
        return fail("store", format!("cannot read {}", home.display()), fix);
    };
    let magic = about.f_type as u64 & 0xffff_ffff;
    let kind = FILE_SYSTEMS
        .iter()
        .find(|(number, _)| *number == magic)
        .map_or("another file system", |(_, name)| name);
    let found = format!("driver {}, on {kind}", if magic == BTRFS { "btrfs" } else { "dir" });
    match kind {
        "tmpfs" => {
            warn("store", found, "a home in memory is lost at reboot: move HARVEST_HOME to a disk")
        }
        "nfs" | "overlay" => warn("store", found, "move HARVEST_HOME to ext4, xfs or btrfs"),
        _ => ok("store", found),
    }
}

fn room(id: &'static str, path: &Path) -> Finding {
    let Ok(about) = statvfs(path) else {
        return fail(id, format!("cannot read {}", path.display()), "create the folder");
    };
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    let found =
        format!("{:.1} GiB free in {}", free as f64 / f64::from(1u32 << 30), path.display());
    let fix = "free space there; `harvest gc` removes what nothing uses";
    // Some file systems create inodes on demand and report zero.
    let no_files = about.f_files > 0 && about.f_favail < 10_000;
    match (free, no_files) {
        (..REQUIRED_BYTES, _) => fail(id, found, fix),
        (_, true) => fail(id, format!("{found}, room for {} more files", about.f_favail), fix),
        (..RECOMMENDED_BYTES, _) => warn(id, found, fix),
        _ => ok(id, found),
    }
}
