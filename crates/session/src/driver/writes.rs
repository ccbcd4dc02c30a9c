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
    let mut of_turn = None;
    let body = match action.clone() {
        Action::SetPromptStatus { prompt, from, to } => {
            writes.push(Write::PromptStatus { prompt: prompt.clone(), from, to });
            (to == PromptStatus::Cancelled).then_some(EventBody::PromptCancelled { prompt })
        }
        Action::ReorderQueue { queue, moved } => {
            writes.push(Write::QueueOrder(queue));
            moved.map(|(prompt, position)| EventBody::PromptMoved { prompt, position })
        }
        Action::TurnStarted { turn, number, prompt } => {
            writes.push(Write::TurnInsert { turn, number, prompt, at });
            None
        }
        Action::TurnEnded { turn, prompt, outcome, reason, error, millis } => {
            writes.push(Write::TurnEnd { turn: turn.clone(), outcome, reason, at });
            of_turn = Some(turn);
            error.is_some().then_some(EventBody::TurnEnded {
                prompt,
                outcome,
                reason,
                error,
                millis,
            })
        }
        Action::SnapshotTaken { snapshot, kind, turn, millis } => {
            of_turn = turn.clone();
            writes.push(Write::SnapshotInsert { snapshot: snapshot.clone(), kind, turn, at });
            Some(EventBody::SnapshotTaken { snapshot_id: snapshot, kind, millis })
        }
        Action::Restored { snapshot, turn } => {
            let detail = match turn {
                Some(0) => "the start of this session".to_owned(),
                Some(turn) => format!("turn {turn} of this session"),
                None => "a snapshot of this session".to_owned(),
            };
            Some(EventBody::Restored { snapshot_id: snapshot, detail })
        }
        Action::SyncBlocked { report } => Some(*report),
        Action::ReportPosition { position } => Some(EventBody::Waiting { position }),
        Action::SandboxEnded { sandbox, reason } => {
            Some(EventBody::SandboxEnded { sandbox, reason })
        }
        Action::SetPublicState { state, reason, detail } => {
            Some(EventBody::StateChanged { state, reason, detail })
        }
        _ => None,
    };
    writes.extend(body.map(|body| event(at, of_turn, body)));
}

pub(crate) fn state(state: &State, json: String, resting: bool) -> Write {
    Write::DriverState(DriverState {
        json,
        state: state.public.state,
        reason: state.public.reason,
        sandbox: state.sandbox_id().cloned(),
        epoch: state.epoch,
        snapshot: state.latest_snapshot.clone(),
        resting,
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
    let NewPrompt { id, author, agent, model, effort, attachments, at, .. } = new;
    let attachments = attachments.into_iter().map(|attachment| attachment.info).collect();
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
    Prompt {
        id,
        text,
        author,
        agent,
        model,
        effort,
        attachments,
        status,
        position,
        turn,
        seq,
        created_at: at,
    }
}
