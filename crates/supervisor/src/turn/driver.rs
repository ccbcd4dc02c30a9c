//! The task that owns the agent: runs prompts, stops them and verifies that all their processes are
//! dead, and restarts a crashed agent.
//!
//! ```text
//! idle ──prompt──▶ in a turn ──result and idle──▶ idle
//!   │                 ├─stop: interrupt ≤ 10 s, kill all, TurnEnded Stopped─▶ restart
//!   └──crash──────────┴─crash: AgentExited, kill all, TurnEnded Failed──▶ wait 2^n s ─▶ restart
//! ```

use std::{pin::pin, rc::Rc, time::Duration};

use harvest_proto::{
    EventBody, TurnId, TurnReason,
    bridge::{AgentLaunch, Exit, TurnRequest},
    event::TurnOutcome,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    DriverInput, Turns, past_messages,
    progress::{Failing, INTERRUPT_TIMEOUT, Progress, TurnError},
};
use crate::{
    agents::{AgentContext, AgentOutput, AgentProcess, Signal},
    capture::describe,
    git::Git,
    log,
    users::AGENT_USER,
};

// Within 15 s in all, every process must be verifiably dead.
const KILL_TIMEOUT: Duration = Duration::from_secs(3);
const KILL_GROUP_TIMEOUT: Duration = Duration::from_secs(12);

const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct ActiveTurn {
    request: TurnRequest,
    started_at: Instant,
}

// What the turn wants of its agent, if it differs from the agent that runs.
fn other_launch(running: &AgentLaunch, request: &TurnRequest) -> Option<AgentLaunch> {
    let wanted = request.agent.as_deref()?;
    let wanted = AgentLaunch { resume: running.resume, ..wanted.clone() };
    (wanted != *running).then_some(wanted)
}

enum TurnEnd {
    Done(Result<(), TurnError>),
    /// The agent was interrupted for this reason and did not react.
    Unresponsive(TurnError),
    Stopped,
    Crashed(Exit),
    ShutDown(oneshot::Sender<()>),
}

pub(super) struct Driver {
    pub(super) turns: Rc<Turns>,
    pub(super) context: AgentContext,
    pub(super) inputs: mpsc::UnboundedReceiver<DriverInput>,
    /// A prompt that waits until the agent has been restarted.
    pub(super) waiting: Option<ActiveTurn>,
    /// Whether another agent ran the last turns: what this one remembers is not all.
    pub(super) missed_turns: bool,
    pub(super) crashes: u32,
    pub(super) last_exit: Option<Exit>,
}

impl Driver {
    /// Runs until shutdown or until the agent has crashed too often.
    pub(super) async fn run(mut self, agent: AgentProcess) {
        let mut running = Some(agent);
        loop {
            running = match (running, self.waiting.take()) {
                (Some(mut agent), Some(turn)) => {
                    match other_launch(&self.context.launch, &turn.request) {
                        Some(launch) if !self.adopt(&mut agent, &turn, &launch) => {
                            self.waiting = Some(turn);
                            self.replace(agent, launch).await;
                            None
                        }
                        _ => self.run_turn(agent, turn).await,
                    }
                }
                (Some(agent), None) => self.idle(agent).await,
                (None, waiting) => {
                    self.waiting = waiting;
                    self.restart().await
                }
            };
            if running.is_none()
                && (self.crashes > self.context.launch.restarts.times || self.inputs.is_closed())
            {
                return self.give_up();
            }
        }
    }

    // Whether the running agent can do the turn as it is wanted.
    fn adopt(&mut self, agent: &mut AgentProcess, turn: &ActiveTurn, wanted: &AgentLaunch) -> bool {
        let running = &self.context.launch;
        let same_program = wanted.name == running.name && wanted.program == running.program;
        if !same_program || wanted.upstream != running.upstream {
            return false;
        }
        if (&wanted.model, wanted.effort) != (&running.model, running.effort) {
            let Some(signals) = agent.set_model(wanted) else { return false };
            self.publish(Some(&turn.request.turn), signals);
        }
        self.context.launch = wanted.clone();
        true
    }

    // Ends the agent; the next start is that of another one, or with another model.
    async fn replace(&mut self, agent: AgentProcess, launch: AgentLaunch) {
        agent.close(CLOSE_TIMEOUT).await;
        self.context.sandbox.agent_group.kill_all(KILL_GROUP_TIMEOUT).await;
        self.missed_turns |= launch.name != self.context.launch.name;
        self.turns.agent.replace(Some(launch.name.clone()));
        self.context.launch = launch;
        self.crashes = 0;
    }

    // `None` when the agent has exited.
    async fn idle(&mut self, mut agent: AgentProcess) -> Option<AgentProcess> {
        tokio::select! {
            input = self.inputs.recv() => match input {
                Some(DriverInput::ShutDown(done)) => {
                    self.shut_down(agent, done).await;
                    None
                }
                Some(input) => {
                    self.accept(input);
                    Some(agent)
                }
                None => None,
            },
            output = agent.next() => match output {
                AgentOutput::Signals(signals) => {
                    self.outside_turn(&mut agent, signals);
                    Some(agent)
                }
                AgentOutput::Exited(exit) => {
                    self.crashed(exit, agent.stderr_tail());
                    self.kill_all(agent).await;
                    None
                }
            },
        }
    }

    // The user answers questions of turns only. An agent must not wait for an answer forever.
    fn outside_turn(&self, agent: &mut AgentProcess, signals: Vec<Signal>) {
        for signal in signals {
            let body = match signal {
                Signal::Event(EventBody::RequestOpened { question, .. }) => EventBody::Warning {
                    message: format!("refused a question of the agent outside a turn: {question}"),
                },
                Signal::Event(body) => body,
                _ => continue,
            };
            self.context.outbox.push(None, body);
        }
        agent.close_questions();
    }

    // Outside a turn: a prompt waits for its turn to start; a stop ends it before that.
    fn accept(&mut self, input: DriverInput) {
        match input {
            DriverInput::Prompt(request) => {
                let body = EventBody::TurnStarted {
                    prompt: request.prompt.clone(),
                    number: request.number,
                };
                self.context.outbox.push(Some(&request.turn), body);
                self.waiting = Some(ActiveTurn { request, started_at: Instant::now() });
            }
            DriverInput::Stop => {
                if let Some(turn) = self.waiting.take() {
                    self.end(&turn, TurnOutcome::Stopped, None, None);
                }
            }
            DriverInput::Answer { .. } | DriverInput::ShutDown(_) => {}
        }
    }

    async fn run_turn(
        &mut self,
        mut agent: AgentProcess,
        mut turn: ActiveTurn,
    ) -> Option<AgentProcess> {
        let forgot = self.turns.forgot.replace(false);
        if let Some(message) = past_messages::apply(&mut turn.request, forgot) {
            self.context.outbox.push(Some(&turn.request.turn), EventBody::Warning { message });
        }
        self.set_author(&turn).await;
        if !agent.asks_for_tools()
            && let Some(early) = self.wait_for_sync(&mut agent, &turn.request.turn).await
        {
            self.turns.forgot.set(forgot);
            return self.end_early(agent, turn, early).await;
        }
        agent.prompt(&turn.request).await;
        let end = self.wait_for_end(&mut agent, &turn.request.turn).await;
        if matches!(end, TurnEnd::Stopped | TurnEnd::ShutDown(_)) {
            self.interrupt(&mut agent, &turn.request.turn).await;
        }
        let closed = agent.close_questions();
        self.publish(Some(&turn.request.turn), closed);
        let end = match end {
            TurnEnd::Done(Ok(())) => self.save_work(&turn.request).await,
            end => end,
        };
        self.finish(agent, turn, end).await
    }

    // Commits and pushes what the agent of a completed turn left behind. A stop ends it.
    async fn save_work(&mut self, request: &TurnRequest) -> TurnEnd {
        let (sandbox, outbox) = (Rc::clone(&self.context.sandbox), Rc::clone(&self.context.outbox));
        let save = async {
            let Ok(user) = sandbox.user(Some(AGENT_USER)) else { return };
            let git = Git { sandbox: &sandbox, user: &user };
            for checkout in &request.save_work {
                let saved = git.save_work(checkout, &request.author, request.number).await;
                if let Some(saved) = saved {
                    outbox.push(Some(&request.turn), EventBody::WorkSaved(saved));
                }
            }
        };
        let mut save = pin!(save);
        loop {
            tokio::select! {
                biased;
                input = self.inputs.recv() => match input {
                    Some(DriverInput::Stop) => return TurnEnd::Stopped,
                    Some(DriverInput::ShutDown(done)) => return TurnEnd::ShutDown(done),
                    Some(DriverInput::Prompt(_) | DriverInput::Answer { .. }) => {}
                    None => return TurnEnd::Done(Ok(())),
                },
                () = &mut save => return TurnEnd::Done(Ok(())),
            }
        }
    }

    // Waits for the checkouts before a prompt whose agent would not ask for its tools. Returns how
    // the turn ended if it ends before.
    async fn wait_for_sync(&mut self, agent: &mut AgentProcess, turn: &TurnId) -> Option<TurnEnd> {
        let sandbox = Rc::clone(&self.context.sandbox);
        while sandbox.sync.is_running() {
            tokio::select! {
                biased;
                input = self.inputs.recv() => match input {
                    Some(DriverInput::Stop) => return Some(TurnEnd::Stopped),
                    Some(DriverInput::ShutDown(done)) => return Some(TurnEnd::ShutDown(done)),
                    Some(DriverInput::Prompt(_) | DriverInput::Answer { .. }) | None => {}
                },
                () = sandbox.sync.over() => {}
                output = agent.next() => match output {
                    AgentOutput::Exited(exit) => return Some(TurnEnd::Crashed(exit)),
                    AgentOutput::Signals(signals) => {
                        self.publish(Some(turn), signals);
                    }
                },
            }
        }
        sandbox.sync.failure().map(|reason| TurnEnd::Done(Err((TurnReason::SyncFailed, reason))))
    }

    // Ends a turn whose prompt the agent has not got.
    async fn end_early(
        &mut self,
        agent: AgentProcess,
        turn: ActiveTurn,
        end: TurnEnd,
    ) -> Option<AgentProcess> {
        if let TurnEnd::Stopped = end {
            self.end(&turn, TurnOutcome::Stopped, None, None);
            return Some(agent);
        }
        self.finish(agent, turn, end).await
    }

    async fn finish(
        &mut self,
        agent: AgentProcess,
        turn: ActiveTurn,
        end: TurnEnd,
    ) -> Option<AgentProcess> {
        match end {
            TurnEnd::Done(result) => {
                self.crashes = 0;
                // The history was in front of this prompt.
                self.missed_turns = false;
                let outcome =
                    if result.is_ok() { TurnOutcome::Completed } else { TurnOutcome::Failed };
                let (why, error) = result.err().unzip();
                self.end(&turn, outcome, why, error);
                return Some(agent);
            }
            TurnEnd::Unresponsive((why, error)) => {
                self.kill_all(agent).await;
                self.end(&turn, TurnOutcome::Failed, Some(why), Some(error));
            }
            TurnEnd::Stopped => {
                self.kill_all(agent).await;
                self.end(&turn, TurnOutcome::Stopped, None, None);
            }
            TurnEnd::Crashed(exit) => {
                self.crashed(exit, agent.stderr_tail());
                self.kill_all(agent).await;
                let (why, error) =
                    (TurnReason::AgentExited, format!("the agent {}", describe(exit)));
                self.end(&turn, TurnOutcome::Failed, Some(why), Some(error));
            }
            TurnEnd::ShutDown(done) => {
                let (why, error) = (TurnReason::ShutDown, "the sandbox was shut down".to_owned());
                self.end(&turn, TurnOutcome::Stopped, Some(why), Some(error));
                self.shut_down(agent, done).await;
            }
        }
        None
    }

    async fn wait_for_end(&mut self, agent: &mut AgentProcess, turn: &TurnId) -> TurnEnd {
        let mut progress = Progress::default();
        let sandbox = Rc::clone(&self.context.sandbox);
        loop {
            let failure = sandbox.sync.failure().map(|reason| (TurnReason::SyncFailed, reason));
            match progress.finished.take() {
                Some(result) if !sandbox.sync.is_running() => {
                    return TurnEnd::Done(failure.map_or(result, Err));
                }
                finished => progress.finished = finished,
            }
            if let Some((why, reason)) = failure.filter(|_| progress.failing.is_none()) {
                progress.failing = Some(Failing::begin(agent, why, reason));
            }
            let wake_at = match &progress.failing {
                Some(failing) => Some(failing.deadline),
                None => self.silent_at(agent),
            };
            let timed_out = sleep_until(wake_at.unwrap_or_else(Instant::now));
            tokio::select! {
                biased;
                input = self.inputs.recv() => match input {
                    Some(DriverInput::Stop) => return TurnEnd::Stopped,
                    Some(DriverInput::Answer { request, answer }) => {
                        let signals = agent.answer(&request, &answer);
                        self.publish(Some(turn), signals);
                    }
                    Some(DriverInput::ShutDown(done)) => return TurnEnd::ShutDown(done),
                    Some(DriverInput::Prompt(_)) | None => {}
                },
                () = sandbox.sync.over(), if sandbox.sync.is_running() => {}
                () = timed_out, if wake_at.is_some() => match progress.failing {
                    Some(failing) => {
                        return TurnEnd::Unresponsive((failing.why, failing.error));
                    }
                    // The model or the agent may have written something meanwhile.
                    None if self.silent_at(agent) > wake_at => {}
                    None => {
                        let silence = self.silence();
                        progress.failing =
                            Some(Failing::begin(agent, TurnReason::Silent, silence));
                    }
                },
                output = agent.next() => match output {
                    AgentOutput::Exited(exit) => return TurnEnd::Crashed(exit),
                    AgentOutput::Signals(all) => {
                        progress.spoke |= all.iter().any(Signal::is_output);
                        let rest = self.publish(Some(turn), all);
                        // A snapshot of the turn must not hold half of a sync.
                        if let Some(result) = progress.result_in(rest, agent) {
                            progress.finished = Some(result);
                        }
                    }
                },
            }
        }
    }

    // When the turn counts as silent. An open question waits for the user, tools wait for the sync,
    // and an agent whose output is not read cannot write.
    fn silent_at(&self, agent: &mut AgentProcess) -> Option<Instant> {
        let AgentContext { sandbox, outbox, launch, .. } = &self.context;
        let waits = !self.turns.requests.borrow().is_empty()
            || !outbox.has_space()
            || sandbox.sync.is_running();
        if waits {
            agent.last_activity = Instant::now();
        }
        let last = Some(agent.last_activity).max(sandbox.model_activity.last())?;
        last.checked_add(Duration::from_millis(launch.silence_millis))
    }

    fn silence(&self) -> String {
        let silence = Duration::from_millis(self.context.launch.silence_millis);
        format!("silent: neither the agent nor the model wrote anything for {silence:?}")
    }

    // Publishes events and records open questions; returns the other signals.
    fn publish(&self, turn: Option<&TurnId>, signals: Vec<Signal>) -> Vec<Signal> {
        let mut rest = Vec::new();
        for signal in signals {
            match signal {
                Signal::Event(body) => self.context.outbox.push(turn, body),
                Signal::Question { request } => {
                    self.turns.requests.borrow_mut().insert(request);
                }
                other => rest.push(other),
            }
        }
        rest
    }

    async fn set_author(&self, turn: &ActiveTurn) {
        let Ok(user) = self.context.sandbox.user(Some(AGENT_USER)) else { return };
        let git = Git { sandbox: &self.context.sandbox, user: &user };
        if let Err(tail) = git.set_author(&turn.request.author).await {
            let message = format!("cannot set the author of commits: {tail}");
            self.context.outbox.push(Some(&turn.request.turn), EventBody::Warning { message });
        }
    }

    // Lets the agent save its conversation before it is killed.
    async fn interrupt(&self, agent: &mut AgentProcess, turn: &TurnId) {
        agent.interrupt();
        let finished = async {
            loop {
                match agent.next().await {
                    AgentOutput::Exited(_) => return,
                    AgentOutput::Signals(signals) => {
                        let rest = self.publish(Some(turn), signals);
                        if rest.iter().any(|signal| matches!(signal, Signal::Done(_))) {
                            return;
                        }
                    }
                }
            }
        };
        let _killed_next = timeout(INTERRUPT_TIMEOUT, finished).await;
    }

    // When this returns, all processes of the agent are dead. If that cannot be verified, the
    // sandbox exits.
    #[expect(clippy::disallowed_methods, reason = "the end of pid 1 kills every process")]
    async fn kill_all(&self, agent: AgentProcess) {
        // The restarted agent may fail to resume its conversation: prompts bring the history.
        self.turns.forgot.set(true);
        let killed = agent.kill(KILL_TIMEOUT).await;
        let group = &self.context.sandbox.agent_group;
        if !group.kill_all(KILL_GROUP_TIMEOUT).await || !(killed || group.is_available()) {
            log::line(format_args!("cannot kill the agent's processes: stopping the sandbox"));
            std::process::exit(1);
        }
    }

    fn crashed(&mut self, exit: Exit, tail: String) {
        self.crashes += 1;
        self.last_exit = Some(exit);
        let restarts = self.crashes <= self.context.launch.restarts.times;
        self.context.outbox.push(None, EventBody::AgentExited { exit, tail, restarts });
    }

    // The server adds the reason of a turn that was stopped on its request.
    fn end(
        &self,
        turn: &ActiveTurn,
        outcome: TurnOutcome,
        reason: Option<TurnReason>,
        error: Option<String>,
    ) {
        let prompt = turn.request.prompt.clone();
        let millis = u64::try_from(turn.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let body = EventBody::TurnEnded { prompt: prompt.clone(), outcome, reason, error, millis };
        self.context.outbox.push(Some(&turn.request.turn), body);
        self.turns.ended(&prompt);
    }

    // With a backoff after a crash, at once after a stop.
    async fn restart(&mut self) -> Option<AgentProcess> {
        let delay = super::restart_delay(self.crashes, self.context.launch.restarts);
        let context = self.context.clone();
        let mut start = pin!(async move {
            sleep(delay).await;
            AgentProcess::start(&context, true).await
        });
        loop {
            tokio::select! {
                started = &mut start => return match started {
                    Ok(agent) => {
                        self.turns.forgot.set(agent.is_new || self.missed_turns);
                        Some(agent)
                    }
                    Err(error) => {
                        if error.permanent {
                            self.crashes = self.context.launch.restarts.times;
                        }
                        self.crashed(error.exit(), error.tail);
                        None
                    }
                },
                input = self.inputs.recv() => match input {
                    Some(DriverInput::ShutDown(done)) => {
                        self.inputs.close();
                        let _receiver_gone = done.send(());
                        return None;
                    }
                    Some(input) => self.accept(input),
                    None => return None,
                },
            }
        }
    }

    async fn shut_down(&mut self, agent: AgentProcess, done: oneshot::Sender<()>) {
        self.inputs.close();
        agent.close(CLOSE_TIMEOUT).await;
        self.context.sandbox.agent_group.kill_all(KILL_GROUP_TIMEOUT).await;
        let _receiver_gone = done.send(());
    }

    fn give_up(mut self) {
        let ended = self.last_exit.map_or_else(|| "was shut down".to_owned(), describe);
        let reason = format!("the agent {ended} and is not restarted");
        self.turns.give_up(reason.clone());
        self.inputs.close();
        while let Ok(input) = self.inputs.try_recv() {
            self.accept(input);
        }
        if let Some(turn) = self.waiting.take() {
            self.end(&turn, TurnOutcome::Failed, Some(TurnReason::AgentExited), Some(reason));
        }
    }
}
