//! What this machine lacks: one check per ability, each with a stable id and a way to mend it. Looks
//! only; what a check needs, it reads from `/proc`, `/sys` and the programs themselves.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Serialize;

/// The oldest kernel whose id-mapped mounts, overlay and `cgroup.kill` are all what the engine expects.
const OLDEST_KERNEL: (u32, u32) = (6, 1);

/// Below this, builds are refused; an image and a few snapshots need it.
const WANTED_BYTES: u64 = 10 << 30;
/// Below this, nothing works for long.
const NEEDED_BYTES: u64 = 2 << 30;

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Ok,
    Warn,
    Fail,
}

/// One ability of the machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Check {
    /// Stable: programs and people may search for it.
    pub(crate) id: &'static str,
    pub(crate) status: Status,
    /// What was found.
    pub(crate) found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<&'static str>,
}

impl Check {
    fn ok(id: &'static str, found: impl Into<String>) -> Self {
        Self { id, status: Status::Ok, found: found.into(), fix: None }
    }

    fn warn(id: &'static str, found: impl Into<String>, fix: &'static str) -> Self {
        Self { id, status: Status::Warn, found: found.into(), fix: Some(fix) }
    }

    fn fail(id: &'static str, found: impl Into<String>, fix: &'static str) -> Self {
        Self { id, status: Status::Fail, found: found.into(), fix: Some(fix) }
    }
}

/// Every check, for an installation at `home`.
pub(crate) fn checks(home: &Path) -> Vec<Check> {
    vec![
        kernel(&read("/proc/sys/kernel/osrelease")),
        root(rustix::process::geteuid().is_root()),
        namespaces(),
        overlay(&read("/proc/filesystems"), file_system(home)),
        idmapped(file_system(home)),
        cgroups(&read("/proc/mounts"), &read("/sys/fs/cgroup/cgroup.controllers")),
        seccomp(&read("/proc/sys/kernel/seccomp/actions_avail")),
        redirect(),
        disk(home),
        git(),
        http_backend(),
        mmdebstrap(),
        supervisor(),
    ]
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn kernel(release: &str) -> Check {
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version >= OLDEST_KERNEL {
        true => Check::ok("kernel", format!("Linux {release}")),
        false => {
            Check::fail("kernel", format!("Linux {release} is older than 6.1"), "install a newer kernel")
        }
    }
}

fn root(is_root: bool) -> Check {
    match is_root {
        true => Check::ok("root", "running as root"),
        false => Check::fail("root", "not running as root", "run it as root: `sudo harvest …`"),
    }
}

fn namespaces() -> Check {
    let wanted = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];
    let missing: Vec<&str> =
        wanted.into_iter().filter(|name| !Path::new("/proc/self/ns").join(name).exists()).collect();
    let most = read("/proc/sys/user/max_user_namespaces");
    match (missing.is_empty(), most.as_str()) {
        (false, _) => Check::fail(
            "namespaces",
            format!("the kernel lacks {}", missing.join(", ")),
            "use a kernel built with all namespaces",
        ),
        (true, "0") => Check::fail(
            "namespaces",
            "user namespaces are switched off",
            "`sysctl -w user.max_user_namespaces=15000`",
        ),
        (true, _) => Check::ok("namespaces", wanted.join(" ")),
    }
}

/// Kinds of file systems, by the numbers of statfs(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileSystem {
    Good(&'static str),
    Overlay,
    Network(&'static str),
    Other(u64),
}

/// The file system that holds `path`, or would.
fn file_system(path: &Path) -> FileSystem {
    let number =
        rustix::fs::statfs(existing(path)).map_or(0, |stat| u64::from_ne_bytes(stat.f_type.to_ne_bytes()));
    match number {
        0xEF53 => FileSystem::Good("ext4"),
        0x5846_5342 => FileSystem::Good("xfs"),
        0x9123_683E => FileSystem::Good("btrfs"),
        0x0102_1994 => FileSystem::Good("tmpfs"),
        0xF2F5_2010 => FileSystem::Good("f2fs"),
        0x794C_7630 => FileSystem::Overlay,
        0x6969 => FileSystem::Network("nfs"),
        0x6573_5546 => FileSystem::Network("fuse"),
        number => FileSystem::Other(number),
    }
}

fn existing(path: &Path) -> PathBuf {
    let there = path.ancestors().find(|ancestor| ancestor.exists());
    there.unwrap_or(Path::new("/")).to_owned()
}

fn overlay(known: &str, home: FileSystem) -> Check {
    let fix = "put HARVEST_HOME on ext4, xfs or btrfs";
    if !known.lines().any(|line| line.trim_start_matches("nodev").trim() == "overlay") {
        // It may be a module that is not loaded yet; the first sandbox loads it.
        return Check::warn("overlay", "overlayfs is not loaded", "`modprobe overlay`");
    }
    match home {
        FileSystem::Good(name) => Check::ok("overlay", format!("overlayfs on {name}")),
        FileSystem::Overlay => Check::fail("overlay", "HARVEST_HOME is itself on an overlay", fix),
        FileSystem::Network(name) => Check::fail("overlay", format!("HARVEST_HOME is on {name}"), fix),
        FileSystem::Other(number) => {
            Check::warn("overlay", format!("HARVEST_HOME is on an unknown file system ({number:#x})"), fix)
        }
    }
}

fn idmapped(home: FileSystem) -> Check {
    match home {
        FileSystem::Good(name) => Check::ok("idmapped_mounts", format!("{name} can be id-mapped")),
        _ => Check::warn(
            "idmapped_mounts",
            "not known to work on the file system of HARVEST_HOME",
            "put HARVEST_HOME on ext4, xfs or btrfs",
        ),
    }
}

fn cgroups(mounts: &str, v2: &str) -> Check {
    let wanted = ["memory", "cpu", "pids", "freezer"];
    if !v2.is_empty() {
        let has = |name: &&&str| v2.split_whitespace().any(|controller| controller == **name);
        // Freezing is part of v2 itself.
        let missing: Vec<_> = wanted[..3].iter().filter(|name| !has(name)).copied().collect();
        return match missing.is_empty() {
            true => Check::ok("cgroups", "v2 with memory, cpu and pids"),
            false => Check::fail(
                "cgroups",
                format!("v2 lacks {}", missing.join(", ")),
                "delegate the controllers: `systemctl edit` with `Delegate=yes`, or boot without `cgroup_disable`",
            ),
        };
    }
    let options = mounts.lines().filter(|line| line.split(' ').nth(2) == Some("cgroup"));
    let mounted: Vec<&str> =
        options.flat_map(|line| line.split(' ').nth(3).unwrap_or("").split(',')).collect();
    let missing: Vec<_> = wanted.iter().filter(|name| !mounted.contains(*name)).copied().collect();
    match missing.is_empty() {
        true => Check::ok("cgroups", "v1 with memory, cpu, pids and freezer"),
        false => Check::fail(
            "cgroups",
            format!("neither v2 nor v1 with {}", missing.join(", ")),
            "`mount -t cgroup2 none /sys/fs/cgroup`",
        ),
    }
}

fn seccomp(actions: &str) -> Check {
    match actions.split_whitespace().any(|action| action == "errno") {
        true => Check::ok("seccomp", "filters can be loaded"),
        false => Check::fail(
            "seccomp",
            "the kernel has no seccomp filters",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        ),
    }
}

fn redirect() -> Check {
    // Built in, loaded, or there to be loaded on first use.
    let release = read("/proc/sys/kernel/osrelease");
    let lists = [
        "/proc/modules".to_owned(),
        format!("/lib/modules/{release}/modules.builtin"),
        format!("/lib/modules/{release}/modules.dep"),
    ];
    let texts: Vec<String> = lists.iter().map(|path| read(path)).collect();
    let has = |name: &str| texts.iter().any(|text| text.contains(name));
    if has("nf_tables") && has("nft_redir") {
        return Check::ok("redirect", "nftables can redirect");
    }
    match Path::new("/proc/net/netfilter").exists() || Path::new("/proc/sys/net/netfilter").exists() {
        true => Check::ok("redirect", "netfilter is built in"),
        false => {
            Check::warn("redirect", "nftables was not found", "`modprobe nft_redir`, or network `none` only")
        }
    }
}

fn disk(home: &Path) -> Check {
    let free =
        rustix::fs::statvfs(existing(home)).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let found = format!("{} GiB free for {}", free >> 30, home.display());
    match free {
        0..NEEDED_BYTES => {
            Check::fail("disk", found, "free some space, or move HARVEST_HOME; `harvest gc --dry-run`")
        }
        NEEDED_BYTES..WANTED_BYTES => {
            Check::warn("disk", found, "10 GiB are comfortable; `harvest gc --dry-run`")
        }
        _ => Check::ok("disk", found),
    }
}

/// What a program prints; nothing when it is not there.
fn printed(program: &str, argument: &str) -> Option<String> {
    let output =
        Command::new(program).arg(argument).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn git() -> Check {
    match printed("git", "--version") {
        Some(version) => Check::ok("git", version),
        None => Check::fail("git", "git was not found", "install git"),
    }
}

fn http_backend() -> Check {
    let found =
        printed("git", "--exec-path").is_some_and(|path| Path::new(&path).join("git-http-backend").exists());
    match found {
        true => Check::ok("git_http_backend", "there, for the local forge"),
        false => {
            Check::warn("git_http_backend", "git http-backend was not found", "install the whole of git")
        }
    }
}

fn mmdebstrap() -> Check {
    match printed("mmdebstrap", "--version") {
        Some(version) => Check::ok("mmdebstrap", version.lines().next().unwrap_or("").to_owned()),
        None => Check::warn(
            "mmdebstrap",
            "mmdebstrap was not found; images are bootstrapped with it",
            "install mmdebstrap",
        ),
    }
}

fn supervisor() -> Check {
    match crate::supervisor::is_there() {
        true => Check::ok("supervisor", "comes with this program"),
        false => Check::fail("supervisor", "built without a supervisor", "build with `make build`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_kernel_fails_and_a_new_one_passes() {
        let status = |release| kernel(release).status;
        assert_eq!([status("5.15.0-91-generic"), status("6.0.1"), status("")], [Status::Fail; 3]);
        assert_eq!([status("6.1.0"), status("6.12.3-arch1"), status("7.0")], [Status::Ok; 3]);
    }

    #[test]
    fn controllers_are_found_on_either_version() {
        assert_eq!(cgroups("", "cpuset cpu io memory pids").status, Status::Ok);
        assert_eq!(cgroups("", "cpu memory").status, Status::Fail);
        let v1 = "cgroup /a cgroup rw,memory 0 0\ncgroup /b cgroup rw,cpu,cpuacct 0 0\n\
                  cgroup /c cgroup rw,pids 0 0\ncgroup /d cgroup rw,freezer 0 0";
        assert_eq!(cgroups(v1, "").status, Status::Ok);
        assert_eq!(cgroups("tmpfs /sys/fs/cgroup tmpfs rw 0 0", "").status, Status::Fail);
    }

    #[test]
    fn an_overlay_cannot_carry_another() {
        let known = "nodev\tsysfs\nnodev\toverlay\n\text4";
        assert_eq!(overlay(known, FileSystem::Good("ext4")).status, Status::Ok);
        assert_eq!(overlay(known, FileSystem::Overlay).status, Status::Fail);
        assert_eq!(overlay("", FileSystem::Good("ext4")).status, Status::Warn);
    }

    #[test]
    fn every_check_that_is_not_ok_says_how_to_mend_it() {
        let checks = checks(Path::new("/nonexistent/harvest"));
        assert!(checks.iter().all(|check| (check.status == Status::Ok) == check.fix.is_none()));
        let mut ids: Vec<_> = checks.iter().map(|check| check.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), checks.len());
    }
}
