//! Where a session stands. Each variant has exactly the data that exists in it. The whole of it, the
//! queue apart, is what the store keeps as the session's `drive`: what is not here is lost in a crash.
//!
//! Servers of the last version read it, too: what is new is a field that may be missing, never another
//! variant of what they know.

use std::collections::VecDeque;

use harvest_proto::{
    PromptId, SandboxId, SnapshotId, Timestamp, TurnId, api::SessionState, bridge::BootStart,
    event::SnapshotKind,
};
use serde::{Deserialize, Serialize};

use super::{
    place::{Limit, Waiting},
    restore::Restoring,
    still::Still,
};
use crate::clocks::Clocks;

/// Where a session stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The count of sandboxes so far; names the current one.
    pub epoch: u64,
    /// The count of turns so far.
    pub turns: u32,
    /// The prompts that wait, the next one first. Kept as rows of their own.
    #[serde(skip)]
    pub queue: VecDeque<PromptId>,
    /// What the next sandbox starts from; the repository's image when absent.
    pub disk: Option<SnapshotId>,
    /// Whether the disk holds the agent's conversation.
    pub conversed: bool,
    /// Whether the session goes on by itself.
    pub rest: Rest,
    /// A sandbox is wanted although nothing waits.
    pub wake: bool,
    /// Its machine.
    pub machine: Machine,
    /// What people see.
    pub shown: Shown,
    /// When starts failed lately.
    pub failures: Vec<Timestamp>,
    /// Whose limit it counts against; its author's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// It wants a machine and waits for a place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// Its place goes to somebody else as soon as its machine is ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ceding: bool,
    /// What it goes back to as soon as its machine is ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restoring: Option<Restoring>,
}

/// Whether a session goes on by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rest {
    /// It does.
    Open,
    /// It waits for a prompt or for `resume`.
    Paused {
        /// Why.
        reason: String,
    },
    /// It could not go on, and waits for a prompt or for `resume`.
    Failed {
        /// Why.
        reason: String,
        /// In words.
        detail: String,
    },
    /// It is put away.
    Archived,
}

/// A session's machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Machine {
    /// There is none.
    Absent,
    /// It is being started. Its id is stored before it exists.
    Starting {
        /// Which.
        sandbox: SandboxId,
        /// Since when.
        since: Timestamp,
    },
    /// It runs and gets ready. It holds no work yet.
    Booting {
        /// Which.
        sandbox: SandboxId,
        /// What its disk held at first.
        start: BootStart,
        /// Whether we can speak with it.
        link: Link,
        /// Since when.
        since: Timestamp,
        /// The supervisor is ready; only our own preparation is missing.
        booted: bool,
    },
    /// It takes prompts.
    Ready {
        /// Which.
        sandbox: SandboxId,
        /// Whether we can speak with it.
        link: Link,
        /// When it became ready.
        born: Timestamp,
        /// What it does.
        work: Work,
    },
    /// It is being ended.
    Ending {
        /// Which.
        sandbox: SandboxId,
        /// What becomes of its disk.
        how: Ending,
        /// Why.
        reason: String,
    },
    /// It was being kept, and nobody knows whether it was. Nothing starts before that is known.
    Held {
        /// Which.
        sandbox: SandboxId,
        /// What it was being kept as.
        keep: Keep,
        /// Why it was ended.
        reason: String,
        /// What went wrong.
        detail: String,
    },
}

/// Whether we can speak with a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Link {
    /// The bridge is up.
    Up,
    /// It is not.
    Down {
        /// Since when.
        since: Timestamp,
    },
}

/// What a ready machine does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Nothing.
    Idle {
        /// Since when.
        since: Timestamp,
        /// Whether what runs in it stands still.
        #[serde(default, skip_serializing_if = "Still::is_awake")]
        still: Still,
    },
    /// A turn.
    Turn(Turn),
    /// The state after a turn is being kept.
    Saving(Save),
    /// That failed. Nothing is sent before it is done.
    Unsaved {
        /// What was to be kept.
        save: Save,
        /// What went wrong.
        detail: String,
    },
}

/// A turn in progress. Its prompt is dispatched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// The prompt it carries out.
    pub prompt: PromptId,
    /// Its id.
    pub turn: TurnId,
    /// Its number.
    pub number: u32,
    /// Since when.
    pub since: Timestamp,
    /// The supervisor has said that it has the prompt.
    pub accepted: bool,
    /// Since when it is being stopped.
    pub stopping: Option<Timestamp>,
    /// What the agent asks.
    pub asked: Option<Asked>,
}

/// A question of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// The agent's id of it.
    pub request: String,
    /// The prompt that answers it, until we know that the answer arrived.
    pub answer: Option<PromptId>,
}

/// A turn's snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Save {
    /// The snapshot's id, stored before it exists.
    pub snapshot: SnapshotId,
    /// The turn it follows.
    pub turn: TurnId,
    /// It is taken once the machine can be spoken with: what the turn changed is asked for first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub later: bool,
}

/// What becomes of the disk of a sandbox that ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It is kept.
    Keep(Keep),
    /// It holds no work.
    Discard,
}

/// What a disk is kept as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The snapshot's id, stored before it exists.
    pub snapshot: SnapshotId,
    /// Why.
    pub kind: SnapshotKind,
    /// The turn whose snapshot it becomes, when that turn has none.
    pub turn: Option<TurnId>,
}

/// What people see of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The state.
    pub state: SessionState,
    /// Why.
    pub reason: String,
}

impl State {
    /// A session that has just been created. It wants a machine.
    #[must_use]
    pub fn new(disk: Option<SnapshotId>, conversed: bool) -> Self {
        Self {
            epoch: 0,
            turns: 0,
            queue: VecDeque::new(),
            disk,
            conversed,
            rest: Rest::Open,
            wake: true,
            machine: Machine::Absent,
            shown: Shown { state: SessionState::Queued, reason: "created".to_owned() },
            failures: Vec::new(),
            user: None,
            waiting: None,
            ceding: false,
            restoring: None,
        }
    }

    /// Its place in line was taken when it was created, and nobody has said yet whether it has to wait.
    pub(super) fn is_new(&self) -> bool {
        self.epoch == 0 && self.waiting.is_some_and(|waiting| waiting.limit == Limit::Closed)
    }

    /// As which number in line it waits, once that is known.
    #[must_use]
    pub fn position(&self) -> Option<u32> {
        self.waiting.map(|waiting| waiting.position).filter(|position| *position > 0)
    }

    /// The session's sandbox, while it has one.
    #[must_use]
    pub fn sandbox(&self) -> Option<&SandboxId> {
        match &self.machine {
            Machine::Absent => None,
            Machine::Starting { sandbox, .. }
            | Machine::Booting { sandbox, .. }
            | Machine::Ready { sandbox, .. }
            | Machine::Ending { sandbox, .. }
            | Machine::Held { sandbox, .. } => Some(sandbox),
        }
    }

    /// Since when nothing is done and nothing waits to be done. `busy` when commands run beside the agent. Who
    /// cannot be spoken with is not idle: what another server left running there is not known.
    #[must_use]
    pub fn idle_since(&self, busy: bool) -> Option<Timestamp> {
        match &self.machine {
            Machine::Ready { link: Link::Up, work: Work::Idle { since, .. }, .. }
                if !busy
                    && self.queue.is_empty()
                    && self.rest == Rest::Open
                    && self.restoring.is_none() =>
            {
                Some(*since)
            }
            _ => None,
        }
    }

    /// Whether its machine takes prompts and commands this moment.
    #[must_use]
    pub const fn is_awake(&self) -> bool {
        match &self.machine {
            Machine::Ready { work: Work::Idle { still, .. }, .. } => {
                matches!(still, Still::Awake | Still::Restless)
            }
            Machine::Ready { .. } => true,
            _ => false,
        }
    }

    /// The snapshot that is being taken, or may have been.
    #[must_use]
    pub fn saving(&self) -> Option<&SnapshotId> {
        match &self.machine {
            Machine::Ready { work: Work::Saving(save) | Work::Unsaved { save, .. }, .. } => {
                Some(&save.snapshot)
            }
            Machine::Ending { how: Ending::Keep(keep), .. } | Machine::Held { keep, .. } => {
                Some(&keep.snapshot)
            }
            _ => None,
        }
    }

    /// The turn whose state is being kept.
    #[must_use]
    pub fn saved_turn(&self) -> Option<&TurnId> {
        match &self.machine {
            Machine::Ready { work: Work::Saving(save) | Work::Unsaved { save, .. }, .. } => {
                Some(&save.turn)
            }
            _ => None,
        }
    }

    /// The turn in progress.
    #[must_use]
    pub fn turn(&self) -> Option<&Turn> {
        match &self.machine {
            Machine::Ready { work: Work::Turn(turn), .. } => Some(turn),
            _ => None,
        }
    }

    /// The prompt that is the answer to the agent's question: neither waiting nor dispatched.
    #[must_use]
    pub fn answering(&self) -> Option<&PromptId> {
        self.turn()?.asked.as_ref()?.answer.as_ref()
    }

    /// When a clock strikes next, if any runs.
    #[must_use]
    pub fn next_clock(&self, clocks: &Clocks) -> Option<Timestamp> {
        let down = |link: &Link| match link {
            Link::Down { since } => Some(since.after(clocks.stale)),
            Link::Up => None,
        };
        match &self.machine {
            Machine::Starting { since, .. } => Some(since.after(clocks.boot)),
            Machine::Booting { link, since, .. } => {
                Some(since.after(clocks.boot)).into_iter().chain(down(link)).min()
            }
            Machine::Ready { link, born, work, .. } => {
                let own = match work {
                    Work::Idle { still: Still::Thawing { since }, .. } => {
                        Some(since.after(clocks.stale))
                    }
                    // What waits is sent as soon as the machine can be spoken with, and whether it is idle known.
                    Work::Idle { .. } if !self.queue.is_empty() || *link != Link::Up => None,
                    Work::Idle { since, still } => {
                        let freeze = clocks.idle_freeze.filter(|_| still.is_awake());
                        let pause = since.after(clocks.idle_pause).min(born.after(clocks.lifetime));
                        Some(freeze.map_or(pause, |freeze| since.after(freeze).min(pause)))
                    }
                    Work::Turn(Turn { stopping: Some(since), .. }) => {
                        Some(since.after(clocks.stop))
                    }
                    Work::Turn(turn) => Some(turn.since.after(clocks.turn)),
                    Work::Saving(_) | Work::Unsaved { .. } => None,
                };
                own.into_iter().chain(down(link)).min()
            }
            _ => None,
        }
    }
}
