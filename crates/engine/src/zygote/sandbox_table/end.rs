//! Kills sandboxes, records why they ended, and cleans up after them.

use std::{fs, os::fd::AsFd};

use harvest_proto::SandboxId;
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use super::{Event, SandboxTable};
use crate::{
    sandbox_record::{Record, RecordedState},
    spec::Owner,
    syscall,
};

impl SandboxTable {
    /// Kills all of a sandbox; `Event::Ended` follows. False when it is not running.
    pub(in crate::zygote) fn kill(&mut self, id: &SandboxId) -> bool {
        self.kill_for(id, "killed")
    }

    pub(super) fn kill_for(&mut self, id: &SandboxId, reason: &'static str) -> bool {
        let Some(live) = self.live.get_mut(id) else { return false };
        live.killed.get_or_insert(reason);
        // Killing pid 1 kills its pid namespace; frozen processes on cgroup v1 die only after a
        // thaw.
        let _ = pidfd_send_signal(&live.pidfd, Signal::KILL);
        let _ = self.cgroups.freeze(id, &live.cgroup, &live.pidfd, false);
        live.thaw_at = None;
        true
    }

    /// Records that a sandbox which was never started never will be.
    pub(in crate::zygote) fn mark_never_started(&self, id: &SandboxId) {
        if self.home.sandbox(id).exists() && matches!(RecordedState::read(&self.home, id), Ok(None))
        {
            self.write_state(id, &RecordedState::ended("never started"));
        }
    }

    /// Pid 1 is dead: determines the reason, then clears the cgroups; returns the event once they
    /// are empty.
    pub(in crate::zygote) fn ended(&mut self, id: &SandboxId) -> Option<Event> {
        let live = self.live.get_mut(id)?;
        if live.ended.is_none() {
            let status = waitid(WaitId::PidFd(live.pidfd.as_fd()), WaitIdOptions::EXITED);
            let exit = match status {
                Ok(Some(status)) => {
                    describe_exit(status.exit_status(), status.terminating_signal())
                }
                // A child of an earlier zygote.
                _ => syscall::exit_status_of(&live.pidfd).map_or("lost".to_owned(), |status| {
                    let signal = status & 0x7f;
                    describe_exit(
                        (signal == 0).then_some(status >> 8 & 0xff),
                        (signal != 0).then_some(signal),
                    )
                }),
            };
            let oom =
                self.cgroups.hierarchy.oom_kills(&self.cgroups.group, &live.cgroup, "supervisor")
                    > 0;
            let reason = match &live.failure {
                Some(failure) => failure.clone(),
                None => match live.killed {
                    Some(reason) => reason.to_owned(),
                    None if oom => "oom".to_owned(),
                    None => exit,
                },
            };
            live.ended = Some(reason);
            let usage = self.cgroups.hierarchy.usage(&self.cgroups.group, &live.cgroup);
            live.cpu_micros = usage.map(|usage| usage.cpu_micros);
        }
        if !self.cgroups.clear(&live.cgroup) {
            return None;
        }
        let reason = live.ended.take()?;
        self.close(id, reason.clone());
        Some(Event::Ended { id: id.clone(), reason })
    }

    /// Records the end of a sandbox whose processes are all dead and releases what it held.
    pub(super) fn close(&mut self, id: &SandboxId, reason: String) {
        let _ = fs::remove_dir_all(self.home.sandbox_run(id));
        let cpu_micros = self.live.get(id).and_then(|live| live.cpu_micros);
        let at = std::time::SystemTime::now().into();
        self.write_state(id, &RecordedState::Ended { reason, at, cpu_micros });
        if let Some(live) = self.live.remove(id) {
            live.claim.release();
            if let Some(mounts) = live.mounts {
                let upper = self.home.writable(id).join("upper");
                self.mount_cache.unmount_async(mounts, &upper);
            }
        }
    }

    pub(super) fn write_state(&self, id: &SandboxId, state: &RecordedState) {
        // A full disk must not prevent a sandbox from ending; the next zygote sees that it is dead.
        if let Err(error) = state.write(&self.home, id) {
            eprintln!("cannot record the end of {id}: {error}");
        }
    }

    /// The process that owns a sandbox has exited.
    pub(in crate::zygote) fn owner_ended(&mut self, id: &SandboxId) {
        self.owners.remove(id);
        if !self.kill(id) {
            self.discard(id);
        }
    }

    /// Removes the disk of a sandbox whose owner exited.
    pub(in crate::zygote) fn discard(&self, id: &SandboxId) {
        if let Err(error) = self.home.discard(&self.home.sandbox(id)) {
            eprintln!("cannot remove {id}: {error}");
        }
    }

    /// Why a sandbox ended; `None` while it runs.
    pub(in crate::zygote) fn end_reason(&self, id: &SandboxId) -> Option<String> {
        match RecordedState::read(&self.home, id) {
            Ok(Some(RecordedState::Ended { reason, .. })) => Some(reason),
            _ => None,
        }
    }

    /// Whether a dead sandbox is to be removed because its owner exited.
    pub(in crate::zygote) fn is_orphaned(&self, id: &SandboxId) -> bool {
        !self.owners.contains_key(id)
            && matches!(
                Record::read(&self.home, id),
                Ok(Some(Record { owner: Owner::Process(_), .. }))
            )
    }
}

fn describe_exit(code: Option<i32>, signal: Option<i32>) -> String {
    match (code, signal) {
        (Some(code), _) => format!("exited {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => "lost".to_owned(),
    }
}
