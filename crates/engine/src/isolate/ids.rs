//! Ranges of host ids, one per sandbox, claimed host-wide: two sandboxes never share an id, whatever
//! home they belong to, so that neither can signal the other or eat up its per-user limits.
//!
//! Where there is no root to give them out, sandboxes share the ids of their user; then only the id
//! that owns a user namespace differs, among those of one zygote.
//!
//! A claim is a file named after the range that says which process holds it: the zygote while a
//! sandbox is being made, its pid 1 afterwards. A claim whose process is gone is void.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Doing, StepError},
    home::{boot_id, start_ticks},
    plan::IDS,
};

/// Where claims are. Emptied by a reboot on most hosts; the boot id in each claim covers the others.
pub(crate) const CLAIMS: &str = "/run/harvest-ids";

// Above what systemd gives its containers (0x0008_0000 to 0x6fff_ffff) and below the ids that some
// programs take for negative.
const FIRST: u32 = 0x7000_0000;
const RANGES: u32 = 0x1000_0000 / IDS;

/// A range of ids that is ours, or that we may use.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Nobody else has it.
    Own { file: PathBuf, first: u32 },
    /// The whole of what the user has.
    Shared { owner: u32, processes: u32 },
}

#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    boot: String,
    pid: u32,
    started: u64,
}

impl Holder {
    fn lives(&self) -> bool {
        self.boot == boot_id() && start_ticks(self.pid) == Some(self.started)
    }
}

impl Claim {
    /// Takes a free range for this process. `wish` spreads claims, so that a free one is found at once.
    pub(crate) fn take(folder: &Path, wish: u32) -> Result<Self, StepError> {
        let _lock = lock(folder)?;
        let own = std::process::id();
        for number in (0..RANGES).map(|offset| wish.wrapping_add(offset) % RANGES) {
            let (file, first) = (folder.join(number.to_string()), FIRST + number * IDS);
            if !held(&file) {
                write(&file, own)?;
                return Ok(Self::Own { file, first });
            }
        }
        Err(StepError::new("find a free range of ids", io::ErrorKind::QuotaExceeded.into()))
    }

    /// The range that starts with this id, as an earlier zygote claimed it.
    pub(crate) fn adopt(folder: &Path, first: u32) -> Self {
        match first {
            0 => Self::Shared { owner: 0, processes: 0 },
            _ => Self::Own {
                file: folder.join((first.wrapping_sub(FIRST) / IDS).to_string()),
                first,
            },
        }
    }

    /// All ids of this user, for at most so many processes. Those with different wishes do not count
    /// against each other.
    pub(crate) fn share(wish: u32, processes: u32) -> Self {
        Self::Shared { owner: 1 + wish % (IDS - 1), processes }
    }

    /// Says that the range is in use as long as this process lives.
    pub(crate) fn hand_to(&self, pid: u32) -> Result<(), StepError> {
        let Self::Own { file, .. } = self else { return Ok(()) };
        let _lock = lock(file.parent().unwrap_or(Path::new("/")))?;
        write(file, pid)
    }

    /// Gives the range back, unless somebody else has it by now: with the process it was handed to our
    /// claim was void, and whoever needed a range could take it.
    pub(crate) fn release(&self) {
        let Self::Own { file, .. } = self else { return };
        let Ok(_lock) = lock(file.parent().unwrap_or(Path::new("/"))) else { return };
        if holder(file).is_none_or(|holder| holder.pid == std::process::id() || !holder.lives()) {
            let _ = fs::remove_file(file);
        }
    }

    /// The host id that is root inside; 0 where ids are shared.
    pub(crate) fn first(&self) -> u32 {
        match self {
            Self::Own { first, .. } => *first,
            Self::Shared { .. } => 0,
        }
    }

    /// The id that makes the user namespace: what the kernel counts is counted against it.
    pub(crate) fn owner(&self) -> u32 {
        match self {
            Self::Own { first, .. } => *first,
            Self::Shared { owner, .. } => *owner,
        }
    }

    /// How many processes the user namespace may have, where nothing better limits them.
    pub(crate) fn processes(&self) -> Option<u32> {
        match self {
            Self::Own { .. } => None,
            Self::Shared { processes, .. } => Some(*processes),
        }
    }
}

fn held(file: &Path) -> bool {
    holder(file).is_some_and(|holder| holder.lives())
}

fn holder(file: &Path) -> Option<Holder> {
    // A claim that cannot be read was cut off while being written, under the lock we hold now.
    fs::read(file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
}

/// Under the lock: a sweep takes unfinished claims for abandoned ones.
fn write(file: &Path, pid: u32) -> Result<(), StepError> {
    let doing = || format!("claim ids in {}", file.display());
    let started =
        start_ticks(pid).ok_or(io::ErrorKind::NotFound).map_err(io::Error::from).doing(doing)?;
    let holder = Holder { boot: boot_id().to_owned(), pid, started };
    let text = serde_json::to_vec(&holder).map_err(io::Error::from).doing(doing)?;
    // Replaced as a whole: a reader never sees a claim without its holder.
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

/// Removes every claim whose process is gone.
pub(crate) fn sweep(folder: &Path) -> Result<(), StepError> {
    let _lock = lock(folder)?;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_claim = name.to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        // Besides claims and the lock there are only claims cut off while being written.
        if name != "lock" && (!is_claim || !held(&entry.path())) {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_taken_once_and_free_again_after_release() {
        let folder = tempfile::tempdir().unwrap();
        let first = Claim::take(folder.path(), 5).unwrap();
        let second = Claim::take(folder.path(), 5).unwrap();
        assert!(first.first().abs_diff(second.first()) >= IDS);
        first.release();
        assert_eq!(Claim::take(folder.path(), 5).unwrap().first(), first.first());
    }

    #[test]
    fn a_claim_whose_process_is_gone_is_void() {
        let folder = tempfile::tempdir().unwrap();
        let claim = Claim::take(folder.path(), 7).unwrap();
        let holder = Holder { boot: boot_id().to_owned(), pid: std::process::id(), started: 1 };
        let Claim::Own { file, first } = claim else { panic!("{claim:?}") };
        fs::write(&file, serde_json::to_vec(&holder).unwrap()).unwrap();
        assert_eq!(Claim::take(folder.path(), 7).unwrap().first(), first);
        fs::write(&file, "").unwrap();
        sweep(folder.path()).unwrap();
        assert!(!file.exists());
    }

    #[test]
    fn a_range_that_somebody_else_has_taken_over_stays_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let dead = Claim::take(folder.path(), 3).unwrap();
        // Its process died, so that another zygote could take the range and hand it to a sandbox.
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
    fn no_owner_of_shared_ids_is_root_or_outside_the_range() {
        for wish in [0, 1, IDS - 2, IDS - 1, IDS, u32::MAX] {
            assert!((1..IDS).contains(&Claim::share(wish, 1).owner()), "{wish}");
        }
    }

    #[test]
    fn no_range_reaches_ids_that_look_negative() {
        assert!(FIRST.checked_add(RANGES * IDS).unwrap() <= 1 << 31);
    }
}
