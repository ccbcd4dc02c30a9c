//! Takes over what an earlier zygote of the home left: the living go on, the rest is cleared up.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use harvest_proto::SandboxId;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Signal, pidfd_send_signal},
};

use super::{
    CLEAR_AGAIN, Live, Nursery, freeze::FREEZE, limits::Clocks, open_process, seeds::Seeds, told,
};
use crate::{
    cgroup::Hierarchy,
    error::{EngineError, StepError},
    home::{Home, start_ticks},
    isolate::{self, ids::Claim},
    plan::Redirect,
    sandbox::{self, Record, State},
    spec::Owner,
    zygote::{
        Alter, holds::Holds, seed::mounts_of, still::Brake, supervisor::Supervisor, watch::Watch,
    },
};

// What an earlier zygote left is waited for, but not for ever: a process may hang in the kernel.
const CLEAR_PATIENCE: Duration = Duration::from_secs(1);

impl Nursery {
    /// Takes over what an earlier zygote of this home left.
    pub(in crate::zygote) fn adopt(
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
            seeds: Seeds::new(),
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
            let there = start_ticks(pid)
                .filter(|ticks| owner_started.is_none_or(|started| started == *ticks));
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

    /// The owner went while no zygote looked.
    fn owner_was_gone(&mut self, id: &SandboxId, state: Option<&State>) {
        if let Some(pidfd) = state.and_then(State::living).and_then(open_process) {
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            let patience = Timespec { tv_sec: 5, tv_nsec: 0 };
            let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&patience));
        }
        self.clear_soon(id.part());
        self.close(id, "its owner is gone".to_owned());
        self.discard(id);
    }
}
