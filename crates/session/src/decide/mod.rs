//! Decides what a session does next. Pure: no clock, no I/O, no await; time and new ids come in as
//! values.
//!
//! ```text
//! Absent → Starting → Booting → Ready{Idle ⇄ Turn → Saving} → Ending{Keep} → Absent
//!             └──────────┴→ Ending{Discard} → Absent      Ending{Keep} → Held (outcome unknown)
//! ```
//!
//! Whoever is not `Absent` has a place on the machine; who wants to leave `Absent` without one waits for
//! it. Idle{Awake → Freezing → Frozen → Thawing → Awake}: nothing is sent to what stands still.
//!
//! A step's actions come in two kinds. Those that are *kept* are written in one transaction with the
//! new state; only then the others are carried out. So a crash between the two finds a state that
//! knows what was about to be done, and [`restart`] does it again: every such act is idempotent, by
//! the sandbox's, the snapshot's or the prompt's id.

mod inside;
mod machine;
mod people;
mod place;
mod restore;
mod state;
mod step;
mod still;
#[cfg(test)]
mod tests;
mod time;

use harvest_proto::{
    PromptId, SandboxId, SnapshotId, Timestamp, TurnId,
    api::{PromptStatus, SessionState},
    bridge::{BootStart, Status},
    event::{SnapshotKind, TurnOutcome},
};

pub(crate) use place::SUSPENDED;
pub use place::{Limit, Room, Waiting};
pub use restore::Restoring;
pub use state::{Asked, Ending, Keep, Link, Machine, Rest, Save, Shown, State, Turn, Work};
use step::Deciding;
pub use still::Still;

use crate::clocks::Clocks;

/// What happened, or what somebody wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A prompt came.
    Queued {
        /// Which.
        prompt: PromptId,
        /// Stop the turn in progress and do this next.
        now: bool,
    },
    /// A waiting prompt is taken back.
    Cancelled {
        /// Which.
        prompt: PromptId,
    },
    /// A waiting prompt gets another place, 1 being the next.
    Moved {
        /// Which.
        prompt: PromptId,
        /// Where to.
        position: u32,
    },
    /// Stop what is being done.
    Stop,
    /// Keep the machine on disk. A turn in progress is stopped first.
    Pause,
    /// Go on, whatever held the session.
    Resume,
    /// End the machine at once. Its disk is kept.
    Terminate,
    /// Put the session away.
    Archive,
    /// Go back to the state after a turn, in place.
    Restore {
        /// The turn's snapshot.
        snapshot: SnapshotId,
        /// Its number.
        turn: u32,
    },
    /// The server ends: keep the machine on disk until the next one.
    Suspend,
    /// There is a place for the session.
    PlaceGiven {
        /// For which waiting.
        ticket: u64,
    },
    /// There is no place yet.
    PlaceMoved {
        /// For which waiting.
        ticket: u64,
        /// Why.
        limit: Limit,
        /// As which number in line it waits.
        position: u32,
    },
    /// Somebody waits for a place; an idle session gives up its own.
    PlaceNeeded,
    /// What runs in the machine stands still.
    Froze {
        /// Whose.
        epoch: u64,
    },
    /// It could not be made to, or does so no longer.
    FreezeFailed {
        /// Whose.
        epoch: u64,
    },
    /// It goes on.
    Thawed {
        /// Whose.
        epoch: u64,
    },
    /// The sandbox runs.
    Started {
        /// Whose word it is: an older epoch's is not heard.
        epoch: u64,
        /// What its disk holds.
        start: BootStart,
    },
    /// The sandbox could not be started.
    StartFailed {
        /// Whose.
        epoch: u64,
        /// What went wrong.
        detail: String,
        /// Trying again cannot help.
        permanent: bool,
    },
    /// After a restart: the sandbox runs still.
    FoundRunning {
        /// Whose.
        epoch: u64,
    },
    /// After a restart: nothing is left of the sandbox.
    FoundGone {
        /// Whose.
        epoch: u64,
    },
    /// The sandbox ended by itself.
    SandboxEnded {
        /// Whose.
        epoch: u64,
        /// Why.
        reason: String,
    },
    /// The bridge is up.
    LinkUp {
        /// Whose.
        epoch: u64,
        /// How things stand inside.
        status: Status,
    },
    /// The bridge is lost.
    LinkLost {
        /// Whose.
        epoch: u64,
    },
    /// The supervisor is ready.
    BootReady {
        /// Whose.
        epoch: u64,
    },
    /// Getting ready failed.
    BootFailed {
        /// Whose.
        epoch: u64,
        /// What went wrong.
        detail: String,
    },
    /// Our own preparation is done.
    Prepared {
        /// Whose.
        epoch: u64,
    },
    /// The supervisor has the prompt.
    Accepted {
        /// Which.
        prompt: PromptId,
    },
    /// The supervisor does not take the prompt.
    Refused {
        /// Which.
        prompt: PromptId,
        /// Why.
        detail: String,
    },
    /// The turn ended, says its own event.
    TurnEnded {
        /// The prompt it carried out.
        prompt: PromptId,
        /// How.
        outcome: TurnOutcome,
    },
    /// The agent asks a person.
    RequestOpened {
        /// The agent's id of the question.
        request: String,
    },
    /// The question is answered, or no longer asked.
    RequestClosed {
        /// Which.
        request: String,
        /// Whether a person answered it.
        answered: bool,
    },
    /// The snapshot after a turn is there.
    Saved {
        /// Which.
        snapshot: SnapshotId,
        /// How long the machine stood still.
        millis: u64,
    },
    /// This provider takes no snapshots of what runs.
    CannotSave {
        /// The one that was asked for.
        snapshot: SnapshotId,
    },
    /// Nobody knows whether the snapshot is there.
    SaveFailed {
        /// Which.
        snapshot: SnapshotId,
        /// What went wrong.
        detail: String,
    },
    /// The sandbox is ended and its disk kept.
    Kept {
        /// As which snapshot.
        snapshot: SnapshotId,
        /// How long that took.
        millis: u64,
    },
    /// Nobody knows whether the disk is kept.
    KeepFailed {
        /// As which snapshot.
        snapshot: SnapshotId,
        /// What went wrong.
        detail: String,
        /// It is certain that nothing is left to keep.
        gone: bool,
    },
    /// The sandbox is ended and its disk thrown away.
    Discarded {
        /// Whose.
        epoch: u64,
    },
    /// Somebody used the machine by other means than a prompt.
    Touched,
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Kept: a prompt changes its status.
    Prompt {
        /// Which.
        prompt: PromptId,
        /// What it was.
        from: PromptStatus,
        /// What it is.
        to: PromptStatus,
    },
    /// Kept: the queue has another order.
    Order {
        /// The waiting prompts.
        queue: Vec<PromptId>,
        /// The one that moved, and where to; absent when it has just come.
        moved: Option<(PromptId, u32)>,
    },
    /// Kept: a prompt is given to a turn.
    TurnBegun {
        /// The turn.
        turn: TurnId,
        /// Its number.
        number: u32,
        /// The prompt.
        prompt: PromptId,
    },
    /// Kept: a turn ended.
    TurnOver {
        /// Which.
        turn: TurnId,
        /// Its prompt.
        prompt: PromptId,
        /// How.
        outcome: TurnOutcome,
        /// The words for the event, when the supervisor cannot tell it itself.
        told: Option<String>,
        /// How long it ran.
        millis: u64,
    },
    /// Kept: a snapshot is there.
    SnapshotTaken {
        /// Which.
        snapshot: SnapshotId,
        /// Why.
        kind: SnapshotKind,
        /// The turn it follows.
        turn: Option<TurnId>,
        /// How long the machine stood still.
        millis: u64,
    },
    /// Kept: the session goes on from an earlier turn.
    Restored {
        /// Its snapshot.
        snapshot: SnapshotId,
        /// Its number.
        turn: u32,
    },
    /// Kept: the session waits, as this number in line.
    Wait {
        /// 1 is the next.
        position: u32,
    },
    /// Kept: a sandbox is no more.
    SandboxOver {
        /// Which.
        sandbox: SandboxId,
        /// Why.
        reason: String,
    },
    /// Kept: people see another state.
    Show {
        /// The state.
        state: SessionState,
        /// Why.
        reason: String,
        /// In words.
        detail: Option<String>,
    },
    /// Look whether the sandbox of an earlier server runs still.
    Find {
        /// Which.
        sandbox: SandboxId,
    },
    /// Start a sandbox.
    Start {
        /// Which.
        sandbox: SandboxId,
        /// Its epoch.
        epoch: u64,
        /// What from; the repository's image when absent.
        from: Option<SnapshotId>,
    },
    /// Open its door, dial it, and keep dialling.
    Connect {
        /// Which.
        sandbox: SandboxId,
        /// Its epoch.
        epoch: u64,
    },
    /// Tell it what for.
    Boot {
        /// What its disk holds.
        start: BootStart,
        /// Whether it holds the conversation.
        resume: bool,
    },
    /// Do what must be done between `ready` and the first prompt.
    Prepare,
    /// Give it a prompt.
    Send {
        /// Which.
        prompt: PromptId,
        /// The turn.
        turn: TurnId,
        /// The turn's number.
        number: u32,
    },
    /// Stop a turn.
    StopTurn {
        /// Which.
        turn: TurnId,
    },
    /// Answer the agent's question with a prompt's text.
    Answer {
        /// The question.
        request: String,
        /// The prompt.
        prompt: PromptId,
    },
    /// Have what runs in a machine stand still, and keep it so.
    Freeze {
        /// Which.
        sandbox: SandboxId,
    },
    /// Have it go on.
    Thaw {
        /// Which.
        sandbox: SandboxId,
    },
    /// Keep the disk of a machine that goes on.
    Capture {
        /// Which.
        sandbox: SandboxId,
        /// As which snapshot.
        snapshot: SnapshotId,
    },
    /// End a machine and keep its disk.
    EndKept {
        /// Which.
        sandbox: SandboxId,
        /// As which snapshot.
        snapshot: SnapshotId,
        /// Why.
        kind: SnapshotKind,
    },
    /// End a machine and throw its disk away.
    End {
        /// Which.
        sandbox: SandboxId,
    },
    /// Remove a snapshot that may be there and that nobody knows of.
    Forget {
        /// Which.
        snapshot: SnapshotId,
    },
    /// If a commit was pushed: open the pull request and run the check.
    Review,
}

/// When a step is decided, and the ids it may use.
#[derive(Debug, Clone)]
pub struct Moment<'a> {
    /// The time.
    pub now: Timestamp,
    /// How long things may take.
    pub clocks: &'a Clocks,
    /// Commands run in the machine apart from the agent: it is not idle.
    pub busy: bool,
    /// Whether there is a place for a session that has none.
    pub room: Room,
    /// For a new place in line.
    pub ticket: u64,
    /// For a new sandbox.
    pub sandbox: SandboxId,
    /// For a new turn.
    pub turn: TurnId,
    /// For a new snapshot.
    pub snapshot: SnapshotId,
}

/// What was decided.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Where the session stands now.
    pub state: State,
    /// What to do, in this order.
    pub actions: Vec<Action>,
}

/// Decides what follows from an input.
#[must_use]
pub fn decide(state: State, input: Input, moment: &Moment<'_>) -> Step {
    let mut deciding = Deciding::new(state, moment);
    deciding.take(input);
    deciding.advance();
    deciding.finish()
}

/// Decides what to do after a restart, from what the store held. `queue` are the waiting prompts.
#[must_use]
pub fn restart(mut state: State, queue: Vec<PromptId>, moment: &Moment<'_>) -> Step {
    let answering = state.answering().cloned();
    state.queue = queue.into_iter().filter(|prompt| Some(prompt) != answering.as_ref()).collect();
    let mut deciding = Deciding::new(state, moment);
    deciding.unsuspend();
    deciding.pick_up();
    deciding.advance();
    deciding.finish()
}
