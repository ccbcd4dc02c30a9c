//! Checks of what a sandbox consists of: its layers, cgroups and network. They use the engine's own
//! code, so that a finding predicts what a start would do.

use std::{
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use harvest_proto::launch::{DNS_ADDRESS, SYNTHETIC_PREFIX_BITS};
use rustix::{
    fs::{AtFlags, Mode, OFlags, openat, statat},
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    thread::UnshareFlags,
};

use super::{Finding, bad, fail, host::ProbeUser, ok, warn};
use crate::{
    cgroup::Hierarchy,
    child_probe::{Outcome, in_child},
    error::StepError,
    facts,
    isolate::{self, ids::Claim, mounts::Scratch, network},
    plan::SYNTHETIC_IPV6,
    spec::Limits,
    syscall,
};

// Just below the ranges of sandboxes: never claimed.
const SPARE_ID: u32 = 0x7000_0000 - 65_536;

pub(super) fn findings(home: &Path, user: ProbeUser) -> Vec<Finding> {
    let mut findings = layers(home, user);
    findings.extend([cgroups(user), redirect(user)]);
    findings
}

fn layers(home: &Path, user: ProbeUser) -> Vec<Finding> {
    // In the trash, where the garbage collector finds it if this process is killed.
    let folder = home.join("trash").join(format!("probe-{}", std::process::id()));
    let made = ["lower", "upper", "work", "root"]
        .iter()
        .try_for_each(|name| fs::create_dir_all(folder.join(name)));
    if let Err(error) = made {
        let found = format!("{}: {error}", folder.display());
        return vec![fail("overlay", found, "make the home writable, or free space")];
    }
    let findings = vec![overlay(&folder, user), id_mapped(&folder, user)];
    let _ = fs::remove_dir_all(&folder);
    findings
}

fn text(error: impl Into<io::Error>) -> String {
    error.into().to_string()
}

fn own_mounts(user: ProbeUser) -> Result<(), String> {
    user.become_root().map_err(text)?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).map_err(text)
}

fn overlay(folder: &Path, user: ProbeUser) -> Finding {
    let act = || -> Outcome {
        own_mounts(user)?;
        rustix::process::chdir(folder).map_err(text)?;
        let options = match user.is_host_root() {
            true => c"lowerdir=lower,upperdir=upper,workdir=work,redirect_dir=nofollow,metacopy=off",
            false => {
                c"lowerdir=lower,upperdir=upper,workdir=work,redirect_dir=nofollow,metacopy=off,userxattr"
            }
        };
        mount("overlay", "root", "overlay", MountFlags::empty(), Some(options)).map_err(text)?;
        fs::write("root/made", "").map_err(text)?;
        Ok(String::new())
    };
    // SAFETY: the probing process has one thread.
    match unsafe { in_child(user.flags(libc::CLONE_NEWNS), act) } {
        Ok(_) => ok("overlay", "works on the home's file system"),
        Err(reason) => {
            let fix = "modprobe overlay; keep HARVEST_HOME on ext4, xfs or btrfs, not on an overlay or NFS";
            fail("overlay", format!("refused on the home's file system ({reason})"), fix)
        }
    }
}

/// Mounts a layer and a writable folder with mapped ids as an overlay.
fn id_mapped(folder: &Path, user: ProbeUser) -> Finding {
    let id = "id_mapped_mounts";
    let writable = folder.to_owned();
    let act = || -> Outcome {
        own_mounts(user)?;
        mount_id_mapped(&writable).map_err(|error| error.line())
    };
    // SAFETY: the probing process has one thread.
    match unsafe { in_child(user.flags(libc::CLONE_NEWNS), act) } {
        Ok(found) => ok(id, found),
        Err(reason) => {
            let fix = if user.is_host_root() {
                "keep HARVEST_HOME on a file system with id-mapped mounts: ext4, xfs, btrfs"
            } else {
                "only root can create id-mapped mounts; otherwise all sandboxes share one id range"
            };
            bad(id, user.refusal_level(), reason, fix)
        }
    }
}

fn mount_id_mapped(folder: &Path) -> Result<String, StepError> {
    use crate::error::Doing;
    let spare = Claim::Exclusive { file: PathBuf::new(), first: SPARE_ID };
    // SAFETY: this child process has one thread.
    let users = unsafe { isolate::make_user_namespace(&spare) }?;
    let lower = syscall::clone_mount(rustix::fs::CWD, &folder.join("lower"), false);
    let lower = lower.doing(|| "clone a mount")?;
    let scratch = Scratch::make_on(&folder.join("root"))?;
    scratch.layer(&lower, "0", Some(users.as_fd())).doing(|| "map the ids of a layer")?;
    scratch.writable(folder, Some(users.as_fd())).doing(|| "map the ids of a writable folder")?;
    isolate::use_file_ids(SPARE_ID)?;
    let root = scratch.overlay(&["0".to_owned()]).doing(|| "mount an overlay of both")?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    openat(&root, "mine", flags, Mode::from_raw_mode(0o600)).doing(|| "write through it")?;
    let owner =
        |at: &dyn Fn() -> rustix::io::Result<rustix::fs::Stat>| at().map(|about| about.st_uid);
    let inside = owner(&|| statat(&root, "mine", AtFlags::empty())).doing(|| "look at it")?;
    let on_disk =
        owner(&|| rustix::fs::stat(folder.join("upper/mine"))).doing(|| "find it on disk")?;
    if (inside, on_disk) == (SPARE_ID, 0) {
        return Ok("layers and writable folders show each sandbox its own ids".to_owned());
    }
    let wrong = format!("map ids: a file of {SPARE_ID} is {inside} inside and {on_disk} on disk");
    Err(StepError::new(wrong, io::ErrorKind::InvalidData))
}

fn cgroups(user: ProbeUser) -> Finding {
    let fix = "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or mount cpu, freezer, memory, pids";
    let hierarchy = match Hierarchy::detect() {
        Ok(hierarchy) => hierarchy,
        Err(error) => return bad("cgroups", user.refusal_level(), error.line(), fix),
    };
    let home = format!("harvest-probe-{}", std::process::id());
    let act = || -> Outcome {
        hierarchy.enter_home(&home).map_err(|error| error.line())?;
        let groups = hierarchy.groups(&home, "probe", &Limits::default());
        groups
            .make
            .iter()
            .try_for_each(crate::cgroup::Group::make)
            .map_err(|error| error.line())?;
        Ok(String::new())
    };
    // SAFETY: the probing process has one thread.
    let outcome = unsafe { in_child(0, act) };
    clear(&hierarchy, &home);
    match outcome {
        Ok(_) => hierarchy_found(&hierarchy),
        Err(reason) => {
            let fix = "run as root, or delegate a cgroup with memory and pids to this user";
            bad("cgroups", user.refusal_level(), reason, fix)
        }
    }
}

fn hierarchy_found(hierarchy: &Hierarchy) -> Finding {
    match hierarchy {
        Hierarchy::None => {
            let found = "none delegated to this user: memory and CPU time are not limited";
            let fix =
                "run as root, or on cgroup v2 under `systemd-run --user --scope -p Delegate=yes`";
            warn("cgroups", found, fix)
        }
        Hierarchy::V1 { mounts } => {
            let names: Vec<&str> = mounts.keys().map(String::as_str).collect();
            ok("cgroups", format!("v1 with {}", names.join(", ")))
        }
        Hierarchy::V2 { mount } => {
            let has = fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
            let found =
                format!("v2 with {}", has.split_whitespace().collect::<Vec<_>>().join(", "));
            if has.split_whitespace().any(|name| name == "cpu") {
                return ok("cgroups", found);
            }
            let fix = "enable the cpu controller; without it CPU time is not limited";
            warn("cgroups", found, fix)
        }
    }
}

/// Removes the cgroups of a check, whose processes are dead or dying.
fn clear(hierarchy: &Hierarchy, home: &str) {
    let folders: Vec<PathBuf> = hierarchy.mounts().iter().map(|mount| mount.join(home)).collect();
    for _ in 0..50 {
        hierarchy.clear(home, "probe");
        for folder in &folders {
            let _ = fs::remove_dir(folder.join("zygote"));
            let _ = fs::remove_dir(folder);
        }
        if !folders.iter().any(|folder| folder.exists()) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn redirect(user: ProbeUser) -> Finding {
    let act = || -> Outcome {
        user.become_root().map_err(text)?;
        let mechanism = network::detect_redirect();
        // A fresh namespace, without the rules that the detection installed.
        // SAFETY: this process has one thread and ends right afterwards.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(text)?;
        network::set_up(DNS_ADDRESS, SYNTHETIC_PREFIX_BITS, SYNTHETIC_IPV6, mechanism)
            .map_err(|error| error.line())?;
        Ok(facts::redirect_name(mechanism).to_owned())
    };
    // SAFETY: the probing process has one thread.
    match unsafe { in_child(user.flags(libc::CLONE_NEWNET), act) } {
        Ok(mechanism) => ok("redirect", format!("loopback redirect by {mechanism}")),
        Err(reason) => {
            let fix = "modprobe -a nf_tables nft_chain_nat nft_redir, or iptable_nat xt_REDIRECT xt_tcpudp";
            fail("redirect", reason, fix)
        }
    }
}
