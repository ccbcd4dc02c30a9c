//! Adopts the sandboxes of an earlier zygote of the home and removes what belongs to none of them.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use harvest_proto::SandboxId;
use rustix::process::{Signal, pidfd_send_signal};

use super::{
    LiveSandbox, SandboxTable, freeze::FREEZE_HOLD, limits::LimitState, open_process,
    standby_pool::StandbyPool, step_error,
};
use crate::{
    cgroup::Hierarchy,
    error::{EngineError, StepError},
    home::Home,
    isolate::{self, ids::Claim},
    plan::Redirect,
    process::start_ticks,
    sandbox_record::{self, Record, RecordedState},
    spec::Owner,
    syscall,
    zygote::{
        Alter, disk_watch::DiskWatch, freezer::HomeCgroups, mount_cache::MountCache,
        standby::mounts_of, supervisor::Supervisor,
    },
};

impl SandboxTable {
    /// Builds the table with the sandboxes of an earlier zygote that are still alive.
    pub(in crate::zygote) fn adopt(
        home: Home,
        hierarchy: Hierarchy,
        claims: PathBuf,
        redirect: Redirect,
        alter: Alter,
    ) -> Result<Self, StepError> {
        isolate::seccomp::program();
        let mut table = Self {
            cgroups: HomeCgroups { home: home.clone(), hierarchy, group: home.cgroup_name() },
            home,
            claims,
            redirect,
            alter,
            supervisor: Supervisor::default(),
            live: BTreeMap::new(),
            owners: BTreeMap::new(),
            disk_watch: DiskWatch::new(),
            mount_cache: MountCache::default(),
            spawn_counter: std::process::id(),
            standbys: StandbyPool::new(),
        };
        for id in sandbox_record::list_ids(&table.home).map_err(step_error)? {
            if let Err(error) = table.adopt_sandbox(&id) {
                eprintln!("cannot adopt {id}: {error}");
                // A sandbox that cannot be adopted is recorded as ended; its processes are killed
                // below.
                table
                    .write_state(&id, &RecordedState::ended(format!("cannot be adopted: {error}")));
            }
        }
        table.remove_orphans();
        Ok(table)
    }

    /// Kills and removes cgroups and sockets that belong to no live sandbox.
    fn remove_orphans(&self) {
        let lives = |cgroup: &str| self.live.values().any(|live| live.cgroup == cgroup);
        for cgroup in
            self.cgroups.hierarchy.parts(&self.cgroups.group).iter().filter(|cgroup| !lives(cgroup))
        {
            self.cgroups.clear_with_timeout(cgroup);
        }
        for id in sandbox_record::ids_in(&self.home.run()).unwrap_or_default() {
            if !self.live.contains_key(&id) {
                let _ = fs::remove_dir_all(self.home.sandbox_run(&id));
            }
        }
    }

    fn adopt_sandbox(&mut self, id: &SandboxId) -> Result<(), EngineError> {
        let state = RecordedState::read(&self.home, id)?;
        let record = Record::read(&self.home, id).unwrap_or_else(|error| {
            // The owner is unknown, and work is not discarded on a guess.
            eprintln!("{id} has an unreadable record and is kept: {error}");
            None
        });
        if let Some(Record { owner: Owner::Process(pid), .. }) = record {
            let owner_started = match &state {
                Some(RecordedState::Running { owner_started, .. }) => *owner_started,
                _ => None,
            };
            // Without a start time the owner cannot be distinguished from a later process with its
            // pid; an existing process is then taken for the owner.
            let present = start_ticks(pid)
                .filter(|ticks| owner_started.is_none_or(|started| started == *ticks));
            let Some(owner) = present.and_then(|_| open_process(pid)) else {
                self.remove_orphaned(id, state.as_ref());
                return Ok(());
            };
            self.owners.insert(id.clone(), owner);
        }
        let Some(state @ RecordedState::Running { pid, first_id, cgroup, .. }) = &state else {
            return Ok(());
        };
        let (pid, cgroup) = (*pid, cgroup.clone());
        let Some(pidfd) = state.live_pid().and_then(open_process) else {
            self.cgroups.clear_with_timeout(&cgroup);
            self.close(id, "ended while no zygote was running".to_owned());
            return Ok(());
        };
        let live = LiveSandbox {
            pid,
            cgroup,
            pidfd,
            claim: Claim::adopt(&self.claims, *first_id),
            report: None,
            assignment_socket: None,
            failure: None,
            killed: None,
            limit_state: record.map_or_else(LimitState::none, |record| {
                LimitState::new(&record.limits, record.lifetime_start(), !self.home.has_quotas())
            }),
            // A freeze requested from the earlier zygote does not carry over.
            thaw_at: Some(Instant::now()),
            hold: FREEZE_HOLD,
            mounts: mounts_of(pid),
            freezing_until: None,
            ended: None,
            cpu_micros: None,
        };
        self.live.insert(id.clone(), live);
        Ok(())
    }

    /// Removes a sandbox whose owner exited while no zygote was running.
    fn remove_orphaned(&mut self, id: &SandboxId, state: Option<&RecordedState>) {
        if let Some(pidfd) = state.and_then(RecordedState::live_pid).and_then(open_process) {
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            let _ = syscall::is_readable(&pidfd, Duration::from_secs(5));
        }
        if let Some(RecordedState::Running { cgroup, .. }) = state {
            self.cgroups.clear_with_timeout(cgroup);
        }
        self.close(id, "its owner exited".to_owned());
        self.discard(id);
    }
}
