//! Hands the supervisor its descriptors, its standard streams and the id of its sandbox.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::Path,
};

use harvest_proto::launch::{Descriptor, EarlyLaunch};
use rustix::{
    fs::{Mode, OFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use serde::Serialize;

use super::{FREEZE_FILE, SUPERVISOR_LOG, StepRunner, mounts, out_of_order};
use crate::{
    error::{Doing, StepError},
    fd_passing::send_with,
    syscall,
};

impl StepRunner {
    pub(super) fn inherit(
        &mut self,
        descriptor: Descriptor,
        path: &Path,
        write: bool,
    ) -> Result<(), StepError> {
        let access = if write { OFlags::WRONLY } else { OFlags::RDONLY };
        let file = rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())
            .doing(|| format!("open {}", path.display()))?;
        self.inherited.push((descriptor, file));
        Ok(())
    }

    pub(super) fn bridge(&mut self) -> Result<(), StepError> {
        let run = &self.assignment()?.run;
        let make = || -> io::Result<OwnedFd> {
            match fs::DirBuilder::new().mode(0o711).create(run) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            // Bound by a relative name: a socket path is limited to 107 bytes.
            rustix::process::chdir(run)?;
            let _ = fs::remove_file("bridge.sock");
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            bind(&socket, &SocketAddrUnix::new("bridge.sock")?)?;
            fs::set_permissions("bridge.sock", fs::Permissions::from_mode(0o666))?;
            listen(&socket, 128)?;
            rustix::process::chdir("/")?;
            Ok(socket)
        };
        let bridge = make().doing(|| format!("bind the bridge in {}", run.display()))?;
        self.inherited.push((Descriptor::Bridge, bridge));
        Ok(())
    }

    pub(super) fn door(&mut self) -> Result<(), StepError> {
        let run = &self.assignment()?.run;
        let door = mounts::detached_folder(run)
            .doing(|| format!("open the door's folder {}", run.display()))?;
        self.inherited.push((Descriptor::Door, door));
        Ok(())
    }

    pub(super) fn log(&mut self) -> Result<(), StepError> {
        let path = self.assignment()?.folder.join(SUPERVISOR_LOG);
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
        let log = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600));
        self.inherited.push((Descriptor::Log, log.doing(|| format!("open {}", path.display()))?));
        Ok(())
    }

    pub(super) fn freeze_orders(&mut self) -> Result<(), StepError> {
        let path = self.assignment()?.folder.join(FREEZE_FILE);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        // Two numbers, written now, so that a disk that fills up later has room for them.
        let make = || -> io::Result<OwnedFd> {
            let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))?;
            rustix::io::write(&file, &[0; 16])?;
            Ok(file)
        };
        let orders = make().doing(|| format!("create {}", path.display()))?;
        self.inherited.push((Descriptor::FreezeOrders, orders));
        Ok(())
    }

    /// Executes the supervisor, which reads its early launch from standard input.
    pub(super) fn exec(&mut self, supervisor: &OwnedFd) -> StepError {
        let (Some(stdin), Some(null)) = (self.stdin.take(), self.null.take()) else {
            return out_of_order();
        };
        let start = || -> io::Result<()> {
            syscall::standard_stream(&null, 1)?;
            syscall::standard_stream(&null, 2)?;
            syscall::standard_stream(&stdin, 0)
        };
        if let Err(error) = start() {
            return StepError::new("prepare the supervisor's streams", error);
        }
        syscall::default_signals();
        // The zygote's umask is 0, so that files it creates get exactly the requested modes.
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let name = CString::from(c"harvest-supervisor");
        StepError::new("execute the supervisor", syscall::execute(supervisor, &[name]))
    }

    /// Sends the supervisor the descriptors that are ready before its sandbox is known.
    pub(super) fn early_launch(&mut self, launcher: &OwnedFd) -> Result<(), StepError> {
        let null = self.scratch()?.null().doing(|| "open /dev/null")?;
        self.null = Some(null.try_clone().doing(|| "duplicate /dev/null")?);
        self.inherited.push((Descriptor::DevNull, null));
        let (early_descriptors, files): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.inherited).into_iter().unzip();
        send_json(launcher, &EarlyLaunch { early_descriptors }, &files)
            .doing(|| "send the supervisor its early launch")
    }

    pub(super) fn launch(&mut self, cpus: &[u32]) -> Result<(), StepError> {
        let (Some(assignment), Some(launcher)) = (self.assignment.take(), self.launcher.take())
        else {
            return Err(out_of_order());
        };
        let mut launch = assignment.launch;
        let (names, files): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.inherited).into_iter().unzip();
        (launch.descriptors, launch.cpus) = (names, cpus.to_vec());
        send_json(&launcher, &launch, &files).doing(|| "launch the supervisor")
    }
}

fn send_json<T: Serialize>(socket: &OwnedFd, message: &T, files: &[OwnedFd]) -> io::Result<()> {
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    send_with(socket, &serde_json::to_vec(message)?, &files)
}
