//! The peers' rows: the host's own bubblewrap, crun and runc, podman and docker where they work, and
//! a plain fork and exec. All of them run `true` from the same file tree and clean up before they end.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{
    contest::Contestant,
    place::{MEMORY_BYTES, PIDS, Place},
    report::Report,
};

/// A plain fork, exec and wait.
pub(crate) const FORK_EXEC: &str = "plain fork+exec";
/// Bubblewrap with a writable overlay.
pub(crate) const BUBBLEWRAP: &str = "bubblewrap, overlay on tmpfs, no limits";
/// Bubblewrap before 0.11, which has no overlay.
pub(crate) const BUBBLEWRAP_READ_ONLY: &str = "bubblewrap, read-only root, no limits";

/// A peer that may not work here.
pub(crate) struct Offer<'a> {
    row: &'static str,
    made: Result<Contestant<'a>>,
}

impl<'a> Offer<'a> {
    fn command(row: &'static str, words: Vec<String>) -> Self {
        Self { row, made: Ok(Contestant::whole(row, move || quietly(&words))) }
    }

    /// Takes part when a first try succeeds; else the report says why not.
    pub(crate) fn enter(self, contestants: &mut Vec<Contestant<'a>>, report: &mut Report) {
        let tried = self.made.and_then(|mut contestant| contestant.sample().map(|_| contestant));
        match tried {
            Ok(contestant) => contestants.push(contestant),
            Err(error) => {
                let reason = error.root_cause().to_string();
                report
                    .skipped
                    .push((self.row.to_owned(), reason.lines().next().unwrap_or("?").to_owned()));
            }
        }
    }
}

/// What everything else is compared with.
pub(crate) fn fork_exec(place: &Place) -> Vec<Contestant<'_>> {
    vec![fork_exec_as(FORK_EXEC, place)]
}

/// The same under another name.
pub(crate) fn fork_exec_as<'a>(row: &'static str, place: &Place) -> Contestant<'a> {
    let program = place.rootfs().join("bin/true").display().to_string();
    Contestant::whole(row, move || quietly(&[program.as_str()]))
}

/// Every peer, also those that are not installed.
pub(crate) fn all(place: &Place) -> Vec<Offer<'_>> {
    let rootfs = place.rootfs().display().to_string();
    let mut offers = vec![bubblewrap(place, [BUBBLEWRAP, BUBBLEWRAP_READ_ONLY])];
    offers.extend(runtimes(place));
    let podman =
        ["podman", "run", "--rm", "--network=none", "--rootfs"].map(str::to_owned).to_vec();
    let podman = [podman, vec![format!("{rootfs}:O"), "/bin/true".to_owned()]].concat();
    offers.push(Offer::command("podman run --network=none", podman));
    offers.push(docker(&rootfs));
    offers
}

/// Bubblewrap under one of two names: where it has overlays, and where it has none.
pub(crate) fn bubblewrap(place: &Place, rows: [&'static str; 2]) -> Offer<'static> {
    let rootfs = &*place.rootfs().display().to_string();
    let help = Command::new("bwrap").arg("--help").output();
    let overlays =
        help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--tmp-overlay"));
    let (row, root): (_, &[&str]) = if overlays {
        (rows[0], &["--overlay-src", rootfs, "--tmp-overlay", "/"])
    } else {
        (rows[1], &["--ro-bind", rootfs, "/", "--tmpfs", "/tmp"])
    };
    let words =
        ["bwrap", "--unshare-all"].iter().chain(root).chain(&["--proc", "/proc", "--dev", "/dev"]);
    Offer::command(row, words.chain(&["/bin/true"]).map(|word| (*word).to_owned()).collect())
}

/// crun and runc take a bundle: a folder with a configuration that names the file tree.
fn runtimes(place: &Place) -> Vec<Offer<'_>> {
    let limits = json!({"memory": {"limit": MEMORY_BYTES}, "pids": {"limit": PIDS}});
    let bundle = |name: &str, resources: Option<&Value>| -> Result<String> {
        let folder = place.at(name);
        fs::create_dir_all(&folder)?;
        let config = config(&place.rootfs(), resources);
        fs::write(folder.join("config.json"), config.to_string())?;
        Ok(folder.display().to_string())
    };
    let made = |row, program: &'static str, flags: &[&str], bundle: Result<String>| {
        let root = place.at("runtimes").display().to_string();
        let words = bundle.map(|bundle| {
            let mut words = vec![program.to_owned(), "--root".to_owned(), root];
            words.extend(flags.iter().map(|flag| (*flag).to_owned()));
            words.extend(["run", "--bundle", &bundle].map(str::to_owned));
            words
        });
        let made = words.map(|words| {
            let mut number = 0;
            Contestant::whole(row, move || {
                number += 1;
                let id = format!("harvest-bench-{}-{number}", std::process::id());
                quietly(&[words.clone(), vec![id]].concat())
            })
        });
        Offer { row, made }
    };
    vec![
        made("crun, cgroups, read-only root", "crun", &[], bundle("crun", Some(&limits))),
        made(
            "crun, no cgroups, read-only root",
            "crun",
            &["--cgroup-manager=disabled"],
            bundle("crun-bare", None),
        ),
        made("runc, cgroups, read-only root", "runc", &[], bundle("runc", Some(&limits))),
    ]
}

fn config(rootfs: &Path, resources: Option<&Value>) -> Value {
    let namespaces = ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({"type": kind}));
    let mut linux = json!({"namespaces": namespaces, "maskedPaths": ["/proc/kcore", "/proc/keys"],
        "readonlyPaths": ["/proc/sys", "/proc/bus"]});
    if let Some(resources) = resources {
        linux["resources"] = resources.clone();
    }
    json!({
        "ociVersion": "1.0.0",
        "process": {"terminal": false, "user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/true"],
            "env": ["PATH=/bin"], "noNewPrivileges": true},
        "root": {"path": rootfs, "readonly": true},
        "hostname": "bench",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
                "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]},
        ],
        "linux": linux,
    })
}

fn docker(rootfs: &str) -> Offer<'static> {
    const ROW: &str = "docker run --network=none";
    const IMAGE: &str = "harvest-bench:latest";
    let import = || -> Result<Contestant<'static>> {
        quietly(&["docker", "info"])?;
        let mut tar =
            Command::new("tar").args(["-C", rootfs, "-c", "."]).stdout(Stdio::piped()).spawn()?;
        let input = tar.stdout.take().context("tar has an output")?;
        let status =
            Command::new("docker").args(["import", "-", IMAGE]).stdin(input).output()?.status;
        if !tar.wait()?.success() || !status.success() {
            bail!("docker does not take the file tree");
        }
        let words = ["docker", "run", "--rm", "--network=none", IMAGE, "/bin/true"];
        Ok(Contestant::whole(ROW, move || quietly(&words)))
    };
    Offer { row: ROW, made: import() }
}

/// Runs a program to its end; what it said comes with the error when it fails.
pub(crate) fn quietly<T: AsRef<str>>(words: &[T]) -> Result<()> {
    let (program, arguments) = words.split_first().context("a command has a program")?;
    let program = program.as_ref();
    // Into a file, not a pipe: waiting for the program is all that is to be measured.
    let mut command = Command::new(program);
    command.args(arguments.iter().map(AsRef::as_ref)).stdin(Stdio::null()).stdout(Stdio::null());
    let status =
        command.stderr(Stdio::null()).status().with_context(|| format!("cannot run {program}"))?;
    if status.success() {
        return Ok(());
    }
    let output = command.stderr(Stdio::piped()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    bail!(
        "{} ({program} ended with {status})",
        said.lines().last().unwrap_or("said nothing").trim()
    )
}
