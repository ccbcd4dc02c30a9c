//! The zygote: the parent of every sandbox of one home. It has a single thread, because only a
//! single-threaded process can fork safely, and an almost empty mount table, because every sandbox
//! starts with a copy of it. It outlives the CLI and the server; after a crash the next zygote
//! adopts the sandboxes that are still alive.

pub(crate) mod client;
mod disk_watch;
mod freezer;
mod mount_cache;
pub(crate) mod protocol;
mod sandbox_table;
mod server;
mod standby;
mod supervisor;

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
    facts::{DisabledFeature, RedirectProbe},
    home::Home,
    isolate::{ids, mounts},
    plan::{NODES, Plan},
    rootless,
    syscall::{self, Side},
};
use protocol::BuildId;
use sandbox_table::SandboxTable;
use server::Server;

// An exiting zygote holds the lock a moment longer.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Changes a plan before it is executed.
#[doc(hidden)]
pub type Alter = Box<dyn Fn(&mut Plan)>;

/// Runs the zygote of a home: prints `ready` or the reason of a failure on standard output, then
/// continues in the background until it has been idle for a minute.
pub fn main(home: &Path) -> ExitCode {
    main_altered(home, &[], Box::new(|_| {}))
}

/// As [`main`], treating these features of the host as missing, and with every plan changed before
/// it is executed. Only for the engine's tests, which prove that a probe notices a missing guard;
/// `src/bin/harvest-zygote.rs` decides what to change.
#[doc(hidden)]
pub fn main_altered(home: &Path, disabled: &[DisabledFeature], alter: Alter) -> ExitCode {
    // Closes descriptors inherited from a careless parent.
    // SAFETY: this is the first thing the program does; it owns no descriptor yet.
    unsafe { syscall::close_all_but(&[]) };
    match fork() {
        Ok(Side::Parent { .. }) => return ExitCode::SUCCESS,
        Ok(Side::Child) => {}
        Err(error) => return report_failure(&format!("cannot move to the background: {error}")),
    }
    let _ = rustix::process::setsid();
    let prepared = prepare(home, disabled, alter);
    match prepared.and_then(|prepared| report_ready().map(|()| prepared)) {
        Ok((mut server, _lock)) => {
            server.run();
            ExitCode::SUCCESS
        }
        Err(error) => report_failure(&error.line()),
    }
}

/// Prints the failure for the process that started this one and waits for this line.
fn report_failure(text: &str) -> ExitCode {
    let _ = writeln!(io::stdout(), "{text}");
    ExitCode::FAILURE
}

/// Prints `ready` and closes standard output, so that the waiting parent sees end of file.
fn report_ready() -> Result<(), StepError> {
    let doing = || "close standard output";
    writeln!(io::stdout(), "ready").doing(doing)?;
    let stderr = io::stderr();
    syscall::standard_stream(stderr.as_fd(), 1).doing(doing)
}

fn fork() -> io::Result<Side> {
    // SAFETY: the program has just begun and has one thread.
    unsafe { syscall::clone_process(0, None) }
}

fn prepare(
    home: &Path,
    disabled: &[DisabledFeature],
    alter: Alter,
) -> Result<(Server, File), StepError> {
    let build = BuildId::of(Path::new("/proc/self/exe"));
    let path = home.canonicalize().doing(|| format!("find {}", home.display()))?;
    let home = Home::find(path)
        .map_err(|error| StepError::new("read the home's record", io::Error::other(error)))?;
    let lock = lock(&home)?;
    rustix::process::umask(Mode::empty());
    syscall::fresh_keyring();
    // Three descriptors per sandbox and one per client, for hundreds of both.
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
    // Best effort: lowering the score needs CAP_SYS_RESOURCE on the host.
    let _ = fs::write("/proc/self/oom_score_adj", "-900");
    let claims = Path::new(ids::CLAIMS);
    // Sandboxes of an unprivileged user share that user's ids, so there are no claims.
    if !rootless::is_active() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(claims)
            .doing(|| format!("make {}", ids::CLAIMS))?;
    }
    // SAFETY: the zygote has one thread.
    let redirect = unsafe { RedirectProbe::start(disabled) };
    let mut cgroups = Hierarchy::detect()?;
    match cgroups.enter_home(&home.cgroup_name()) {
        // The cgroup only looked delegated. Sandboxes without limits are better than none, and the
        // plan shows that there are no cgroups.
        Err(error) if rootless::is_active() => {
            eprintln!("no cgroups: {}", error.line());
            cgroups = Hierarchy::None;
        }
        result => result?,
    }
    empty_mount_table(&home, claims, &cgroups)?;
    if !rootless::is_active() {
        ids::sweep(claims)?;
    }
    let table =
        SandboxTable::adopt(home.clone(), cgroups, claims.to_owned(), redirect.outcome(), alter)?;
    Ok((Server::listen(home, build, table)?, lock))
}

/// Ensures one zygote per home. An fcntl lock is not inherited by children, unlike `flock`.
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

/// Replaces the host's mount table by one with only the home, `/proc`, the cgroups and the claims.
fn empty_mount_table(home: &Home, claims: &Path, cgroups: &Hierarchy) -> Result<(), StepError> {
    let doing = || "create a private mount table";
    // SAFETY: one thread; no other relies on the old mount table.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.doing(doing)?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).doing(doing)?;
    let mut kept: Vec<(PathBuf, bool)> = vec![
        // `/proc` without its submounts needs root on the host: they may hide something.
        ("/proc".into(), rootless::is_active()),
        // A store may be mounted inside the home.
        (home.path().to_owned(), true),
    ];
    if rootless::is_active() {
        kept.extend(NODES.map(|(name, ..)| (Path::new(mounts::DEVICES).join(name), false)));
    } else {
        kept.push((claims.to_owned(), false));
    }
    kept.extend(cgroups.mounts().into_iter().map(|mount| (mount.to_owned(), false)));
    let mut trees: Vec<(PathBuf, OwnedFd)> = Vec::new();
    for (path, recursive) in kept {
        let tree = syscall::clone_mount(CWD, &path, recursive)
            .doing(|| format!("keep {}", path.display()))?;
        trees.push((path, tree));
    }
    let build = || -> io::Result<()> {
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let root = mounts::new("tmpfs", &[("mode", "0755")], flags)?;
        let target = rustix::fs::open(home.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        syscall::attach_mount(&root, &target)?;
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
            syscall::attach_mount(tree, &target)?;
        }
        mounts::enter_root(&root)
    };
    build().doing(doing)
}
