//! The table of live sandboxes: starts them, follows them to their end, and adopts those of an
//! earlier zygote. It does not know clients: what happens to a sandbox is reported as an [`Event`].

mod adopt;
mod end;
mod freeze;
mod limits;
mod standby_pool;

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, launch::Launch};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{
    Alter,
    disk_watch::DiskWatch,
    freezer::HomeCgroups,
    mount_cache::MountCache,
    standby::{LAUNCHED, Standby},
    supervisor::Supervisor,
};
use crate::{
    error::{Doing, EngineError, StepError},
    facts,
    fd_passing::send,
    home::Home,
    isolate::{Assignment, SUPERVISOR_LOG, ids::Claim},
    plan::{HostFacts, Plan, Redirect, plan},
    process::{boot_id, is_exiting, start_ticks},
    sandbox_record::{Record, RecordedState},
    spec::{Network, Owner, VolumeName},
};
use freeze::FREEZE_HOLD;
use limits::LimitState;
use standby_pool::StandbyPool;

// A pid 1 that was killed waits for all its processes to die, and on cgroup v1 frozen ones do not.
// Its pidfd reports only the end of that.
const EXIT_POLL: Duration = Duration::from_secs(1);
const FREEZE_POLL: Duration = Duration::from_millis(1);
// Maximum size of a supervisor's log; a larger one is emptied.
const LOG_BYTES: u64 = 1 << 20;
// Dying processes usually leave their cgroups within microseconds.
const CLEAR_POLL: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) enum Event {
    Started {
        id: SandboxId,
        pid: u32,
    },
    Ended {
        id: SandboxId,
        reason: String,
    },
    /// A freeze has completed or failed.
    FreezeDone {
        id: SandboxId,
        result: Result<(), StepError>,
    },
}

/// A sandbox whose pid 1 is alive or died a moment ago.
pub(super) struct LiveSandbox {
    pid: u32,
    /// Name of its cgroups.
    cgroup: String,
    pidfd: OwnedFd,
    claim: Claim,
    /// Open until pid 1 is the supervisor or has reported an error.
    pub(super) report: Option<OwnedFd>,
    /// Open as long as `report`: closing it with unread data would break the other end.
    assignment_socket: Option<OwnedFd>,
    failure: Option<String>,
    /// Why the zygote killed it.
    killed: Option<&'static str>,
    thaw_at: Option<Instant>,
    /// How long a freeze lasts unless it is renewed.
    hold: Duration,
    mounts: Option<OwnedFd>,
    limit_state: LimitState,
    /// The freeze is requested but not complete; polled until this deadline.
    freezing_until: Option<Instant>,
    /// Pid 1 is dead and reaped, for this reason; its cgroups are being cleared.
    ended: Option<String>,
    /// The CPU time it used, once it is dead.
    cpu_micros: Option<u64>,
}

impl LiveSandbox {
    fn new(standby: Standby, limit_state: LimitState) -> Self {
        let Standby { pid, cgroup, pidfd, claim, report, assignment_socket, mounts, .. } = standby;
        let (report, assignment_socket) = (Some(report), Some(assignment_socket));
        Self {
            pid,
            cgroup,
            pidfd,
            claim,
            report,
            assignment_socket,
            failure: None,
            killed: None,
            thaw_at: None,
            hold: FREEZE_HOLD,
            mounts,
            freezing_until: None,
            limit_state,
            ended: None,
            cpu_micros: None,
        }
    }

    /// Becomes readable when pid 1 dies; `None` once it is dead.
    pub(super) fn live_pidfd(&self) -> Option<&OwnedFd> {
        self.ended.is_none().then_some(&self.pidfd)
    }
}

pub(super) struct SandboxTable {
    home: Home,
    cgroups: HomeCgroups,
    claims: PathBuf,
    redirect: Redirect,
    alter: Alter,
    supervisor: Supervisor,
    pub(super) live: BTreeMap<SandboxId, LiveSandbox>,
    /// Processes that own sandboxes. A dead sandbox's disk is removed with its owner.
    pub(super) owners: BTreeMap<SandboxId, OwnedFd>,
    disk_watch: DiskWatch,
    pub(super) mount_cache: MountCache,
    spawn_counter: u32,
    standbys: StandbyPool,
}

impl SandboxTable {
    /// Starts the recorded sandbox; `Event::Started` or `Event::Ended` follows.
    pub(super) fn start(
        &mut self,
        record: Record,
        layers: &[PathBuf],
        resolv_conf: String,
        mut files: Vec<OwnedFd>,
        restart: bool,
    ) -> Result<(), StepError> {
        let id = record.id.clone();
        let startable = match RecordedState::read(&self.home, &id) {
            Ok(None) => true,
            // A recorded state may claim a dead sandbox runs, when the disk was too full to record
            // its end.
            Ok(Some(state)) => restart && state.live_pid().is_none(),
            Err(_) => false,
        };
        if self.live.contains_key(&id) || !startable {
            let error = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(StepError::new("start a sandbox that was started before", error));
        }
        if files.len() != 1 + layers.len() + record.binds.len() + record.volumes.len() {
            let error = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(StepError::new("count the attached descriptors", error));
        }
        let owner = self.owner(&record)?;
        let mut descriptors = files.split_off(1);
        let supervisor = files.pop().expect("its length was checked above");
        if self.supervisor.load(supervisor)? {
            self.discard_standbys();
        }
        let plan = self.plan(&record, layers, resolv_conf);
        let owner_started = owner.as_ref().map(|(started, _)| *started);
        let standby = self.standby_for(&record, &plan)?;
        let limit_state =
            LimitState::new(&record.limits, record.lifetime_start(), !self.home.has_quotas());
        let volumes: Vec<VolumeName> =
            record.volumes.iter().map(|volume| volume.name.clone()).collect();
        let unmount = self.mount_cache.pending_unmount(&descriptors[..layers.len()]);
        let files: Vec<_> = descriptors.iter().chain(&unmount).map(AsFd::as_fd).collect();
        let after_unmount = unmount.is_some();
        let assigned = self.assign(&standby, record, &plan, &files, owner_started, after_unmount);
        if let Err(error) = assigned {
            standby.discard(&self.cgroups);
            // The state may already say that it runs, and a running sandbox cannot be started
            // again.
            self.write_state(&id, &RecordedState::ended(error.line()));
            return Err(error);
        }
        self.owners.extend(owner.map(|(_, pidfd)| (id.clone(), pidfd)));
        let mounts = descriptors.split_off(descriptors.len() - volumes.len());
        for (name, mount) in volumes.into_iter().zip(mounts) {
            self.mount_cache.insert(name, mount, Instant::now());
        }
        self.live.insert(id, LiveSandbox::new(standby, limit_state));
        Ok(())
    }

    fn plan(&self, record: &Record, layers: &[PathBuf], resolv_conf: String) -> Plan {
        let facts = HostFacts {
            cgroups: self.cgroups.hierarchy.clone(),
            group: self.cgroups.group.clone(),
            resolv_conf,
            redirect: self.redirect,
            ids: facts::id_allocation(),
            size: facts::host_size(),
        };
        let mut plan = plan(record, layers, &facts);
        (self.alter)(&mut plan);
        plan
    }

    /// Records that pid 1 belongs to this sandbox, then sends it its assignment.
    fn assign(
        &self,
        standby: &Standby,
        record: Record,
        plan: &Plan,
        files: &[BorrowedFd<'_>],
        owner_started: Option<u64>,
        after_unmount: bool,
    ) -> Result<(), StepError> {
        let state = RecordedState::Running {
            boot: boot_id().to_owned(),
            pid: standby.pid,
            started: standby.started,
            first_id: standby.claim.first(),
            owner_started,
            cgroup: standby.cgroup.clone(),
        };
        let id = record.id;
        state.write(&self.home, &id).map_err(step_error)?;
        let mut env = record.config.env;
        env.extend(record.env);
        let assignment = Assignment {
            steps: plan.parts().assigned.to_vec(),
            folder: self.home.sandbox(&id),
            writable: self.home.writable(&id),
            run: self.home.sandbox_run(&id),
            after_unmount,
            launch: Launch {
                sandbox: id,
                descriptors: Vec::new(),
                env,
                user: record.config.user,
                workdir: record.config.workdir,
                sealed: record.network == Network::Nothing,
                file_bytes: record.file_bytes,
                cpus: Vec::new(),
                settings: record.settings,
            },
        };
        send(&standby.assignment_socket, &assignment, files).doing(|| "send pid 1 its assignment")
    }

    fn owner(&self, record: &Record) -> Result<Option<(u64, OwnedFd)>, StepError> {
        let Owner::Process(pid) = record.owner else { return Ok(None) };
        // The pidfd comes first: then the start time belongs to the process it names, or there is
        // none.
        let owner = open_process(pid).and_then(|pidfd| Some((start_ticks(pid)?, pidfd)));
        let gone =
            || StepError::new(format!("find the owner, process {pid}"), io::ErrorKind::NotFound);
        owner.map(Some).ok_or_else(gone)
    }

    /// The report pipe is readable: pid 1 was launched or failed.
    pub(super) fn on_report(&mut self, id: &SandboxId) -> Option<Event> {
        let live = self.live.get_mut(id)?;
        let report = live.report.take()?;
        live.assignment_socket = None;
        let mut text = String::new();
        let _ = io::Read::read_to_string(&mut fs::File::from(report), &mut text);
        // When one of the two processes fails, the other may report too: the first line is the
        // cause.
        let mut lines = text.lines();
        let failure = match lines.next() {
            Some(LAUNCHED) if lines.next().is_none() => {
                return Some(Event::Started { id: id.clone(), pid: live.pid });
            }
            Some(LAUNCHED) | None => "a process that assembled the sandbox died",
            Some(line) => line,
        };
        live.failure = Some(failure.to_owned());
        let _ = pidfd_send_signal(&live.pidfd, Signal::KILL);
        None
    }

    /// Handles everything that depends on time; returns events and when to call again.
    pub(super) fn tick(&mut self, now: Instant) -> (Vec<Event>, Option<Instant>) {
        let dying: Vec<SandboxId> = self
            .live
            .iter()
            .filter(|(_, live)| live.ended.is_some())
            .map(|(id, _)| id.clone())
            .collect();
        let mut events: Vec<Event> = dying.iter().filter_map(|id| self.ended(id)).collect();
        events.extend(self.poll_freezing(now));
        let mut next = [
            self.kill_expired(now),
            self.scan_disks(now),
            self.kill_over_limit(now),
            self.mount_cache.tick(now),
        ]
        .into_iter()
        .flatten()
        .min();
        let mut wake_by = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        for (id, live) in &mut self.live {
            if live.ended.is_some() {
                wake_by(now + CLEAR_POLL);
            }
            if live.freezing_until.is_some() {
                wake_by(now + FREEZE_POLL);
            }
            match live.thaw_at {
                Some(at) if at <= now || is_exiting(live.pid) => {
                    live.thaw_at = None;
                    let _ = self.cgroups.freeze(id, &live.cgroup, &live.pidfd, false);
                }
                Some(at) => wake_by(at.min(now + EXIT_POLL)),
                None => {}
            }
        }
        (events, next)
    }

    /// Empties logs that have become too large. Safe, because supervisors write in append mode.
    pub(super) fn truncate_logs(&self) {
        for id in self.live.keys() {
            let path = self.home.sandbox(id).join(SUPERVISOR_LOG);
            if fs::metadata(&path).is_ok_and(|about| about.len() > LOG_BYTES) {
                let _ =
                    fs::OpenOptions::new().write(true).open(&path).and_then(|log| log.set_len(0));
            }
        }
    }

    /// Whether no sandbox and no owner needs the zygote.
    pub(super) fn is_empty(&mut self) -> bool {
        if !self.live.is_empty() {
            return false;
        }
        // Sandboxes that another process removed need no owner any more.
        let home = &self.home;
        self.owners.retain(|id, _| home.sandbox(id).exists());
        self.owners.is_empty()
    }

    /// Releases everything and removes the home's cgroup before the zygote exits.
    pub(super) fn shut_down(&mut self) {
        self.disk_watch.stop();
        self.discard_standbys();
        self.mount_cache.release_all();
        self.cgroups.hierarchy.leave_home(&self.cgroups.group);
    }
}

fn open_process(pid: u32) -> Option<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

fn step_error(error: EngineError) -> StepError {
    let source = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
    StepError::new(error.to_string(), io::Error::other(source))
}
