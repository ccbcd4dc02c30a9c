//! The verbs of a session: prompt, stop, pause, resume, terminate, restore, archive.

use harvest_proto::{
    AgentName, PromptId, PromptText, SessionId, SnapshotId,
    api::{CreatePrompt, Prompt, Session},
    bridge::Author,
};
use harvest_store::NewPrompt;

use super::{Sessions, attachments};
use crate::{
    decide::{Input, Mode, SandboxState, State},
    driver::{Command, DriverHandle, PromptCommand},
    error::SessionError,
    repositories::owners_of,
    sandboxes::StartFrom,
    wall_clock::now,
};

impl Sessions {
    /// Queues a prompt; it is stored when this returns. A prompt during a question of the agent is
    /// the answer.
    ///
    /// # Errors
    /// When the session is archived, or cannot use the agent or the model.
    pub async fn prompt(
        &self,
        session: &SessionId,
        create: CreatePrompt,
        user: Author,
    ) -> Result<Prompt, SessionError> {
        if create.agent.is_some() || create.model.is_some() {
            let record = self.shared.store.session_get(session).await?;
            let (session, owners) = (&record.session, owners_of(&record));
            let agent = create.agent.as_ref().unwrap_or(&session.agent);
            let model = create.model.as_ref().or(session.model.as_ref());
            self.check_model_key(agent, model, &owners).await?;
            if create.agent.is_some() {
                self.check_other_agent(agent, session).await?;
            }
        }
        let (agent, model, effort) = (create.agent, create.model, create.effort);
        let attachments = attachments::check(create.attachments)?;
        let plain = new_prompt(create.text, create.author.unwrap_or(user));
        let new = NewPrompt { agent, model, effort, attachments, ..plain };
        let now = create.now;
        let writes = self.created_write(&new.id.to_string()).into_iter().collect();
        let handle = self.handle(session).await?;
        let command = |reply| Command::Prompt(Box::new(PromptCommand { new, now, writes, reply }));
        self.not_found_if_deleted(session, handle.call(command).await).await
    }

    /// Refuses an agent that the session's disk does not have.
    async fn check_other_agent(
        &self,
        agent: &AgentName,
        session: &Session,
    ) -> Result<(), SessionError> {
        let repositories = &self.shared.repositories;
        let repository = match session.repositories.first() {
            Some(first) => Some(repositories.get(&first.name).await?),
            None => None,
        };
        let disk = match session.snapshot_id.as_ref() {
            Some(id) => {
                let provider = &self.shared.sandboxes.provider;
                let exists = provider.can_start_from(&StartFrom::Snapshot(id.clone())).await?;
                exists.then_some(id)
            }
            None => None,
        };
        Ok(repositories.check_agent(agent, repository.as_ref(), disk).await?)
    }

    /// Applies an input, and returns the handle to wait for its outcome.
    pub(super) async fn apply(
        &self,
        session: &SessionId,
        input: Input,
    ) -> Result<DriverHandle, SessionError> {
        let handle = self.handle(session).await?;
        let applied = handle.apply(input).await;
        self.not_found_if_deleted(session, applied).await?;
        Ok(handle)
    }

    /// A session's prompts, oldest first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn prompts(&self, session: &SessionId) -> Result<Vec<Prompt>, SessionError> {
        let prompts = self.shared.store.prompt_list(session).await?;
        self.exists_if_empty(session, prompts).await
    }

    /// Cancels a queued prompt.
    ///
    /// # Errors
    /// When it is not queued.
    pub async fn prompt_cancel(
        &self,
        session: &SessionId,
        prompt: &PromptId,
    ) -> Result<Prompt, SessionError> {
        self.change_prompt(session, prompt, Input::PromptCancelled { prompt: prompt.clone() }).await
    }

    /// Moves a queued prompt to another position; 1 is the next.
    ///
    /// # Errors
    /// When it is not queued.
    pub async fn prompt_move(
        &self,
        session: &SessionId,
        prompt: &PromptId,
        position: u32,
    ) -> Result<Prompt, SessionError> {
        let input = Input::PromptMoved { prompt: prompt.clone(), position };
        self.change_prompt(session, prompt, input).await
    }

    /// A prompt that does not exist is reported as missing rather than as not queued.
    async fn change_prompt(
        &self,
        session: &SessionId,
        prompt: &PromptId,
        input: Input,
    ) -> Result<Prompt, SessionError> {
        let changed = self.apply(session, input).await;
        let stored = self.shared.store.prompt_get(session, prompt).await;
        match (changed, stored) {
            (Err(SessionError::Conflict { .. }), Err(missing)) => Err(missing.into()),
            (changed, stored) => changed.and(stored.map_err(Into::into)),
        }
    }

    /// Requests the stop of the turn in progress; its processes are dead once `TurnEnded` is
    /// stored.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn stop(&self, session: &SessionId) -> Result<(), SessionError> {
        self.apply(session, Input::Stop).await.map(drop)
    }

    /// Saves the session's sandbox and stops it; returns the snapshot.
    ///
    /// # Errors
    /// When there is nothing to save, or the save failed.
    pub async fn pause(&self, session: &SessionId) -> Result<SnapshotId, SessionError> {
        let handle = self.apply(session, Input::Pause).await?;
        self.wait_until_stopped(session, &handle).await?.latest_snapshot.ok_or_else(|| {
            SessionError::conflict(
                "nothing_to_save",
                "the session's sandbox holds no work yet",
                "`harvest send SESSION PROMPT` gives it work",
            )
        })
    }

    /// Waits until the session's sandbox has stopped, or cannot be saved.
    pub(super) async fn wait_until_stopped(
        &self,
        session: &SessionId,
        handle: &DriverHandle,
    ) -> Result<State, SessionError> {
        let stopped = handle.wait_for(|state| {
            state.mode == Mode::Active
                || matches!(state.sandbox, SandboxState::Absent | SandboxState::SaveUnknown { .. })
        });
        let state = self.not_found_if_deleted(session, stopped.await).await?;
        match &state.sandbox {
            SandboxState::SaveUnknown { detail, .. } => Err(save_unknown(detail)),
            SandboxState::Absent => Ok(state),
            _ => Err(SessionError::conflict(
                "resumed",
                "the session was resumed meanwhile",
                "`harvest pause SESSION` pauses it again",
            )),
        }
    }

    /// Starts a sandbox from the latest snapshot; retries a save whose outcome is unknown first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn resume(&self, session: &SessionId) -> Result<(), SessionError> {
        self.apply(session, Input::Resume).await.map(drop)
    }

    /// Kills the session's sandbox at once. Its disk is saved; a turn in progress counts as
    /// stopped.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn terminate(&self, session: &SessionId) -> Result<(), SessionError> {
        let handle = self.apply(session, Input::Terminate).await?;
        self.wait_until_stopped(session, &handle).await.map(drop)
    }

    /// Archives a session: its sandbox is saved and stopped, queued prompts are cancelled.
    ///
    /// # Errors
    /// When there is no such session, or the outcome of a save is unknown.
    pub async fn archive(&self, session: &SessionId) -> Result<(), SessionError> {
        self.apply(session, Input::Archive).await.map(drop)
    }
}

pub(super) fn save_unknown(detail: &str) -> SessionError {
    SessionError::conflict(
        "save_unknown",
        format!("the outcome of the last save is unknown: {detail}"),
        "`harvest resume SESSION` tries to save it again, then resumes",
    )
}

pub(super) fn new_prompt(text: PromptText, author: Author) -> NewPrompt {
    NewPrompt {
        id: PromptId::random(),
        text,
        author,
        agent: None,
        model: None,
        effort: None,
        attachments: Vec::new(),
        at: now(),
    }
}
