//! What the supervisor gets from the host: its descriptors, its streams, and word of which sandbox it is pid 1 of.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::Path,
};

use harvest_proto::launch::{Cradle, Descriptor};
use rustix::{
    fs::{Mode, OFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use serde::Serialize;

use super::{LOG, STILL, Work, mounts, out_of_order};
use crate::{
    error::{Doing, StepError},
    syscall,
    zygote::protocol::send_with,
};

impl Work {
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
        let run = &self.calling()?.run;
        let make = || -> io::Result<OwnedFd> {
            match fs::DirBuilder::new().mode(0o711).create(run) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            // Bound by a short name: a socket's path may have 107 bytes only.
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
        let run = &self.calling()?.run;
        let door =
            mounts::detached(run).doing(|| format!("open the door's folder {}", run.display()))?;
        self.inherited.push((Descriptor::Door, door));
        Ok(())
    }

    pub(super) fn log(&mut self) -> Result<(), StepError> {
        let path = self.calling()?.folder.join(LOG);
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
        let log = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600));
        self.inherited.push((Descriptor::Log, log.doing(|| format!("open {}", path.display()))?));
        Ok(())
    }

    pub(super) fn still(&mut self) -> Result<(), StepError> {
        let path = self.calling()?.folder.join(STILL);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        // Two numbers: a disk that is full later has room for them already.
        let make = || -> io::Result<OwnedFd> {
            let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))?;
            rustix::io::write(&file, &[0; 16])?;
            Ok(file)
        };
        self.inherited
            .push((Descriptor::Still, make().doing(|| format!("make {}", path.display()))?));
        Ok(())
    }

    /// Becomes the supervisor, which finds what it gets ahead of its launch on its standard input.
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
        // The zygote's own is empty, so that the modes it asks for are the modes it gets.
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let name = CString::from(c"harvest-supervisor");
        StepError::new("execute the supervisor", syscall::execute(supervisor, &[name]))
    }

    /// Gives the supervisor what is ready before anybody knows which sandbox it will be pid 1 of.
    pub(super) fn cradle(&mut self, launcher: &OwnedFd) -> Result<(), StepError> {
        let null = self.scratch()?.null().doing(|| "open /dev/null".to_owned())?;
        self.null = Some(null.try_clone().doing(|| "keep /dev/null".to_owned())?);
        self.inherited.push((Descriptor::Null, null));
        let (cradle, files): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.inherited).into_iter().unzip();
        give(launcher, &Cradle { cradle }, &files)
            .doing(|| "fill the supervisor's cradle".to_owned())
    }

    pub(super) fn launch(&mut self) -> Result<(), StepError> {
        let (Some(calling), Some(launcher)) = (self.calling.take(), self.launcher.take()) else {
            return Err(out_of_order());
        };
        let mut launch = calling.launch;
        let (names, files): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.inherited).into_iter().unzip();
        launch.descriptors = names;
        give(&launcher, &launch, &files).doing(|| "launch the supervisor".to_owned())
    }
}

fn give<T: Serialize>(socket: &OwnedFd, message: &T, files: &[OwnedFd]) -> io::Result<()> {
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    send_with(socket, &serde_json::to_vec(message)?, &files)
}
