//! Prompts: stored in the queue, then sent to the supervisor, as a turn or as an answer.

use std::sync::Arc;

use harvest_proto::{
    PromptId, SessionId, TurnId,
    api::{Prompt, PullRequestMode},
    bridge::{FaultCode, ToSupervisor, TurnRequest},
};
use harvest_store::Write;

use super::{
    ControlFlow, Driver, PromptCommand, UNTITLED,
    images::{self, CopyError},
    past_messages, refuse,
    secrets::mask_prompt,
    writes,
};
use crate::{
    bridge::{Bridge, BridgeError, PendingReply},
    context::Shared,
    decide::Input,
};

const TITLE_CHARACTERS: usize = 80;

impl Driver {
    /// Queues a prompt. Neither the reply nor the effects read it back from the store.
    pub(super) async fn on_prompt(&mut self, command: PromptCommand) -> ControlFlow {
        let PromptCommand { mut new, now, mut writes, reply } = command;
        if !new.attachments.is_empty() && !now && self.state.waits_for_answer() {
            return refuse(reply, images::not_in_an_answer());
        }
        match self.secrets.values(&self.shared).await {
            Ok(values) => writes.extend(mask_prompt(&mut new, &values)),
            Err(error) => return refuse(reply, error.into()),
        }
        let title = title(&new.text);
        let untitled = self.record.session.title == UNTITLED;
        writes.extend(untitled.then(|| Write::Title(title.clone())));
        // The prompts that wait already keep the agent that they were written for.
        if let Some(agent) = new.agent.clone() {
            let session = &self.record.session;
            new.model = new.model.or_else(|| session.model.clone());
            new.effort = new.effort.or(session.effort);
            writes.push(Write::Agent(agent));
            writes.extend(new.model.clone().map(Write::Model));
            writes.extend(new.effort.map(Write::Effort));
        }
        let (agent, model, effort) = (new.agent.clone(), new.model.clone(), new.effort);
        writes.push(Write::PromptInsert(Box::new(new.clone())));
        let input = Input::PromptQueued { prompt: new.id.clone(), now };
        let (decision, events) = match self.commit_once(input, writes).await {
            Ok(committed) => committed,
            Err(error) => return refuse(reply, error),
        };
        if untitled {
            self.record.session.title = title;
        }
        if let Some(agent) = agent {
            let session = &mut self.record.session;
            (session.agent, session.model, session.effort) = (agent, model, effort);
        }
        let prompt = writes::stored_prompt(new, &decision, &events);
        let _ = reply.send(Ok(prompt.clone()));
        self.new_prompt = Some(prompt);
        let flow = self.run_effects(decision).await;
        self.new_prompt = None;
        flow
    }

    /// A prompt that was just queued, or else as it is in the store.
    pub(super) async fn prompt(&mut self, prompt: &PromptId) -> Option<Prompt> {
        match self.new_prompt.take_if(|new| new.id == *prompt) {
            Some(new) => Some(new),
            None => self.shared.store.prompt_get(self.id(), prompt).await.ok(),
        }
    }

    pub(super) async fn send(&mut self, prompt: PromptId, turn: TurnId, number: u32) {
        let Some(row) = self.prompt(&prompt).await else { return };
        let launch = match self.launch(true, Some(&row)) {
            Ok(launch) => launch,
            Err(unknown) => {
                let refused = Input::PromptRefused { prompt, detail: unknown.to_string() };
                let _ = self.report_sender.send(refused.into());
                return;
            }
        };
        self.upstream.send_replace(launch.upstream.clone());
        let failed_checks = self.state.turn().and_then(|turn| turn.failed_checks.clone());
        let synced = self.state.syncs.note.clone();
        let wants_pr = self.record.session.pr_mode.is_some_and(PullRequestMode::is_wanted);
        let order = TurnRequest {
            prompt,
            turn,
            number,
            text: synced.unwrap_or_default() + &failed_checks.unwrap_or_default() + &row.text,
            images: images::files(&row),
            author: row.author.clone(),
            agent: Some(Box::new(launch)),
            history: None,
            save_work: if wants_pr { self.checkouts() } else { Vec::new() },
        };
        let Some(bridge) = self.connection.as_ref().map(|link| link.bridge.clone()) else { return };
        // At once if there is nothing to copy first.
        let posted = order.images.is_empty().then(|| post(&bridge, &order));
        let (shared, session) = (Arc::clone(&self.shared), self.id().clone());
        let reports = self.report_sender.clone();
        self.spawn_attached(async move {
            let input = deliver(&shared, &session, &bridge, &row, order, posted).await;
            if let Some(input) = input {
                let _ = reports.send(input.into());
            }
        });
    }

    pub(super) async fn answer(&mut self, request: String, prompt: PromptId) {
        let Some(row) = self.prompt(&prompt).await else { return };
        self.post(|id| ToSupervisor::Answer { id, request, answer: row.text });
    }
}

/// The title of a session by its first prompt: the first line that is not blank, truncated.
pub(crate) fn title(text: &str) -> String {
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    if line.chars().count() <= TITLE_CHARACTERS {
        return line.to_owned();
    }
    line.chars().take(TITLE_CHARACTERS - 1).chain(['…']).collect()
}

fn post(bridge: &Bridge, order: &TurnRequest) -> Result<PendingReply, BridgeError> {
    let order = Box::new(order.clone());
    bridge.post(|id| ToSupervisor::Prompt { id, prompt: order })
}

/// Whether the supervisor has the prompt. `None` when the connection is lost: the status of the
/// next one tells whether it arrived.
async fn deliver(
    shared: &Shared,
    session: &SessionId,
    bridge: &Bridge,
    row: &Prompt,
    order: TurnRequest,
    posted: Option<Result<PendingReply, BridgeError>>,
) -> Option<Input> {
    let prompt = order.prompt.clone();
    let posted = match posted {
        Some(posted) => posted,
        None => match images::copy(&shared.store, session, row, bridge).await {
            Ok(()) => post(bridge, &order),
            Err(CopyError::Lost) => return None,
            Err(CopyError::Failed(why)) => {
                let detail = format!("cannot copy an image into the sandbox: {why}");
                return Some(Input::PromptRefused { prompt, detail });
            }
        },
    };
    let reply = match posted.ok()?.reply().await {
        Err(BridgeError::Fault(fault)) if fault.code == FaultCode::NeedsHistory => {
            past_messages::send_with_history(&shared.store, session, bridge, order).await
        }
        reply => reply,
    };
    match reply {
        Ok(_) => Some(Input::PromptAccepted { prompt }),
        Err(BridgeError::Fault(fault)) => {
            Some(Input::PromptRefused { prompt, detail: fault.message })
        }
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn title_is_the_first_nonblank_line() {
        assert_eq!(title("\n  Fix the parser \nplease"), "Fix the parser");
        assert_eq!(title(&"x".repeat(200)).chars().count(), TITLE_CHARACTERS);
    }
}
