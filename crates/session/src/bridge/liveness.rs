//! Whether the supervisor at the other end of a bridge is alive. Heartbeats prove that its frames
//! arrive here, answered pings that ours arrive there. Pure: time comes in.

use std::time::Duration;

use tokio::time::Instant;

use crate::timeouts::LivenessTimeouts;

#[derive(Debug)]
pub(super) struct LivenessMonitor {
    timeouts: LivenessTimeouts,
    /// When the last whole frame arrived. Bytes alone prove nothing: a wrong length swallows
    /// heartbeats.
    last_frame: Instant,
    ping: PingState,
}

#[derive(Debug)]
enum PingState {
    DueAt(Instant),
    SentAt(Instant),
}

/// What the owner of a bridge has to do now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Probe {
    Wait,
    SendPing,
    /// The supervisor counts as dead.
    TimedOut,
}

impl LivenessMonitor {
    pub(super) fn new(timeouts: LivenessTimeouts, now: Instant) -> Self {
        Self { timeouts, last_frame: now, ping: PingState::DueAt(now + timeouts.heartbeat) }
    }

    /// A whole frame arrived.
    pub(super) const fn frame_received(&mut self, now: Instant) {
        self.last_frame = now;
    }

    /// The ping was answered.
    pub(super) fn pong_received(&mut self, now: Instant) {
        self.ping = PingState::DueAt(now + self.timeouts.heartbeat);
    }

    /// The reader could not read for this long, which does not count against the supervisor.
    pub(super) fn exclude(&mut self, time: Duration) {
        self.last_frame += time;
        let (PingState::DueAt(at) | PingState::SentAt(at)) = &mut self.ping;
        *at += time;
    }

    /// When to call [`Self::probe`] next.
    pub(super) fn deadline(&self) -> Instant {
        let ping = match self.ping {
            PingState::DueAt(at) => at,
            PingState::SentAt(at) => at + self.timeouts.silence,
        };
        ping.min(self.last_frame + self.timeouts.silence)
    }

    /// A ping that is due counts as sent.
    pub(super) fn probe(&mut self, now: Instant) -> Probe {
        if now >= self.last_frame + self.timeouts.silence {
            return Probe::TimedOut;
        }
        match self.ping {
            PingState::SentAt(at) if now >= at + self.timeouts.silence => Probe::TimedOut,
            PingState::DueAt(at) if now >= at => {
                self.ping = PingState::SentAt(now);
                Probe::SendPing
            }
            _ => Probe::Wait,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn monitor() -> (LivenessMonitor, Instant) {
        let now = Instant::now();
        let timeouts = LivenessTimeouts { heartbeat: 3 * SECOND, silence: 9 * SECOND };
        (LivenessMonitor::new(timeouts, now), now)
    }

    #[test]
    fn silent_supervisor_times_out_answering_one_does_not() {
        let (mut monitor, now) = monitor();
        assert_eq!(monitor.deadline(), now + 3 * SECOND);
        assert_eq!(monitor.probe(now + 3 * SECOND), Probe::SendPing);
        assert_eq!(monitor.probe(now + 4 * SECOND), Probe::Wait);
        assert_eq!(monitor.deadline(), now + 9 * SECOND);
        assert_eq!(monitor.probe(now + 9 * SECOND), Probe::TimedOut);
        monitor.frame_received(now + 5 * SECOND);
        monitor.pong_received(now + 5 * SECOND);
        assert_eq!(monitor.probe(now + 9 * SECOND), Probe::SendPing);
    }

    #[test]
    fn supervisor_that_never_answers_pings_times_out() {
        let (mut monitor, now) = monitor();
        assert_eq!(monitor.probe(now + 3 * SECOND), Probe::SendPing);
        for second in 4..12 {
            monitor.frame_received(now + second * SECOND);
            assert_eq!(monitor.probe(now + second * SECOND), Probe::Wait);
        }
        assert_eq!(monitor.probe(now + 12 * SECOND), Probe::TimedOut);
    }

    #[test]
    fn time_without_reading_is_excluded() {
        let (mut monitor, now) = monitor();
        assert_eq!(monitor.probe(now + 3 * SECOND), Probe::SendPing);
        monitor.exclude(100 * SECOND);
        assert_eq!(monitor.probe(now + 103 * SECOND), Probe::Wait);
        assert_eq!(monitor.probe(now + 109 * SECOND), Probe::TimedOut);
    }
}
