//! Stops everything inside and lets it go on, when the engine asks pid 1 for it: only where there is no
//! cgroup that could be frozen from outside.

use harvest_proto::launch::{GO_ON_SIGNAL, STAND_STILL_SIGNAL};
use rustix::process::{Signal, getpid, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};

/// Obeys for ever.
pub(crate) async fn run() {
    let heard = |number| signal(SignalKind::from_raw(number));
    let (Ok(mut stop), Ok(mut go_on)) = (heard(STAND_STILL_SIGNAL), heard(GO_ON_SIGNAL)) else { return };
    loop {
        let signal = tokio::select! {
            _ = stop.recv() => Signal::STOP,
            _ = go_on.recv() => Signal::CONT,
        };
        tell_everyone(signal);
    }
}

// Only pid 1 may say "everyone": anywhere else that would be the machine it runs on.
fn tell_everyone(signal: Signal) {
    let own = getpid();
    if own.is_init() {
        // To the kernel a negative pid 1 means every process but ourselves, all at once: none can be
        // born in between and be missed.
        let _there_is_none = kill_process_group(own, signal);
    }
}
