//! Reaps every child and orphan of pid 1. Exit statuses of commands come from their launchers.

use rustix::process::WaitOptions;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(crate) async fn run() {
    let Ok(mut child_exits): Result<Signal, _> = signal(SignalKind::child()) else { return };
    loop {
        reap_all();
        if child_exits.recv().await.is_none() {
            return;
        }
    }
}

/// Reaps all exited children; true when no child is left.
pub(crate) fn reap_all() -> bool {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) => return false,
            Err(_no_child) => return true,
        }
    }
}
