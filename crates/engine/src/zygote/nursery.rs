//! The sandboxes the zygote looks after: their birth, their end, and the adoption of those an earlier
//! zygote left. Knows nothing of clients: what becomes of a sandbox is told as [`Told`].

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
    protocol::send,
    reaper::Reaper,
    seed::{LAUNCHED, Seed, mounts_of},
    supervisor::Supervisor,
};
use crate::{
    cgroup::Hierarchy,
    error::{Doing, EngineError, StepError},
    home::{Home, boot_id, start_ticks},
    isolate::{self, Calling, LOG, ids::Claim},
    plan::{HostFacts, Plan, plan},
    sandbox::{self, Record, State},
    spec::{Network, Owner},
    syscall,
};

// A freeze that nobody renews ends: whoever asked for it may be dead.
const FREEZE: Duration = Duration::from_secs(5);
// What a supervisor may have written to its log; more is cut off at the front.
const LOG_BYTES: u64 = 1 << 20;
// Dying processes leave their cgroups within microseconds, seldom later.
const CLEAR_AGAIN: Duration = Duration::from_millis(2);
// A process that cannot be killed (waiting for a dead disk, say) must not keep a zygote from starting.
const CLEAR_PATIENCE: Duration = Duration::from_secs(2);

/// Something that happened to a sandbox.
#[derive(Debug)]
pub(super) enum Told {
    Started { id: SandboxId, pid: u32 },
    Ended { id: SandboxId, reason: String },
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
    killed: bool,
    thaw_at: Option<Instant>,
    mounts: Option<OwnedFd>,
    /// Pid 1 is dead and reaped, for this reason; cgroups are still being cleared.
    ended: Option<String>,
}

impl Live {
    fn new(seed: Seed) -> Self {
        let Seed { pid, pidfd, claim, report, gate, mounts, .. } = seed;
        let (report, gate) = (Some(report), Some(gate));
        let (failure, killed, thaw_at, ended) = (None, false, None, None);
        Self { pid, pidfd, claim, report, gate, failure, killed, thaw_at, mounts, ended }
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
    supervisor: Supervisor,
    reaper: Reaper,
    pub(super) live: BTreeMap<SandboxId, Live>,
    /// Processes that own sandboxes, also dead ones, whose disks go when the owner goes.
    pub(super) owners: BTreeMap<SandboxId, OwnedFd>,
    births: u32,
    seeds: Vec<Seed>,
    seeds_wanted: bool,
}

impl Nursery {
    /// Takes over what an earlier zygote of this home left.
    pub(super) fn adopt(home: Home, cgroups: Hierarchy, claims: PathBuf) -> Result<Self, StepError> {
        let group = home.group();
        isolate::seccomp::program();
        let mut nursery = Self {
            home,
            cgroups,
            group,
            claims,
            supervisor: Supervisor::default(),
            // SAFETY: the zygote has one thread.
            reaper: unsafe { Reaper::start() },
            live: BTreeMap::new(),
            owners: BTreeMap::new(),
            births: std::process::id(),
            seeds: Vec::new(),
            seeds_wanted: false,
        };
        for id in sandbox::all(&nursery.home).map_err(told)? {
            if let Err(error) = nursery.adopt_one(&id) {
                eprintln!("cannot adopt {id}: {error}");
            }
        }
        nursery.clear_strangers();
        Ok(nursery)
    }

    /// Removes the cgroups of what is not alive, and of seeds that die with the zygote they waited for.
    fn clear_strangers(&self) {
        let mut parts = self.cgroups.parts(&self.group);
        parts.retain(|part| !self.live.keys().any(|id| id.part() == part));
        let end = Instant::now() + CLEAR_PATIENCE;
        loop {
            parts.retain(|part| !self.cgroups.clear(&self.group, part));
            if parts.is_empty() || Instant::now() > end {
                return;
            }
            thread::sleep(CLEAR_AGAIN);
        }
    }

    fn adopt_one(&mut self, id: &SandboxId) -> Result<(), EngineError> {
        let state = State::read(&self.home, id)?;
        if let Some(Record { owner: Owner::Process(pid), .. }) = Record::read(&self.home, id)? {
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
            self.cgroups.clear(&self.group, id.part());
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
            killed: false,
            // Whoever asked for a freeze asked another zygote.
            thaw_at: Some(Instant::now()),
            mounts: mounts_of(pid),
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
    ) -> Result<(), StepError> {
        let id = record.id.clone();
        if self.live.contains_key(&id) || !matches!(State::read(&self.home, &id), Ok(None)) {
            let error = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(StepError::new("start what has been started before", error));
        }
        if files.len() != 1 + layers.len() + record.binds.len() {
            let error = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(StepError::new("count the descriptors handed over", error));
        }
        let owner = self.owner(&record)?;
        let handed = files.split_off(1);
        let supervisor = files.pop().expect("its length was checked above");
        if self.supervisor.load(supervisor)? {
            self.discard_seeds();
        }
        let facts = self.facts(resolv_conf);
        let plan = plan(&record, layers, &facts);
        let owner_started = owner.as_ref().map(|(started, _)| *started);
        let seed = self.seed_for(&record, &plan)?;
        if let Err(error) = self.call(&seed, record, &plan, &handed, owner_started) {
            seed.discard(&self.cgroups, &self.group);
            return Err(error);
        }
        self.owners.extend(owner.map(|(_, pidfd)| (id.clone(), pidfd)));
        self.live.insert(id, Live::new(seed));
        Ok(())
    }

    fn facts(&self, resolv_conf: String) -> HostFacts {
        HostFacts { cgroups: self.cgroups.clone(), group: self.group.clone(), resolv_conf }
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
        let plan = plan(&Record::of_a_seed(), &[], &self.facts(String::new()));
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
            run: self.home.run_of(&id),
            launch: Launch {
                sandbox: id,
                descriptors: Vec::new(),
                env,
                user: record.config.user,
                workdir: record.config.workdir,
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
        let Some(live) = self.live.get_mut(id) else { return false };
        live.killed = true;
        // With pid 1 its whole pid namespace dies; frozen processes of cgroup v1 after a thaw only.
        let _ = pidfd_send_signal(&live.pidfd, Signal::KILL);
        let _ = self.cgroups.freeze(&self.group, id.part(), false);
        live.thaw_at = None;
        true
    }

    /// Writes down that a sandbox that was never started never will be.
    pub(super) fn forgo(&self, id: &SandboxId) {
        if self.home.sandbox(id).exists() && matches!(State::read(&self.home, id), Ok(None)) {
            self.write_state(id, &State::ended("never started"));
        }
    }

    /// Freezes or thaws. `None` when it does not run.
    pub(super) fn freeze(&mut self, id: &SandboxId, frozen: bool) -> Option<Result<(), StepError>> {
        let live = self.live.get_mut(id)?;
        let result = self.cgroups.freeze(&self.group, id.part(), frozen);
        live.thaw_at = (frozen && result.is_ok()).then(|| Instant::now() + FREEZE);
        if frozen && result.is_err() {
            let _ = self.cgroups.freeze(&self.group, id.part(), false);
        }
        Some(result)
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
                None if live.killed => "killed".to_owned(),
                None if oom => "oom".to_owned(),
                None => how,
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
                self.reaper.let_go(mounts);
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
        self.cgroups.clear(&self.group, id.part());
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
        let told: Vec<Told> = dying.iter().filter_map(|id| self.ended(id)).collect();
        let mut next: Option<Instant> = None;
        let mut sooner = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        for (id, live) in &mut self.live {
            if live.ended.is_some() {
                sooner(now + CLEAR_AGAIN);
            }
            match live.thaw_at {
                Some(at) if at <= now => {
                    live.thaw_at = None;
                    let _ = self.cgroups.freeze(&self.group, id.part(), false);
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
        self.discard_seeds();
        self.reaper.end();
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
