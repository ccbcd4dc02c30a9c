//! Stops everything inside, lets it go on or kills it, when the engine asks pid 1 for it: only where there
//! is no cgroup that could be frozen or killed from outside.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::atomic::{AtomicBool, Ordering},
};

use harvest_proto::launch::STILL_SIGNAL;
use rustix::process::{Signal, getpid, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};

use crate::log;

/// Whether everything is to stand still at the moment.
static STILL: AtomicBool = AtomicBool::new(false);

/// To be called by who has just started a process: when the others stand still, it has to as well.
pub(crate) fn include_newcomers() {
    if STILL.load(Ordering::Relaxed) {
        tell_everyone(Signal::STOP);
    }
}

/// Obeys for ever what the engine writes into this file.
pub(crate) async fn run(orders: OwnedFd) {
    let orders = File::from(orders);
    let Ok(mut called) = signal(SignalKind::from_raw(STILL_SIGNAL)) else { return };
    // Once at the beginning: an order may have come before anyone listened.
    loop {
        if let Err(error) = obey(&orders) {
            log::line(format_args!("cannot read the order to stand still: {error}"));
        }
        if called.recv().await.is_none() {
            return;
        }
    }
}

fn obey(orders: &File) -> io::Result<()> {
    let number = |at: u64| {
        let mut bytes = [0; 8];
        orders.read_exact_at(&mut bytes, at).map(|()| u64::from_ne_bytes(bytes))
    };
    // Until nothing new has come meanwhile: the engine relies on what was answered last.
    loop {
        let order = number(0)?;
        if order == number(8)? {
            return Ok(());
        }
        match order % 4 {
            1 => {
                STILL.store(true, Ordering::Relaxed);
                tell_everyone(Signal::STOP);
            }
            // Who comes after the dead stands still as long as they would have.
            2 => tell_everyone(Signal::KILL),
            _ => {
                STILL.store(false, Ordering::Relaxed);
                tell_everyone(Signal::CONT);
            }
        }
        orders.write_all_at(&order.to_ne_bytes(), 8)?;
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
