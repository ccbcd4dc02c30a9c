//! Turns: one prompt at a time, each carried out once. This is what the bridge talks to; the task
//! that owns the agent is [`driver`].

mod driver;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeSet, VecDeque},
    rc::Rc,
    time::Duration,
};

use harvest_proto::{
    PromptId, TurnId,
    bridge::{AgentLaunch, Fault, FaultCode, PromptOrder, PromptProgress, Reply, Restarts},
};
use tokio::sync::{mpsc, oneshot};

use self::driver::Driver;
use crate::{agents::AgentProcess, supervisor::Supervisor};

// The server asks about the one prompt it has sent last; a client that repeats itself does so soon. All of
// them fit a frame a few times over.
const MAX_SEEN: usize = 1024;

/// What the bridge wants of the driver.
enum Input {
    Prompt(PromptOrder),
    Stop,
    Answer { request: String, answer: String },
    ShutDown(oneshot::Sender<()>),
}

/// What is known of prompts, and the way to the driver.
#[derive(Default)]
pub(crate) struct Turns {
    seen: RefCell<VecDeque<(PromptId, PromptProgress)>>,
    /// The turn that is accepted and has not ended: the fence against a second one.
    current: RefCell<Option<TurnId>>,
    requests: RefCell<BTreeSet<String>>,
    /// Set while the agent runs or is being started again.
    driver: RefCell<Option<mpsc::UnboundedSender<Input>>>,
    stopping: Cell<bool>,
    /// Why there is no driver any more.
    gave_up: RefCell<Option<String>>,
}

impl Turns {
    /// Starts the agent; returns when it takes prompts, or its last words.
    pub(crate) async fn start(
        &self,
        supervisor: &Rc<Supervisor>,
        launch: &AgentLaunch,
        cwd: String,
    ) -> Result<(), String> {
        let started = AgentProcess::start(supervisor, launch, &cwd, launch.resume).await;
        let agent = started.map_err(|error| error.to_string())?;
        let (sender, inputs) = mpsc::unbounded_channel();
        self.driver.replace(Some(sender));
        let driver = Driver::new(Rc::clone(supervisor), launch.clone(), cwd, inputs);
        tokio::task::spawn_local(driver.run(agent));
        Ok(())
    }

    /// Accepts a prompt, or knows it already.
    pub(crate) fn prompt(&self, order: PromptOrder) -> Result<Reply, Fault> {
        if self.seen.borrow().iter().any(|(seen, _)| *seen == order.prompt) {
            return Ok(Reply::Done);
        }
        if self.driver.borrow().is_none() {
            let gave_up = self.gave_up.borrow().clone();
            let reason =
                gave_up.unwrap_or_else(|| "there is no agent that takes prompts".to_owned());
            return Err(Fault::new(FaultCode::NotReady, reason));
        }
        if self.busy() {
            return Err(Fault::new(FaultCode::Busy, "a turn is in progress"));
        }
        self.note(order.prompt.clone());
        self.current.replace(Some(order.turn.clone()));
        self.stopping.set(false);
        self.send(Input::Prompt(order));
        Ok(Reply::Done)
    }

    /// Stops this turn, if it is the one in progress.
    pub(crate) fn stop(&self, turn: &TurnId) -> Result<Reply, Fault> {
        if self.current.borrow().as_ref() != Some(turn) {
            return Err(Fault::new(FaultCode::NotFound, format!("{turn} is not in progress")));
        }
        if !self.stopping.replace(true) {
            self.send(Input::Stop);
        }
        Ok(Reply::Done)
    }

    /// Answers a question of the agent, once.
    pub(crate) fn answer(&self, request: String, answer: String) -> Result<Reply, Fault> {
        if !self.requests.borrow_mut().remove(&request) {
            return Err(Fault::new(
                FaultCode::NotFound,
                format!("nobody waits for an answer to `{request}`"),
            ));
        }
        self.send(Input::Answer { request, answer });
        Ok(Reply::Done)
    }

    // None runs when another one comes, so the oldest has ended.
    fn note(&self, prompt: PromptId) {
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

    /// There will be no agent any more, for this reason.
    fn give_up(&self, reason: String) {
        self.driver.replace(None);
        self.gave_up.replace(Some(reason));
    }

    /// Whether a turn is in progress.
    pub(crate) fn busy(&self) -> bool {
        self.current.borrow().is_some()
    }

    /// Ends the agent in order.
    pub(crate) async fn shut_down(&self) {
        let (done, ended) = oneshot::channel();
        self.send(Input::ShutDown(done));
        // An error means that there is no driver (any more).
        let _no_agent = ended.await;
    }

    fn send(&self, input: Input) {
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

/// How long to wait before the start that follows this many crashes.
fn wait_after(crashes: u32, restarts: Restarts) -> Duration {
    let doublings = crashes.saturating_sub(1).min(32);
    let wait = if crashes == 0 { 0 } else { restarts.first_millis.saturating_mul(1 << doublings) };
    Duration::from_millis(wait.min(restarts.longest_millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crashed_agent_waits_twice_as_long_each_time_and_never_longer_than_a_minute() {
        let waits = |crashes: u32| wait_after(crashes, Restarts::default()).as_secs();
        assert_eq!((0..=7).map(waits).collect::<Vec<_>>(), [0, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(waits(u32::MAX), 60);
    }

    #[test]
    fn a_prompt_seen_is_known_and_the_oldest_are_forgotten() {
        let turns = Turns::default();
        let first = PromptId::random();
        turns.note(first.clone());
        for _ in 1..MAX_SEEN {
            turns.note(PromptId::random());
        }
        assert_eq!(turns.seen()[0].0, first);
        turns.note(PromptId::random());
        assert_eq!(turns.seen().len(), MAX_SEEN);
        assert!(!turns.seen().iter().any(|(seen, _)| *seen == first));
    }
}
