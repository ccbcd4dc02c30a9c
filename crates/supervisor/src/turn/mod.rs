//! Turns: one prompt at a time, each executed once. This is the interface for the bridge; the task
//! that owns the agent is [`driver`].

mod driver;
mod past_messages;
mod progress;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeSet, VecDeque},
    rc::Rc,
    time::Duration,
};

use harvest_proto::{
    AgentName, PromptId, TurnId,
    bridge::{AgentLaunch, Fault, FaultCode, PromptProgress, Reply, RestartPolicy, TurnRequest},
};
use tokio::sync::{Notify, mpsc, oneshot};

use self::driver::Driver;
use crate::agents::{AgentContext, AgentProcess, AgentStartError};

// The server asks only about the last prompt, and repeats come soon. The list fits into a frame
// several times.
const MAX_SEEN: usize = 1024;

enum DriverInput {
    Prompt(TurnRequest),
    Stop,
    Answer { request: String, answer: String },
    ShutDown(oneshot::Sender<()>),
}

/// The known prompts and the channel to the driver.
#[derive(Default)]
pub(crate) struct Turns {
    seen: RefCell<VecDeque<(PromptId, PromptProgress)>>,
    /// The accepted turn that has not ended; blocks a second one.
    current: RefCell<Option<TurnId>>,
    requests: RefCell<BTreeSet<String>>,
    /// Set while the agent runs or is being restarted.
    driver: RefCell<Option<mpsc::UnboundedSender<DriverInput>>>,
    stopping: Cell<bool>,
    /// The agent does not remember all earlier turns, or it is being restarted and may not.
    forgot: Cell<bool>,
    /// The agent that runs.
    agent: RefCell<Option<AgentName>>,
    /// Notified when a turn begins or continues after an answer.
    pub(crate) resumed: Notify,
    /// Why the checkouts cannot be worked on.
    sync_failure: RefCell<Option<String>>,
    /// Why the agent is not restarted any more.
    gave_up: RefCell<Option<String>>,
}

impl Turns {
    /// Starts the agent; returns when it is ready.
    pub(crate) async fn start(
        self: &Rc<Self>,
        context: AgentContext,
    ) -> Result<(), AgentStartError> {
        let agent = AgentProcess::start(&context, context.launch.resume).await?;
        let (sender, inputs) = mpsc::unbounded_channel();
        self.driver.replace(Some(sender));
        self.forgot.set(agent.is_new);
        self.agent.replace(Some(context.launch.name.clone()));
        let driver = Driver {
            turns: Rc::clone(self),
            context,
            inputs,
            waiting: None,
            missed_turns: false,
            crashes: 0,
            last_exit: None,
        };
        tokio::task::spawn_local(driver.run(agent));
        Ok(())
    }

    /// Accepts a prompt; a known one is only acknowledged.
    pub(crate) fn prompt(&self, request: TurnRequest) -> Result<Reply, Fault> {
        if self.seen.borrow().iter().any(|(seen, _)| *seen == request.prompt) {
            return Ok(Reply::Done);
        }
        if self.driver.borrow().is_none() {
            let gave_up = self.gave_up.borrow().clone();
            let reason = gave_up.unwrap_or_else(|| "no agent is running".to_owned());
            return Err(Fault::new(FaultCode::NotReady, reason));
        }
        if let Some(reason) = self.sync_failure.borrow().clone() {
            return Err(Fault::new(FaultCode::NotReady, reason));
        }
        if self.busy() {
            return Err(Fault::new(FaultCode::Busy, "a turn is in progress"));
        }
        let other = |wanted: &AgentLaunch| self.agent.borrow().as_ref() != Some(&wanted.name);
        let forgot = self.forgot.get() || request.agent.as_deref().is_some_and(other);
        if forgot && request.number > 1 && request.history.is_none() {
            return Err(Fault::new(FaultCode::NeedsHistory, "the agent remembers no earlier turn"));
        }
        self.remember(request.prompt.clone());
        self.current.replace(Some(request.turn.clone()));
        self.stopping.set(false);
        self.send(DriverInput::Prompt(request));
        self.resumed.notify_one();
        Ok(Reply::Done)
    }

    /// Stops this turn, if it is the one in progress.
    pub(crate) fn stop(&self, turn: &TurnId) -> Result<Reply, Fault> {
        if self.current.borrow().as_ref() != Some(turn) {
            return Err(Fault::not_found(format!("turn {turn} is not in progress")));
        }
        if !self.stopping.replace(true) {
            self.send(DriverInput::Stop);
        }
        Ok(Reply::Done)
    }

    /// Answers a question of the agent, once.
    pub(crate) fn answer(&self, request: String, answer: String) -> Result<Reply, Fault> {
        if !self.requests.borrow_mut().remove(&request) {
            return Err(Fault::not_found(format!("there is no open question `{request}`")));
        }
        self.send(DriverInput::Answer { request, answer });
        self.resumed.notify_one();
        Ok(Reply::Done)
    }

    // Prompts run one at a time, so a removed one has ended.
    fn remember(&self, prompt: PromptId) {
        let mut seen = self.seen.borrow_mut();
        if seen.len() == MAX_SEEN {
            seen.pop_front();
        }
        seen.push_back((prompt, PromptProgress::Running));
    }

    /// The last prompts seen in this sandbox, oldest first.
    pub(crate) fn seen(&self) -> Vec<(PromptId, PromptProgress)> {
        self.seen.borrow().iter().cloned().collect()
    }

    /// Refuses all further prompts.
    pub(crate) fn sync_failed(&self, reason: String) {
        self.sync_failure.replace(Some(reason));
    }

    fn give_up(&self, reason: String) {
        self.driver.replace(None);
        self.gave_up.replace(Some(reason));
    }

    /// Whether a turn is in progress.
    pub(crate) fn busy(&self) -> bool {
        self.current.borrow().is_some()
    }

    /// Whether a turn is in progress that does not wait for an answer.
    pub(crate) fn is_working(&self) -> bool {
        self.busy() && self.requests.borrow().is_empty()
    }

    /// Shuts the agent down gracefully.
    pub(crate) async fn shut_down(&self) {
        let (done, ended) = oneshot::channel();
        self.send(DriverInput::ShutDown(done));
        // An error means that there is no driver.
        let _no_agent = ended.await;
    }

    fn send(&self, input: DriverInput) {
        if let Some(driver) = &*self.driver.borrow() {
            let _driver_has_ended = driver.send(input);
        }
    }

    fn ended(&self, prompt: &PromptId) {
        self.current.replace(None);
        self.requests.borrow_mut().clear();
        for (seen, progress) in self.seen.borrow_mut().iter_mut() {
            if seen == prompt {
                *progress = PromptProgress::Ended;
            }
        }
    }
}

/// The backoff before a restart after this many crashes.
fn restart_delay(crashes: u32, restarts: RestartPolicy) -> Duration {
    let doublings = crashes.saturating_sub(1).min(32);
    let wait = if crashes == 0 { 0 } else { restarts.first_millis.saturating_mul(1 << doublings) };
    Duration::from_millis(wait.min(restarts.longest_millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_delay_doubles_up_to_a_minute() {
        let waits = |crashes: u32| restart_delay(crashes, RestartPolicy::default()).as_secs();
        assert_eq!((0..=7).map(waits).collect::<Vec<_>>(), [0, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(waits(u32::MAX), 60);
    }

    #[test]
    fn oldest_seen_prompts_are_forgotten() {
        let turns = Turns::default();
        let first = PromptId::random();
        turns.remember(first.clone());
        for _ in 1..MAX_SEEN {
            turns.remember(PromptId::random());
        }
        assert_eq!(turns.seen()[0].0, first);
        turns.remember(PromptId::random());
        assert_eq!(turns.seen().len(), MAX_SEEN);
        assert!(!turns.seen().iter().any(|(seen, _)| *seen == first));
    }
}
