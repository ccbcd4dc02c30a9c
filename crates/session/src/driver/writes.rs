//! What of a step is written, in the store's words.

use harvest_proto::{EventBody, Timestamp, TurnId, api::PromptStatus};
use harvest_store::Write;

use super::snapshot_event;
use crate::decide::{Action, State};

/// Adds what an action keeps.
pub(super) fn of(action: &Action, at: Timestamp, writes: &mut Vec<Write>) {
    match action {
        Action::Prompt { prompt, from, to } => {
            writes.push(Write::PromptStatus { prompt: prompt.clone(), from: *from, to: *to });
            if *to == PromptStatus::Cancelled {
                writes.push(event(at, None, EventBody::PromptCancelled { prompt: prompt.clone() }));
            }
        }
        Action::Order { queue, moved } => {
            writes.push(Write::PromptOrder(queue.clone()));
            if let Some((prompt, position)) = moved {
                let body = EventBody::PromptMoved { prompt: prompt.clone(), position: *position };
                writes.push(event(at, None, body));
            }
        }
        Action::TurnBegun { turn, number, prompt } => {
            let (turn, prompt) = (turn.clone(), prompt.clone());
            writes.push(Write::TurnInsert { turn, number: *number, prompt, at });
        }
        Action::TurnOver { turn, prompt, outcome, told, millis } => {
            writes.push(Write::TurnEnd { turn: turn.clone(), outcome: *outcome, at });
            if told.is_some() {
                let body = EventBody::TurnEnded {
                    prompt: prompt.clone(),
                    outcome: *outcome,
                    error: told.clone(),
                    millis: *millis,
                };
                writes.push(event(at, Some(turn.clone()), body));
            }
        }
        Action::SnapshotTaken { snapshot, kind, turn, millis } => {
            let (kind, turn) = (*kind, turn.clone());
            writes.push(Write::SnapshotInsert {
                snapshot: snapshot.clone(),
                kind,
                turn: turn.clone(),
                at,
            });
            writes.push(event(at, turn, snapshot_event(snapshot, kind, *millis)));
        }
        Action::Restored { snapshot, turn } => {
            let body = EventBody::Restored {
                snapshot: snapshot.clone(),
                detail: format!("turn {turn} of this session"),
            };
            writes.push(event(at, None, body));
        }
        Action::Wait { position } => {
            writes.push(event(at, None, EventBody::Waiting { position: *position }));
        }
        Action::SandboxOver { sandbox, reason } => {
            let body = EventBody::SandboxEnded { sandbox: sandbox.clone(), reason: reason.clone() };
            writes.push(event(at, None, body));
        }
        Action::Show { state, reason, detail } => {
            let body = EventBody::StateChanged {
                state: *state,
                reason: reason.clone(),
                detail: detail.clone(),
            };
            writes.push(event(at, None, body));
        }
        _ => {}
    }
}

/// The state itself.
pub(super) fn drive(state: &State, drive: String) -> Write {
    Write::Drive {
        drive,
        state: state.shown.state,
        reason: state.shown.reason.clone(),
        sandbox: state.sandbox().cloned(),
        epoch: state.epoch,
        snapshot: state.disk.clone(),
    }
}

/// An event of the server's own.
pub(crate) fn event(at: Timestamp, turn: Option<TurnId>, body: EventBody) -> Write {
    Write::Event { at, turn, body: Box::new(body) }
}

/// Kept actions have been written when this is asked.
pub(super) const fn is_kept(action: &Action) -> bool {
    matches!(
        action,
        Action::Prompt { .. }
            | Action::Order { .. }
            | Action::TurnBegun { .. }
            | Action::TurnOver { .. }
            | Action::SnapshotTaken { .. }
            | Action::SandboxOver { .. }
            | Action::Restored { .. }
            | Action::Wait { .. }
            | Action::Show { .. }
    )
}
