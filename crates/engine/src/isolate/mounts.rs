//! Mounts a sandbox's file tree, as root of the host in the sandbox's own mount namespace.
//!
//! The image may be hostile: paths inside are resolved only below the new root, and mounts attach
//! to open descriptors, never to names.

use std::{
    ffi::OsStr,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2, statat},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags, fsconfig_create,
        fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount,
    },
};

use harvest_proto::launch::Descriptor;

use crate::{
    error::{Doing, StepError},
    plan::below_root,
    rootless, syscall,
};

const NOSUID_NODEV: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);
pub(super) const READ_ONLY: u64 =
    libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;

// All sandboxes share `kernel.pty.max`, 3,072 by default: without a limit one of them could take
// all.
const MAX_TERMINALS: &str = "256";

/// Mount point in the zygote's root where mounts are assembled; a fresh tmpfs for each sandbox.
pub(crate) const SCRATCH: &str = "/scratch";

/// Where an unprivileged user's zygote keeps the host's devices.
pub(crate) const DEVICES: &str = "/dev";

/// Creates a file system that is not attached anywhere yet.
pub(crate) fn new(
    kind: &str,
    options: &[(&str, &str)],
    flags: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        match *value {
            "" => fsconfig_set_flag(context.as_fd(), *key)?,
            value => fsconfig_set_string(context.as_fd(), *key, value)?,
        }
    }
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

fn folder(at: impl AsFd, path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, path.as_ref(), flags, Mode::empty())?)
}

/// The scratch tmpfs of the sandbox being created.
pub(crate) struct Scratch(OwnedFd);

impl Scratch {
    pub(crate) fn make() -> Result<Self, StepError> {
        Self::make_on(Path::new(SCRATCH))
    }

    /// Mounts the scratch tmpfs on this folder.
    pub(crate) fn make_on(folder_path: &Path) -> Result<Self, StepError> {
        let make = || -> io::Result<OwnedFd> {
            let tmpfs = new("tmpfs", &[("mode", "0700")], NOSUID_NODEV)?;
            let target = folder(CWD, folder_path)?;
            syscall::attach_mount(&tmpfs, &target)?;
            for name in [
                "layers",
                "writable",
                "root",
                "files",
                "prepared",
                "prepared/proc",
                "prepared/dev",
                "prepared/sys",
            ] {
                mkdirat(&tmpfs, name, Mode::from_raw_mode(0o755))?;
            }
            Ok(tmpfs)
        };
        make().doing(|| "create the scratch tmpfs").map(Self)
    }

    /// The tree of mounts that are the same for every sandbox, prepared before there is a root.
    pub(crate) fn prepared(&self) -> io::Result<RootTree> {
        Ok(RootTree { root: folder(&self.0, "prepared")? })
    }

    /// The prepared `/dev/null`.
    pub(crate) fn null(&self) -> io::Result<OwnedFd> {
        Ok(openat(&self.0, "prepared/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Moves the prepared mounts, with everything below them, into a tree.
    pub(crate) fn assemble_root(&self, tree: &RootTree) -> io::Result<()> {
        for name in ["proc", "dev", "sys"] {
            let made = folder(&self.0, Path::new("prepared").join(name))?;
            tree.on_folder(&made, &Path::new("/").join(name))?;
        }
        Ok(())
    }

    /// Attaches a layer, read-only and mapped to `ids`.
    pub(crate) fn layer(
        &self,
        tree: &OwnedFd,
        name: &str,
        ids: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let target = Path::new("layers").join(name);
        mkdirat(&self.0, &target, Mode::from_raw_mode(0o755))?;
        syscall::set_mount_attributes(tree, READ_ONLY, ids)?;
        syscall::attach_mount(tree, folder(&self.0, &target)?)
    }

    /// Attaches the folder with `upper` and `work`, mapped to `ids`.
    pub(crate) fn writable(&self, path: &Path, ids: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let tree = syscall::clone_mount(CWD, path, false)?;
        let flags = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
        syscall::set_mount_attributes(&tree, flags, ids)?;
        syscall::attach_mount(&tree, folder(&self.0, "writable")?)
    }

    /// Mounts the layers as an overlay; returns the new root.
    pub(crate) fn overlay(&self, lowers: &[String]) -> io::Result<OwnedFd> {
        let lowers: Vec<String> = lowers.iter().map(|name| format!("layers/{name}")).collect();
        // Every option whose default depends on the kernel's build is explicit. Without redirects
        // and metadata-only copies each layer is readable on its own and cannot refer to another.
        let options = format!(
            "lowerdir={},upperdir=writable/upper,workdir=writable/work,\
             redirect_dir=nofollow,metacopy=off,index=off,nfs_export=off{}",
            lowers.join(":"),
            if rootless::is_active() { ",userxattr" } else { "" }
        );
        let options = std::ffi::CString::new(options)?;
        // All paths above are relative to the scratch tmpfs.
        rustix::process::fchdir(&self.0)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("overlay", "root", "overlay", flags, Some(&*options))?;
        folder(&self.0, "root")
    }

    /// A read-only empty file that is not attached anywhere yet.
    pub(crate) fn empty_file(&self) -> io::Result<OwnedFd> {
        let name = Path::new("files/empty");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        openat(&self.0, name, flags, Mode::from_raw_mode(0o444))?;
        let tree = syscall::clone_mount(&self.0, name, false)?;
        syscall::set_mount_attributes(&tree, READ_ONLY | libc::MOUNT_ATTR_NOEXEC, None)?;
        Ok(tree)
    }

    /// A small file system as two mounts that are not attached anywhere yet: one to write, for pid
    /// 1, and a read-only one.
    pub(crate) fn pid1_folder(&self, writer: Descriptor) -> io::Result<(OwnedFd, OwnedFd)> {
        let flags = NOSUID_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let tmpfs = new("tmpfs", &[("mode", "0755"), ("size", "4m")], flags)?;
        let name = format!("pid1-{writer:?}");
        let name = Path::new(&name);
        mkdirat(&self.0, name, Mode::from_raw_mode(0o755))?;
        // Kernels before 6.15 clone only mounts that are attached.
        syscall::attach_mount(&tmpfs, folder(&self.0, name)?)?;
        let shown = syscall::clone_mount(&self.0, name, false)?;
        syscall::set_mount_attributes(&shown, READ_ONLY | libc::MOUNT_ATTR_NOEXEC, None)?;
        Ok((syscall::clone_mount(&self.0, name, false)?, shown))
    }

    /// A new file with this text, open for writing, and a read-only mount of it that is not
    /// attached anywhere yet.
    pub(crate) fn file(&self, number: usize, text: &str) -> io::Result<(OwnedFd, OwnedFd)> {
        let name = Path::new("files").join(number.to_string());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file =
            std::fs::File::from(openat(&self.0, &name, flags, Mode::from_raw_mode(0o644))?);
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        let tree = syscall::clone_mount(&self.0, &name, false)?;
        syscall::set_mount_attributes(&tree, READ_ONLY | libc::MOUNT_ATTR_NOEXEC, None)?;
        Ok((file.into(), tree))
    }
}

/// The file tree of a sandbox while it is assembled.
pub(crate) struct RootTree {
    pub(crate) root: OwnedFd,
}

impl RootTree {
    /// Opens a folder inside, creating missing parts.
    pub(super) fn folder(&self, inside: &Path) -> io::Result<OwnedFd> {
        let mut at = PathBuf::new();
        let mut open = self.resolve(Path::new("."))?;
        for component in below_root(inside).components() {
            let Component::Normal(name) = component else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            at.push(name);
            open = match self.resolve(&at) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    mkdirat(&open, name, Mode::from_raw_mode(0o755))?;
                    self.resolve(&at)?
                }
                result => result?,
            };
        }
        Ok(open)
    }

    fn resolve(&self, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        Ok(openat2(&self.root, path, flags, Mode::empty(), how)?)
    }

    /// Opens a regular file inside. Anything else of that name, such as a dangling link, is
    /// replaced.
    fn file(&self, inside: &Path) -> io::Result<OwnedFd> {
        let parent = self.folder(inside.parent().unwrap_or(Path::new("/")))?;
        let name: &OsStr = inside.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        match statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {}
            Ok(_) => {
                rustix::fs::unlinkat(&parent, name, AtFlags::empty())?;
                create(&parent, name)?;
            }
            Err(Errno::NOENT) => create(&parent, name)?,
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&parent, name, flags, Mode::empty())?)
    }

    /// Mounts onto a folder inside.
    pub(crate) fn on_folder(&self, mount: &OwnedFd, inside: &Path) -> io::Result<()> {
        syscall::attach_mount(mount, self.folder(inside)?)
    }

    /// Mounts onto a folder inside, which no link leads to. Anything else of that name is replaced.
    pub(crate) fn on_real_folder(&self, mount: &OwnedFd, inside: &Path) -> io::Result<()> {
        let parent = self.folder(inside.parent().unwrap_or(Path::new("/")))?;
        let name: &OsStr = inside.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mode = Mode::from_raw_mode(0o755);
        match statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {}
            Ok(_) => {
                rustix::fs::unlinkat(&parent, name, AtFlags::empty())?;
                mkdirat(&parent, name, mode)?;
            }
            Err(Errno::NOENT) => mkdirat(&parent, name, mode)?,
            Err(error) => return Err(error.into()),
        }
        syscall::attach_mount(mount, folder(&parent, name)?)
    }

    /// Mounts onto a file inside.
    pub(crate) fn on_file(&self, mount: &OwnedFd, inside: &Path) -> io::Result<()> {
        syscall::attach_mount(mount, self.file(inside)?)
    }

    /// A `/proc` that shows this pid namespace only.
    pub(crate) fn proc(&self) -> io::Result<()> {
        let flags = NOSUID_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        self.on_folder(&new("proc", &[], flags)?, Path::new("/proc"))
    }

    /// A `/dev` with these nodes, private terminals and a mount point for shared memory.
    pub(crate) fn dev<'a>(
        &self,
        nodes: impl Iterator<Item = (&'a str, u32, u32)>,
        first_id: u32,
    ) -> io::Result<()> {
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        // 64 KiB hold the names; everything written here counts against the sandbox's memory.
        let dev = new("tmpfs", &[("mode", "0755"), ("size", "64k")], flags)?;
        let mut names = Vec::new();
        for (name, major, minor) in nodes {
            let device = rustix::fs::makedev(major, minor);
            let mode = Mode::from_raw_mode(0o666);
            match rootless::is_active() {
                true => create(&dev, OsStr::new(name))?,
                false => rustix::fs::mknodat(&dev, name, FileType::CharacterDevice, mode, device)?,
            }
            names.push(name);
        }
        for (name, target) in [
            ("ptmx", "pts/ptmx"),
            ("fd", "/proc/self/fd"),
            ("stdin", "/proc/self/fd/0"),
            ("stdout", "/proc/self/fd/1"),
            ("stderr", "/proc/self/fd/2"),
        ] {
            rustix::fs::symlinkat(target, &dev, name)?;
        }
        for name in ["pts", "shm"] {
            mkdirat(&dev, name, Mode::from_raw_mode(0o755))?;
        }
        self.on_folder(&dev, Path::new("/dev"))?;
        // Only the host's root can create device nodes; others mount the host's own.
        for name in names.iter().filter(|_| rootless::is_active()) {
            let node = syscall::clone_mount(CWD, &Path::new(DEVICES).join(name), false)?;
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            syscall::attach_mount(&node, openat(&dev, *name, flags, Mode::empty())?)?;
        }
        // 5 is the `tty` group on every distribution; mount options use host ids.
        let group = (first_id + 5).to_string();
        let options =
            [("ptmxmode", "0666"), ("mode", "0620"), ("gid", &*group), ("max", MAX_TERMINALS)];
        let pts = new("devpts", &options, flags)?;
        syscall::attach_mount(&pts, folder(&dev, "pts")?)
    }

    /// A `/dev/shm` of this size.
    pub(crate) fn shm(&self, bytes: u64) -> io::Result<()> {
        let shm = new("tmpfs", &[("mode", "1777"), ("size", &bytes.to_string())], NOSUID_NODEV)?;
        self.on_folder(&shm, Path::new("/dev/shm"))
    }

    /// Hides paths below `/proc`. Not with `/dev/null`, which would accept writes.
    pub(crate) fn mask(&self, paths: &[PathBuf], scratch: &Scratch) -> io::Result<()> {
        let proc = folder(&self.root, "proc")?;
        for path in paths {
            let Some((target, is_folder)) = existing(&proc, path)? else { continue };
            let cover = if is_folder { empty_tmpfs()? } else { scratch.empty_file()? };
            syscall::attach_mount(&cover, &target)?;
        }
        Ok(())
    }

    /// Makes paths below `/proc` read-only.
    pub(crate) fn read_only(&self, paths: &[PathBuf]) -> io::Result<()> {
        let proc = folder(&self.root, "proc")?;
        for path in paths {
            let Some((target, _)) = existing(&proc, path)? else { continue };
            let tree = syscall::clone_mount(&target, Path::new(""), false)?;
            syscall::set_mount_attributes(&tree, READ_ONLY | libc::MOUNT_ATTR_NOEXEC, None)?;
            syscall::attach_mount(&tree, &target)?;
        }
        Ok(())
    }

    /// Mounts a file or folder of the host, read-only.
    pub(crate) fn bind(&self, tree: &OwnedFd, inside: &Path) -> io::Result<()> {
        syscall::set_mount_attributes(tree, READ_ONLY, None)?;
        let is_folder = is_folder(tree)?;
        if is_folder { self.on_folder(tree, inside) } else { self.on_file(tree, inside) }
    }

    /// Mounts a volume, mapped to the sandbox's ids.
    pub(crate) fn volume(
        &self,
        mount: &OwnedFd,
        inside: &Path,
        read_only: bool,
        ids: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let flags = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
        let flags = if read_only { READ_ONLY } else { flags };
        syscall::set_mount_attributes(mount, flags, ids)?;
        self.on_folder(mount, inside)
    }

    /// Makes this tree the root and unmounts everything else.
    pub(crate) fn enter(self) -> io::Result<()> {
        enter_root(&self.root)
    }
}

/// Makes an open mount the root of this mount namespace and unmounts the old one.
pub(crate) fn enter_root(root: &OwnedFd) -> io::Result<()> {
    rustix::process::fchdir(root)?;
    // The old root ends up stacked on the new one and is then unmounted.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    Ok(rustix::process::chdir("/")?)
}

fn create(parent: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::from_raw_mode(0o644)).map(drop)
}

fn is_folder(file: impl AsFd) -> io::Result<bool> {
    let stat = rustix::fs::fstat(file)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Opens a path that may be missing; the flag says whether it is a folder.
fn existing(at: &OwnedFd, path: &Path) -> io::Result<Option<(OwnedFd, bool)>> {
    match openat(at, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => {
            let is_folder = is_folder(&file)?;
            Ok(Some((file, is_folder)))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn empty_tmpfs() -> io::Result<OwnedFd> {
    let flags =
        NOSUID_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC | MountAttrFlags::MOUNT_ATTR_RDONLY;
    new("tmpfs", &[("mode", "0555"), ("size", "4k")], flags)
}

/// The folder of a sandbox's sockets as a detached mount, in which `..` leads nowhere.
pub(crate) fn detached_folder(path: &Path) -> io::Result<OwnedFd> {
    let tree = syscall::clone_mount(CWD, path, false)?;
    syscall::set_mount_attributes(&tree, READ_ONLY | libc::MOUNT_ATTR_NOEXEC, None)?;
    Ok(tree)
}
