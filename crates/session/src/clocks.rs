//! How long things may take. Each clock measures one thing; the unit is in the name.

use std::time::Duration;

use crate::bridge::Pulse;

/// The clocks of design §7 that a session looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clocks {
    /// How often a supervisor says that it is there.
    pub heartbeat: Duration,
    /// An idle session's sandbox stands still after this; `None` when it never does.
    pub idle_freeze: Option<Duration>,
    /// An idle session is paused after this.
    pub idle_pause: Duration,
    /// A bridge that has been silent for this long is dialled anew; a sandbox that could not be
    /// reached for this long is taken for lost.
    pub stale: Duration,
    /// From a sandbox's start to `ready`.
    pub boot: Duration,
    /// A turn that runs longer is stopped. Two hours: what the ancestors allow.
    pub turn: Duration,
    /// A stop that has not been confirmed after this kills the sandbox.
    pub stop: Duration,
    /// A sandbox older than this is saved when it is idle, and the session goes on in a new one.
    pub lifetime: Duration,
    /// A save that takes longer has an unknown outcome. Five minutes: what the ancestors allow.
    pub save: Duration,
    /// A command that runs longer is killed, unless it asks for another limit.
    pub exec: Duration,
    /// A repository build.
    pub build: Duration,
    /// The declared check, when it warms a build up.
    pub warm: Duration,
    /// The declared check, when it makes evidence.
    pub check: Duration,
    /// Failed starts count for this long …
    pub breaker: Duration,
    /// … and after so many the session waits for a person.
    pub breaker_failures: usize,
}

impl Clocks {
    pub(crate) const fn pulse(&self) -> Pulse {
        Pulse { heartbeat: self.heartbeat, silence: self.stale }
    }
}

impl Default for Clocks {
    fn default() -> Self {
        let minutes = |count: u64| Duration::from_secs(count * 60);
        Self {
            heartbeat: Duration::from_secs(30),
            idle_freeze: Some(minutes(2)),
            idle_pause: minutes(10),
            stale: Duration::from_secs(90),
            boot: minutes(30),
            turn: minutes(120),
            stop: minutes(1),
            lifetime: minutes(24 * 60),
            save: minutes(5),
            exec: minutes(30),
            build: minutes(30),
            warm: minutes(5),
            check: minutes(30),
            breaker: minutes(5),
            breaker_failures: 3,
        }
    }
}
