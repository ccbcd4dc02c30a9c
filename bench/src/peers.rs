//! The peers' rows: bubblewrap, crun, runc, podman and docker where they are installed and work,
//! and a plain fork and exec. All run `true` from the same file tree and clean up before they exit.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{
    report::Report,
    runner::Benchmark,
    workspace::{MEMORY_BYTES, PIDS, Workspace},
};

/// A plain fork, exec and wait.
pub(crate) const FORK_EXEC: &str = "plain fork+exec";
/// Bubblewrap with a writable overlay.
pub(crate) const BUBBLEWRAP: &str = "bubblewrap, overlay on tmpfs, no limits";
/// Bubblewrap before 0.11, without overlays.
pub(crate) const BUBBLEWRAP_READ_ONLY: &str = "bubblewrap, read-only root, no limits";

/// A peer that may not work on this machine.
pub(crate) struct Peer<'a> {
    row: &'static str,
    benchmark: Result<Benchmark<'a>>,
}

impl<'a> Peer<'a> {
    fn command(row: &'static str, words: Vec<String>) -> Self {
        Self { row, benchmark: Ok(Benchmark::whole(row, move || run_silently(&words))) }
    }

    /// Adds the benchmark if a first run succeeds; otherwise the report lists it as skipped.
    pub(crate) fn add_if_working(self, benchmarks: &mut Vec<Benchmark<'a>>, report: &mut Report) {
        let tried = self.benchmark.and_then(|mut benchmark| benchmark.sample().map(|_| benchmark));
        match tried {
            Ok(benchmark) => benchmarks.push(benchmark),
            Err(error) => {
                let reason = error.root_cause().to_string();
                report
                    .skipped
                    .push((self.row.to_owned(), reason.lines().next().unwrap_or("?").to_owned()));
            }
        }
    }
}

pub(crate) fn fork_exec(workspace: &Workspace) -> Vec<Benchmark<'_>> {
    vec![fork_exec_as(FORK_EXEC, workspace)]
}

pub(crate) fn fork_exec_as<'a>(row: &'static str, workspace: &Workspace) -> Benchmark<'a> {
    let program = workspace.rootfs().join("bin/true").display().to_string();
    Benchmark::whole(row, move || run_silently(&[program.as_str()]))
}

/// All peers, including those that are not installed.
pub(crate) fn all(workspace: &Workspace) -> Vec<Peer<'_>> {
    let rootfs = workspace.rootfs().display().to_string();
    let mut peers = vec![bubblewrap(workspace, [BUBBLEWRAP, BUBBLEWRAP_READ_ONLY])];
    peers.extend(runtimes(workspace));
    let podman =
        ["podman", "run", "--rm", "--network=none", "--rootfs"].map(str::to_owned).to_vec();
    let podman = [podman, vec![format!("{rootfs}:O"), "/bin/true".to_owned()]].concat();
    peers.push(Peer::command("podman run --network=none", podman));
    peers.push(docker(&rootfs));
    peers
}

/// Bubblewrap, under the first name if it supports overlays, else under the second.
pub(crate) fn bubblewrap(workspace: &Workspace, rows: [&'static str; 2]) -> Peer<'static> {
    let rootfs = &*workspace.rootfs().display().to_string();
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
    Peer::command(row, words.chain(&["/bin/true"]).map(|word| (*word).to_owned()).collect())
}

/// crun and runc, which run an OCI bundle: a folder with a configuration that refers to the file
/// tree.
fn runtimes(workspace: &Workspace) -> Vec<Peer<'_>> {
    let limits = json!({"memory": {"limit": MEMORY_BYTES}, "pids": {"limit": PIDS}});
    let bundle = |name: &str, resources: Option<&Value>| -> Result<String> {
        let folder = workspace.at(name);
        fs::create_dir_all(&folder)?;
        let config = config(&workspace.rootfs(), resources);
        fs::write(folder.join("config.json"), config.to_string())?;
        Ok(folder.display().to_string())
    };
    let runtime = |row, program: &'static str, flags: &[&str], bundle: Result<String>| {
        let root = workspace.at("runtimes").display().to_string();
        let words = bundle.map(|bundle| {
            let mut words = vec![program.to_owned(), "--root".to_owned(), root];
            words.extend(flags.iter().map(|flag| (*flag).to_owned()));
            words.extend(["run", "--bundle", &bundle].map(str::to_owned));
            words
        });
        let benchmark = words.map(|words| {
            let mut number = 0;
            Benchmark::whole(row, move || {
                number += 1;
                let id = format!("harvest-bench-{}-{number}", std::process::id());
                run_silently(&[words.clone(), vec![id]].concat())
            })
        });
        Peer { row, benchmark }
    };
    vec![
        runtime("crun, cgroups, read-only root", "crun", &[], bundle("crun", Some(&limits))),
        runtime(
            "crun, no cgroups, read-only root",
            "crun",
            &["--cgroup-manager=disabled"],
            bundle("crun-bare", None),
        ),
        runtime("runc, cgroups, read-only root", "runc", &[], bundle("runc", Some(&limits))),
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

fn docker(rootfs: &str) -> Peer<'static> {
    const ROW: &str = "docker run --network=none";
    const IMAGE: &str = "harvest-bench:latest";
    let import = || -> Result<Benchmark<'static>> {
        run_silently(&["docker", "info"])?;
        let mut tar =
            Command::new("tar").args(["-C", rootfs, "-c", "."]).stdout(Stdio::piped()).spawn()?;
        let input = tar.stdout.take().context("tar has an output")?;
        let status =
            Command::new("docker").args(["import", "-", IMAGE]).stdin(input).output()?.status;
        if !tar.wait()?.success() || !status.success() {
            bail!("docker cannot import the file tree");
        }
        let words = ["docker", "run", "--rm", "--network=none", IMAGE, "/bin/true"];
        Ok(Benchmark::whole(ROW, move || run_silently(&words)))
    };
    Peer { row: ROW, benchmark: import() }
}

/// Runs a program to completion; the error of a failed run contains its last line of stderr.
pub(crate) fn run_silently<T: AsRef<str>>(words: &[T]) -> Result<()> {
    let (program, arguments) = words.split_first().context("a command has a program")?;
    let program = program.as_ref();
    // Output goes to /dev/null, not a pipe: only waiting for the program is measured.
    let mut command = Command::new(program);
    command.args(arguments.iter().map(AsRef::as_ref)).stdin(Stdio::null()).stdout(Stdio::null());
    let status =
        command.stderr(Stdio::null()).status().with_context(|| format!("cannot run {program}"))?;
    if status.success() {
        return Ok(());
    }
    let output = command.stderr(Stdio::piped()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    bail!("{} ({program} failed with {status})", said.lines().last().unwrap_or("no output").trim())
}
