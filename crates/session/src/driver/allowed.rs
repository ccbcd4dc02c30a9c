//! What may be asked of a session as things stand, and in words why not.

use crate::{
    decide::{Input, Machine, Rest, State},
    error::SessionError,
};

/// Whether a person may ask this as things stand.
pub(super) fn allowed(state: &State, input: &Input) -> Result<(), SessionError> {
    let archived = state.rest == Rest::Archived;
    let held = matches!(state.machine, Machine::Held { .. });
    match input {
        Input::Queued { .. } if archived => Err(SessionError::conflict(
            "archived",
            "the session is archived",
            "resume it first, or create another",
        )),
        Input::Cancelled { prompt } | Input::Moved { prompt, .. }
            if !state.queue.contains(prompt) =>
        {
            Err(SessionError::conflict(
                "not_queued",
                format!("prompt {prompt} does not wait"),
                "only waiting prompts can be moved or cancelled; stop the turn instead",
            ))
        }
        Input::Pause | Input::Archive | Input::Restore { .. } if held => {
            Err(SessionError::conflict(
                "save_unknown",
                "nobody knows whether the last save worked",
                "resume the session: the save is tried again first",
            ))
        }
        Input::Pause | Input::Terminate if archived => Err(SessionError::conflict(
            "archived",
            "the session is archived",
            "it has no machine any more",
        )),
        Input::Restore { .. } if archived => Err(SessionError::conflict(
            "archived",
            "the session is archived",
            "resume it first, or fork it",
        )),
        Input::Pause if matches!(state.machine, Machine::Absent) && state.disk.is_none() => {
            Err(SessionError::conflict(
                "nothing_to_keep",
                "the session has no machine and never had one",
                "send it a prompt",
            ))
        }
        _ => Ok(()),
    }
}
