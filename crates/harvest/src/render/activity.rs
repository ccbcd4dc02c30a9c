//! What a followed session is doing at this moment, for the live line. Pure.

use std::collections::BTreeMap;

use harvest_proto::{
    Event, EventBody, RepositoryName, StateReason, Timestamp,
    api::SessionState,
    event::{BootPhase, PhaseStatus},
};

use super::short_commit;

const SLOT: &str = "Waiting for a free slot";
const WORKING: &str = "Working";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Activity {
    pub(crate) what: String,
    /// The start of its clock; without it there is none.
    pub(crate) since: Option<Timestamp>,
}

/// Follows everything but tools: waits, boots, the agent itself and checks.
#[derive(Debug, Default)]
pub(super) struct ActivityTracker {
    current: Option<Activity>,
    /// Whether a question is open.
    asks: bool,
    /// Pushed commits without a check result.
    unchecked: BTreeMap<RepositoryName, String>,
}

enum Change {
    Keep,
    End,
    Begin(String),
    /// The same activity with other words; its clock runs on.
    Rename(String),
}

impl ActivityTracker {
    pub(super) fn event(&mut self, event: &Event) {
        match event.body {
            EventBody::RequestOpened { .. } => self.asks = true,
            EventBody::RequestClosed { .. }
            | EventBody::TurnStarted { .. }
            | EventBody::TurnEnded { .. } => self.asks = false,
            _ => {}
        }
        let change = self.change(&event.body);
        self.current = match (change, self.current.take()) {
            (Change::Keep, current) => current,
            (Change::End, _) => None,
            (Change::Rename(what), Some(current)) => Some(Activity { what, ..current }),
            (Change::Rename(what) | Change::Begin(what), _) => {
                Some(Activity { what, since: Some(event.at) })
            }
        };
    }

    pub(super) fn asks(&self) -> bool {
        self.asks
    }

    pub(super) fn current(&self) -> Option<&Activity> {
        self.current.as_ref()
    }

    fn change(&mut self, body: &EventBody) -> Change {
        match body {
            // A new session has this state before it asks for a slot.
            EventBody::StateChanged {
                state: SessionState::Queued,
                reason: StateReason::Created,
                ..
            } => Change::Begin("Starting".to_owned()),
            EventBody::StateChanged { state: SessionState::Queued, detail: Some(why), .. } => {
                Change::Begin(format!("{SLOT} ({why})"))
            }
            EventBody::StateChanged { state, .. } => self.state_changed(*state),
            EventBody::Waiting { position } if *position > 1 => {
                Change::Rename(format!("{SLOT} (position {position})"))
            }
            EventBody::BootPhase { phase, status: PhaseStatus::Started, .. } => {
                Change::Begin(phase_label(*phase).to_owned())
            }
            EventBody::Retry { attempt, status, .. } => {
                let status = status.map_or_else(String::new, |status| format!(", status {status}"));
                Change::Begin(format!("Waiting for the model (attempt {attempt}{status})"))
            }
            EventBody::ThoughtDelta { .. } => Change::Rename("Thinking".to_owned()),
            EventBody::TurnStarted { .. }
            | EventBody::TextDelta { .. }
            | EventBody::ToolEnded { .. }
            | EventBody::RequestClosed { .. } => Change::Begin(WORKING.to_owned()),
            EventBody::RequestOpened { .. } => Change::End,
            EventBody::TurnEnded { .. } => Change::Begin("Saving a snapshot".to_owned()),
            EventBody::Pushed { repository, commit, .. } => {
                self.unchecked.insert(repository.clone(), commit.clone());
                Change::Keep
            }
            EventBody::Evidence(evidence) => {
                self.unchecked.remove(&evidence.repository);
                self.check()
            }
            // One of these warnings reports a check that could not run.
            EventBody::Warning { .. } if self.is_checking() => {
                self.unchecked.clear();
                Change::End
            }
            _ => Change::Keep,
        }
    }

    fn state_changed(&self, state: SessionState) -> Change {
        match state {
            SessionState::Queued => Change::Begin(SLOT.to_owned()),
            SessionState::Starting => Change::Begin("Starting a sandbox".to_owned()),
            SessionState::Running => Change::Keep,
            SessionState::Idle | SessionState::Paused => self.check(),
            SessionState::NeedsInput | SessionState::Failed | SessionState::Archived => Change::End,
        }
    }

    fn is_checking(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.what.starts_with("Checking"))
    }

    /// After a turn, the pushed commits are checked.
    fn check(&self) -> Change {
        match self.unchecked.values().next() {
            Some(commit) => {
                Change::Begin(format!("Checking {} in a fresh sandbox", short_commit(commit)))
            }
            None => Change::End,
        }
    }
}

/// What a boot phase does, while it runs.
pub(crate) fn phase_label(phase: BootPhase) -> &'static str {
    match phase {
        BootPhase::Starting => "Preparing the sandbox",
        BootPhase::Sync => "Fetching the code",
        BootPhase::Install => "Installing dependencies",
        BootPhase::Setup => "Running the repository's setup",
        BootPhase::Start => "Running .harvest/start.sh",
        BootPhase::Agent => "Starting the agent",
        BootPhase::Ready => "Getting ready",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{PromptId, event::TurnOutcome};

    fn after(bodies: Vec<EventBody>) -> Option<(String, i64)> {
        let mut tracker = ActivityTracker::default();
        for (at, body) in (1..).zip(bodies) {
            let at = Timestamp::from_millis(at);
            tracker.event(&Event { seq: 1, at, turn: None, body });
        }
        let activity = tracker.current()?;
        Some((activity.what.clone(), activity.since?.as_millis()))
    }

    fn state(state: SessionState) -> EventBody {
        EventBody::StateChanged { state, reason: StateReason::Turn, detail: None }
    }

    fn doing(what: &str, since: i64) -> Option<(String, i64)> {
        Some((what.to_owned(), since))
    }

    #[test]
    fn waits_and_boots_are_activities() {
        let created = EventBody::StateChanged {
            state: SessionState::Queued,
            reason: StateReason::Created,
            detail: None,
        };
        assert_eq!(after(vec![created]), doing("Starting", 1));
        let queued = || state(SessionState::Queued);
        assert_eq!(after(vec![queued()]), doing("Waiting for a free slot", 1));
        let full = EventBody::StateChanged {
            state: SessionState::Queued,
            reason: StateReason::LimitSandboxes,
            detail: Some("8 of 8 sandboxes in use".to_owned()),
        };
        let waits = "Waiting for a free slot (8 of 8 sandboxes in use)";
        assert_eq!(after(vec![full]), doing(waits, 1));
        let moved = EventBody::Waiting { position: 3 };
        assert_eq!(after(vec![queued(), moved]), doing("Waiting for a free slot (position 3)", 1));
        let setup = EventBody::BootPhase {
            phase: BootPhase::Setup,
            status: PhaseStatus::Started,
            millis: None,
            tail: None,
            failure: None,
        };
        assert_eq!(
            after(vec![state(SessionState::Starting), setup]),
            doing("Running the repository's setup", 2)
        );
        let retry = EventBody::Retry { attempt: 2, after_millis: 500, status: Some(529) };
        assert_eq!(after(vec![retry]), doing("Waiting for the model (attempt 2, status 529)", 1));
    }

    #[test]
    fn questions_and_idle_sessions_show_nothing() {
        let started = || EventBody::TurnStarted { prompt: PromptId::random(), number: 1 };
        assert_eq!(after(vec![started()]), doing("Working", 1));
        let asked = EventBody::RequestOpened {
            request: "r".into(),
            question: "Which?".into(),
            options: vec![],
        };
        assert_eq!(after(vec![started(), asked]), None);
        let ended = EventBody::TurnEnded {
            prompt: PromptId::random(),
            outcome: TurnOutcome::Completed,
            reason: None,
            error: None,
            millis: 1,
        };
        assert_eq!(after(vec![started(), ended.clone()]), doing("Saving a snapshot", 2));
        assert_eq!(after(vec![started(), ended, state(SessionState::Idle)]), None);
    }

    #[test]
    fn idle_session_shows_check_of_pushed_commit() {
        let pushed = EventBody::Pushed {
            repository: "local/calc".parse().unwrap(),
            branch: "b".parse().unwrap(),
            commit: "1c9e0d4aaaaaaaaa".into(),
        };
        let bodies = vec![pushed, state(SessionState::Idle)];
        assert_eq!(after(bodies.clone()), doing("Checking 1c9e0d4 in a fresh sandbox", 2));
        let failed = EventBody::Warning { message: "cannot check".into() };
        assert_eq!(after([bodies, vec![failed]].concat()), None);
    }
}
