//! Turns persisted actions into writes of the store.

use std::sync::Arc;

use harvest_proto::{
    Event, EventBody, StateReason, Timestamp, TurnId,
    api::{Prompt, PromptStatus, SessionState},
};
use harvest_store::{DriverState, NewPrompt, Write};

use crate::decide::{Action, Decision, State};

/// Appends the writes of a persisted action; an effect has none.
pub(super) fn push(action: &Action, at: Timestamp, writes: &mut Vec<Write>) {
    match action {
        Action::SetPromptStatus { prompt, from, to } => {
            writes.push(Write::PromptStatus { prompt: prompt.clone(), from: *from, to: *to });
            if *to == PromptStatus::Cancelled {
                writes.push(event(at, None, EventBody::PromptCancelled { prompt: prompt.clone() }));
            }
        }
        Action::ReorderQueue { queue, moved } => {
            writes.push(Write::QueueOrder(queue.clone()));
            if let Some((prompt, position)) = moved {
                let body = EventBody::PromptMoved { prompt: prompt.clone(), position: *position };
                writes.push(event(at, None, body));
            }
        }
        Action::TurnStarted { turn, number, prompt } => {
            let (turn, prompt) = (turn.clone(), prompt.clone());
            writes.push(Write::TurnInsert { turn, number: *number, prompt, at });
        }
        Action::TurnEnded { turn, prompt, outcome, error, millis } => {
            writes.push(Write::TurnEnd { turn: turn.clone(), outcome: *outcome, at });
            if error.is_some() {
                let body = EventBody::TurnEnded {
                    prompt: prompt.clone(),
                    outcome: *outcome,
                    error: error.clone(),
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
            let (snapshot, millis) = (snapshot.clone(), *millis);
            writes.push(event(at, turn, EventBody::SnapshotTaken { snapshot, kind, millis }));
        }
        Action::Restored { snapshot, turn } => {
            let body = EventBody::Restored {
                snapshot: snapshot.clone(),
                detail: format!("turn {turn} of this session"),
            };
            writes.push(event(at, None, body));
        }
        Action::ReportPosition { position } => {
            writes.push(event(at, None, EventBody::Waiting { position: *position }));
        }
        Action::SandboxEnded { sandbox, reason } => {
            let body = EventBody::SandboxEnded { sandbox: sandbox.clone(), reason: reason.clone() };
            writes.push(event(at, None, body));
        }
        Action::SetPublicState { state, reason, detail } => {
            let body =
                EventBody::StateChanged { state: *state, reason: *reason, detail: detail.clone() };
            writes.push(event(at, None, body));
        }
        _ => {}
    }
}

pub(super) fn state(state: &State, json: String) -> Write {
    Write::DriverState(DriverState {
        json,
        state: state.public.state,
        reason: state.public.reason,
        sandbox: state.sandbox_id().cloned(),
        epoch: state.epoch,
        snapshot: state.latest_snapshot.clone(),
    })
}

/// An event that the server itself reports.
pub(crate) fn event(at: Timestamp, turn: Option<TurnId>, body: EventBody) -> Write {
    Write::Event { at, turn, body: Box::new(body) }
}

/// The first event of every session.
pub(crate) fn created(at: Timestamp) -> Write {
    let (state, reason) = (SessionState::Queued, StateReason::Created);
    event(at, None, EventBody::StateChanged { state, reason, detail: None })
}

/// A new prompt as the commit of its decision stored it.
pub(super) fn stored_prompt(new: NewPrompt, decision: &Decision, events: &[Arc<Event>]) -> Prompt {
    let NewPrompt { id, author, at, .. } = new;
    // The text as stored may differ: NUL characters are replaced.
    let queued = events.iter().find_map(|event| match &event.body {
        EventBody::PromptQueued { prompt, text, .. } if *prompt == id => {
            Some((event.seq, text.clone()))
        }
        _ => None,
    });
    let (seq, text) = queued.expect("a prompt is stored with its event");
    let status = decision.actions.iter().find_map(|action| match action {
        Action::SetPromptStatus { prompt, to, .. } if *prompt == id => Some(*to),
        _ => None,
    });
    let turn = decision.actions.iter().find_map(|action| match action {
        Action::TurnStarted { turn, prompt, .. } if *prompt == id => Some(turn.clone()),
        _ => None,
    });
    // An answer to the agent's question is in no queue.
    let index = decision.state.queue.iter().position(|queued| *queued == id);
    let position = index.map(|index| u32::try_from(index + 1).unwrap_or(u32::MAX));
    let status = status.unwrap_or(PromptStatus::Queued);
    Prompt { id, text, author, status, position, turn, seq, created_at: at }
}

/// Whether the action is written rather than executed.
pub(super) const fn is_persisted(action: &Action) -> bool {
    matches!(
        action,
        Action::SetPromptStatus { .. }
            | Action::ReorderQueue { .. }
            | Action::TurnStarted { .. }
            | Action::TurnEnded { .. }
            | Action::SnapshotTaken { .. }
            | Action::SandboxEnded { .. }
            | Action::Restored { .. }
            | Action::ReportPosition { .. }
            | Action::SetPublicState { .. }
    )
}
