//! The disk rows: a live snapshot and a live fork of a big writable layer, beside `cp -a` of the same
//! tree and `btrfs subvolume snapshot`.

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
    contest::{Contestant, Samples, run as contest},
    harvest::in_sandbox,
    options::Options,
    peers::quietly,
    place::Place,
    report::Report,
};

/// The tree that is copied.
struct Size {
    files: usize,
    folders: usize,
    file_bytes: usize,
    /// The bigger changes shown.
    dirty_mib: [usize; 2],
}

// 50,000 files and 1.2 GB: a checkout with its dependencies installed.
const FULL: Size =
    Size { files: 50_000, folders: 5_000, file_bytes: 24_000, dirty_mib: [100, 1024] };
const QUICK: Size = Size { files: 200, folders: 20, file_bytes: 24_000, dirty_mib: [2, 4] };

/// The copy everybody could make.
pub(crate) const COPY: &str = "cp -a, 1.2 GB / 50k files";
/// The file system's own way.
pub(crate) const SUBVOLUME: &str = "btrfs subvolume snapshot, 1 MB dirty";
/// A snapshot while the sandbox runs, in plain folders.
pub(crate) const SNAPSHOT: &str = "harvest dir: live snapshot, 1 MB dirty";
/// A snapshot and a second sandbox that has run a command from it, on btrfs.
pub(crate) const FORK: &str = "harvest btrfs: live fork, 1 MB dirty";

/// Whether a row is about disks.
pub(crate) fn is_row(name: &str) -> bool {
    name.contains("dirty") || name.contains("1.2 GB")
}

/// The names of one driver's rows.
struct Names {
    first: &'static str,
    small: [&'static str; 2],
    large: [[&'static str; 2]; 2],
}

const DIR: Names = Names {
    first: "harvest dir: first live snapshot, all 1.2 GB",
    small: [SNAPSHOT, "harvest dir: live fork, 1 MB dirty"],
    large: [
        ["harvest dir: live snapshot, 100 MB dirty", "harvest dir: live fork, 100 MB dirty"],
        ["harvest dir: live snapshot, 1 GB dirty", "harvest dir: live fork, 1 GB dirty"],
    ],
};
const BTRFS: Names = Names {
    first: "harvest btrfs: first live snapshot, all 1.2 GB",
    small: ["harvest btrfs: live snapshot, 1 MB dirty", FORK],
    large: [
        ["harvest btrfs: live snapshot, 100 MB dirty", "harvest btrfs: live fork, 100 MB dirty"],
        ["harvest btrfs: live snapshot, 1 GB dirty", "harvest btrfs: live fork, 1 GB dirty"],
    ],
};

/// Measures the rows and adds them to the report.
pub(crate) fn run(place: &Place, options: &Options, report: &mut Report) -> Result<()> {
    let size = if options.quick { &QUICK } else { &FULL };
    let stage = place.at("stage");
    eprintln!("making {} files", size.files);
    make_tree(&stage, size)?;
    let volume = if options.peers { Volume::make(place, &stage) } else { bail_quietly() };
    let btrfs = place.on_btrfs();
    let mut lives = vec![Live::start(place, &place.engine, &stage, &DIR)?];
    match &btrfs {
        Ok(engine) => lives.push(Live::start(place, &engine.0, &stage, &BTRFS)?),
        Err(error) => report.skipped.push((FORK.to_owned(), error.root_cause().to_string())),
    }
    for live in &lives {
        report.add(vec![Samples { row: live.names.first, taken: vec![live.snapshot()?] }]);
    }
    let mut contestants: Vec<Contestant<'_>> = lives.iter().map(Live::contestant).collect();
    match &volume {
        Ok(volume) => contestants.push(volume.contestant()),
        Err(error) => report.skipped.push((SUBVOLUME.to_owned(), error.root_cause().to_string())),
    }
    // Each copy takes seconds to make and longer to delete: fewer rounds than for a start.
    let rounds = (options.rounds / 5).clamp(1, 10);
    report.add(contest(&mut contestants, rounds, options.gap)?);
    drop(contestants);
    for live in &lives {
        for (mib, names) in size.dirty_mib.into_iter().zip(live.names.large) {
            live.change(mib)?;
            for (row, took) in names.into_iter().zip(live.fork()?) {
                report.add(vec![Samples { row, taken: vec![took] }]);
            }
        }
    }
    if options.peers {
        report.add(vec![copies(place, &stage, rounds.min(3))?]);
    }
    for live in lives {
        live.engine.remove(&live.running.id)?;
    }
    Ok(())
}

fn bail_quietly<T>() -> Result<T> {
    bail!("no peers were asked for")
}

fn copies(place: &Place, stage: &Path, rounds: usize) -> Result<Samples> {
    let mut taken = Vec::new();
    for number in 0..rounds {
        let copy = place.at(&format!("copy-{number}"));
        let began = Instant::now();
        quietly(&["cp", "-a", &stage.display().to_string(), &copy.display().to_string()])?;
        taken.push(began.elapsed());
    }
    Ok(Samples { row: COPY, taken })
}

/// Files of bytes that do not compress, over many folders.
fn make_tree(root: &Path, size: &Size) -> Result<()> {
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
            .context("cannot make the tree")?;
    }
    Ok(())
}

/// A running sandbox whose writable layer holds the tree.
struct Live<'a> {
    place: &'a Place,
    engine: &'a Engine,
    running: Running,
    names: &'static Names,
}

impl<'a> Live<'a> {
    fn start(
        place: &'a Place,
        engine: &'a Engine,
        stage: &Path,
        names: &'static Names,
    ) -> Result<Self> {
        let mut spec = place.spec()?;
        spec.binds = vec![Bind { source: stage.to_owned(), inside: "/stage".into() }];
        let running = engine.start(&spec)?;
        in_sandbox(&running.bridge, &["cp", "-a", "/stage", "/changed/tree"])?;
        Ok(Self { place, engine, running, names })
    }

    fn contestant(&self) -> Contestant<'_> {
        Contestant::parts(&self.names.small, || {
            self.change(1)?;
            self.fork()
        })
    }

    /// Writes this many MiB, new each time.
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

    /// A snapshot, then a second sandbox from it that has run a command.
    fn fork(&self) -> Result<Vec<Duration>> {
        let snapshot = SnapshotId::random();
        let spec = self.place.spec()?;
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

/// A btrfs in a file, with the tree in a subvolume.
struct Volume {
    mount: PathBuf,
}

impl Volume {
    fn make(place: &Place, stage: &Path) -> Result<Self> {
        let (image, mount) = (place.at("btrfs.img"), place.at("btrfs"));
        fs::create_dir_all(&mount)?;
        // Sparse, with room for the tree and what is written besides.
        File::create(&image)?.set_len(4 << 30)?;
        let words = |words: &[&Path]| {
            words.iter().map(|word| word.display().to_string()).collect::<Vec<_>>()
        };
        quietly(&[vec!["mkfs.btrfs".to_owned(), "--quiet".to_owned()], words(&[&image])].concat())?;
        quietly(
            &[
                vec!["mount".to_owned(), "-o".to_owned(), "loop".to_owned()],
                words(&[&image, &mount]),
            ]
            .concat(),
        )?;
        let volume = Self { mount };
        volume.btrfs("create", &["live"])?;
        let target = volume.mount.join("live/tree");
        quietly(&[vec!["cp".to_owned(), "-a".to_owned()], words(&[stage, &target])].concat())?;
        quietly(&["sync"])?;
        Ok(volume)
    }

    fn btrfs(&self, verb: &str, names: &[&str]) -> Result<()> {
        let mut words = vec!["btrfs".to_owned(), "subvolume".to_owned(), verb.to_owned()];
        words.extend(names.iter().map(|name| self.mount.join(name).display().to_string()));
        quietly(&words)
    }

    fn contestant(&self) -> Contestant<'_> {
        let mut number = 0u32;
        Contestant::parts(&[SUBVOLUME], move || {
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

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mount).status();
    }
}
