//! Keeps an eye on what sandboxes write where the disk has no limits of its own. The zygote must never
//! wait for a disk, so a process of its own, last in line for the processor, weighs their trees.
//!
//! When to weigh is decided by what costs nothing to ask: no sandbox can have grown by more than the
//! host's disk has lost. Where one grows while another shrinks, the minute's round finds it.

use std::{
    fs,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use harvest_proto::SandboxId;
use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid},
};

use crate::{
    cgroup::Hierarchy,
    home::Home,
    syscall::{self, Side},
    weigh::{NAME_BYTES, weigh, weigh_nameless},
};

const LOOK_EVERY: Duration = Duration::from_millis(500);
const WEIGH_EVERY: Duration = Duration::from_secs(60);
// So that weighing takes a tenth of one processor at most, and only while nobody else wants it.
const REST_PER_WORK: u32 = 10;
// However far from its limit everybody is.
const MOST_LOSS_BYTES: u64 = 1 << 30;
const LEAST_LOSS_BYTES: u64 = 1 << 20;
// How far over its limit a tree is walked still, in names.
const MORE_NAMES: u64 = 1 << 20;

/// Where sandboxes and their processes are.
pub(super) struct Place<'a> {
    pub(super) home: &'a Home,
    pub(super) cgroups: &'a Hierarchy,
    pub(super) group: &'a str,
}

/// A sandbox to keep an eye on.
pub(super) struct Watched<'a> {
    pub(super) id: &'a SandboxId,
    /// More than this is too much.
    pub(super) allowed: u64,
    /// What it weighed last time.
    pub(super) weight: u64,
}

pub(super) struct Watch {
    scales: Option<Scales>,
    look_at: Option<Instant>,
    /// The most that was free since the last weighing.
    free: Option<Free>,
    rest_until: Instant,
    weighed_at: Option<Instant>,
}

/// A process that weighs.
struct Scales {
    pidfd: OwnedFd,
    says: fs::File,
    said: Vec<u8>,
    began: Instant,
}

/// What the disk has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Free {
    bytes: u64,
    names: u64,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            scales: None,
            look_at: None,
            free: None,
            rest_until: Instant::now(),
            weighed_at: None,
        }
    }

    /// Readable when the scales have something to say.
    pub(super) fn scales(&self) -> Option<&fs::File> {
        self.scales.as_ref().map(|scales| &scales.says)
    }

    /// Looks at the disk when it is time to, and weighs when there is reason to; answers when to look again.
    pub(super) fn tick(
        &mut self,
        now: Instant,
        place: &Place<'_>,
        watched: &[Watched<'_>],
    ) -> Option<Instant> {
        if watched.is_empty() {
            self.look_at = None;
            self.free = None;
            self.weighed_at = None;
            return None;
        }
        let at = *self.look_at.get_or_insert(now + LOOK_EVERY);
        if now < at {
            return Some(at);
        }
        self.look_at = Some(now + LOOK_EVERY);
        let free = free(place.home);
        let most = self.free.get_or_insert(free);
        *most = Free { bytes: most.bytes.max(free.bytes), names: most.names.max(free.names) };
        let due = self.weighed_at.is_none_or(|weighed| now.duration_since(weighed) > WEIGH_EVERY);
        if self.scales.is_none()
            && now >= self.rest_until
            && (due || has_lost(*most, free, watched))
        {
            self.free = Some(free);
            self.weighed_at = Some(now);
            match Scales::start(now, place, watched) {
                Ok(scales) => self.scales = Some(scales),
                Err(error) => eprintln!("cannot weigh what sandboxes have written: {error}"),
            }
        }
        self.look_at
    }

    /// Takes what the scales say; all of it once they have finished.
    pub(super) fn heard(&mut self, now: Instant) -> Vec<(SandboxId, u64)> {
        let Some(scales) = &mut self.scales else { return Vec::new() };
        let mut bytes = [0; 4096];
        match scales.says.read(&mut bytes) {
            Ok(0) => {}
            Ok(length) => {
                scales.said.extend_from_slice(&bytes[..length]);
                return Vec::new();
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                return Vec::new();
            }
            Err(_) => {}
        }
        let Some(scales) = self.scales.take() else { return Vec::new() };
        self.rest_until = now + now.duration_since(scales.began) * REST_PER_WORK;
        let text = String::from_utf8_lossy(&scales.said);
        text.lines().filter_map(weighed).collect()
    }

    /// Ends what is under way.
    pub(super) fn leave(&mut self) {
        self.scales = None;
    }
}

impl Scales {
    fn start(now: Instant, place: &Place<'_>, watched: &[Watched<'_>]) -> io::Result<Self> {
        let (says, say) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // Before the split: in another pid namespace nobody has a number.
        let processes: Vec<Vec<Pid>> = watched
            .iter()
            .map(|sandbox| place.cgroups.working(place.group, sandbox.id.part()))
            .collect();
        // In a pid namespace of its own: it can signal nobody, and is nobody's zygote.
        let flags = libc::CLONE_NEWPID.cast_unsigned().into();
        // SAFETY: the zygote has one thread.
        match unsafe { syscall::clone_process(flags, None) }? {
            Side::Child => {
                let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
                // SAFETY: this process never goes back to what owns the other descriptors.
                unsafe { syscall::close_all_but(&[say.as_fd()]) };
                work(&say, place.home, watched.iter().zip(&processes));
                syscall::exit_now(0)
            }
            Side::Parent { pidfd, .. } => {
                Ok(Self { pidfd, says: says.into(), said: Vec::new(), began: now })
            }
        }
    }
}

impl Drop for Scales {
    fn drop(&mut self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}

/// Weighs each and says so, a line each.
fn work<'a>(
    say: &OwnedFd,
    home: &Home,
    watched: impl Iterator<Item = (&'a Watched<'a>, &'a Vec<Pid>)>,
) {
    let _ = rustix::process::nice(19);
    syscall::idle_disk_priority();
    let Ok(say) = say.try_clone() else { return };
    let flags = rustix::fs::fcntl_getfl(&say).unwrap_or(rustix::fs::OFlags::empty());
    let _ = rustix::fs::fcntl_setfl(&say, flags - rustix::fs::OFlags::NONBLOCK);
    let mut say = fs::File::from(say);
    for (sandbox, processes) in watched {
        let most_names = sandbox.allowed / NAME_BYTES + MORE_NAMES;
        let upper = home.writable(sandbox.id).join("upper");
        let weight =
            weigh(&upper, most_names).saturating_add(nameless(upper, processes, most_names));
        if writeln!(say, "{} {weight}", sandbox.id).is_err() {
            return;
        }
    }
}

fn nameless(upper: PathBuf, processes: &[Pid], most: u64) -> u64 {
    // An overlay gives its files a device of its own, or shows the upper's where its layers are on several.
    let inside = processes.first().map(|pid| format!("/proc/{}/root", pid.as_raw_nonzero()).into());
    let places = [Some(upper), inside];
    let device = |path: PathBuf| rustix::fs::stat(path).ok().map(|stat| stat.st_dev);
    let devices: Vec<u64> = places.into_iter().flatten().filter_map(device).collect();
    weigh_nameless(processes, &devices, most)
}

fn weighed(line: &str) -> Option<(SandboxId, u64)> {
    let (id, weight) = line.split_once(' ')?;
    Some((id.parse().ok()?, weight.parse().ok()?))
}

fn free(home: &Home) -> Free {
    // A disk that does not answer is looked at again by the clock.
    rustix::fs::statvfs(home.path()).map_or(Free { bytes: 0, names: 0 }, |about| Free {
        bytes: about.f_bfree.saturating_mul(about.f_frsize),
        names: about.f_ffree,
    })
}

/// Whether the disk has lost so much that somebody may be half-way from his last weight to his limit.
fn has_lost(most: Free, free: Free, watched: &[Watched<'_>]) -> bool {
    let room = watched.iter().map(|sandbox| sandbox.allowed.saturating_sub(sandbox.weight)).min();
    let loss = (room.unwrap_or(u64::MAX) / 2).clamp(LEAST_LOSS_BYTES, MOST_LOSS_BYTES);
    most.bytes.saturating_sub(free.bytes) >= loss
        || most.names.saturating_sub(free.names) >= loss / NAME_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_reason_to_weigh_only_when_it_can_matter_to_somebody() {
        let (near, far) = (SandboxId::random(), SandboxId::random());
        let far = Watched { id: &far, allowed: 10 << 30, weight: 0 };
        let near = Watched { id: &near, allowed: 10 << 30, weight: (10 << 30) - (8 << 20) };
        let most = Free { bytes: 1 << 40, names: 1 << 20 };
        let after =
            |bytes: u64, names: u64| Free { bytes: most.bytes - bytes, names: most.names - names };
        assert!(!has_lost(most, after(5 << 20, 10), &[Watched { ..far }]));
        assert!(has_lost(most, after(5 << 20, 10), &[Watched { ..far }, Watched { ..near }]));
        assert!(has_lost(most, after(1 << 30, 0), &[Watched { ..far }]));
        assert!(has_lost(most, after(0, 1 << 18), &[far]), "names are lost too");
    }

    #[test]
    fn a_line_of_the_scales_is_an_id_and_a_weight() {
        let id = SandboxId::random();
        assert_eq!(weighed(&format!("{id} 17")), Some((id, 17)));
        assert_eq!(weighed("nonsense"), None);
        assert_eq!(weighed("sbx_ -1"), None);
    }
}
