//! The one task that owns the agent. It carries prompts out, stops them with proof, and starts a
//! crashed agent again.
//!
//! ```text
//! idle ──prompt──▶ in a turn ──result and idle──▶ idle
//!   │                 ├─stop: interrupt ≤ 10 s, kill all, cgroup empty─▶ TurnEnded Stopped ─▶ start again
//!   └──crash──────────┴─crash: AgentExited, TurnEnded Failed, kill all──▶ wait 2^n s ─────▶ start again
//! ```

use std::{
    pin::pin,
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::{
    EventBody, TurnId,
    bridge::{AgentLaunch, Exit, PromptOrder},
    event::TurnOutcome,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};

use super::Input;
use crate::{
    agents::{AgentProcess, News, Signal},
    capture::describe,
    git::Git,
    log,
    supervisor::Supervisor,
    users::AGENT_USER,
};

// What an interrupted agent gets to save its conversation; it takes 50 ms when all is well.
const INTERRUPT_LIMIT: Duration = Duration::from_secs(10);

// Together the 15 s in which everything must be proven dead.
const KILL_LIMIT: Duration = Duration::from_secs(3);
const CLEAR_LIMIT: Duration = Duration::from_secs(12);

const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A prompt being carried out.
struct Turn {
    order: PromptOrder,
    began: Instant,
}

/// Why a turn's loop ended.
enum Ending {
    Done(Result<(), String>),
    /// It was told to give up, for this reason, and did not.
    Stuck(String),
    Stopped,
    Crashed(Exit),
    ShutDown(oneshot::Sender<()>),
}

/// Owns the agent.
pub(super) struct Driver {
    supervisor: Rc<Supervisor>,
    launch: AgentLaunch,
    cwd: String,
    inputs: mpsc::UnboundedReceiver<Input>,
    /// A prompt that waits for the agent to be up again.
    waiting: Option<Turn>,
    crashes: u32,
    last_exit: Option<Exit>,
}

impl Driver {
    pub(super) fn new(
        supervisor: Rc<Supervisor>,
        launch: AgentLaunch,
        cwd: String,
        inputs: mpsc::UnboundedReceiver<Input>,
    ) -> Self {
        Self { supervisor, launch, cwd, inputs, waiting: None, crashes: 0, last_exit: None }
    }

    /// Drives until shutdown or until the agent cannot be kept running.
    pub(super) async fn run(mut self, agent: AgentProcess) {
        let mut running = Some(agent);
        loop {
            running = match (running, self.waiting.take()) {
                (Some(agent), Some(turn)) => self.carry_out(agent, turn).await,
                (Some(agent), None) => self.idle(agent).await,
                (None, waiting) => {
                    self.waiting = waiting;
                    self.start_again().await
                }
            };
            if running.is_none()
                && (self.crashes > self.launch.restarts.times || self.inputs.is_closed())
            {
                return self.give_up();
            }
        }
    }

    // `None` when the agent is gone.
    async fn idle(&mut self, mut agent: AgentProcess) -> Option<AgentProcess> {
        tokio::select! {
            input = self.inputs.recv() => match input {
                Some(Input::ShutDown(done)) => {
                    self.shut_down(agent, done).await;
                    None
                }
                Some(input) => {
                    self.take(input);
                    Some(agent)
                }
                None => None,
            },
            news = agent.next() => match news {
                News::Signals(signals) => {
                    self.tell(None, signals);
                    Some(agent)
                }
                News::Exited(exit) => {
                    let tail = agent.last_words();
                    self.crashed(exit, tail);
                    self.clear(agent).await;
                    None
                }
            },
        }
    }

    // Outside a turn: a prompt waits for its turn to begin, a stop ends it before it began.
    fn take(&mut self, input: Input) {
        match input {
            Input::Prompt(order) => {
                let body =
                    EventBody::TurnStarted { prompt: order.prompt.clone(), number: order.number };
                self.supervisor.outbox.push(Some(&order.turn), body);
                self.waiting = Some(Turn { order, began: Instant::now() });
            }
            Input::Stop => {
                if let Some(turn) = self.waiting.take() {
                    self.end(&turn, TurnOutcome::Stopped, None);
                }
            }
            Input::Answer { .. } | Input::ShutDown(_) => {}
        }
    }

    async fn carry_out(&mut self, mut agent: AgentProcess, turn: Turn) -> Option<AgentProcess> {
        self.identify(&turn).await;
        agent.prompt(&turn.order);
        let ending = self.turn(&mut agent, &turn.order.turn).await;
        self.close_requests(&mut agent, &turn.order.turn);
        match ending {
            Ending::Done(result) => {
                self.crashes = 0;
                let outcome =
                    if result.is_ok() { TurnOutcome::Completed } else { TurnOutcome::Failed };
                self.end(&turn, outcome, result.err());
                return Some(agent);
            }
            Ending::Stuck(reason) => {
                self.clear(agent).await;
                self.end(&turn, TurnOutcome::Failed, Some(reason));
            }
            Ending::Stopped => {
                self.interrupt(&mut agent, &turn.order.turn).await;
                self.clear(agent).await;
                self.end(&turn, TurnOutcome::Stopped, None);
            }
            Ending::Crashed(exit) => {
                self.crashed(exit, agent.last_words());
                self.clear(agent).await;
                self.end(&turn, TurnOutcome::Failed, Some(format!("the agent {}", describe(exit))));
            }
            Ending::ShutDown(done) => {
                self.interrupt(&mut agent, &turn.order.turn).await;
                self.end(&turn, TurnOutcome::Stopped, Some("the sandbox was shut down".to_owned()));
                self.shut_down(agent, done).await;
            }
        }
        None
    }

    async fn turn(&mut self, agent: &mut AgentProcess, turn: &TurnId) -> Ending {
        let mut hopeless = None;
        let mut deadline = None;
        loop {
            let time_is_up = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                input = self.inputs.recv() => match input {
                    Some(Input::Stop) => return Ending::Stopped,
                    Some(Input::Answer { request, answer }) => {
                        let signals = agent.answer(&request, &answer);
                        self.tell(Some(turn), signals);
                    }
                    Some(Input::ShutDown(done)) => return Ending::ShutDown(done),
                    Some(Input::Prompt(_)) | None => {}
                },
                () = time_is_up => return Ending::Stuck(hopeless.unwrap_or_default()),
                news = agent.next() => match news {
                    News::Exited(exit) => return Ending::Crashed(exit),
                    News::Signals(signals) => for signal in self.tell(Some(turn), signals) {
                        match signal {
                            Signal::Done(result) => {
                                return Ending::Done(hopeless.map_or(result, Err));
                            }
                            Signal::Hopeless(reason) if hopeless.is_none() => {
                                agent.interrupt();
                                hopeless = Some(reason);
                                deadline = Some(tokio::time::Instant::now() + INTERRUPT_LIMIT);
                            }
                            _ => {}
                        }
                    },
                },
            }
        }
    }

    // Pushes events and notes requests; the rest is the caller's.
    fn tell(&self, turn: Option<&TurnId>, signals: Vec<Signal>) -> Vec<Signal> {
        let mut rest = Vec::new();
        for signal in signals {
            match signal {
                Signal::Event(body) => self.supervisor.outbox.push(turn, body),
                Signal::Asked { request } => {
                    self.supervisor.turns.requests.borrow_mut().insert(request);
                }
                other => rest.push(other),
            }
        }
        rest
    }

    fn close_requests(&self, agent: &mut AgentProcess, turn: &TurnId) {
        for request in agent.open_requests() {
            self.supervisor
                .outbox
                .push(Some(turn), EventBody::RequestClosed { request, answer: None });
        }
    }

    async fn identify(&self, turn: &Turn) {
        let Ok(user) = self.supervisor.user(Some(AGENT_USER)) else { return };
        let git = Git { supervisor: &self.supervisor, user: &user };
        if let Err(tail) = git.identity(&turn.order.author).await {
            let message = format!("commits do not carry the author's name: {tail}");
            self.supervisor.outbox.push(Some(&turn.order.turn), EventBody::Warning { message });
        }
    }

    // Asks first, so that the conversation is saved up to here.
    async fn interrupt(&self, agent: &mut AgentProcess, turn: &TurnId) {
        agent.interrupt();
        let calm = async {
            loop {
                match agent.next().await {
                    News::Exited(_) => return,
                    News::Signals(signals) => {
                        if self
                            .tell(Some(turn), signals)
                            .iter()
                            .any(|one| matches!(one, Signal::Done(_)))
                        {
                            return;
                        }
                    }
                }
            }
        };
        let _killed_next = timeout(INTERRUPT_LIMIT, calm).await;
    }

    // Everything the agent started is dead when this returns; where that cannot be proven the
    // sandbox dies instead.
    async fn clear(&self, agent: AgentProcess) {
        let killed = agent.kill(KILL_LIMIT).await;
        let group = &self.supervisor.agent_group;
        if !group.clear(CLEAR_LIMIT).await || !(killed || group.proves()) {
            log::line(format_args!("the agent's processes do not die: the sandbox ends"));
            std::process::exit(1);
        }
    }

    fn crashed(&mut self, exit: Exit, tail: String) {
        self.crashes += 1;
        self.last_exit = Some(exit);
        let restarts = self.crashes <= self.launch.restarts.times;
        self.supervisor.outbox.push(None, EventBody::AgentExited { exit, tail, restarts });
    }

    fn end(&self, turn: &Turn, outcome: TurnOutcome, error: Option<String>) {
        let prompt = turn.order.prompt.clone();
        let millis = u64::try_from(turn.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let body = EventBody::TurnEnded { prompt: prompt.clone(), outcome, error, millis };
        self.supervisor.outbox.push(Some(&turn.order.turn), body);
        self.supervisor.turns.ended(&prompt);
    }

    // After a while when it crashed, at once after a stop.
    async fn start_again(&mut self) -> Option<AgentProcess> {
        let wait = super::wait_after(self.crashes, self.launch.restarts);
        let (supervisor, launch, cwd) =
            (Rc::clone(&self.supervisor), self.launch.clone(), self.cwd.clone());
        let mut start = pin!(async move {
            sleep(wait).await;
            AgentProcess::start(&supervisor, &launch, &cwd, true).await
        });
        loop {
            tokio::select! {
                started = &mut start => return match started {
                    Ok(agent) => Some(agent),
                    Err(error) => {
                        self.crashed(error.exit(), error.tail().to_owned());
                        None
                    }
                },
                input = self.inputs.recv() => match input {
                    Some(Input::ShutDown(done)) => {
                        self.inputs.close();
                        let _nobody_waits = done.send(());
                        return None;
                    }
                    Some(input) => self.take(input),
                    None => return None,
                },
            }
        }
    }

    async fn shut_down(&mut self, agent: AgentProcess, done: oneshot::Sender<()>) {
        self.inputs.close();
        agent.close(CLOSE_LIMIT).await;
        self.supervisor.agent_group.clear(CLEAR_LIMIT).await;
        let _nobody_waits = done.send(());
    }

    fn give_up(mut self) {
        let ended = self.last_exit.map_or_else(|| "was shut down".to_owned(), describe);
        let reason = format!("the agent {ended} and is not started again");
        self.supervisor.turns.give_up(reason.clone());
        self.inputs.close();
        while let Ok(input) = self.inputs.try_recv() {
            self.take(input);
        }
        if let Some(turn) = self.waiting.take() {
            self.end(&turn, TurnOutcome::Failed, Some(reason));
        }
    }
}
