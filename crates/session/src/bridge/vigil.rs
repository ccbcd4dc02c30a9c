//! Whether the other side of a bridge lives: it says so now and then, and it answers when it is asked. The
//! first proves only that what it says arrives, the second that what we say does. Pure: time comes in.

use std::time::Duration;

use tokio::time::Instant;

use super::Pulse;

/// What an owner knows of the other side.
#[derive(Debug)]
pub(super) struct Vigil {
    pulse: Pulse,
    /// When the last whole frame came. Bytes alone prove nothing: a length that lies swallows heartbeats.
    heard: Instant,
    question: Question,
}

#[derive(Debug)]
enum Question {
    /// To be asked then.
    Next(Instant),
    /// Asked then, and not answered yet.
    Open(Instant),
}

/// What is to be done now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Duty {
    Wait,
    Ask,
    /// The other side is taken for dead.
    GiveUp,
}

impl Vigil {
    pub(super) fn new(pulse: Pulse, now: Instant) -> Self {
        Self { pulse, heard: now, question: Question::Next(now + pulse.heartbeat) }
    }

    /// A whole frame came.
    pub(super) const fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// The question was answered.
    pub(super) fn answered(&mut self, now: Instant) {
        self.question = Question::Next(now + self.pulse.heartbeat);
    }

    /// We could not listen for so long; nobody else is to blame for that.
    pub(super) fn away(&mut self, time: Duration) {
        self.heard += time;
        let (Question::Next(at) | Question::Open(at)) = &mut self.question;
        *at += time;
    }

    /// When to look again.
    pub(super) fn due(&self) -> Instant {
        let question = match self.question {
            Question::Next(at) => at,
            Question::Open(since) => since + self.pulse.silence,
        };
        question.min(self.heard + self.pulse.silence)
    }

    /// Looks: a question that is to be asked counts as asked.
    pub(super) fn look(&mut self, now: Instant) -> Duty {
        if now >= self.heard + self.pulse.silence {
            return Duty::GiveUp;
        }
        match self.question {
            Question::Open(since) if now >= since + self.pulse.silence => Duty::GiveUp,
            Question::Next(at) if now >= at => {
                self.question = Question::Open(now);
                Duty::Ask
            }
            _ => Duty::Wait,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn vigil() -> (Vigil, Instant) {
        let now = Instant::now();
        (Vigil::new(Pulse { heartbeat: 3 * SECOND, silence: 9 * SECOND }, now), now)
    }

    #[test]
    fn who_says_nothing_is_given_up_and_who_answers_is_not() {
        let (mut vigil, now) = vigil();
        assert_eq!(vigil.due(), now + 3 * SECOND);
        assert_eq!(vigil.look(now + 3 * SECOND), Duty::Ask);
        assert_eq!(vigil.look(now + 4 * SECOND), Duty::Wait);
        assert_eq!(vigil.due(), now + 9 * SECOND);
        assert_eq!(vigil.look(now + 9 * SECOND), Duty::GiveUp);
        vigil.heard(now + 5 * SECOND);
        vigil.answered(now + 5 * SECOND);
        assert_eq!(vigil.look(now + 9 * SECOND), Duty::Ask);
    }

    #[test]
    fn who_talks_and_does_not_answer_is_given_up() {
        let (mut vigil, now) = vigil();
        assert_eq!(vigil.look(now + 3 * SECOND), Duty::Ask);
        for second in 4..12 {
            vigil.heard(now + second * SECOND);
            assert_eq!(vigil.look(now + second * SECOND), Duty::Wait);
        }
        assert_eq!(vigil.look(now + 12 * SECOND), Duty::GiveUp);
    }

    #[test]
    fn nobody_is_blamed_for_the_time_we_could_not_listen() {
        let (mut vigil, now) = vigil();
        assert_eq!(vigil.look(now + 3 * SECOND), Duty::Ask);
        vigil.away(100 * SECOND);
        assert_eq!(vigil.look(now + 103 * SECOND), Duty::Wait);
        assert_eq!(vigil.look(now + 109 * SECOND), Duty::GiveUp);
    }
}
