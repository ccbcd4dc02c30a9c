//! The zygote: the parent of every sandbox of one home. A small process with one thread, because
//! only such a process may be split in two safely, and with an almost empty mount table, because
//! every sandbox starts with a copy of it. It outlives the CLI and the server; when it dies, the next
//! one adopts what lives.

pub(crate) mod client;
mod holds;
mod nursery;
pub(crate) mod protocol;
mod seed;
mod server;
mod still;
mod supervisor;
mod watch;

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{CWD, FlockOperation, Mode, OFlags, fcntl_lock},
    io::Errno,
    mount::{MountAttrFlags, MountPropagationFlags, mount_change},
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::UnshareFlags,
};

use crate::{
    cgroup::Hierarchy,
    error::{Doing, StepError},
    facts::{Lack, RedirectTrial},
    home::Home,
    isolate::{ids, mounts},
    plan::{NODES, Plan},
    rootless,
    syscall::{self, Side},
};
use nursery::Nursery;
use protocol::Build;
use server::Server;

// A zygote that is just going holds its lock for a moment longer.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Changes a plan before it is carried out.
#[doc(hidden)]
pub type Alter = Box<dyn Fn(&mut Plan)>;

/// Runs the zygote of a home: says `ready` (or why not) on standard output and goes on in the
/// background until it has had nothing to do for a minute.
pub fn main(home: &Path) -> ExitCode {
    run(home, &[], Box::new(|_| {}))
}

/// The same, on a host that is to be taken for a lesser one.
pub fn main_without(home: &Path, lacking: &[Lack]) -> ExitCode {
    run(home, lacking, Box::new(|_| {}))
}

/// The same with every plan changed first. For the engine's own tests, which show that a probe finds a
/// guard that is off; what to change is known to their zygote alone, `src/bin/harvest-zygote.rs`.
#[doc(hidden)]
pub fn main_altered(home: &Path, alter: Alter) -> ExitCode {
    run(home, &[], alter)
}

fn run(home: &Path, lacking: &[Lack], alter: Alter) -> ExitCode {
    // What some careless parent left open.
    // SAFETY: this is the first thing the program does; it owns no descriptor yet.
    unsafe { syscall::close_all_but(&[]) };
    match split() {
        Ok(Side::Parent { .. }) => return ExitCode::SUCCESS,
        Ok(Side::Child) => {}
        Err(error) => return say(&format!("cannot go into the background: {error}")),
    }
    let _ = rustix::process::setsid();
    match prepare(home, lacking, alter).and_then(|(server, lock)| {
        hush()?;
        Ok((server, lock))
    }) {
        Ok((mut server, _lock)) => {
            server.run();
            ExitCode::SUCCESS
        }
        Err(error) => say(&error.line()),
    }
}

/// Answers who started us: this line is all they wait for.
fn say(text: &str) -> ExitCode {
    let _ = writeln!(io::stdout(), "{text}");
    ExitCode::FAILURE
}

/// The last word on standard output; whoever waits for it sees its end.
fn hush() -> Result<(), StepError> {
    let doing = || "let go of standard output".to_owned();
    writeln!(io::stdout(), "ready").doing(doing)?;
    let stderr = io::stderr();
    syscall::standard_stream(stderr.as_fd(), 1).doing(doing)
}

fn split() -> io::Result<Side> {
    // SAFETY: the program has just begun and has one thread.
    unsafe { syscall::clone_process(0, None) }
}

fn prepare(home: &Path, lacking: &[Lack], alter: Alter) -> Result<(Server, File), StepError> {
    let build = Build::of(Path::new("/proc/self/exe"));
    let path = home.canonicalize().doing(|| format!("find {}", home.display()))?;
    let home = Home::find(path)
        .map_err(|error| StepError::new("read the home's record", io::Error::other(error)))?;
    let lock = lock(&home)?;
    rustix::process::umask(Mode::empty());
    syscall::fresh_keyring();
    // Three descriptors per sandbox and one per client, for hundreds of both.
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
    // Best effort: only the most privileged may make themselves less likely to be killed.
    let _ = fs::write("/proc/self/oom_score_adj", "-900");
    let claims = Path::new(ids::CLAIMS);
    // An ordinary user's sandboxes share their ids: nothing is claimed.
    if !rootless::is_here() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(claims)
            .doing(|| format!("make {}", ids::CLAIMS))?;
    }
    // SAFETY: the zygote has one thread.
    let redirect = unsafe { RedirectTrial::start(lacking) };
    let mut cgroups = Hierarchy::detect()?;
    match cgroups.enter_home(&home.group()) {
        // What looked like ours is not: sandboxes without limits are better than none, and the plan says so.
        Err(error) if rootless::is_here() => {
            eprintln!("no cgroups: {}", error.line());
            cgroups = Hierarchy::None;
        }
        result => result?,
    }
    empty_mount_table(&home, claims, &cgroups)?;
    if !rootless::is_here() {
        ids::sweep(claims)?;
    }
    let nursery =
        Nursery::adopt(home.clone(), cgroups, claims.to_owned(), redirect.found(), alter)?;
    Ok((Server::listen(home, build, nursery)?, lock))
}

/// One zygote per home. Not inherited by what we start, unlike a lock of `flock`.
fn lock(home: &Home) -> Result<File, StepError> {
    let path = home.run().join("zygote.lock");
    let doing = || format!("lock {}", path.display());
    let file = OpenOptions::new().create(true).append(true).open(&path).doing(doing)?;
    let end = Instant::now() + LOCK_PATIENCE;
    loop {
        match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN | Errno::ACCESS) if Instant::now() < end => {
                thread::sleep(Duration::from_millis(2));
            }
            result => return result.doing(doing).map(|()| file),
        }
    }
}

/// Leaves the host's mount table for one with the home, `/proc`, the cgroups and the claims only.
fn empty_mount_table(home: &Home, claims: &Path, cgroups: &Hierarchy) -> Result<(), StepError> {
    let doing = || "make a mount table of its own".to_owned();
    // SAFETY: one thread; no other relies on the old mount table.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.doing(doing)?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).doing(doing)?;
    let mut kept: Vec<(PathBuf, bool)> = vec![
        // Only the host's root may show what others have mounted over.
        ("/proc".into(), rootless::is_here()),
        // A store may be mounted inside the home.
        (home.path().to_owned(), true),
    ];
    if rootless::is_here() {
        kept.extend(NODES.map(|(name, ..)| (Path::new(mounts::DEVICES).join(name), false)));
    } else {
        kept.push((claims.to_owned(), false));
    }
    kept.extend(cgroups.mounts().into_iter().map(|mount| (mount.to_owned(), false)));
    let mut trees: Vec<(PathBuf, OwnedFd)> = Vec::new();
    for (path, recursive) in kept {
        let tree =
            syscall::tree(CWD, &path, recursive).doing(|| format!("keep {}", path.display()))?;
        trees.push((path, tree));
    }
    let build = || -> io::Result<()> {
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let root = mounts::new("tmpfs", &[("mode", "0755")], flags)?;
        let target = rustix::fs::open(home.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        syscall::attach(&root, &target)?;
        rustix::process::fchdir(&root)?;
        let below = |path: &Path| path.strip_prefix("/").unwrap_or(path).to_owned();
        for folder in [mounts::SCRATCH, mounts::DEVICES] {
            fs::create_dir(below(Path::new(folder)))?;
        }
        for (path, tree) in &trees {
            let path = below(path);
            match fs::File::from(tree.try_clone()?).metadata()?.is_dir() {
                true => fs::create_dir_all(&path)?,
                false => fs::write(&path, "")?,
            }
            let target = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            syscall::attach(tree, &target)?;
        }
        mounts::enter_root(&root)
    };
    build().doing(doing)
}
