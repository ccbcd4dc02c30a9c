//! Background jobs: work that a server repeats for as long as it runs. A job runs once when it is
//! spawned, then after each period or when it is woken; a failed run is retried with backoff.
//! Shutdown cancels a job, in the middle of a run too, and waits until it has ended.

use std::{error::Error, sync::Arc, time::Duration};

use tokio::sync::Notify;

use crate::{error_chain::error_chain, tasks::Tasks};

// Most failures are brief; a volume in use or a full disk takes longer.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(300);

/// Why a run failed; logged by the job.
pub(crate) type JobError = Box<dyn Error + Send + Sync>;

pub(crate) struct Job {
    /// Names the job in the log.
    pub(crate) name: &'static str,
    /// The time from the end of a run to the next one; `None` when only `wake` starts it.
    pub(crate) period: Option<Duration>,
    /// Starts the next run at once. A wake-up during a run starts another one after it.
    pub(crate) wake: Arc<Notify>,
}

impl Job {
    /// Starts the job as one of the server's background tasks.
    pub(crate) fn spawn<R, F>(self, tasks: &Tasks, mut run: R)
    where
        R: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<(), JobError>> + Send,
    {
        tasks.spawn(async move {
            let mut retry = FIRST_RETRY;
            loop {
                let result = run().await;
                if let Err(error) = &result {
                    let (job, error) = (self.name, error_chain(&**error));
                    tracing::warn!(job, error, "a background job failed; retrying");
                }
                let wait = next_wait(self.period, result.is_ok(), &mut retry);
                let _ = tokio::time::timeout(wait, self.wake.notified()).await;
            }
        });
    }
}

/// How long a job waits for its next run, unless it is woken. `retry` is the wait after the next
/// failure.
fn next_wait(period: Option<Duration>, succeeded: bool, retry: &mut Duration) -> Duration {
    if succeeded {
        *retry = FIRST_RETRY;
        return period.unwrap_or(Duration::MAX);
    }
    let wait = *retry;
    *retry = (wait * 2).min(MAX_RETRY);
    wait
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::sync::mpsc;

    use super::*;

    /// A job that reports the start of each run. Its runs end with `results`; a further one does
    /// not end.
    fn spawn(
        tasks: &Tasks,
        period: Option<Duration>,
        results: Vec<Result<(), JobError>>,
    ) -> (mpsc::UnboundedReceiver<()>, Arc<Notify>) {
        let (started, runs) = mpsc::unbounded_channel();
        let wake = Arc::new(Notify::new());
        let mut results = results.into_iter();
        Job { name: "test", period, wake: Arc::clone(&wake) }.spawn(tasks, move || {
            let result = results.next();
            let _ = started.send(());
            async {
                match result {
                    Some(result) => result,
                    None => std::future::pending().await,
                }
            }
        });
        (runs, wake)
    }

    #[tokio::test]
    async fn job_runs_at_once_and_after_each_period() {
        let tasks = Tasks::default();
        let (mut runs, _wake) = spawn(&tasks, Some(Duration::ZERO), vec![Ok(()), Ok(())]);
        for _ in 0..3 {
            runs.recv().await.expect("the job runs");
        }
    }

    #[tokio::test]
    async fn wake_up_starts_next_run() {
        let tasks = Tasks::default();
        let (mut runs, wake) = spawn(&tasks, None, vec![Ok(())]);
        runs.recv().await.expect("the job runs at once");
        tokio::task::yield_now().await;
        assert!(runs.try_recv().is_err(), "without a period it waits");
        wake.notify_one();
        runs.recv().await.expect("the job runs again");
    }

    #[tokio::test]
    async fn failed_run_does_not_end_job() {
        let tasks = Tasks::default();
        let (mut runs, wake) = spawn(&tasks, None, vec![Err("the disk is full".into())]);
        runs.recv().await.expect("the job runs at once");
        wake.notify_one();
        runs.recv().await.expect("the job runs again");
    }

    #[test]
    fn failed_runs_are_retried_with_backoff() {
        let (minute, mut retry) = (Duration::from_secs(60), FIRST_RETRY);
        let mut wait = |succeeded| next_wait(Some(minute), succeeded, &mut retry);
        assert_eq!([wait(false), wait(false)], [FIRST_RETRY, 2 * FIRST_RETRY]);
        assert_eq!([wait(true), wait(false)], [minute, FIRST_RETRY]);
        let last = (0..20).map(|_| wait(false)).last();
        assert_eq!(last, Some(MAX_RETRY));
    }

    #[tokio::test]
    async fn shutdown_cancels_and_awaits_running_job() {
        struct SetOnDrop(Arc<AtomicBool>);
        impl Drop for SetOnDrop {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let (tasks, ended) = (Tasks::default(), Arc::new(AtomicBool::new(false)));
        let (started, mut runs) = mpsc::unbounded_channel();
        let job = Job { name: "test", period: None, wake: Arc::new(Notify::new()) };
        let flag = Arc::clone(&ended);
        job.spawn(&tasks, move || {
            let (started, on_drop) = (started.clone(), SetOnDrop(Arc::clone(&flag)));
            async move {
                let _on_drop = on_drop;
                let _ = started.send(());
                std::future::pending().await
            }
        });
        runs.recv().await.expect("the job runs at once");
        tasks.close().await;
        assert!(ended.load(Ordering::SeqCst), "the run has ended");
    }
}
