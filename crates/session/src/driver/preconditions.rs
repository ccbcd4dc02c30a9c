//! Which requests a session accepts in its state, and why it refuses the others.

use crate::{
    decide::{Input, Mode, SandboxState, State},
    error::SessionError,
};

pub(super) fn check_preconditions(state: &State, input: &Input) -> Result<(), SessionError> {
    let archived = state.mode == Mode::Archived;
    let save_unknown = matches!(state.sandbox, SandboxState::SaveUnknown { .. });
    match input {
        Input::PromptQueued { .. } if archived => Err(SessionError::conflict(
            "archived",
            "the session is archived",
            "`harvest resume SESSION` resumes it, `harvest fork SESSION` continues in another one",
        )),
        Input::PromptCancelled { prompt } | Input::PromptMoved { prompt, .. }
            if !state.queue.contains(prompt) =>
        {
            Err(SessionError::conflict(
                "not_queued",
                format!("prompt {prompt} is not queued"),
                "`harvest queue ls SESSION` lists queued prompts; `harvest stop SESSION` stops a running one",
            ))
        }
        Input::Pause | Input::Archive | Input::Restore { .. } if save_unknown => {
            Err(SessionError::conflict(
                "save_unknown",
                "the outcome of the last save is unknown",
                "`harvest resume SESSION` tries to save it again, then resumes",
            ))
        }
        Input::Pause | Input::Terminate if archived => Err(SessionError::conflict(
            "archived",
            "the session is archived",
            "it has no sandbox; `harvest resume SESSION` starts one",
        )),
        Input::Restore { .. } if archived => Err(SessionError::conflict(
            "archived",
            "the session is archived",
            "`harvest resume SESSION` resumes it, `harvest fork SESSION@TURN` continues in another one",
        )),
        Input::Pause
            if matches!(state.sandbox, SandboxState::Absent) && state.latest_snapshot.is_none() =>
        {
            Err(SessionError::conflict(
                "nothing_to_save",
                "the session has never had a sandbox",
                "`harvest send SESSION PROMPT` starts its sandbox",
            ))
        }
        // Code in the sandbox can report, and each report is stored.
        Input::Blocked if state.blocked => Err(SessionError::conflict(
            "already_blocked",
            "this turn has already been reported as blocked",
            "end the turn; the next prompt is the answer",
        )),
        Input::Blocked if state.turn().is_none() => Err(SessionError::conflict(
            "no_turn",
            "no turn is in progress",
            "only an agent at work can be blocked",
        )),
        _ => Ok(()),
    }
}
