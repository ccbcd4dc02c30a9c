//! Freezes, thaws or kills all processes on the engine's orders, where there is no cgroup that the
//! engine could freeze or kill from outside.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::atomic::{AtomicBool, Ordering},
};

use harvest_proto::launch::FREEZE_SIGNAL;
use rustix::process::{Signal, getpid, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};

use crate::log;

static FROZEN: AtomicBool = AtomicBool::new(false);

/// Must be called after every start of a process: while frozen, the new one is frozen as well.
pub(crate) fn freeze_new_processes() {
    if FROZEN.load(Ordering::Relaxed) {
        signal_all(Signal::STOP);
    }
}

/// Executes the orders that the engine writes into this file.
pub(crate) async fn run(orders: OwnedFd) {
    let orders = File::from(orders);
    let Ok(mut signals) = signal(SignalKind::from_raw(FREEZE_SIGNAL)) else { return };
    // Check once at the start: an order may have come before the signal handler was installed.
    loop {
        if let Err(error) = execute_orders(&orders) {
            log::line(format_args!("cannot read the freeze order: {error}"));
        }
        if signals.recv().await.is_none() {
            return;
        }
    }
}

fn execute_orders(orders: &File) -> io::Result<()> {
    let number = |at: u64| {
        let mut bytes = [0; 8];
        orders.read_exact_at(&mut bytes, at).map(|()| u64::from_ne_bytes(bytes))
    };
    // Repeat until no newer order has arrived: the engine relies on the last acknowledgement.
    loop {
        let order = number(0)?;
        if order == number(8)? {
            return Ok(());
        }
        match order % 4 {
            1 => {
                FROZEN.store(true, Ordering::Relaxed);
                signal_all(Signal::STOP);
            }
            // Processes started after the kill stay frozen as the killed ones were.
            2 => {
                signal_all(Signal::KILL);
            }
            _ => {
                FROZEN.store(false, Ordering::Relaxed);
                signal_all(Signal::CONT);
            }
        }
        orders.write_all_at(&order.to_ne_bytes(), 8)?;
    }
}

/// Signals every other process; false when there is none. Only as pid 1: anywhere else the signal
/// would reach every process of the machine.
pub(crate) fn signal_all(signal: Signal) -> bool {
    let own = getpid();
    // To the kernel, pid -1 means every process but the caller, atomically: none can fork in
    // between and be missed.
    own.is_init() && kill_process_group(own, signal).is_ok()
}
