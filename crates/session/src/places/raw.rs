//! Places of sandboxes that no session has. They never wait in line: there is room, or whoever asks is told that
//! there is none; and they are asked for nothing. Who is refused may still have an idle session asked for its place,
//! as a session that waits would, so that asking again helps.

use harvest_proto::{SandboxId, SessionId};

use super::{Guest, Places, Standing, Word};
use crate::decide::Limit;

/// A place somebody's own sandbox has.
pub(super) struct Taken {
    /// Who made it, where a server was asked.
    pub(super) user: Option<String>,
    /// Tells this place from another one the same sandbox had before.
    number: u64,
}

/// Why there is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// What is reached.
    pub(crate) limit: Limit,
    /// A place that would help is being given up.
    pub(crate) soon: bool,
}

impl Places {
    /// Places for all of these sandboxes of a user, or for none. One that has a place goes on with it, under the
    /// number that is answered, by which the places are left. Who does not `ask` has no idle session asked.
    pub(crate) fn claim_raw(
        &mut self,
        sandboxes: &[SandboxId],
        user: Option<&str>,
        ask: bool,
    ) -> (Result<u64, Refusal>, Vec<(SessionId, Word)>) {
        if !self.open {
            return (Err(Refusal { limit: Limit::Closed, soon: false }), Vec::new());
        }
        let new = sandboxes.iter().filter(|sandbox| !self.raw.contains_key(sandbox)).count();
        if let Some((limit, missing)) = self.reached(new, user) {
            let user = user.unwrap_or_default().to_owned();
            // Nobody gives up a place for what finds no room all the same.
            let soon = new <= self.most(limit) && missing <= self.could_leave(limit, &user);
            let asked =
                if soon && ask { self.ask(vec![(limit, user); missing]) } else { Vec::new() };
            let words = asked.into_iter().map(|session| (session, Word::Needed)).collect();
            return (Err(Refusal { limit, soon }), words);
        }
        let number = self.ticket();
        for sandbox in sandboxes {
            self.take_raw(sandbox.clone(), user.map(str::to_owned), number);
        }
        (Ok(number), Vec::new())
    }

    /// A sandbox that runs has its place, whether or not there is room.
    pub(crate) fn take_raw(&mut self, sandbox: SandboxId, user: Option<String>, number: u64) {
        self.raw.insert(sandbox, Taken { user, number });
    }

    /// The number of a sandbox's place.
    pub(crate) fn number_raw(&self, sandbox: &SandboxId) -> Option<u64> {
        self.raw.get(sandbox).map(|taken| taken.number)
    }

    /// A sandbox runs no more. Only the place of that number is left: the sandbox may have been started again
    /// since.
    pub(crate) fn leave_raw(&mut self, sandbox: &SandboxId, number: u64) -> Vec<(SessionId, Word)> {
        if self.number_raw(sandbox) != Some(number) {
            return Vec::new();
        }
        self.raw.remove(sandbox);
        self.judge()
    }

    /// Every sandbox that has a place and no session, with the place's number.
    pub(crate) fn all_raw(&self) -> Vec<(SandboxId, u64)> {
        self.raw.iter().map(|(sandbox, taken)| (sandbox.clone(), taken.number)).collect()
    }

    /// Which limit so many more would pass, and by how many.
    fn reached(&self, new: usize, user: Option<&str>) -> Option<(Limit, usize)> {
        let (total, users) = self.count();
        let of_user = user.map_or(0, |user| users.get(user).copied().unwrap_or(0));
        let per_user =
            self.limits.sandboxes_per_user.filter(|_| user.is_some()).unwrap_or(usize::MAX);
        let over = |has: usize, limit: usize| (has + new).saturating_sub(limit).min(new);
        match (over(of_user, per_user), over(total, self.limits.sandboxes)) {
            (0, 0) => None,
            (0, missing) => Some((Limit::Sandboxes, missing)),
            (missing, _) => Some((Limit::User, missing)),
        }
    }

    /// How many there may be at all.
    fn most(&self, limit: Limit) -> usize {
        match limit {
            Limit::User => self.limits.sandboxes_per_user.unwrap_or(usize::MAX),
            Limit::Sandboxes | Limit::Closed => self.limits.sandboxes,
        }
    }

    /// How many places are being left, or would be if they were asked for.
    fn could_leave(&self, limit: Limit, user: &str) -> usize {
        let could = |guest: &&Guest| match guest.standing {
            Standing::Holds { idle_since, leaving } => leaving || idle_since.is_some(),
            _ => false,
        };
        let fits = |guest: &&Guest| limit != Limit::User || guest.user == user;
        self.guests.values().filter(could).filter(fits).count()
    }
}
