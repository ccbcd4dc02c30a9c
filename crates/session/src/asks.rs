//! What people ask of a session: prompts in its queue, and the verbs that stop it and set it going.

use harvest_proto::{
    PromptId, SessionId, SnapshotId,
    api::{CreatePrompt, Prompt},
    bridge::Author,
};
use harvest_store::{NewPrompt, Write};

use crate::{
    Sessions,
    decide::{Input, Machine, Rest, State},
    driver::{Command, Handle},
    error::SessionError,
    forks::fork_point,
    wiring::now,
};

// What the ancestors take, and what fits a control frame even if every character is escaped.
const PROMPT_CHARACTERS: usize = 64_000;

const TITLE_CHARACTERS: usize = 80;

impl Sessions {
    /// Queues a prompt; it is on disk when this answers. While the agent asks something, the prompt is
    /// the answer.
    ///
    /// # Errors
    /// When it is empty or too long, or the session takes none.
    pub async fn prompt(
        &self,
        session: &SessionId,
        create: CreatePrompt,
        user: Author,
    ) -> Result<Prompt, SessionError> {
        let new = new_prompt(create.text, create.author.unwrap_or(user))?;
        let id = new.id.clone();
        let handle = self.handle(session).await?;
        let untitled = self.shared.store.session_get(session).await?.session.title == "untitled";
        let title = untitled.then(|| title(&new.text));
        let also = title.map(Write::Title).into_iter().chain(self.made(&id.to_string())).collect();
        let order = |reply| Command::Prompt { new: Box::new(new), now: create.now, also, reply };
        self.or_missing(session, handle.call(order).await).await?;
        Ok(self.shared.store.prompt_get(session, &id).await?)
    }

    pub(crate) async fn ask(
        &self,
        session: &SessionId,
        input: Input,
    ) -> Result<Handle, SessionError> {
        let handle = self.handle(session).await?;
        let answer = handle.ask(input).await;
        self.or_missing(session, answer).await?;
        Ok(handle)
    }

    /// A session's prompts, oldest first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn prompts(&self, session: &SessionId) -> Result<Vec<Prompt>, SessionError> {
        self.shared.store.session_get(session).await?;
        Ok(self.shared.store.prompt_list(session).await?)
    }

    /// Takes a waiting prompt back.
    ///
    /// # Errors
    /// When it does not wait.
    pub async fn prompt_cancel(
        &self,
        session: &SessionId,
        prompt: &PromptId,
    ) -> Result<Prompt, SessionError> {
        self.shared.store.prompt_get(session, prompt).await?;
        self.ask(session, Input::Cancelled { prompt: prompt.clone() }).await?;
        Ok(self.shared.store.prompt_get(session, prompt).await?)
    }

    /// Gives a waiting prompt another place, 1 being the next.
    ///
    /// # Errors
    /// When it does not wait.
    pub async fn prompt_move(
        &self,
        session: &SessionId,
        prompt: &PromptId,
        position: u32,
    ) -> Result<Prompt, SessionError> {
        self.shared.store.prompt_get(session, prompt).await?;
        self.ask(session, Input::Moved { prompt: prompt.clone(), position }).await?;
        Ok(self.shared.store.prompt_get(session, prompt).await?)
    }

    /// Stops the turn in progress. `TurnEnded` tells when it is proven dead.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn stop(&self, session: &SessionId) -> Result<(), SessionError> {
        self.ask(session, Input::Stop).await.map(drop)
    }

    /// Keeps the session's machine on disk and ends it; answers the snapshot once it is there.
    ///
    /// # Errors
    /// When there is nothing to keep, or it could not be kept.
    pub async fn pause(&self, session: &SessionId) -> Result<SnapshotId, SessionError> {
        let handle = self.ask(session, Input::Pause).await?;
        self.rested(session, &handle).await?.disk.ok_or_else(|| {
            SessionError::conflict(
                "nothing_to_keep",
                "the session's machine held no work yet",
                "send it a prompt",
            )
        })
    }

    /// Waits until the session has no machine, or cannot get rid of it.
    pub(crate) async fn rested(
        &self,
        session: &SessionId,
        handle: &Handle,
    ) -> Result<State, SessionError> {
        let rested = handle.until(|state| {
            state.rest == Rest::Open
                || matches!(state.machine, Machine::Absent | Machine::Held { .. })
        });
        let state = self.or_missing(session, rested.await).await?;
        match &state.machine {
            Machine::Held { detail, .. } => Err(save_unknown(detail)),
            Machine::Absent => Ok(state),
            _ => Err(SessionError::conflict(
                "resumed",
                "somebody resumed the session meanwhile",
                "pause it again",
            )),
        }
    }

    /// Goes on, whatever held the session: starts a machine from the newest state.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn resume(&self, session: &SessionId) -> Result<(), SessionError> {
        self.ask(session, Input::Resume).await.map(drop)
    }

    /// Ends the session's machine at once. Its disk is kept; a turn in progress counts as stopped.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn terminate(&self, session: &SessionId) -> Result<(), SessionError> {
        let handle = self.ask(session, Input::Terminate).await?;
        self.rested(session, &handle).await.map(drop)
    }

    /// Goes back to the state after a turn: files and conversation. A turn in progress is stopped first, and
    /// the present state is kept; the turns in between can be gone back to, too. Answers when it is done; it
    /// goes on when nobody waits any more.
    ///
    /// # Errors
    /// When the turn is not known or left no snapshot, or a save of the session is unknown.
    pub async fn restore(&self, session: &SessionId, turn: u32) -> Result<(), SessionError> {
        let source = self.shared.store.session_get(session).await?;
        let turns = self.shared.store.turn_list(session).await?;
        let snapshots = self.shared.store.snapshot_list(session).await?;
        let snapshot = fork_point(&source.session, &turns, &snapshots, Some(turn))?.snapshot;
        let handle = self.ask(session, Input::Restore { snapshot, turn }).await?;
        let done = handle.until(|state| {
            state.restoring.is_none() || matches!(state.machine, Machine::Held { .. })
        });
        let state = self.or_missing(session, done.await).await?;
        match &state.machine {
            Machine::Held { detail, .. } if state.restoring.is_some() => Err(save_unknown(detail)),
            _ => Ok(()),
        }
    }

    /// Puts a session away: its machine is kept on disk, waiting prompts are cancelled.
    ///
    /// # Errors
    /// When there is no such session, or a save of it is unknown.
    pub async fn archive(&self, session: &SessionId) -> Result<(), SessionError> {
        self.ask(session, Input::Archive).await.map(drop)
    }
}

fn save_unknown(detail: &str) -> SessionError {
    SessionError::conflict(
        "save_unknown",
        format!("nobody knows whether the machine was kept: {detail}"),
        "resume the session: the save is tried again first",
    )
}

pub(crate) fn new_prompt(text: String, author: Author) -> Result<NewPrompt, SessionError> {
    if text.trim().is_empty() {
        return Err(SessionError::invalid("invalid_prompt", "a prompt says something"));
    }
    if text.chars().count() > PROMPT_CHARACTERS {
        let what = format!("a prompt has at most {PROMPT_CHARACTERS} characters");
        return Err(SessionError::invalid("invalid_prompt", what));
    }
    Ok(NewPrompt { id: PromptId::random(), text, author, at: now() })
}

/// The first line that says something, cut.
pub(crate) fn title(text: &str) -> String {
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    if line.chars().count() <= TITLE_CHARACTERS {
        return line.to_owned();
    }
    line.chars().take(TITLE_CHARACTERS - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_is_the_first_line_that_says_something() {
        assert_eq!(title("\n  Fix the parser \nplease"), "Fix the parser");
        assert_eq!(title(&"x".repeat(200)).chars().count(), TITLE_CHARACTERS);
    }

    #[test]
    fn an_empty_prompt_is_refused() {
        let author = Author { name: "Ada".into(), email: "ada@example.org".into() };
        assert!(new_prompt(" \n".into(), author.clone()).is_err());
        assert!(new_prompt("x".repeat(PROMPT_CHARACTERS + 1), author).is_err());
    }
}
