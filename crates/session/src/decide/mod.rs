//! Decides what a session does next. Pure: no clock, no I/O, no await; time and new ids come in as
//! values, and a slot is claimed through the context.
//!
//! ```text
//! Absent → Starting → Booting → Ready{Idle ⇄ Turn → Saving} → Stopping{Save} → Absent
//!             └──────────┴→ Stopping{Discard} → Absent     Stopping{Save} → SaveUnknown
//! ```
//!
//! Every state but `Absent` holds a slot; leaving `Absent` needs one. An idle sandbox goes
//! Running → Freezing → Frozen → Thawing → Running; nothing is sent to it unless it is running.
//!
//! A decision has two kinds of actions. *Persisted* actions are written in one transaction with the
//! new state; only then the *effects* are executed. A crash between the two finds a state that
//! knows which effects were due, and [`restart`] emits them again: every effect is idempotent, by
//! the id of the sandbox, the snapshot or the prompt.

mod decider;
mod freeze;
mod requests;
mod restore;
mod sandbox;
mod slot;
mod state;
mod supervisor;
mod sync;
#[cfg(test)]
mod tests;
mod timers;

use harvest_proto::{
    EventBody, PromptId, SandboxId, SnapshotId, StateReason, Timestamp, TurnId, TurnReason,
    api::{PromptStatus, SessionState},
    bridge::{BootStart, Status},
    event::{CheckoutSync, SnapshotKind, TurnOutcome},
};

use decider::Decider;
pub use freeze::FreezeState;
pub use restore::Restoring;
pub use slot::{Limit, SlotClaim, Waiting};
pub use state::{
    Activity, DiskOnStop, EndingTurn, LinkState, Mode, PublicState, Question, SandboxState, State,
    StopReason, StopSave, Turn, TurnSave,
};
pub use sync::{RepeatedFailure, SyncState};

use crate::{sandboxes::Found, timeouts::Timeouts};

/// A request of a user, or a report about the sandbox, the slot or the time. Reports that carry an
/// `epoch` are ignored unless it is the current sandbox's.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    PromptQueued {
        prompt: PromptId,
        /// Stop the turn in progress and run this prompt next.
        now: bool,
    },
    /// A queued prompt is withdrawn.
    PromptCancelled {
        prompt: PromptId,
    },
    /// A queued prompt gets another position; 1 is the next.
    PromptMoved {
        prompt: PromptId,
        position: u32,
    },
    /// Stop the turn in progress, or the start of a sandbox.
    Stop,
    /// Save the sandbox and stop it. A turn in progress is stopped first.
    Pause,
    /// Start a sandbox; retry a save whose outcome is unknown.
    Resume,
    /// Kill the sandbox at once. Its disk is saved.
    Terminate,
    Archive,
    /// Return to the state after an earlier turn of this session, or to another of its snapshots.
    Restore {
        /// The repository's image when absent: the session's start.
        snapshot: Option<SnapshotId>,
        /// The turn that left the snapshot; absent for one that a user asked for.
        turn: Option<u32>,
    },
    /// The server shuts down: leave a turn in progress to the next server, and save any other
    /// sandbox.
    Suspend,
    /// The session has a slot.
    SlotGranted {
        /// Of the queue entry that is served; an older entry's grant is ignored.
        sequence: u64,
    },
    /// The session's position in the slot queue changed.
    SlotQueued {
        sequence: u64,
        limit: Limit,
        position: u32,
    },
    /// Another session waits for a slot; an idle session gives up its own.
    SlotReleaseRequested,
    Frozen {
        epoch: u64,
    },
    /// The sandbox could not be frozen, or is no longer.
    FreezeFailed {
        epoch: u64,
    },
    Thawed {
        epoch: u64,
    },
    /// The sandbox runs.
    Started {
        epoch: u64,
        /// What its disk holds.
        start: BootStart,
    },
    StartFailed {
        epoch: u64,
        detail: String,
        cause: StartFailure,
    },
    /// After a restart: the sandbox still runs.
    FoundRunning {
        epoch: u64,
    },
    /// After a restart: nothing is left of the sandbox, its disk included.
    FoundGone {
        epoch: u64,
    },
    /// The sandbox exited by itself.
    SandboxEnded {
        epoch: u64,
        reason: String,
    },
    /// The bridge is connected.
    LinkUp {
        epoch: u64,
        status: Status,
    },
    LinkLost {
        epoch: u64,
    },
    /// The supervisor has booted.
    BootReady {
        epoch: u64,
    },
    BootFailed {
        epoch: u64,
        detail: String,
        /// Another boot would fail in the same way.
        permanent: bool,
    },
    /// The driver's own preparation of the sandbox is done.
    Prepared {
        epoch: u64,
    },
    /// The supervisor has the prompt.
    PromptAccepted {
        prompt: PromptId,
    },
    PromptRefused {
        prompt: PromptId,
        detail: String,
    },
    /// The supervisor's event for the end of the turn arrived.
    TurnEnded {
        prompt: PromptId,
        outcome: TurnOutcome,
        reason: Option<TurnReason>,
    },
    /// The agent asks the user a question.
    RequestOpened {
        /// The agent's id of the question.
        request: String,
    },
    /// The question is answered or withdrawn.
    RequestClosed {
        request: String,
        /// Whether a person answered it.
        answered: bool,
    },
    /// The agent cannot go on without a person.
    Blocked,
    /// A requested sync ended.
    SyncEnded {
        checkouts: Vec<CheckoutSync>,
    },
    /// The snapshot after a turn exists.
    Captured {
        snapshot: SnapshotId,
        /// How long the sandbox was paused for it.
        millis: u64,
    },
    /// The provider cannot take snapshots of a running sandbox.
    CaptureUnsupported {
        snapshot: SnapshotId,
    },
    /// Whether the snapshot exists is unknown.
    CaptureFailed {
        snapshot: SnapshotId,
        detail: String,
    },
    /// The sandbox has stopped and its disk is saved.
    StoppedAndSaved {
        snapshot: SnapshotId,
        millis: u64,
    },
    /// Whether the disk was saved is unknown.
    StopSaveFailed {
        snapshot: SnapshotId,
        detail: String,
        /// What the provider finds of the sandbox; absent when it does not answer.
        found: Option<Found>,
    },
    /// The sandbox has stopped and its disk is deleted.
    Discarded {
        epoch: u64,
    },
    /// Pushed commits were checked.
    Reviewed {
        /// What the next prompt tells the agent.
        failed_checks: Option<String>,
    },
    /// The sandbox was used by other means than a prompt.
    Touched,
    /// A deadline may have passed.
    Tick,
}

impl Input {
    /// Whether a user ends work by it.
    pub(crate) const fn ends_work(&self) -> bool {
        matches!(self, Self::Stop | Self::Pause | Self::Terminate | Self::Archive)
    }
}

/// Whether another start may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartFailure {
    /// At once.
    Transient,
    /// When the disk has room again.
    NoSpace,
    /// No retry can help.
    Permanent,
}

/// Persisted actions first, up to `SetPublicState`; the others are effects.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    SetPromptStatus {
        prompt: PromptId,
        from: PromptStatus,
        to: PromptStatus,
    },
    /// The order of the queued prompts.
    ReorderQueue {
        queue: Vec<PromptId>,
        /// The prompt that moved and its new position; absent when it has just been queued.
        moved: Option<(PromptId, u32)>,
    },
    TurnStarted {
        turn: TurnId,
        number: u32,
        prompt: PromptId,
    },
    TurnEnded {
        turn: TurnId,
        prompt: PromptId,
        outcome: TurnOutcome,
        reason: Option<TurnReason>,
        /// The message of the event to write; absent when the supervisor sent the event itself.
        error: Option<String>,
        millis: u64,
    },
    SnapshotTaken {
        snapshot: SnapshotId,
        kind: SnapshotKind,
        /// The turn it follows.
        turn: Option<TurnId>,
        /// How long the sandbox was paused for it, or took to stop.
        millis: u64,
    },
    /// The session continues from an earlier turn or snapshot.
    Restored {
        snapshot: Option<SnapshotId>,
        turn: Option<u32>,
    },
    /// The position in the slot queue; 1 is the next.
    ReportPosition {
        position: u32,
    },
    SandboxEnded {
        sandbox: SandboxId,
        reason: String,
    },
    /// A sync has failed in the same way again: the event that says what a person has to do.
    SyncBlocked {
        report: Box<EventBody>,
    },
    /// The state that users see.
    SetPublicState {
        state: SessionState,
        reason: StateReason,
        detail: Option<String>,
    },
    /// Ask the provider whether the sandbox of an earlier server still runs.
    Find {
        sandbox: SandboxId,
    },
    /// Start a sandbox.
    Start {
        sandbox: SandboxId,
        epoch: u64,
        /// The repository's image when absent.
        from: Option<SnapshotId>,
    },
    /// Open the sandbox's door and dial its bridge until it answers.
    Connect {
        sandbox: SandboxId,
        epoch: u64,
    },
    /// Send the supervisor its boot order.
    Boot {
        start: BootStart,
        /// Whether the disk holds the agent's conversation.
        resume: bool,
    },
    /// Prepare the checkouts between the boot and the first prompt.
    Prepare,
    SendPrompt {
        prompt: PromptId,
        turn: TurnId,
        number: u32,
    },
    StopTurn {
        turn: TurnId,
    },
    /// Answer the agent's question with a prompt's text.
    Answer {
        request: String,
        prompt: PromptId,
    },
    /// Freeze the sandbox's processes and keep them frozen.
    Freeze {
        sandbox: SandboxId,
    },
    Thaw {
        sandbox: SandboxId,
    },
    /// Freeze the sandbox's processes until the next server thaws them.
    HandOver {
        sandbox: SandboxId,
    },
    /// Take a snapshot of a sandbox that keeps running.
    Capture {
        sandbox: SandboxId,
        snapshot: SnapshotId,
    },
    /// Stop a sandbox and save its disk as this snapshot.
    StopAndSave {
        sandbox: SandboxId,
        snapshot: SnapshotId,
        kind: SnapshotKind,
    },
    /// Stop a sandbox and delete its disk.
    StopAndDiscard {
        sandbox: SandboxId,
    },
    /// Remove a snapshot that may exist and that no state refers to.
    RemoveSnapshot {
        snapshot: SnapshotId,
    },
    /// If a commit was pushed: open the pull request and run the check.
    Review,
}

/// The time of a decision, the facts it may look at, and the ids it may use.
pub struct StepContext<'a> {
    pub now: Timestamp,
    pub timeouts: &'a Timeouts,
    /// Commands run in the sandbox apart from the agent: it is not idle.
    pub busy: bool,
    /// Claims a slot, with the sequence number of an entry in the slot queue in case there is none.
    /// Called once at most, and only when a session without a slot needs one.
    pub claim_slot: &'a dyn Fn() -> (SlotClaim, u64),
    /// For a new sandbox.
    pub sandbox: SandboxId,
    /// For a new turn.
    pub turn: TurnId,
    /// For a new snapshot.
    pub snapshot: SnapshotId,
}

/// The new state, and the actions in the order they are to be done.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    pub state: State,
    pub actions: Vec<Action>,
}

/// Decides what follows from an input.
#[must_use]
pub fn decide(state: State, input: Input, context: &StepContext<'_>) -> Decision {
    let mut decider = Decider::new(state, context);
    decider.apply(input);
    decider.advance();
    decider.finish()
}

/// Decides what to do after a restart of the server, from the stored state and the queued prompts.
#[must_use]
pub fn restart(mut state: State, queue: Vec<PromptId>, context: &StepContext<'_>) -> Decision {
    let answering = state.answering().cloned();
    state.queue = queue.into_iter().filter(|prompt| Some(prompt) != answering.as_ref()).collect();
    let mut decider = Decider::new(state, context);
    decider.resume_suspended();
    decider.recover();
    decider.advance();
    decider.finish()
}
