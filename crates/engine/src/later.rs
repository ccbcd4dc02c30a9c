//! Work that is done in the background by one thread, however often it is asked for meanwhile.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    thread,
};

const IDLE: u8 = 0;
const AT_WORK: u8 = 1;
/// Somebody asked since it was begun.
const ASKED: u8 = 2;

/// Whether the work is being done. Clones are of the same work.
#[derive(Debug, Clone, Default)]
pub(crate) struct Later(Arc<AtomicU8>);

impl Later {
    /// Does `work` soon and waits for nothing: once for everybody who asks before it begins, and once more for
    /// those who ask while it is done.
    pub(crate) fn ask(&self, name: &str, work: impl Fn() + Send + 'static) {
        if self.0.swap(ASKED, Ordering::SeqCst) != IDLE {
            return;
        }
        let state = Arc::clone(&self.0);
        let at_work = move || {
            loop {
                // What was there before they asked is seen by what follows.
                state.store(AT_WORK, Ordering::SeqCst);
                work();
                if state.compare_exchange(AT_WORK, IDLE, Ordering::SeqCst, Ordering::SeqCst).is_ok()
                {
                    return;
                }
            }
        };
        if thread::Builder::new().name(name.to_owned()).spawn(at_work).is_err() {
            self.0.store(IDLE, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn however_often_it_is_asked_for_it_is_done_once_more() {
        let (later, (begun, begins), (go, goes)) =
            (Later::default(), mpsc::channel(), mpsc::channel::<()>());
        let goes = std::sync::Mutex::new(goes);
        let work = Arc::new(move || {
            begun.send(()).unwrap();
            goes.lock().unwrap().recv().unwrap();
        });
        let ask = || {
            let work = Arc::clone(&work);
            later.ask("test", move || work());
        };
        ask();
        begins.recv().unwrap();
        (0..50).for_each(|_| ask());
        go.send(()).unwrap();
        begins.recv().unwrap();
        assert!(begins.try_recv().is_err(), "nobody else is at it");
        go.send(()).unwrap();
        while later.0.load(Ordering::SeqCst) != IDLE {
            thread::yield_now();
        }
        assert!(begins.try_recv().is_err(), "and it is over");
        ask();
        begins.recv().unwrap();
        go.send(()).unwrap();
    }
}
