//! Shows sessions, and sandboxes that none of them has, to their places: keeps the line behind a lock and passes on what `places` decides to
//! the drivers it is about. Decides nothing.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

use harvest_proto::{SandboxId, SessionId};
use tokio::sync::{mpsc, watch};

use crate::{
    decide::{Input, Limit, Machine, Room, State},
    driver::Note,
    places::{Limits, Places, Refusal, Standing, Word},
};

/// Where every session has its place.
pub(crate) struct Usher {
    hall: Mutex<Hall>,
    /// Told whenever there may be a place that was not there before.
    moved: watch::Sender<()>,
}

struct Hall {
    places: Places,
    notes: HashMap<SessionId, mpsc::UnboundedSender<Note>>,
}

impl Usher {
    pub(crate) fn new(limits: Limits) -> Self {
        let hall = Hall { places: Places::new(limits), notes: HashMap::new() };
        Self { hall: Mutex::new(hall), moved: watch::Sender::default() }
    }

    fn hall(&self) -> MutexGuard<'_, Hall> {
        self.hall.lock().expect("no holder of this lock can panic")
    }

    /// From here on places are given, or no more.
    pub(crate) fn set_open(&self, open: bool) {
        self.hall().pass_on(|places| places.set_open(open));
        self.moved.send_replace(());
    }

    /// Tickets given from here on are larger than this one.
    pub(crate) fn tickets_after(&self, ticket: u64) {
        self.hall().places.tickets_after(ticket);
    }

    /// A place at the end of the line.
    pub(crate) fn ticket(&self) -> u64 {
        self.hall().places.ticket()
    }

    /// A driver begins with its session standing so.
    pub(crate) fn join(
        &self,
        session: &SessionId,
        user: String,
        state: &State,
        notes: mpsc::UnboundedSender<Note>,
    ) {
        let mut hall = self.hall();
        hall.notes.insert(session.clone(), notes);
        hall.pass_on(|places| places.join(session.clone(), person(&user), standing(state, false)));
    }

    /// A driver has ended.
    pub(crate) fn leave(&self, session: &SessionId) {
        let mut hall = self.hall();
        hall.notes.remove(session);
        hall.pass_on(|places| places.leave(session));
        self.moved.send_replace(());
    }

    /// Whether there is a place, and a ticket for the line in case there is none.
    pub(crate) fn claim(&self, session: &SessionId) -> (Room, u64) {
        let mut hall = self.hall();
        (hall.places.claim(session), hall.places.ticket())
    }

    /// A session stands so now. `answers` when it has just thought about giving up its place.
    pub(crate) fn tell(&self, session: &SessionId, state: &State, busy: bool, answers: bool) {
        self.hall().pass_on(|places| places.tell(session, standing(state, busy), answers));
        self.moved.send_replace(());
    }

    /// Places for these sandboxes that no session has, or for none of them; answers their number. Idle sessions are
    /// asked for theirs if that would help, and `ask` says so.
    pub(crate) fn claim_raw(
        &self,
        sandboxes: &[SandboxId],
        user: Option<&str>,
        ask: bool,
    ) -> Result<u64, Refusal> {
        let mut claimed = Err(Refusal { limit: Limit::Closed, soon: false });
        self.hall().pass_on(|places| {
            let (answer, words) = places.claim_raw(sandboxes, user.map(person).as_deref(), ask);
            claimed = answer;
            words
        });
        claimed
    }

    /// A sandbox that no session has runs, whether or not there is room.
    pub(crate) fn take_raw(&self, sandbox: SandboxId, user: Option<String>) -> u64 {
        let mut hall = self.hall();
        let number = hall.places.ticket();
        hall.places.take_raw(sandbox, user.as_deref().map(person), number);
        number
    }

    /// The number of the place it has.
    pub(crate) fn number_raw(&self, sandbox: &SandboxId) -> Option<u64> {
        self.hall().places.number_raw(sandbox)
    }

    /// It runs no more, unless it has been started again since it got the place of this number.
    pub(crate) fn leave_raw(&self, sandbox: &SandboxId, number: u64) {
        self.hall().pass_on(|places| places.leave_raw(sandbox, number));
        self.moved.send_replace(());
    }

    /// Wakes whoever looks for a place, when it may be worth another look.
    pub(crate) fn moved(&self) -> watch::Receiver<()> {
        self.moved.subscribe()
    }

    /// Every sandbox that has a place and no session, with the place's number.
    pub(crate) fn all_raw(&self) -> Vec<(SandboxId, u64)> {
        self.hall().places.all_raw()
    }
}

impl Hall {
    fn pass_on(&mut self, change: impl FnOnce(&mut Places) -> Vec<(SessionId, Word)>) {
        for (session, word) in change(&mut self.places) {
            let input = match word {
                Word::Given { ticket } => Input::PlaceGiven { ticket },
                Word::Wait { ticket, limit, position } => {
                    Input::PlaceMoved { ticket, limit, position }
                }
                Word::Needed => Input::PlaceNeeded,
            };
            // A driver that has just ended leaves by itself.
            if let Some(notes) = self.notes.get(&session) {
                let _ = notes.send(Note::Input(input, Vec::new()));
            }
        }
    }
}

/// People are told apart by their address, however it is spelled.
fn person(email: &str) -> String {
    email.to_ascii_lowercase()
}

fn standing(state: &State, busy: bool) -> Standing {
    match (&state.machine, state.waiting) {
        (Machine::Absent, Some(waiting)) => Standing::Waits { ticket: waiting.ticket },
        (Machine::Absent, None) => Standing::Away,
        (machine, _) => Standing::Holds {
            idle_since: state.idle_since(busy),
            leaving: state.ceding || matches!(machine, Machine::Ending { .. }),
        },
    }
}
