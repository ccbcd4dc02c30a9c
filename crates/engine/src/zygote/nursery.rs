//! The sandboxes the zygote looks after: their birth, their end, and the adoption of those an earlier
//! zygote left. Knows nothing of clients: what becomes of a sandbox is told as [`Told`].

mod adopt;
mod end;
mod freeze;
mod limits;
mod seeds;

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, launch::Launch};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{
    Alter,
    holds::Holds,
    protocol::send,
    seed::{LAUNCHED, Seed},
    still::Brake,
    supervisor::Supervisor,
    watch::Watch,
};
use crate::{
    cgroup::Hierarchy,
    error::{Doing, EngineError, StepError},
    home::{Home, boot_id, start_ticks},
    isolate::{Calling, LOG, ids::Claim},
    plan::{HostFacts, Ids, Plan, Redirect, plan},
    sandbox::{Record, State},
    spec::Owner,
    volume::VolumeName,
};
use freeze::FREEZE;
use limits::Clocks;
use seeds::Seeds;

const LOOK_AGAIN: Duration = Duration::from_millis(1);
// What a supervisor may have written to its log; more is cut off at the front.
const LOG_BYTES: u64 = 1 << 20;
// Dying processes leave their cgroups within microseconds, seldom later.
const CLEAR_AGAIN: Duration = Duration::from_millis(2);

/// Something that happened to a sandbox.
#[derive(Debug)]
pub(super) enum Told {
    Started {
        id: SandboxId,
        pid: u32,
    },
    Ended {
        id: SandboxId,
        reason: String,
    },
    /// The answer to a freeze.
    Still {
        id: SandboxId,
        result: Result<(), StepError>,
    },
}

/// A sandbox whose pid 1 lives, or died a moment ago.
pub(super) struct Live {
    pid: u32,
    pidfd: OwnedFd,
    claim: Claim,
    /// Open until pid 1 has become the supervisor, or has said why it could not.
    pub(super) report: Option<OwnedFd>,
    /// Open as long: closing it with something unread would break the other end.
    gate: Option<OwnedFd>,
    failure: Option<String>,
    /// Why we have killed it.
    killed: Option<&'static str>,
    thaw_at: Option<Instant>,
    /// How long a freeze lasts that nobody renews.
    hold: Duration,
    mounts: Option<OwnedFd>,
    clocks: Clocks,
    /// It is to stand still and does not yet; until then we look.
    freezing_until: Option<Instant>,
    /// Pid 1 is dead and reaped, for this reason; cgroups are still being cleared.
    ended: Option<String>,
}

impl Live {
    fn new(seed: Seed, clocks: Clocks) -> Self {
        let Seed { pid, pidfd, claim, report, gate, mounts, .. } = seed;
        let (report, gate) = (Some(report), Some(gate));
        Self {
            pid,
            pidfd,
            claim,
            report,
            gate,
            failure: None,
            killed: None,
            thaw_at: None,
            hold: FREEZE,
            mounts,
            freezing_until: None,
            clocks,
            ended: None,
        }
    }

    /// Tells when pid 1 dies, unless it is dead.
    pub(super) fn dies_yet(&self) -> Option<&OwnedFd> {
        self.ended.is_none().then_some(&self.pidfd)
    }
}

pub(super) struct Nursery {
    home: Home,
    cgroups: Hierarchy,
    group: String,
    claims: PathBuf,
    brake: Brake,
    redirect: Redirect,
    alter: Alter,
    supervisor: Supervisor,
    pub(super) live: BTreeMap<SandboxId, Live>,
    /// Processes that own sandboxes, also dead ones, whose disks go when the owner goes.
    pub(super) owners: BTreeMap<SandboxId, OwnedFd>,
    watch: Watch,
    pub(super) holds: Holds,
    births: u32,
    seeds: Seeds,
}

impl Nursery {
    /// Starts what is recorded; `Told::Started` or `Told::Ended` follows.
    pub(super) fn start(
        &mut self,
        record: Record,
        layers: &[PathBuf],
        resolv_conf: String,
        mut files: Vec<OwnedFd>,
        again: bool,
    ) -> Result<(), StepError> {
        let id = record.id.clone();
        let may = match State::read(&self.home, &id) {
            Ok(None) => true,
            // One that says it runs and does not: the disk was full when its end was to be written down.
            Ok(Some(state)) => again && state.living().is_none(),
            Err(_) => false,
        };
        if self.live.contains_key(&id) || !may {
            let error = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(StepError::new("start what has been started before", error));
        }
        if files.len() != 1 + layers.len() + record.binds.len() + record.volumes.len() {
            let error = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(StepError::new("count the descriptors handed over", error));
        }
        let owner = self.owner(&record)?;
        let mut handed = files.split_off(1);
        let supervisor = files.pop().expect("its length was checked above");
        if self.supervisor.load(supervisor)? {
            self.discard_seeds();
        }
        let plan = self.plan(&record, layers, resolv_conf);
        let owner_started = owner.as_ref().map(|(started, _)| *started);
        let seed = self.seed_for(&record, &plan)?;
        let clocks = Clocks::new(&record.limits, record.lives_since(), !self.home.has_quotas());
        let volumes: Vec<VolumeName> =
            record.volumes.iter().map(|volume| volume.name.clone()).collect();
        if let Err(error) = self.call(&seed, record, &plan, &handed, owner_started) {
            seed.discard(&self.cgroups, &self.group);
            // It may be written down already that it runs, and what runs is not started again.
            self.write_state(&id, &State::ended(error.line()));
            return Err(error);
        }
        self.owners.extend(owner.map(|(_, pidfd)| (id.clone(), pidfd)));
        let mounts = handed.split_off(handed.len() - volumes.len());
        for (name, mount) in volumes.into_iter().zip(mounts) {
            self.holds.take(name, mount, Instant::now());
        }
        self.live.insert(id, Live::new(seed, clocks));
        Ok(())
    }

    fn plan(&self, record: &Record, layers: &[PathBuf], resolv_conf: String) -> Plan {
        let mut plan = plan(record, layers, &self.facts(resolv_conf));
        (self.alter)(&mut plan);
        plan
    }

    fn facts(&self, resolv_conf: String) -> HostFacts {
        HostFacts {
            cgroups: self.cgroups.clone(),
            group: self.group.clone(),
            resolv_conf,
            redirect: self.redirect,
            ids: Ids::here(),
        }
    }

    /// Writes down that pid 1 is this sandbox's, then tells it what to become.
    fn call(
        &self,
        seed: &Seed,
        record: Record,
        plan: &Plan,
        handed: &[OwnedFd],
        owner_started: Option<u64>,
    ) -> Result<(), StepError> {
        let state = State::Running {
            boot: boot_id().to_owned(),
            pid: seed.pid,
            started: seed.started,
            first_id: seed.claim.first(),
            owner_started,
        };
        let id = record.id;
        state.write(&self.home, &id).map_err(told)?;
        let mut env = record.config.env;
        env.extend(record.env);
        let calling = Calling {
            steps: plan.parts().called.to_vec(),
            folder: self.home.sandbox(&id),
            writable: self.home.writable(&id),
            run: self.home.run_of(&id),
            launch: Launch {
                sandbox: id,
                descriptors: Vec::new(),
                env,
                user: record.config.user,
                workdir: record.config.workdir,
                sealed: record.sealed,
                file_bytes: record.file_bytes,
            },
        };
        let files: Vec<_> = handed.iter().map(AsFd::as_fd).collect();
        send(&seed.gate, &calling, &files).doing(|| "tell pid 1 what to become".to_owned())
    }

    fn owner(&self, record: &Record) -> Result<Option<(u64, OwnedFd)>, StepError> {
        let Owner::Process(pid) = record.owner else { return Ok(None) };
        // The descriptor first: then the start time is of the process it names, or there is none.
        let owner = open_process(pid).and_then(|pidfd| Some((start_ticks(pid)?, pidfd)));
        let gone = || {
            StepError::new(format!("find the owner, process {pid}"), io::ErrorKind::NotFound.into())
        };
        owner.map(Some).ok_or_else(gone)
    }

    /// Pid 1 is launched, or there is word why it is not.
    pub(super) fn reported(&mut self, id: &SandboxId) -> Option<Told> {
        let live = self.live.get_mut(id)?;
        let report = live.report.take()?;
        live.gate = None;
        let mut text = String::new();
        let _ = io::Read::read_to_string(&mut fs::File::from(report), &mut text);
        // Where one of two processes fails, the other may say so too: the first word is the reason.
        let mut said = text.lines();
        let failure = match said.next() {
            Some(LAUNCHED) if said.next().is_none() => {
                return Some(Told::Started { id: id.clone(), pid: live.pid });
            }
            Some(LAUNCHED) | None => "a process that was to make it died",
            Some(line) => line,
        };
        live.failure = Some(failure.to_owned());
        let _ = pidfd_send_signal(&live.pidfd, Signal::KILL);
        None
    }

    /// What time alone brings about; answers when to look again.
    pub(super) fn tick(&mut self, now: Instant) -> (Vec<Told>, Option<Instant>) {
        let dying: Vec<SandboxId> = self
            .live
            .iter()
            .filter(|(_, live)| live.ended.is_some())
            .map(|(id, _)| id.clone())
            .collect();
        let mut told: Vec<Told> = dying.iter().filter_map(|id| self.ended(id)).collect();
        told.extend(self.look_at_freezing(now));
        let mut next = [self.end_lives(now), self.watch(now), self.stop(now), self.holds.tick(now)]
            .into_iter()
            .flatten()
            .min();
        let mut sooner = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        for (id, live) in &mut self.live {
            if live.ended.is_some() {
                sooner(now + CLEAR_AGAIN);
            }
            if live.freezing_until.is_some() {
                sooner(now + LOOK_AGAIN);
            }
            match live.thaw_at {
                Some(at) if at <= now => {
                    live.thaw_at = None;
                    let _ = self.brake.freeze(id, &live.pidfd, false);
                }
                Some(at) => sooner(at),
                None => {}
            }
        }
        (told, next)
    }

    /// Keeps logs from growing for ever. They are appended to, so cutting them off is safe.
    pub(super) fn cut_logs(&self) {
        for id in self.live.keys() {
            let path = self.home.sandbox(id).join(LOG);
            if fs::metadata(&path).is_ok_and(|about| about.len() > LOG_BYTES) {
                let _ =
                    fs::OpenOptions::new().write(true).open(&path).and_then(|log| log.set_len(0));
            }
        }
    }

    /// Nobody to look after.
    pub(super) fn is_empty(&mut self) -> bool {
        if !self.live.is_empty() {
            return false;
        }
        // Nothing is left to throw away of those that somebody else has removed.
        let home = &self.home;
        self.owners.retain(|id, _| home.sandbox(id).exists());
        self.owners.is_empty()
    }

    /// Removes the home's cgroup before the zygote goes.
    pub(super) fn leave(&mut self) {
        self.watch.leave();
        self.discard_seeds();
        self.holds.leave();
        self.cgroups.leave_home(&self.group);
    }
}

fn open_process(pid: u32) -> Option<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

fn told(error: EngineError) -> StepError {
    let text = error.to_string();
    StepError::new(
        text,
        io::Error::other(
            std::error::Error::source(&error).map_or(String::new(), ToString::to_string),
        ),
    )
}
