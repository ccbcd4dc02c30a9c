//! The sandboxes the zygote looks after: their birth, their end, and the adoption of those an earlier
//! zygote left. Knows nothing of clients: what becomes of a sandbox is told as [`Told`].

mod limits;

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, launch::Launch};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};

use super::{
    Alter,
    holds::Holds,
    protocol::send,
    seed::{LAUNCHED, Seed, mounts_of},
    still::Brake,
    supervisor::Supervisor,
    watch::Watch,
};
use crate::{
    cgroup::Hierarchy,
    error::{Doing, EngineError, StepError},
    home::{Home, boot_id, start_ticks},
    isolate::{self, Calling, LOG, ids::Claim},
    plan::{HostFacts, Ids, Plan, Redirect, plan},
    sandbox::{self, Record, State},
    spec::{Network, Owner},
    syscall,
    volume::VolumeName,
};
use limits::Clocks;

// A freeze that nobody renews ends: whoever asked for it may be dead.
const FREEZE: Duration = Duration::from_secs(5);
// However long somebody wants it.
const LONGEST_FREEZE: Duration = Duration::from_secs(600);
// How long work may take to stand still: a process that waits for a busy disk cannot be stopped.
const STILL: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(1);
// What a supervisor may have written to its log; more is cut off at the front.
const LOG_BYTES: u64 = 1 << 20;
// Dying processes leave their cgroups within microseconds, seldom later.
const CLEAR_AGAIN: Duration = Duration::from_millis(2);
// What an earlier zygote left is waited for, but not for ever: a process may hang in the kernel.
const CLEAR_PATIENCE: Duration = Duration::from_secs(1);

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

// Two starts in a row after an idle moment; in a burst joining cgroups is fast anyway.
const SEEDS: usize = 2;

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
    seeds: Vec<Seed>,
    seeds_wanted: bool,
}

impl Nursery {
    /// Takes over what an earlier zygote of this home left.
    pub(super) fn adopt(
        home: Home,
        cgroups: Hierarchy,
        claims: PathBuf,
        redirect: Redirect,
        alter: Alter,
    ) -> Result<Self, StepError> {
        let group = home.group();
        isolate::seccomp::program();
        let mut nursery = Self {
            brake: Brake { home: home.clone(), cgroups: cgroups.clone(), group: group.clone() },
            home,
            cgroups,
            group,
            claims,
            redirect,
            alter,
            supervisor: Supervisor::default(),
            live: BTreeMap::new(),
            owners: BTreeMap::new(),
            watch: Watch::new(),
            holds: Holds::default(),
            births: std::process::id(),
            seeds: Vec::new(),
            seeds_wanted: false,
        };
        for id in sandbox::all(&nursery.home).map_err(told)? {
            if let Err(error) = nursery.adopt_one(&id) {
                eprintln!("cannot adopt {id}: {error}");
                // Nobody can tell what it is, so nobody looks after it: whatever lives of it ends below.
                nursery.write_state(&id, &State::ended(format!("ended, because {error}")));
            }
        }
        nursery.clear_strangers();
        Ok(nursery)
    }

    /// Ends and removes what belongs to no sandbox that lives.
    fn clear_strangers(&self) {
        let lives = |part: &str| self.live.keys().any(|id| id.part() == part);
        for part in self.cgroups.parts(&self.group).iter().filter(|part| !lives(part)) {
            self.clear_soon(part);
        }
        for id in sandbox::parts_in(&self.home.run()).unwrap_or_default() {
            if !lives(id.part()) {
                let _ = fs::remove_dir_all(self.home.run_of(&id));
            }
        }
    }

    /// Clears cgroups whose processes die only now.
    fn clear_soon(&self, part: &str) {
        let end = Instant::now() + CLEAR_PATIENCE;
        while !self.cgroups.clear(&self.group, part) && Instant::now() < end {
            thread::sleep(CLEAR_AGAIN);
        }
    }

    fn adopt_one(&mut self, id: &SandboxId) -> Result<(), EngineError> {
        let state = State::read(&self.home, id)?;
        let record = Record::read(&self.home, id).unwrap_or_else(|error| {
            // Whose it is cannot be told any more, and work is not thrown away on a guess.
            eprintln!("{id} is taken for a kept one: {error}");
            None
        });
        if let Some(Record { owner: Owner::Process(pid), .. }) = record {
            let owner_started = match &state {
                Some(State::Running { owner_started, .. }) => *owner_started,
                _ => None,
            };
            // Without a start time there is no telling the owner from a later process with its pid;
            // then its being there is believed.
            let there =
                start_ticks(pid).filter(|ticks| owner_started.is_none_or(|started| started == *ticks));
            let Some(owner) = there.and_then(|_| open_process(pid)) else {
                self.owner_was_gone(id, state.as_ref());
                return Ok(());
            };
            self.owners.insert(id.clone(), owner);
        }
        let Some(State::Running { pid, first_id, .. }) = state else { return Ok(()) };
        let Some(pidfd) = state.as_ref().and_then(State::living).and_then(open_process) else {
            self.clear_soon(id.part());
            self.close(id, "ended while nobody looked".to_owned());
            return Ok(());
        };
        let live = Live {
            pid,
            pidfd,
            claim: Claim::adopt(&self.claims, first_id),
            report: None,
            gate: None,
            failure: None,
            killed: None,
            clocks: record.map_or_else(Clocks::none, |record| {
                Clocks::new(&record.limits, record.lives_since(), !self.home.has_quotas())
            }),
            // Whoever asked for a freeze asked another zygote.
            thaw_at: Some(Instant::now()),
            hold: FREEZE,
            mounts: mounts_of(pid),
            freezing_until: None,
            ended: None,
        };
        self.live.insert(id.clone(), live);
        Ok(())
    }

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
        let volumes: Vec<VolumeName> = record.volumes.iter().map(|volume| volume.name.clone()).collect();
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

    /// A process that has taken the steps up to the gate, under this sandbox's name.
    fn seed_for(&mut self, record: &Record, plan: &Plan) -> Result<Seed, StepError> {
        self.seeds_wanted = self.cgroups.renames();
        let part = record.id.part();
        while let Some(at) =
            self.seeds.iter().position(Seed::is_ready).filter(|_| record.network == Network::Door)
        {
            let mut seed = self.seeds.swap_remove(at);
            let dead = || StepError::new("find the process", io::ErrorKind::NotFound.into());
            let renamed =
                if seed.lives() { seed.rename(&self.cgroups, &self.group, part, plan) } else { Err(dead()) };
            match renamed {
                Ok(()) => return Ok(seed),
                Err(error) => {
                    eprintln!("a seed is of no use: {}", error.line());
                    seed.discard(&self.cgroups, &self.group);
                }
            }
        }
        self.births = self.births.wrapping_add(1);
        let supervisor = self.supervisor.program()?;
        Seed::grow(plan, &self.cgroups, &self.group, &self.claims, self.births, supervisor)
    }

    /// Grows a seed ahead of time; false when there are enough.
    pub(super) fn grow_seed(&mut self) -> bool {
        if !self.seeds_wanted || self.seeds.len() >= SEEDS {
            return false;
        }
        self.births = self.births.wrapping_add(1);
        let plan = self.plan(&Record::of_a_seed(), &[], String::new());
        let grown = self.supervisor.program().and_then(|supervisor| {
            Seed::grow(&plan, &self.cgroups, &self.group, &self.claims, self.births, supervisor)
        });
        match grown {
            Ok(seed) => self.seeds.push(seed),
            Err(error) => {
                eprintln!("cannot grow a seed: {}", error.line());
                self.seeds_wanted = false;
            }
        }
        true
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
        let gone =
            || StepError::new(format!("find the owner, process {pid}"), io::ErrorKind::NotFound.into());
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

    /// Kills all of a sandbox; `Told::Ended` follows. False when it does not run.
    pub(super) fn kill(&mut self, id: &SandboxId) -> bool {
        self.kill_for(id, "killed")
    }

    fn kill_for(&mut self, id: &SandboxId, reason: &'static str) -> bool {
        let Some(live) = self.live.get_mut(id) else { return false };
        live.killed.get_or_insert(reason);
        // With pid 1 its whole pid namespace dies; frozen processes of cgroup v1 after a thaw only.
        let _ = pidfd_send_signal(&live.pidfd, Signal::KILL);
        let _ = self.brake.freeze(id, &live.pidfd, false);
        live.thaw_at = None;
        true
    }

    /// Writes down that a sandbox that was never started never will be.
    pub(super) fn forgo(&self, id: &SandboxId) {
        if self.home.sandbox(id).exists() && matches!(State::read(&self.home, id), Ok(None)) {
            self.write_state(id, &State::ended("never started"));
        }
    }

    /// Lets work stand still; `Told::Still` follows. `None` when it does not run.
    pub(super) fn freeze(
        &mut self,
        id: &SandboxId,
        hold_millis: Option<u64>,
    ) -> Option<Result<(), StepError>> {
        // Who is being killed must not be caught by it: on cgroup v1 the frozen do not die.
        let live = self.live.get_mut(id).filter(|live| live.ended.is_none() && live.killed.is_none())?;
        let result = self.brake.freeze(id, &live.pidfd, true);
        if result.is_ok() {
            live.hold = hold_millis.map_or(FREEZE, Duration::from_millis).min(LONGEST_FREEZE);
            live.thaw_at = None;
            live.freezing_until = Some(Instant::now() + STILL);
        }
        Some(result)
    }

    /// Lets work go on. `None` when it does not run.
    pub(super) fn thaw(&mut self, id: &SandboxId) -> Option<Result<(), StepError>> {
        let live = self.live.get_mut(id)?;
        (live.thaw_at, live.freezing_until) = (None, None);
        Some(self.brake.freeze(id, &live.pidfd, false))
    }

    /// Looks whether those that are to stand still do.
    fn look_at_freezing(&mut self, now: Instant) -> Vec<Told> {
        let mut told = Vec::new();
        for (id, live) in &mut self.live {
            let Some(until) = live.freezing_until else { continue };
            let result = if live.killed.is_some() || live.ended.is_some() {
                Err(StepError::new("freeze what has ended", io::ErrorKind::NotFound.into()))
            } else if self.brake.has_stopped(id, live.pid) {
                live.thaw_at = Some(now + live.hold);
                Ok(())
            } else if until <= now {
                let _ = self.brake.freeze(id, &live.pidfd, false);
                Err(StepError::new("make its work stand still", io::ErrorKind::TimedOut.into()))
            } else {
                continue;
            };
            live.freezing_until = None;
            told.push(Told::Still { id: id.clone(), result });
        }
        told
    }

    /// Pid 1 is dead: takes note why and clears up behind it.
    pub(super) fn ended(&mut self, id: &SandboxId) -> Option<Told> {
        let live = self.live.get_mut(id)?;
        if live.ended.is_none() {
            let status = waitid(WaitId::PidFd(live.pidfd.as_fd()), WaitIdOptions::EXITED);
            let how = match status {
                Ok(Some(status)) => how(status.exit_status(), status.terminating_signal()),
                // Not our child but an earlier zygote's.
                _ => syscall::exit_status_of(&live.pidfd).map_or("lost".to_owned(), |status| {
                    let signal = status & 0x7f;
                    how((signal == 0).then_some(status >> 8 & 0xff), (signal != 0).then_some(signal))
                }),
            };
            let oom = self.cgroups.oom_kills(&self.group, id.part(), "supervisor") > 0;
            let reason = match &live.failure {
                Some(failure) => failure.clone(),
                None => match live.killed {
                    Some(reason) => reason.to_owned(),
                    None if oom => "oom".to_owned(),
                    None => how,
                },
            };
            live.ended = Some(reason);
        }
        if !self.cgroups.clear(&self.group, id.part()) {
            return None;
        }
        let reason = live.ended.take()?;
        self.close(id, reason.clone());
        Some(Told::Ended { id: id.clone(), reason })
    }

    /// The last word on a sandbox whose processes are all dead.
    fn close(&mut self, id: &SandboxId, reason: String) {
        let _ = fs::remove_dir_all(self.home.run_of(id));
        self.write_state(id, &State::ended(reason));
        if let Some(live) = self.live.remove(id) {
            live.claim.release();
            if let Some(mounts) = live.mounts {
                self.holds.bury(mounts);
            }
        }
    }

    fn write_state(&self, id: &SandboxId, state: &State) {
        // A full disk must not keep a sandbox from ending; the next zygote sees that it is dead.
        if let Err(error) = state.write(&self.home, id) {
            eprintln!("cannot write down the end of {id}: {error}");
        }
    }

    /// The process a sandbox lived for is gone.
    pub(super) fn owner_ended(&mut self, id: &SandboxId) {
        self.owners.remove(id);
        if !self.kill(id) {
            self.discard(id);
        }
    }

    /// The owner went while no zygote looked.
    fn owner_was_gone(&mut self, id: &SandboxId, state: Option<&State>) {
        if let Some(pidfd) = state.and_then(State::living).and_then(open_process) {
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            let _ = rustix::event::poll(
                &mut [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)],
                Some(&rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 }),
            );
        }
        self.clear_soon(id.part());
        self.close(id, "its owner is gone".to_owned());
        self.discard(id);
    }

    /// Throws the disk of a sandbox away whose owner is gone.
    pub(super) fn discard(&self, id: &SandboxId) {
        if let Err(error) = self.home.discard(&self.home.sandbox(id)) {
            eprintln!("cannot discard {id}: {error}");
        }
    }

    /// What time alone brings about; answers when to look again.
    pub(super) fn tick(&mut self, now: Instant) -> (Vec<Told>, Option<Instant>) {
        let dying: Vec<SandboxId> =
            self.live.iter().filter(|(_, live)| live.ended.is_some()).map(|(id, _)| id.clone()).collect();
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
                let _ = fs::OpenOptions::new().write(true).open(&path).and_then(|log| log.set_len(0));
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

    fn discard_seeds(&mut self) {
        for seed in self.seeds.drain(..) {
            seed.discard(&self.cgroups, &self.group);
        }
    }

    /// The reason a sandbox ended for, when it has.
    pub(super) fn end_of(&self, id: &SandboxId) -> Option<String> {
        match State::read(&self.home, id) {
            Ok(Some(State::Ended { reason, .. })) => Some(reason),
            _ => None,
        }
    }

    /// Whether a sandbox of this owner's is to be thrown away once dead.
    pub(super) fn is_ownerless(&self, id: &SandboxId) -> bool {
        !self.owners.contains_key(id)
            && matches!(Record::read(&self.home, id), Ok(Some(Record { owner: Owner::Process(_), .. })))
    }
}

fn how(code: Option<i32>, signal: Option<i32>) -> String {
    match (code, signal) {
        (Some(code), _) => format!("exited {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => "lost".to_owned(),
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
        io::Error::other(std::error::Error::source(&error).map_or(String::new(), ToString::to_string)),
    )
}
