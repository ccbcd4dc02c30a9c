//! Who may have a sandbox. Pure: told how every session stands and which sandboxes no session has, it says who
//! gets a place, who waits where in line, and who is asked to give a place up. Nothing of it is stored: how sessions stand is,
//! and with it the tickets that keep the line in order across a restart.
//!
//! First come, first served. Only a session whose own user has too many is passed by. When somebody
//! waits, the session that has been idle for longest is asked for its place.

use std::collections::{BTreeMap, HashMap};

use harvest_proto::{SandboxId, SessionId, Timestamp};

use crate::decide::{Limit, Room};

mod raw;
#[cfg(test)]
mod tests;

pub(crate) use raw::Refusal;

/// How much may run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sandboxes that run, be they sessions' or nobody's but their maker's.
    pub sandboxes: usize,
    /// The same, of one user.
    pub sandboxes_per_user: Option<usize>,
    /// Builds and checks of pushed commits. They never wait for a session, nor a session for them.
    pub checks: usize,
}

impl Limits {
    /// What a machine of this size can bear: an agent mostly waits for its model, so a core serves
    /// four; and a gibibyte each, because agents use less than that while they wait.
    #[must_use]
    pub fn of_machine(cores: usize, memory_bytes: u64) -> Self {
        let fit = usize::try_from(memory_bytes >> 30).unwrap_or(usize::MAX);
        Self {
            sandboxes: cores.saturating_mul(4).min(fit).max(2),
            sandboxes_per_user: None,
            checks: (cores / 2).max(1),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { sandboxes: usize::MAX, sandboxes_per_user: None, checks: 2 }
    }
}

/// How a session stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It has no sandbox and wants none.
    Away,
    /// It wants one.
    Waits {
        /// Its place in line: the smallest is next.
        ticket: u64,
    },
    /// It has one.
    Holds {
        /// Since when nothing is done with it; `None` while something is.
        idle_since: Option<Timestamp>,
        /// It is being ended.
        leaving: bool,
    },
}

/// What a session is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// It may start its sandbox.
    Given { ticket: u64 },
    /// It waits, for this reason, as number so and so in line.
    Wait { ticket: u64, limit: Limit, position: u32 },
    /// Somebody waits: would it give up its place?
    Needed,
}

/// Everybody's place.
pub(crate) struct Places {
    limits: Limits,
    guests: BTreeMap<SessionId, Guest>,
    raw: BTreeMap<SandboxId, raw::Taken>,
    next_ticket: u64,
    open: bool,
}

struct Guest {
    user: String,
    standing: Standing,
    /// A place is given to it, and it has not taken it yet.
    given: bool,
    /// It was asked for its place, and has not answered yet.
    asked: bool,
    /// What it was told about its waiting.
    told: Option<(Limit, u32)>,
}

impl Guest {
    fn counts(&self) -> bool {
        self.given || matches!(self.standing, Standing::Holds { .. })
    }
}

impl Places {
    /// Nobody gets a place before [`Places::open`]: first everybody who has one must be known.
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, guests: BTreeMap::new(), raw: BTreeMap::new(), next_ticket: 1, open: false }
    }

    /// From here on places are given, or no more.
    pub(crate) fn set_open(&mut self, open: bool) -> Vec<(SessionId, Word)> {
        self.open = open;
        self.judge()
    }

    /// A number larger than any before.
    pub(crate) fn ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }

    /// Numbers start behind this one.
    pub(crate) fn tickets_after(&mut self, ticket: u64) {
        self.next_ticket = self.next_ticket.max(ticket.saturating_add(1));
    }

    /// A session comes, standing so.
    pub(crate) fn join(
        &mut self,
        session: SessionId,
        user: String,
        standing: Standing,
    ) -> Vec<(SessionId, Word)> {
        if let Standing::Waits { ticket } = standing {
            self.tickets_after(ticket);
        }
        self.guests
            .insert(session, Guest { user, standing, given: false, asked: false, told: None });
        self.judge()
    }

    /// A session is gone.
    pub(crate) fn leave(&mut self, session: &SessionId) -> Vec<(SessionId, Word)> {
        self.guests.remove(session);
        self.judge()
    }

    /// A session that is about to wait asks whether it has to. It has the place when there is room.
    pub(crate) fn claim(&mut self, session: &SessionId) -> Room {
        let waiting = self.line().len();
        let position = u32::try_from(waiting + 1).unwrap_or(u32::MAX);
        let Some(user) = self.guests.get(session).map(|guest| guest.user.clone()) else {
            return Room::Full { limit: Limit::Closed, position };
        };
        let full = |limit| Room::Full { limit, position };
        if !self.open {
            return full(Limit::Closed);
        }
        let (total, users) = self.count();
        if self.is_full_for(&user, &users) {
            return full(Limit::User);
        }
        if total >= self.limits.sandboxes {
            return full(Limit::Sandboxes);
        }
        if let Some(guest) = self.guests.get_mut(session) {
            guest.given = true;
        }
        Room::Free
    }

    /// A session stands so now. `answers` when it has just thought about giving up its place.
    pub(crate) fn tell(
        &mut self,
        session: &SessionId,
        standing: Standing,
        answers: bool,
    ) -> Vec<(SessionId, Word)> {
        let Some(guest) = self.guests.get_mut(session) else { return Vec::new() };
        // A place on its way to somebody who waits stays theirs until they have heard of it.
        let given =
            guest.given && guest.standing == standing && matches!(standing, Standing::Waits { .. });
        if guest.standing == standing && guest.given == given && !answers {
            return Vec::new();
        }
        let idle = matches!(standing, Standing::Holds { idle_since: Some(_), leaving: false });
        guest.asked &= idle && !answers;
        if !matches!(standing, Standing::Waits { .. }) {
            guest.told = None;
        }
        (guest.standing, guest.given) = (standing, given);
        self.judge()
    }

    fn judge(&mut self) -> Vec<(SessionId, Word)> {
        if !self.open {
            return Vec::new();
        }
        let (mut total, mut users) = self.count();
        let (mut words, mut blocked) = (Vec::new(), Vec::new());
        for (ticket, session, user) in self.line() {
            let limit = if self.is_full_for(&user, &users) {
                Limit::User
            } else if total >= self.limits.sandboxes {
                Limit::Sandboxes
            } else {
                total += 1;
                *users.entry(user).or_default() += 1;
                self.with(&session, |guest| (guest.given, guest.told) = (true, None));
                words.push((session, Word::Given { ticket }));
                continue;
            };
            let position = u32::try_from(blocked.len() + 1).unwrap_or(u32::MAX);
            let told = Some((limit, position));
            if self.with(&session, |guest| std::mem::replace(&mut guest.told, told)) != Some(told) {
                words.push((session, Word::Wait { ticket, limit, position }));
            }
            blocked.push((limit, user));
        }
        words.extend(self.ask(blocked).into_iter().map(|session| (session, Word::Needed)));
        words
    }

    /// For each who waits, one place must become free: one that is being left, or one asked for.
    fn ask(&mut self, blocked: Vec<(Limit, String)>) -> Vec<SessionId> {
        let (mut leaving, mut idle) = (Vec::new(), Vec::new());
        for (session, guest) in &self.guests {
            match guest.standing {
                Standing::Holds { leaving: true, .. } => leaving.push(guest.user.clone()),
                Standing::Holds { .. } if guest.asked => leaving.push(guest.user.clone()),
                Standing::Holds { idle_since: Some(since), .. } => {
                    idle.push((since, session.clone(), guest.user.clone()));
                }
                _ => {}
            }
        }
        idle.sort();
        let mut asked = Vec::new();
        for (limit, user) in blocked {
            let fits = |other: &String| limit != Limit::User || *other == user;
            if let Some(found) = leaving.iter().position(fits) {
                leaving.remove(found);
            } else if let Some(found) = idle.iter().position(|(_, _, other)| fits(other)) {
                asked.push(idle.remove(found).1);
            }
        }
        for session in &asked {
            self.with(session, |guest| guest.asked = true);
        }
        asked
    }

    fn with<T>(&mut self, session: &SessionId, change: impl FnOnce(&mut Guest) -> T) -> Option<T> {
        self.guests.get_mut(session).map(change)
    }

    /// Who waits, the next one first.
    fn line(&self) -> Vec<(u64, SessionId, String)> {
        let mut line: Vec<_> = self
            .guests
            .iter()
            .filter_map(|(session, guest)| match guest.standing {
                Standing::Waits { ticket } if !guest.given => {
                    Some((ticket, session.clone(), guest.user.clone()))
                }
                _ => None,
            })
            .collect();
        line.sort();
        line
    }

    fn count(&self) -> (usize, HashMap<String, usize>) {
        let mut users: HashMap<String, usize> = HashMap::new();
        let mut total = 0;
        for guest in self.guests.values().filter(|guest| guest.counts()) {
            total += 1;
            *users.entry(guest.user.clone()).or_default() += 1;
        }
        for taken in self.raw.values() {
            total += 1;
            if let Some(user) = &taken.user {
                *users.entry(user.clone()).or_default() += 1;
            }
        }
        (total, users)
    }

    fn is_full_for(&self, user: &str, users: &HashMap<String, usize>) -> bool {
        let has = users.get(user).copied().unwrap_or(0);
        self.limits.sandboxes_per_user.is_some_and(|limit| has >= limit)
    }
}
