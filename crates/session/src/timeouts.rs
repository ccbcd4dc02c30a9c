//! The timeouts of sessions. Each measures one thing.

use std::time::Duration;

// A freeze ends by itself after this. Long enough that a busy server can renew hundreds, short
// enough that the sandboxes of a dead server thaw soon.
pub(crate) const FREEZE_LEASE: Duration = Duration::from_secs(60);
pub(crate) const FREEZE_RENEWAL: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeouts {
    /// The interval of a supervisor's heartbeats.
    pub heartbeat: Duration,
    /// An idle session's sandbox is frozen after this; `None` for never.
    pub idle_freeze: Option<Duration>,
    /// An idle session is paused after this.
    pub idle_pause: Duration,
    /// A bridge that is silent for this long is redialled; a sandbox that is unreachable for this
    /// long counts as lost.
    pub stale: Duration,
    /// From a sandbox's start to `ready`.
    pub boot: Duration,
    /// A turn that runs longer is stopped.
    pub turn: Duration,
    /// A turn ends when neither its agent nor its model has written anything for this long.
    pub silence: Duration,
    /// A stop that is not confirmed after this kills the sandbox.
    pub stop: Duration,
    /// A sandbox older than this is saved when it is idle, and the session continues in a new one.
    pub lifetime: Duration,
    /// A save that takes longer has an unknown outcome.
    pub save: Duration,
    /// A command that runs longer is killed, unless its request has a timeout of its own.
    pub exec: Duration,
    /// A repository build.
    pub build: Duration,
    /// The repository's check or tests, when they warm up a build.
    pub warm: Duration,
    /// A run of the schedule; what it started goes on.
    pub schedule_run: Duration,
    /// The repository's check of a pushed commit.
    pub check: Duration,
    /// The window of the circuit breaker: failed starts count for this long.
    pub breaker: Duration,
    /// After this many failed starts the session waits for `resume`.
    pub breaker_failures: usize,
}

impl Timeouts {
    pub(crate) const fn liveness(&self) -> LivenessTimeouts {
        LivenessTimeouts { heartbeat: self.heartbeat, silence: self.stale }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        let minutes = |count: u64| Duration::from_secs(count * 60);
        Self {
            heartbeat: Duration::from_secs(30),
            idle_freeze: Some(minutes(2)),
            idle_pause: minutes(10),
            stale: Duration::from_secs(90),
            boot: minutes(30),
            turn: minutes(120),
            silence: minutes(10),
            stop: minutes(1),
            lifetime: minutes(24 * 60),
            save: minutes(5),
            exec: minutes(30),
            build: minutes(30),
            warm: minutes(5),
            schedule_run: minutes(10),
            check: minutes(30),
            breaker: minutes(5),
            breaker_failures: 3,
        }
    }
}

/// A duration in whole milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// When an owner takes its connection for dead.
#[derive(Debug, Clone, Copy)]
pub struct LivenessTimeouts {
    /// The interval of heartbeats and pings.
    pub heartbeat: Duration,
    /// The longest time without a frame, or without an answer to a ping.
    pub silence: Duration,
}
