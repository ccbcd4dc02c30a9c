//! The supervisor's program in memory: copied from the host's file once, sealed, and executable but
//! not readable, so that the kernel refuses every process inside access to pid 1.

use std::{
    fs::File,
    io::{self, Seek},
    os::fd::{AsRawFd, OwnedFd},
};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create};

use super::protocol::BuildId;
use crate::error::{Doing, StepError};

/// The in-memory copy of the supervisor's file.
#[derive(Default)]
pub(crate) struct Supervisor {
    copy: Option<(BuildId, OwnedFd)>,
}

impl Supervisor {
    /// Copies the program from this file unless that version is loaded; true when it was copied.
    pub(crate) fn load(&mut self, file: OwnedFd) -> Result<bool, StepError> {
        let doing = || "copy the supervisor into memory";
        let mut file = File::from(file);
        let version = BuildId::from(&file.metadata().doing(doing)?);
        let is_new = self.copy.as_ref().is_none_or(|copy| copy.0 != version);
        if is_new {
            self.copy = Some((version, sealed_copy(&mut file).doing(doing)?));
        }
        Ok(is_new)
    }

    /// The loaded program.
    pub(crate) fn program(&self) -> Result<&OwnedFd, StepError> {
        let missing = || StepError::new("find the supervisor's program", io::ErrorKind::NotFound);
        self.copy.as_ref().map(|(_, program)| program).ok_or_else(missing)
    }
}

fn sealed_copy(file: &mut File) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let name = "harvest-supervisor";
    // Kernels before 6.3 lack MFD_EXEC; there every memfd is executable.
    let memory =
        memfd_create(name, flags | MemfdFlags::EXEC).or_else(|_| memfd_create(name, flags))?;
    let mut memory = File::from(memory);
    // An earlier zygote may have moved the offset of this shared descriptor and died.
    file.rewind()?;
    if io::copy(file, &mut memory)? != file.metadata()?.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    fchmod(&memory, Mode::from_raw_mode(0o111))?;
    fcntl_add_seals(
        &memory,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    // Reopened read-only: a file open for writing cannot be executed.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}
