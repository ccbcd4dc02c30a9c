//! `harvest gc --all` leaves nothing of a home attached to the machine.

use std::{fs, process::Command};

use harvest_e2e::binary;

/// The mounts and loop devices of a home.
fn attached(home: &std::path::Path) -> Vec<String> {
    let home = home.canonicalize().unwrap().display().to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices
        .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok());
    let all = mounts.lines().map(str::to_owned).chain(files);
    all.filter(|line| line.contains(&home)).collect()
}

#[test]
fn gc_all_detaches_a_store_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("home");
    let harvest = |arguments: &[&str]| {
        let done = Command::new(binary("harvest"))
            .args(arguments)
            .env("HARVEST_HOME", &home)
            .env("HARVEST_CACHE", folder.path().join("cache"))
            .env("HARVEST_STORE_DRIVER", "btrfs")
            .env_remove("HARVEST_URL")
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    harvest(&["sandbox", "ls"]);
    assert_ne!(attached(&home), [""; 0]);
    harvest(&["gc", "--all", "--yes"]);
    // udev may hold the device open for a moment longer.
    harvest_e2e::until("the device to be detached", || attached(&home).is_empty());
}
