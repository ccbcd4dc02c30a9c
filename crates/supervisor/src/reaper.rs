//! Pid 1's duty: reaps every child and every orphan that ends up below it. Whoever needs to know
//! how a command ended hears it from the command's launcher.

use rustix::process::WaitOptions;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Reaps for ever.
pub(crate) async fn run() {
    let Ok(mut ended): Result<Signal, _> = signal(SignalKind::child()) else { return };
    loop {
        reap_all();
        if ended.recv().await.is_none() {
            return;
        }
    }
}

/// Reaps what has ended; true when no child at all is left.
pub(crate) fn reap_all() -> bool {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) => return false,
            Err(_no_child) => return true,
        }
    }
}
