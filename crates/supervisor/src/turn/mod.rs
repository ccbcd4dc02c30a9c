//! Turns: one prompt at a time, each carried out once. This is what the bridge talks to; the task
//! that owns the agent is [`driver`].

mod driver;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    rc::Rc,
};

use harvest_proto::{
    PromptId, TurnId,
    bridge::{AgentLaunch, Fault, FaultCode, PromptOrder, PromptProgress, Reply},
};
use tokio::sync::{mpsc, oneshot};

use self::driver::Driver;
use crate::{agents::AgentProcess, capture::describe, supervisor::Supervisor};

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
    seen: RefCell<Vec<(PromptId, PromptProgress)>>,
    /// The turn that is accepted and has not ended: the fence against a second one.
    current: RefCell<Option<TurnId>>,
    requests: RefCell<BTreeSet<String>>,
    /// Set while the agent runs or is being started again.
    driver: RefCell<Option<mpsc::UnboundedSender<Input>>>,
    stopping: Cell<bool>,
}

impl Turns {
    /// Starts the agent; returns when it takes prompts, or its last words.
    pub(crate) async fn start(
        &self,
        supervisor: &Rc<Supervisor>,
        launch: &AgentLaunch,
        cwd: String,
    ) -> Result<(), String> {
        if launch.name != "claude" {
            return Err(format!("there is no agent `{}` here", launch.name));
        }
        let started = AgentProcess::start(supervisor, launch, &cwd, launch.resume).await;
        let agent = started.map_err(|error| format!("{}\nthe agent {}", error.tail, describe(error.exit)))?;
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
            return Err(Fault::new(FaultCode::NotReady, "there is no agent that takes prompts"));
        }
        if self.busy() {
            return Err(Fault::new(FaultCode::Busy, "a turn is in progress"));
        }
        self.seen.borrow_mut().push((order.prompt.clone(), PromptProgress::Running));
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

    /// Every prompt seen in this sandbox.
    pub(crate) fn seen(&self) -> Vec<(PromptId, PromptProgress)> {
        self.seen.borrow().clone()
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
