//! Progress reports of a build, import or pull.

use std::time::Instant;

/// A progress report of a build, import or pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Another process makes this image; its result is waited for.
    Waiting {
        /// The image's name.
        image: String,
    },
    /// A step has started.
    StepStarted {
        /// The step's number, from 1; the base is step 1.
        index: usize,
        /// The number of steps.
        total: usize,
        /// A description of the step.
        what: String,
    },
    /// A step's layer is in the cache.
    StepCached {
        /// The step's number, from 1.
        index: usize,
        /// The number of steps.
        total: usize,
        /// A description of the step.
        what: String,
    },
    /// Bytes of an archive or layer have been read.
    Bytes {
        /// Bytes read so far.
        done: u64,
        /// All bytes, where that is known.
        total: Option<u64>,
    },
    /// A step wrote a line of output.
    Output {
        /// The line, without secrets of the host.
        line: String,
    },
    /// A step is done.
    StepDone {
        /// The step's number, from 1.
        index: usize,
        /// How long the step took.
        millis: u64,
    },
}

/// Milliseconds since a step started.
pub(crate) fn elapsed_millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
