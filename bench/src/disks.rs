//! The disk rows: live snapshots and forks of a large writable layer, compared with `cp -a` of the
//! same tree and `btrfs subvolume snapshot`.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use harvest_engine::{Bind, Engine, Origin, Running, Spec};
use harvest_proto::{SandboxId, SnapshotId};

use crate::{
    harvest::in_sandbox,
    options::Options,
    peers::run_silently,
    report::Report,
    runner::{Benchmark, Samples, run as run_interleaved},
    workspace::Workspace,
};

/// The size of the tree in the writable layer.
struct TreeSize {
    files: usize,
    folders: usize,
    file_bytes: usize,
    /// The sizes of the larger changes to measure.
    dirty_mib: [usize; 2],
}

// 50,000 files and 1.2 GB: a checkout with its dependencies installed.
const FULL: TreeSize =
    TreeSize { files: 50_000, folders: 5_000, file_bytes: 24_000, dirty_mib: [100, 1024] };
const QUICK: TreeSize = TreeSize { files: 200, folders: 20, file_bytes: 24_000, dirty_mib: [2, 4] };

/// A plain copy.
pub(crate) const COPY: &str = "cp -a, 1.2 GB / 50k files";
/// A snapshot by btrfs itself.
pub(crate) const SUBVOLUME: &str = "btrfs subvolume snapshot, 1 MB dirty";
/// A snapshot of a running sandbox, in plain folders.
pub(crate) const SNAPSHOT: &str = "harvest dir: live snapshot, 1 MB dirty";
/// A snapshot of a running sandbox and a command in a second sandbox started from it, on btrfs.
pub(crate) const FORK: &str = "harvest btrfs: live fork, 1 MB dirty";

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.contains("dirty") || name.contains("1.2 GB")
}

/// The row names of one storage driver.
struct RowNames {
    first: &'static str,
    small: [&'static str; 2],
    large: [[&'static str; 2]; 2],
}

const DIR: RowNames = RowNames {
    first: "harvest dir: first live snapshot, all 1.2 GB",
    small: [SNAPSHOT, "harvest dir: live fork, 1 MB dirty"],
    large: [
        ["harvest dir: live snapshot, 100 MB dirty", "harvest dir: live fork, 100 MB dirty"],
        ["harvest dir: live snapshot, 1 GB dirty", "harvest dir: live fork, 1 GB dirty"],
    ],
};
const BTRFS: RowNames = RowNames {
    first: "harvest btrfs: first live snapshot, all 1.2 GB",
    small: ["harvest btrfs: live snapshot, 1 MB dirty", FORK],
    large: [
        ["harvest btrfs: live snapshot, 100 MB dirty", "harvest btrfs: live fork, 100 MB dirty"],
        ["harvest btrfs: live snapshot, 1 GB dirty", "harvest btrfs: live fork, 1 GB dirty"],
    ],
};

/// Measures the rows and adds them to the report.
pub(crate) fn run(workspace: &Workspace, options: &Options, report: &mut Report) -> Result<()> {
    let size = if options.quick { &QUICK } else { &FULL };
    let stage = workspace.at("stage");
    eprintln!("creating {} files", size.files);
    make_tree(&stage, size)?;
    let volume =
        if options.peers { BtrfsVolume::make(workspace, &stage) } else { peers_disabled() };
    let btrfs = workspace.on_btrfs();
    let mut sandboxes = vec![LiveSandbox::start(workspace, &workspace.engine, &stage, &DIR)?];
    match &btrfs {
        Ok(engine) => sandboxes.push(LiveSandbox::start(workspace, &engine.0, &stage, &BTRFS)?),
        Err(error) => report.skipped.push((FORK.to_owned(), error.root_cause().to_string())),
    }
    for live in &sandboxes {
        report.add(vec![Samples { row: live.names.first, taken: vec![live.snapshot()?] }]);
    }
    let mut benchmarks: Vec<Benchmark<'_>> = sandboxes.iter().map(LiveSandbox::benchmark).collect();
    match &volume {
        Ok(volume) => benchmarks.push(volume.benchmark()),
        Err(error) => report.skipped.push((SUBVOLUME.to_owned(), error.root_cause().to_string())),
    }
    // Fewer rounds than for a start: each copy takes seconds to create and longer to delete.
    let rounds = (options.rounds / 5).clamp(1, 10);
    report.add(run_interleaved(&mut benchmarks, rounds, options.gap)?);
    drop(benchmarks);
    for live in &sandboxes {
        for (mib, names) in size.dirty_mib.into_iter().zip(live.names.large) {
            live.change(mib)?;
            for (row, took) in names.into_iter().zip(live.fork()?) {
                report.add(vec![Samples { row, taken: vec![took] }]);
            }
        }
    }
    if options.peers {
        report.add(vec![copies(workspace, &stage, rounds.min(3))?]);
    }
    for live in sandboxes {
        live.engine.remove(&live.running.id)?;
    }
    Ok(())
}

fn peers_disabled<T>() -> Result<T> {
    bail!("peers are disabled")
}

fn copies(workspace: &Workspace, stage: &Path, rounds: usize) -> Result<Samples> {
    let mut taken = Vec::new();
    for number in 0..rounds {
        let copy = workspace.at(&format!("copy-{number}"));
        let began = Instant::now();
        run_silently(&["cp", "-a", &stage.display().to_string(), &copy.display().to_string()])?;
        taken.push(began.elapsed());
    }
    Ok(Samples { row: COPY, taken })
}

/// Creates files with incompressible content in many folders.
fn make_tree(root: &Path, size: &TreeSize) -> Result<()> {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = vec![0u8; size.file_bytes];
    for number in 0..size.folders {
        fs::create_dir_all(root.join(format!("{:02}/{number}", number % 50)))?;
    }
    for number in 0..size.files {
        for word in bytes.chunks_mut(8) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            word.copy_from_slice(&seed.to_ne_bytes()[..word.len()]);
        }
        let folder = number % size.folders;
        let path = root.join(format!("{:02}/{folder}/file-{number}", folder % 50));
        File::create(&path)
            .and_then(|mut file| file.write_all(&bytes))
            .context("cannot create the tree")?;
    }
    Ok(())
}

/// A running sandbox with the tree in its writable layer.
struct LiveSandbox<'a> {
    workspace: &'a Workspace,
    engine: &'a Engine,
    running: Running,
    names: &'static RowNames,
}

impl<'a> LiveSandbox<'a> {
    fn start(
        workspace: &'a Workspace,
        engine: &'a Engine,
        stage: &Path,
        names: &'static RowNames,
    ) -> Result<Self> {
        let mut spec = workspace.spec()?;
        spec.binds = vec![Bind { source: stage.to_owned(), inside: "/stage".into() }];
        let running = engine.start(&spec)?;
        in_sandbox(&running.bridge, &["cp", "-a", "/stage", "/changed/tree"])?;
        Ok(Self { workspace, engine, running, names })
    }

    fn benchmark(&self) -> Benchmark<'_> {
        Benchmark::parts(&self.names.small, || {
            self.change(1)?;
            self.fork()
        })
    }

    /// Overwrites a file with this many MiB of random data.
    fn change(&self, mib: usize) -> Result<()> {
        let count = format!("count={mib}");
        in_sandbox(
            &self.running.bridge,
            &["dd", "if=/dev/urandom", "of=/changed/dirty", "bs=1M", &count],
        )
    }

    fn snapshot(&self) -> Result<Duration> {
        let began = Instant::now();
        self.engine.capture(&self.running.id, &SnapshotId::random())?;
        Ok(began.elapsed())
    }

    /// Takes a snapshot and runs a command in a second sandbox started from it. Returns both times.
    fn fork(&self) -> Result<Vec<Duration>> {
        let snapshot = SnapshotId::random();
        let spec = self.workspace.spec()?;
        let began = Instant::now();
        self.engine.capture(&self.running.id, &snapshot)?;
        let captured = began.elapsed();
        let fork = Spec { id: SandboxId::random(), from: Origin::Snapshot(snapshot), ..spec };
        let running = self.engine.start(&fork)?;
        in_sandbox(&running.bridge, &["true"])?;
        let forked = began.elapsed();
        self.engine.remove(&fork.id)?;
        Ok(vec![captured, forked])
    }
}

/// A loop-mounted btrfs with the tree in a subvolume.
struct BtrfsVolume {
    mount: PathBuf,
}

impl BtrfsVolume {
    fn make(workspace: &Workspace, stage: &Path) -> Result<Self> {
        let (image, mount) = (workspace.at("btrfs.img"), workspace.at("btrfs"));
        fs::create_dir_all(&mount)?;
        // Sparse; large enough for the tree and the changes.
        File::create(&image)?.set_len(4 << 30)?;
        let words = |words: &[&Path]| {
            words.iter().map(|word| word.display().to_string()).collect::<Vec<_>>()
        };
        run_silently(
            &[vec!["mkfs.btrfs".to_owned(), "--quiet".to_owned()], words(&[&image])].concat(),
        )?;
        run_silently(
            &[
                vec!["mount".to_owned(), "-o".to_owned(), "loop".to_owned()],
                words(&[&image, &mount]),
            ]
            .concat(),
        )?;
        let volume = Self { mount };
        volume.btrfs("create", &["live"])?;
        let target = volume.mount.join("live/tree");
        run_silently(&[vec!["cp".to_owned(), "-a".to_owned()], words(&[stage, &target])].concat())?;
        run_silently(&["sync"])?;
        Ok(volume)
    }

    fn btrfs(&self, verb: &str, names: &[&str]) -> Result<()> {
        let mut words = vec!["btrfs".to_owned(), "subvolume".to_owned(), verb.to_owned()];
        words.extend(names.iter().map(|name| self.mount.join(name).display().to_string()));
        run_silently(&words)
    }

    fn benchmark(&self) -> Benchmark<'_> {
        let mut number = 0u32;
        Benchmark::parts(&[SUBVOLUME], move || {
            number += 1;
            fs::write(self.mount.join("live/dirty"), [number.to_le_bytes()[0]].repeat(1 << 20))?;
            let name = format!("snapshot-{number}");
            let began = Instant::now();
            self.btrfs("snapshot", &["live", &name])?;
            let took = began.elapsed();
            self.btrfs("delete", &[&name])?;
            Ok(vec![took])
        })
    }
}

impl Drop for BtrfsVolume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mount).status();
    }
}
