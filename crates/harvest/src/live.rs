//! The live last line of a terminal: what is going on, with a spinner and a clock.
//!
//! A terminal has one last line, so it is one value per process. Everything else is printed through
//! [`suspend`], which takes the line off the screen meanwhile.

use std::{
    fmt::Write,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::printer::human_millis;

const TICK: Duration = Duration::from_millis(100);

/// The frames of the spinner; the last one is never drawn.
const FRAMES: &str = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏ ";

static LINE: Mutex<Option<ProgressBar>> = Mutex::new(None);

fn line() -> MutexGuard<'static, Option<ProgressBar>> {
    // A panic while the lock is held leaves a line that can still be replaced.
    LINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Replaces the line. `elapsed` is the start value of its clock; without it there is none. The text
/// must be sanitized.
pub(crate) fn show(text: &str, elapsed: Option<Duration>) {
    let mut line = line();
    let is_new = line.is_none();
    let bar = line
        .get_or_insert_with(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()));
    let template = if elapsed.is_some() { "{spinner} {msg}  {clock}" } else { "{spinner} {msg}" };
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    bar.set_style(style.tick_chars(FRAMES).with_key("clock", write_clock));
    bar.set_message(text.to_owned());
    // The clock of another machine may be far ahead; `set_elapsed` panics before this one's boot.
    let elapsed = elapsed.filter(|elapsed| Instant::now().checked_sub(*elapsed).is_some());
    bar.set_elapsed(elapsed.unwrap_or_default());
    if is_new {
        bar.tick();
        bar.enable_steady_tick(TICK);
    }
}

/// Removes the line.
pub(crate) fn clear() {
    if let Some(bar) = line().take() {
        bar.finish_and_clear();
    }
}

/// Writes to the terminal while the line is off the screen.
pub(crate) fn suspend<T>(write: impl FnOnce() -> T) -> T {
    match &*line() {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

fn write_clock(state: &ProgressState, out: &mut dyn Write) {
    // There is nowhere to report a failed write.
    let _ = out.write_str(&clock(state.elapsed()));
}

/// `12s`, then as [`human_millis`].
fn clock(elapsed: Duration) -> String {
    match elapsed.as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds => human_millis(seconds.saturating_mul(1000)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_counts_whole_seconds() {
        let shown = [0, 12, 126].map(|seconds| clock(Duration::from_secs(seconds)));
        assert_eq!(shown, ["0s", "12s", "2m06s"]);
    }
}
