//! Ranges of host ids, one per sandbox, claimed host-wide: no two sandboxes share an id, even
//! across homes, so that neither can signal the other or use up its per-user limits.
//!
//! Without root, sandboxes share the ids of their user; only the owner of the user namespace
//! differs between the sandboxes of one zygote.
//!
//! A claim is a file named after the range that records the process holding it: the zygote while a
//! sandbox is being created, its pid 1 afterwards. A claim whose process has exited is void.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Doing, StepError},
    process::{boot_id, start_ticks},
    spec::IDS_PER_SANDBOX,
};

/// Folder of the claims. Most hosts empty it at boot; the boot id in each claim covers the others.
pub(crate) const CLAIMS: &str = "/run/harvest-ids";

// Above the ids systemd gives its containers (0x0008_0000 to 0x6fff_ffff) and below those that some
// programs read as negative.
const FIRST_ID: u32 = 0x7000_0000;
const RANGES: u32 = 0x1000_0000 / IDS_PER_SANDBOX;

/// A range of host ids for one sandbox.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Used by this sandbox only.
    Exclusive { file: PathBuf, first: u32 },
    /// All ids of an unprivileged user.
    Shared { owner: u32, processes: u32 },
}

#[derive(Debug, Serialize, Deserialize)]
struct ClaimHolder {
    boot: String,
    pid: u32,
    started: u64,
}

impl ClaimHolder {
    fn is_alive(&self) -> bool {
        self.boot == boot_id() && start_ticks(self.pid) == Some(self.started)
    }
}

impl Claim {
    /// Claims a free range for this process. `id_hint` spreads claims, so that a free one is found
    /// at once.
    pub(crate) fn take(folder: &Path, id_hint: u32) -> Result<Self, StepError> {
        let _lock = lock(folder)?;
        let own = std::process::id();
        for number in (0..RANGES).map(|offset| id_hint.wrapping_add(offset) % RANGES) {
            let (file, first) =
                (folder.join(number.to_string()), FIRST_ID + number * IDS_PER_SANDBOX);
            if !is_held(&file) {
                write(&file, own)?;
                return Ok(Self::Exclusive { file, first });
            }
        }
        Err(StepError::new("find a free id range", io::ErrorKind::QuotaExceeded))
    }

    /// The range that starts with this id, claimed by an earlier zygote.
    pub(crate) fn adopt(folder: &Path, first: u32) -> Self {
        match first {
            0 => Self::Shared { owner: 0, processes: 0 },
            _ => Self::Exclusive {
                file: folder.join((first.wrapping_sub(FIRST_ID) / IDS_PER_SANDBOX).to_string()),
                first,
            },
        }
    }

    /// Shares all ids of this user, with a process limit. Different hints give different namespace
    /// owners, whose kernel limits are separate.
    pub(crate) fn share(id_hint: u32, processes: u32) -> Self {
        Self::Shared { owner: 1 + id_hint % (IDS_PER_SANDBOX - 1), processes }
    }

    /// Records that the range is in use as long as this process lives.
    pub(crate) fn hand_to(&self, pid: u32) -> Result<(), StepError> {
        let Self::Exclusive { file, .. } = self else { return Ok(()) };
        let _lock = lock(file.parent().unwrap_or(Path::new("/")))?;
        write(file, pid)
    }

    /// Releases the range, unless another process has claimed it: a claim is void once its process
    /// has exited.
    pub(crate) fn release(&self) {
        let Self::Exclusive { file, .. } = self else { return };
        let Ok(_lock) = lock(file.parent().unwrap_or(Path::new("/"))) else { return };
        if holder(file).is_none_or(|holder| holder.pid == std::process::id() || !holder.is_alive())
        {
            let _ = fs::remove_file(file);
        }
    }

    /// The host id that is root inside; 0 where ids are shared.
    pub(crate) fn first(&self) -> u32 {
        match self {
            Self::Exclusive { first, .. } => *first,
            Self::Shared { .. } => 0,
        }
    }

    /// The id that owns the user namespace; the kernel charges per-user limits to it.
    pub(crate) fn owner(&self) -> u32 {
        match self {
            Self::Exclusive { first, .. } => *first,
            Self::Shared { owner, .. } => *owner,
        }
    }

    /// Process limit of the user namespace, where no cgroup limits processes.
    pub(crate) fn processes(&self) -> Option<u32> {
        match self {
            Self::Exclusive { .. } => None,
            Self::Shared { processes, .. } => Some(*processes),
        }
    }
}

fn is_held(file: &Path) -> bool {
    holder(file).is_some_and(|holder| holder.is_alive())
}

fn holder(file: &Path) -> Option<ClaimHolder> {
    // An unreadable claim was interrupted while being written, and this caller holds the lock.
    fs::read(file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
}

/// Requires the lock: a sweep removes unfinished claims.
fn write(file: &Path, pid: u32) -> Result<(), StepError> {
    let doing = || format!("claim ids in {}", file.display());
    let started = start_ticks(pid).ok_or(io::ErrorKind::NotFound).doing(doing)?;
    let holder = ClaimHolder { boot: boot_id().to_owned(), pid, started };
    let text = serde_json::to_vec(&holder).doing(doing)?;
    // Replaced atomically: a reader never sees a claim without its holder.
    let new = file.with_extension("new");
    fs::write(&new, text).doing(doing)?;
    fs::rename(&new, file).doing(doing)
}

fn lock(folder: &Path) -> Result<fs::File, StepError> {
    let path = folder.join("lock");
    let doing = || format!("lock {}", path.display());
    let file = fs::OpenOptions::new().create(true).append(true).open(&path).doing(doing)?;
    flock(&file, FlockOperation::LockExclusive).doing(doing)?;
    Ok(file)
}

/// Removes every claim whose process has exited.
pub(crate) fn sweep(folder: &Path) -> Result<(), StepError> {
    let _lock = lock(folder)?;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_claim = name.to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        // Other files are claims interrupted while being written.
        if name != "lock" && (!is_claim || !is_held(&entry.path())) {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_is_exclusive_until_released() {
        let folder = tempfile::tempdir().unwrap();
        let first = Claim::take(folder.path(), 5).unwrap();
        let second = Claim::take(folder.path(), 5).unwrap();
        assert!(first.first().abs_diff(second.first()) >= IDS_PER_SANDBOX);
        first.release();
        assert_eq!(Claim::take(folder.path(), 5).unwrap().first(), first.first());
    }

    #[test]
    fn claim_of_exited_process_is_void() {
        let folder = tempfile::tempdir().unwrap();
        let claim = Claim::take(folder.path(), 7).unwrap();
        let holder =
            ClaimHolder { boot: boot_id().to_owned(), pid: std::process::id(), started: 1 };
        let Claim::Exclusive { file, first } = claim else { panic!("{claim:?}") };
        fs::write(&file, serde_json::to_vec(&holder).unwrap()).unwrap();
        assert_eq!(Claim::take(folder.path(), 7).unwrap().first(), first);
        fs::write(&file, "").unwrap();
        sweep(folder.path()).unwrap();
        assert!(!file.exists());
    }

    #[test]
    fn release_keeps_range_claimed_by_another_process() {
        let folder = tempfile::tempdir().unwrap();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let dead = Claim::take(folder.path(), 3).unwrap();
        // The process of this claim is gone, so another zygote takes the range and hands it to a
        // sandbox.
        let theirs = Claim::adopt(folder.path(), dead.first());
        theirs.hand_to(other.id()).unwrap();
        dead.release();
        let next = Claim::take(folder.path(), 3).unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        assert_ne!(next.first(), theirs.first());
        theirs.release();
        assert_eq!(Claim::take(folder.path(), 3).unwrap().first(), theirs.first());
    }

    #[test]
    fn shared_ids_owner_is_never_root() {
        for id_hint in [0, 1, IDS_PER_SANDBOX - 2, IDS_PER_SANDBOX - 1, IDS_PER_SANDBOX, u32::MAX] {
            assert!((1..IDS_PER_SANDBOX).contains(&Claim::share(id_hint, 1).owner()), "{id_hint}");
        }
    }

    #[test]
    fn id_ranges_stay_below_two_to_the_31() {
        assert!(FIRST_ID.checked_add(RANGES * IDS_PER_SANDBOX).unwrap() <= 1 << 31);
    }
}
