//! Waiting for a place on the machine, and giving one up.

use serde::{Deserialize, Serialize};

use super::{Action, Machine, Rest, step::Deciding};

/// A place in line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Who has a smaller one is served before.
    pub ticket: u64,
    /// What it waits for.
    pub limit: Limit,
    /// As which number in line, 1 being the next.
    pub position: u32,
}

/// Why there is no place for a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// As many sandboxes run as may.
    Sandboxes,
    /// As many of this user run as may.
    User,
    /// The server is starting or ending.
    Closed,
}

impl Limit {
    /// The reason people and programs see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sandboxes => "limit_sandboxes",
            Self::User => "limit_user",
            Self::Closed => "server_busy",
        }
    }

    /// For people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Sandboxes => "as many sandboxes run as may at once",
            Self::User => "as many sandboxes of this user run as may at once",
            Self::Closed => "the server is starting or ending",
        }
    }
}

/// Whether there is a place for a session that wants one now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// There is, and it is the session's.
    Free,
    /// There is not.
    Full {
        /// Why.
        limit: Limit,
        /// As which number in line it waits.
        position: u32,
    },
}

impl Deciding<'_> {
    /// A machine is wanted and there is none.
    pub(super) fn start_or_wait(&mut self) {
        match self.moment.room {
            _ if self.place => self.start(),
            Room::Free => self.start(),
            Room::Full { limit, position } if self.state.waiting.is_none() => {
                let ticket = self.moment.ticket;
                self.state.waiting = Some(Waiting { ticket, limit, position });
                self.actions.push(Action::Wait { position });
            }
            Room::Full { .. } => {}
        }
    }

    /// The place that was waited for is there.
    pub(super) fn place_given(&mut self, ticket: u64) {
        self.place |= self.state.waiting.is_some_and(|waiting| waiting.ticket == ticket);
    }

    /// Others went before, or came back.
    pub(super) fn place_moved(&mut self, ticket: u64, limit: Limit, position: u32) {
        if let Some(waiting) =
            self.state.waiting.as_mut().filter(|waiting| waiting.ticket == ticket)
        {
            if waiting.position != position {
                self.actions.push(Action::Wait { position });
            }
            (waiting.limit, waiting.position) = (limit, position);
        }
    }

    /// Somebody waits for a place. One that is in use is kept.
    pub(super) fn place_needed(&mut self) {
        if self.state.idle_since(self.moment.busy).is_some() {
            self.state.ceding = true;
            self.rest("place_needed");
        }
    }

    /// The server ends: the machine is kept on disk, and what waits goes on with the next server.
    pub(super) fn suspend(&mut self) {
        self.state.ceding = self.state.machine != Machine::Absent;
        if self.state.rest == Rest::Open {
            self.rest(SUSPENDED);
        }
    }

    /// What the last server suspended with work still to do goes on.
    pub(super) fn unsuspend(&mut self) {
        self.state.ceding = false;
        let suspended = matches!(&self.state.rest, Rest::Paused { reason } if reason == SUSPENDED);
        if suspended && !self.state.queue.is_empty() {
            self.state.rest = Rest::Open;
        }
    }
}

/// Why a session is paused whose server ended.
pub(crate) const SUSPENDED: &str = "server_shutdown";
