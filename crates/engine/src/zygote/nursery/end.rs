//! The end of sandboxes: who ends them, why, and what is cleared up behind them.

use std::{fs, os::fd::AsFd};

use harvest_proto::SandboxId;
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use super::{Nursery, Told};
use crate::{
    sandbox::{Record, State},
    spec::Owner,
    syscall,
};

impl Nursery {
    /// Kills all of a sandbox; `Told::Ended` follows. False when it does not run.
    pub(in crate::zygote) fn kill(&mut self, id: &SandboxId) -> bool {
        self.kill_for(id, "killed")
    }

    pub(super) fn kill_for(&mut self, id: &SandboxId, reason: &'static str) -> bool {
        let Some(live) = self.live.get_mut(id) else { return false };
        live.killed.get_or_insert(reason);
        // With pid 1 its whole pid namespace dies; frozen processes of cgroup v1 after a thaw only.
        let _ = pidfd_send_signal(&live.pidfd, Signal::KILL);
        let _ = self.brake.freeze(id, &live.pidfd, false);
        live.thaw_at = None;
        true
    }

    /// Writes down that a sandbox that was never started never will be.
    pub(in crate::zygote) fn forgo(&self, id: &SandboxId) {
        if self.home.sandbox(id).exists() && matches!(State::read(&self.home, id), Ok(None)) {
            self.write_state(id, &State::ended("never started"));
        }
    }

    /// Pid 1 is dead: takes note why and clears up behind it.
    pub(in crate::zygote) fn ended(&mut self, id: &SandboxId) -> Option<Told> {
        let live = self.live.get_mut(id)?;
        if live.ended.is_none() {
            let status = waitid(WaitId::PidFd(live.pidfd.as_fd()), WaitIdOptions::EXITED);
            let how = match status {
                Ok(Some(status)) => how(status.exit_status(), status.terminating_signal()),
                // Not our child but an earlier zygote's.
                _ => syscall::exit_status_of(&live.pidfd).map_or("lost".to_owned(), |status| {
                    let signal = status & 0x7f;
                    how(
                        (signal == 0).then_some(status >> 8 & 0xff),
                        (signal != 0).then_some(signal),
                    )
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
    pub(super) fn close(&mut self, id: &SandboxId, reason: String) {
        let _ = fs::remove_dir_all(self.home.run_of(id));
        self.write_state(id, &State::ended(reason));
        if let Some(live) = self.live.remove(id) {
            live.claim.release();
            if let Some(mounts) = live.mounts {
                self.holds.bury(mounts);
            }
        }
    }

    pub(super) fn write_state(&self, id: &SandboxId, state: &State) {
        // A full disk must not keep a sandbox from ending; the next zygote sees that it is dead.
        if let Err(error) = state.write(&self.home, id) {
            eprintln!("cannot write down the end of {id}: {error}");
        }
    }

    /// The process a sandbox lived for is gone.
    pub(in crate::zygote) fn owner_ended(&mut self, id: &SandboxId) {
        self.owners.remove(id);
        if !self.kill(id) {
            self.discard(id);
        }
    }

    /// Throws the disk of a sandbox away whose owner is gone.
    pub(in crate::zygote) fn discard(&self, id: &SandboxId) {
        if let Err(error) = self.home.discard(&self.home.sandbox(id)) {
            eprintln!("cannot discard {id}: {error}");
        }
    }

    /// The reason a sandbox ended for, when it has.
    pub(in crate::zygote) fn end_of(&self, id: &SandboxId) -> Option<String> {
        match State::read(&self.home, id) {
            Ok(Some(State::Ended { reason, .. })) => Some(reason),
            _ => None,
        }
    }

    /// Whether a sandbox of this owner's is to be thrown away once dead.
    pub(in crate::zygote) fn is_ownerless(&self, id: &SandboxId) -> bool {
        !self.owners.contains_key(id)
            && matches!(
                Record::read(&self.home, id),
                Ok(Some(Record { owner: Owner::Process(_), .. }))
            )
    }
}

fn how(code: Option<i32>, signal: Option<i32>) -> String {
    match (code, signal) {
        (Some(code), _) => format!("exited {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => "lost".to_owned(),
    }
}
