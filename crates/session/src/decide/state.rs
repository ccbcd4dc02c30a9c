//! The state of a session. Each variant has exactly the data that exists in it. All of it but the
//! queue is stored as the session's `driver_state`; anything else is lost in a crash.

use std::{collections::VecDeque, fmt};

use harvest_proto::{
    PromptId, SandboxId, SnapshotId, StateReason, Timestamp, TurnId, TurnReason,
    api::SessionState,
    bridge::BootStart,
    event::{SnapshotKind, TurnOutcome},
};
use serde::{Deserialize, Serialize};

use super::{
    freeze::FreezeState,
    restore::Restoring,
    slot::{Limit, Waiting},
    sync::SyncState,
};
use crate::timeouts::Timeouts;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The number of sandboxes so far; names the current one.
    pub epoch: u64,
    /// The number of turns so far.
    pub turns: u32,
    /// The queued prompts, the next one first. Stored as rows of their own.
    #[serde(skip)]
    pub queue: VecDeque<PromptId>,
    /// The next sandbox starts from it; from the repository's image when absent.
    pub latest_snapshot: Option<SnapshotId>,
    /// Whether that snapshot holds the agent's conversation.
    pub has_conversation: bool,
    pub mode: Mode,
    /// A sandbox is wanted although no prompt is queued.
    pub start_requested: bool,
    pub sandbox: SandboxState,
    pub public: PublicState,
    /// The times of recent failed starts.
    pub start_failures: Vec<Timestamp>,
    /// The user whose limit the session counts against; its author when absent.
    pub user: Option<String>,
    /// The session wants a sandbox and waits for a slot.
    pub waiting: Option<Waiting>,
    /// The slot goes to another session as soon as the sandbox has stopped.
    pub yielding_slot: bool,
    /// The session returns to this snapshot as soon as the sandbox has stopped.
    pub restoring: Option<Restoring>,
    /// When a start or save that failed is retried without a request.
    pub retry_at: Option<Timestamp>,
    /// What the next prompt tells the agent about failed checks.
    pub failed_checks: Option<String>,
    /// The agent reported in the last turn that it cannot go on without a person.
    pub blocked: bool,
    /// The last turn ended because a budget is used up.
    pub over_budget: bool,
    pub syncs: SyncState,
    /// This server shuts down. Not stored: the next server does not.
    #[serde(skip)]
    pub suspending: bool,
}

/// Whether a session starts sandboxes and runs prompts by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Active,
    /// Until a prompt or `resume`.
    Paused {
        reason: StateReason,
    },
    /// Until a prompt or `resume`.
    Failed {
        reason: StateReason,
        detail: String,
    },
    Archived,
}

impl Mode {
    /// The server shut down while the session was active.
    pub(crate) fn is_suspended(&self) -> bool {
        *self == Self::Paused { reason: StateReason::ServerShutdown }
    }
}

/// The sandbox of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    Absent,
    /// The provider is starting it. Its id is stored before it exists.
    Starting {
        sandbox: SandboxId,
        since: Timestamp,
    },
    /// It runs and boots. It holds no work yet.
    Booting {
        sandbox: SandboxId,
        /// What its disk held at first.
        start: BootStart,
        link: LinkState,
        since: Timestamp,
        /// The supervisor has booted; only the driver's preparation is missing.
        booted: bool,
    },
    /// It accepts prompts.
    Ready {
        sandbox: SandboxId,
        link: LinkState,
        ready_since: Timestamp,
        activity: Activity,
    },
    Stopping {
        sandbox: SandboxId,
        disk: DiskOnStop,
        reason: StopReason,
    },
    /// It was stopped, and whether its disk was saved is unknown. Nothing starts before that is
    /// known.
    SaveUnknown {
        sandbox: SandboxId,
        save: StopSave,
        /// Why it was stopped.
        reason: StopReason,
        /// What went wrong.
        detail: String,
    },
}

/// The state of the bridge to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkState {
    Up,
    Down { since: Timestamp },
}

/// What a ready sandbox does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    Idle {
        since: Timestamp,
        freeze: FreezeState,
    },
    Turn(Turn),
    /// The state after a turn is being saved.
    Saving(TurnSave),
    /// That failed. No prompt is sent before it succeeds.
    SaveFailed {
        save: TurnSave,
        detail: String,
    },
}

/// A turn in progress. Its prompt is dispatched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    pub prompt: PromptId,
    pub turn: TurnId,
    pub number: u32,
    pub since: Timestamp,
    /// What the prompt tells the agent about failed checks, until it is accepted.
    pub failed_checks: Option<String>,
    /// The supervisor has confirmed that it has the prompt.
    pub prompt_accepted: bool,
    /// When the stop of the turn was requested.
    pub stopping: Option<Timestamp>,
    /// It is stopped because it took too long.
    pub overdue: bool,
    pub question: Option<Question>,
    /// Since when the turn is left to the next server; its time limit does not run meanwhile.
    pub handed_over: Option<Timestamp>,
}

/// A question of the agent that waits for its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// The agent's id of the question.
    pub request: String,
    /// The prompt that answers it, until the answer is known to have arrived.
    pub answer: Option<PromptId>,
}

/// The snapshot after a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSave {
    /// Stored before the snapshot exists.
    pub snapshot: SnapshotId,
    /// The turn it follows.
    pub turn: TurnId,
    /// Taken once the bridge is up: the turn's diff is read over it first.
    pub deferred: bool,
}

/// What happens to the disk of a sandbox that stops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskOnStop {
    Save(StopSave),
    /// It holds no work.
    Discard,
}

/// The snapshot of a sandbox that stops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopSave {
    /// Stored before the snapshot exists.
    pub snapshot: SnapshotId,
    pub kind: SnapshotKind,
    /// The turn whose snapshot it becomes, when that turn has none.
    pub turn: Option<TurnId>,
    pub ending: Option<Box<EndingTurn>>,
}

/// A turn that ends with its sandbox. Its end is stored once the processes of the sandbox are gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndingTurn {
    pub turn: Turn,
    pub outcome: TurnOutcome,
    pub reason: TurnReason,
    pub error: String,
}

impl Turn {
    /// Why a turn that is stopped ends.
    #[must_use]
    pub const fn stop_reason(&self) -> TurnReason {
        if self.overdue { TurnReason::TimeLimit } else { TurnReason::Stopped }
    }
}

/// The state that users see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublicState {
    pub state: SessionState,
    pub reason: StateReason,
}

/// Why a sandbox stops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The same as the reason for the session's state.
    State(StateReason),
    /// The sandbox was lost: a text of its provider.
    Lost(String),
}

impl StopReason {
    /// The reason for the state of a session that stays without a sandbox.
    pub(super) const fn state(&self) -> StateReason {
        match self {
            Self::State(reason) => *reason,
            Self::Lost(_) => StateReason::SandboxLost,
        }
    }
}

impl From<StateReason> for StopReason {
    fn from(reason: StateReason) -> Self {
        Self::State(reason)
    }
}

impl From<&str> for StopReason {
    fn from(text: &str) -> Self {
        Self::Lost(text.to_owned())
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::State(reason) => reason.fmt(out),
            Self::Lost(text) => text.fmt(out),
        }
    }
}

impl State {
    /// A session that has just been created. It wants a sandbox.
    #[must_use]
    pub fn new(latest_snapshot: Option<SnapshotId>, has_conversation: bool) -> Self {
        Self {
            epoch: 0,
            turns: 0,
            queue: VecDeque::new(),
            latest_snapshot,
            has_conversation,
            mode: Mode::Active,
            start_requested: true,
            sandbox: SandboxState::Absent,
            public: PublicState { state: SessionState::Queued, reason: StateReason::Created },
            start_failures: Vec::new(),
            user: None,
            waiting: None,
            yielding_slot: false,
            restoring: None,
            retry_at: None,
            failed_checks: None,
            blocked: false,
            over_budget: false,
            syncs: SyncState::default(),
            suspending: false,
        }
    }

    /// The session was queued for a slot when it was created, and admission has not answered yet.
    pub(super) fn is_new(&self) -> bool {
        self.epoch == 0 && self.waiting.is_some_and(|waiting| waiting.limit == Limit::Closed)
    }

    /// The position in the slot queue, once it is known.
    #[must_use]
    pub fn position(&self) -> Option<u32> {
        self.waiting.map(|waiting| waiting.position).filter(|position| *position > 0)
    }

    #[must_use]
    pub fn sandbox_id(&self) -> Option<&SandboxId> {
        match &self.sandbox {
            SandboxState::Absent => None,
            SandboxState::Starting { sandbox, .. }
            | SandboxState::Booting { sandbox, .. }
            | SandboxState::Ready { sandbox, .. }
            | SandboxState::Stopping { sandbox, .. }
            | SandboxState::SaveUnknown { sandbox, .. } => Some(sandbox),
        }
    }

    /// Whether the session has no sandbox and does nothing by itself. The queue is not considered.
    pub(crate) fn is_resting(&self, timeouts: &Timeouts) -> bool {
        self.sandbox == SandboxState::Absent
            && !(self.mode == Mode::Active && self.start_requested)
            && self.waiting.is_none()
            && self.restoring.is_none()
            && self.next_deadline(timeouts).is_none()
    }

    /// Whether the session ends work: a turn, a sandbox that has run, or everything. A session
    /// gets here only once per boot, and a boot needs disk space.
    #[must_use]
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.mode, Mode::Paused { .. } | Mode::Archived)
            || self.turn().is_some_and(|turn| turn.stopping.is_some())
            || matches!(self.sandbox, SandboxState::Stopping { disk: DiskOnStop::Save(_), .. })
    }

    /// Since when the session is idle: no turn, no queued prompt, no commands beside the agent
    /// (`busy`). Without a bridge it is not idle: commands that an earlier server started may run.
    #[must_use]
    pub fn idle_since(&self, busy: bool) -> Option<Timestamp> {
        match &self.sandbox {
            SandboxState::Ready {
                link: LinkState::Up,
                activity: Activity::Idle { since, .. },
                ..
            } if !busy
                && self.queue.is_empty()
                && self.mode == Mode::Active
                && self.restoring.is_none() =>
            {
                Some(*since)
            }
            _ => None,
        }
    }

    /// Whether the sandbox can take prompts and commands now, without a thaw first.
    #[must_use]
    pub const fn accepts_work(&self) -> bool {
        match &self.sandbox {
            SandboxState::Ready { activity: Activity::Idle { freeze, .. }, .. } => {
                matches!(freeze, FreezeState::Running | FreezeState::FreezeFailed)
            }
            SandboxState::Ready { .. } => true,
            _ => false,
        }
    }

    /// The snapshot that is being taken, or may have been taken.
    #[must_use]
    pub fn saving(&self) -> Option<&SnapshotId> {
        match &self.sandbox {
            SandboxState::Ready {
                activity: Activity::Saving(save) | Activity::SaveFailed { save, .. },
                ..
            } => Some(&save.snapshot),
            SandboxState::Stopping { disk: DiskOnStop::Save(save), .. }
            | SandboxState::SaveUnknown { save, .. } => Some(&save.snapshot),
            _ => None,
        }
    }

    /// The turn whose state is being saved.
    #[must_use]
    pub fn saved_turn(&self) -> Option<&TurnId> {
        match &self.sandbox {
            SandboxState::Ready {
                activity: Activity::Saving(save) | Activity::SaveFailed { save, .. },
                ..
            } => Some(&save.turn),
            _ => None,
        }
    }

    /// The turn in progress.
    #[must_use]
    pub fn turn(&self) -> Option<&Turn> {
        match &self.sandbox {
            SandboxState::Ready { activity: Activity::Turn(turn), .. } => Some(turn),
            _ => None,
        }
    }

    /// Whether a server that shuts down need not wait for this session any longer. The next server
    /// discards a sandbox that is still starting.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        match &self.sandbox {
            SandboxState::Absent
            | SandboxState::Starting { .. }
            | SandboxState::SaveUnknown { .. } => true,
            SandboxState::Booting { .. } | SandboxState::Stopping { .. } => false,
            SandboxState::Ready { .. } => {
                self.turn().is_some_and(|turn| turn.handed_over.is_some())
            }
        }
    }

    /// The prompt that answers the agent's question: neither queued nor dispatched.
    #[must_use]
    pub fn answering(&self) -> Option<&PromptId> {
        self.turn()?.question.as_ref()?.answer.as_ref()
    }

    /// Whether the next prompt answers a question.
    #[must_use]
    pub fn waits_for_answer(&self) -> bool {
        self.turn().is_some_and(|turn| {
            turn.stopping.is_none()
                && turn.question.as_ref().is_some_and(|question| question.answer.is_none())
        })
    }

    /// When the next timeout expires, if one runs.
    #[must_use]
    pub fn next_deadline(&self, timeouts: &Timeouts) -> Option<Timestamp> {
        let down = |link: &LinkState| match link {
            LinkState::Down { since } => Some(since.after(timeouts.stale)),
            LinkState::Up => None,
        };
        let deadline = match &self.sandbox {
            SandboxState::Starting { since, .. } => Some(since.after(timeouts.boot)),
            SandboxState::Booting { link, since, .. } => {
                Some(since.after(timeouts.boot)).into_iter().chain(down(link)).min()
            }
            SandboxState::Ready { link, ready_since, activity, .. } => {
                let own = match activity {
                    Activity::Idle { freeze: FreezeState::Thawing { since }, .. } => {
                        Some(since.after(timeouts.stale))
                    }
                    // Without a bridge the session is not idle; with one, queued prompts are sent.
                    Activity::Idle { .. } if !self.queue.is_empty() || *link != LinkState::Up => {
                        None
                    }
                    Activity::Idle { since, freeze } => {
                        let freeze = timeouts.idle_freeze.filter(|_| freeze.is_running());
                        let pause = since
                            .after(timeouts.idle_pause)
                            .min(ready_since.after(timeouts.lifetime));
                        Some(freeze.map_or(pause, |freeze| since.after(freeze).min(pause)))
                    }
                    Activity::Turn(Turn { stopping: Some(since), .. }) => {
                        Some(since.after(timeouts.stop))
                    }
                    Activity::Turn(turn) => Some(turn.since.after(timeouts.turn)),
                    Activity::Saving(_) | Activity::SaveFailed { .. } => None,
                };
                own.into_iter().chain(down(link)).min()
            }
            _ => None,
        };
        deadline.into_iter().chain(self.retry_at).min()
    }
}
