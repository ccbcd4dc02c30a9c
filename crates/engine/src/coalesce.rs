//! Coalesces requests for the same background job: one thread runs it, however many requests arrive
//! in the meantime.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    thread,
};

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
/// Requested since the current run began (or before the first run).
const REQUESTED: u8 = 2;

/// The state of a coalesced job. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Coalesced(Arc<AtomicU8>);

impl Coalesced {
    /// Runs `job` on a background thread and returns at once. Requests that arrive before a run
    /// begins share that run; requests that arrive during a run share one more.
    pub(crate) fn request(&self, name: &str, job: impl Fn() + Send + 'static) {
        if self.0.swap(REQUESTED, Ordering::SeqCst) != IDLE {
            return;
        }
        let state = Arc::clone(&self.0);
        let run = move || {
            loop {
                // Stored before the job runs, so a later request leads to another run.
                state.store(RUNNING, Ordering::SeqCst);
                job();
                if state.compare_exchange(RUNNING, IDLE, Ordering::SeqCst, Ordering::SeqCst).is_ok()
                {
                    return;
                }
            }
        };
        if thread::Builder::new().name(name.to_owned()).spawn(run).is_err() {
            self.0.store(IDLE, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn requests_during_a_run_share_one_more_run() {
        let (coalesced, (started, starts), (finish, finishes)) =
            (Coalesced::default(), mpsc::channel(), mpsc::channel::<()>());
        let finishes = std::sync::Mutex::new(finishes);
        let job = Arc::new(move || {
            started.send(()).unwrap();
            finishes.lock().unwrap().recv().unwrap();
        });
        let request = || {
            let job = Arc::clone(&job);
            coalesced.request("test", move || job());
        };
        request();
        starts.recv().unwrap();
        (0..50).for_each(|_| request());
        finish.send(()).unwrap();
        starts.recv().unwrap();
        assert!(starts.try_recv().is_err(), "only one run at a time");
        finish.send(()).unwrap();
        while coalesced.0.load(Ordering::SeqCst) != IDLE {
            thread::yield_now();
        }
        assert!(starts.try_recv().is_err(), "no third run");
        request();
        starts.recv().unwrap();
        finish.send(()).unwrap();
    }
}
