//! A running agent: its process in the agent's cgroup, its lines in both directions, and the tail
//! of its stderr.

use std::{
    cell::RefCell,
    fmt,
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use harvest_proto::{
    AgentName, EventBody,
    bridge::{AgentLaunch, Exit, Fault, FaultCode, TurnRequest},
    event::ToolKind,
    redact,
};
use serde_json::Value;
use tokio::{
    net::unix::pipe,
    time::{Instant, timeout},
};

use super::{
    Agent, AgentStart, Image, Invocation, Signal, conversation, images,
    last_warning::LastWarning,
    lines::{AgentLine, LineReader},
    owned,
    stdin::Stdin,
    tool_gate::{ToolDecision, ToolGate},
};
use crate::{
    capture::describe,
    git::NON_INTERACTIVE,
    outbox::Outbox,
    pipes::{pipes, read_all, read_rest},
    processes::{Child, ProcessExit},
    sandbox::Sandbox,
    truncate::Tail,
    users::{AGENT_USER, User},
};

// From exec to ready: 0.4 s for Claude on an idle machine, minutes on an overloaded one.
const START_TIMEOUT: Duration = Duration::from_secs(120);

// Between the end of the agent's output and its exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The fields of tools' inputs that name a file.
const PATH_FIELDS: [&str; 4] = ["file_path", "filePath", "path", "notebook_path"];

/// What an agent is started with.
#[derive(Clone)]
pub(crate) struct AgentContext {
    pub(crate) sandbox: Rc<Sandbox>,
    pub(crate) outbox: Rc<Outbox>,
    pub(crate) launch: AgentLaunch,
    pub(crate) cwd: String,
    pub(crate) last_warning: Rc<LastWarning>,
}

/// Why an agent did not start.
#[derive(Debug)]
pub(crate) struct AgentStartError {
    /// The exit before it was ready; `None` when there is no process, or when it runs but refuses.
    exit: Option<Exit>,
    /// The tail of stderr, or the reason why there is no usable process.
    pub(crate) tail: String,
    /// Whether another start would fail in the same way.
    pub(crate) permanent: bool,
}

impl AgentStartError {
    fn new(exit: Option<Exit>, tail: String) -> Self {
        Self { exit, tail, permanent: false }
    }

    /// There is no process, as when the image lacks the program.
    fn no_process(context: &AgentContext, fault: &Fault) -> Self {
        let AgentContext { launch, cwd, .. } = context;
        let unusable = matches!(fault.code, FaultCode::NotFound | FaultCode::NotExecutable);
        // A removed working directory may come back.
        let permanent = unusable && Path::new(cwd).is_dir();
        let tail = match &launch.program {
            Some(_) if permanent => missing_program(&launch.name, &fault.message),
            _ => fault.message.clone(),
        };
        Self { exit: None, tail, permanent }
    }

    /// The exit; 127, as in shells, for a program that cannot be started.
    pub(crate) fn exit(&self) -> Exit {
        self.exit.unwrap_or(Exit::Code(127))
    }
}

impl fmt::Display for AgentStartError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.tail)?;
        self.exit.map_or(Ok(()), |exit| write!(out, "\nthe agent {}", describe(exit)))
    }
}

/// The image has no program for a configured agent.
fn missing_program(agent: &AgentName, why: &str) -> String {
    format!(
        "{why}; it is the `command` of `[agents.{agent}]`: install it with a recipe of your own \
         (`harvest image build FILE.toml`), set `image` to that image, and create the session \
         again; or continue this one with another agent: `harvest send SESSION -a claude \"…\"`"
    )
}

#[derive(Debug)]
pub(crate) enum AgentOutput {
    Signals(Vec<Signal>),
    Exited(Exit),
}

pub(crate) struct AgentProcess {
    context: AgentContext,
    child: Child,
    lines: LineReader,
    stdin: Stdin,
    stderr: Rc<Stderr>,
    agent: Box<dyn Agent>,
    oom_before: u64,
    exit: Option<ProcessExit>,
    /// The time of the last prompt, answer or line of the agent, or until when it had to wait.
    pub(crate) last_activity: Instant,
    /// Whether the agent remembers nothing.
    pub(crate) is_new: bool,
    tools: ToolGate,
    /// Whether a sync runs whose end has not been handled.
    during_sync: bool,
    in_prompt: bool,
}

impl AgentProcess {
    /// Starts the agent and waits until it is ready. If creating or resuming the conversation of an
    /// agent that takes our id fails (the id is taken, or there is nothing to resume), the other
    /// way is tried. Other agents notice by themselves that there is nothing to resume; without
    /// the saved id they would lose a conversation that is there.
    pub(crate) async fn start(
        context: &AgentContext,
        resume: bool,
    ) -> Result<Self, AgentStartError> {
        match Self::start_once(context, resume).await {
            Err(AgentStartError { exit: Some(Exit::Code(_)), .. }) => {
                let takes_our_id = match context.launch.name {
                    AgentName::Claude | AgentName::Scripted => true,
                    AgentName::Opencode | AgentName::Codex | AgentName::Configured(_) => false,
                };
                Self::start_once(context, if takes_our_id { !resume } else { resume }).await
            }
            other => other,
        }
    }

    async fn start_once(context: &AgentContext, resume: bool) -> Result<Self, AgentStartError> {
        let spawned = Self::spawn(context, resume).await;
        let mut agent = spawned.map_err(|fault| AgentStartError::no_process(context, &fault))?;
        if let Some(line) = agent.agent.init_line() {
            agent.stdin.send(line);
        }
        let error = match timeout(START_TIMEOUT, agent.ready()).await {
            Ok(Ok(())) => return Ok(agent),
            Ok(Err(error)) => error,
            Err(_) => AgentStartError::new(Some(Exit::Timeout), agent.stderr_tail()),
        };
        agent.child.kill().await;
        Err(error)
    }

    // Waits until the agent is ready. Until then only the events that come with it are of interest.
    async fn ready(&mut self) -> Result<(), AgentStartError> {
        loop {
            let signals = match self.next().await {
                AgentOutput::Signals(signals) => signals,
                AgentOutput::Exited(exit) => {
                    return Err(AgentStartError::new(Some(exit), self.stderr_tail()));
                }
            };
            let is_new = signals.iter().find_map(|signal| match signal {
                Signal::Ready { is_new } => Some(*is_new),
                _ => None,
            });
            for signal in signals {
                match signal {
                    Signal::Event(body) if is_new.is_some() => self.context.outbox.push(None, body),
                    Signal::Unrecoverable(tail) => return Err(AgentStartError::new(None, tail)),
                    _ => {}
                }
            }
            if let Some(is_new) = is_new {
                self.is_new = is_new;
                return Ok(());
            }
        }
    }

    async fn spawn(context: &AgentContext, resume: bool) -> Result<Self, Fault> {
        let AgentContext { sandbox, cwd, .. } = context;
        let user = sandbox.user(Some(AGENT_USER))?;
        let (agent, invocation) = prepare(context, &user, resume);
        if let Some(message) = context.last_warning.if_new(invocation.warning) {
            context.outbox.push(None, EventBody::Warning { message });
        }
        let mut spec = sandbox.process_spec(invocation.argv, &user, cwd);
        // Its tools run as the same user; they must not write lines in its name.
        spec.undumpable = true;
        spec.env.extend(owned(&NON_INTERACTIVE));
        spec.env.extend(invocation.env);
        let oom_before = sandbox.oom.read();
        let pipes = pipes(spec.uid, spec.gid, true);
        let (ours, theirs) = pipes.map_err(|error| Fault::system(error.to_string()))?;
        let joins = &sandbox.agent_group.joins;
        let started = sandbox.processes.start_joined(spec, theirs, joins).await;
        let child = started?;
        let stderr = Rc::new(Stderr { pipe: ours.stderr, tail: RefCell::default() });
        let collected = Rc::clone(&stderr);
        tokio::task::spawn_local(async move {
            read_all(&collected.pipe, |bytes| collected.tail.borrow_mut().push(bytes)).await;
        });
        Ok(Self {
            context: context.clone(),
            child,
            lines: LineReader::new(ours.stdout),
            stdin: Stdin::new(ours.stdin),
            stderr,
            agent,
            oom_before,
            exit: None,
            last_activity: Instant::now(),
            is_new: true,
            tools: ToolGate::default(),
            during_sync: false,
            in_prompt: false,
        })
    }

    /// Uses another model or effort of the same model service. `None` if the agent has to be
    /// started again for that.
    pub(crate) fn set_model(&mut self, launch: &AgentLaunch) -> Option<Vec<Signal>> {
        let signals = self.agent.set_model(launch)?;
        Some(self.send_replies(signals))
    }

    /// Sends a prompt.
    pub(crate) async fn prompt(&mut self, request: &TurnRequest) {
        let images = self.load_images(request).await;
        self.last_activity = Instant::now();
        // An agent that was restarted meanwhile knows what it read before.
        let missed = self.context.sandbox.sync.take_note();
        let line = match self.tools.begin_prompt().or(missed) {
            None => self.agent.prompt(request, &images),
            Some(note) => {
                let text = format!("{note}\n\n{}", request.text);
                self.agent.prompt(&TurnRequest { text, ..request.clone() }, &images)
            }
        };
        self.in_prompt = true;
        self.stdin.send(line);
    }

    /// Whether a prompt can begin while the checkouts are synced.
    pub(crate) fn asks_for_tools(&self) -> bool {
        self.agent.asks_for_tools()
    }

    async fn load_images(&self, request: &TurnRequest) -> Vec<Image> {
        let AgentContext { sandbox, outbox, .. } = &self.context;
        let Ok(user) = sandbox.user(Some(AGENT_USER)) else { return Vec::new() };
        images::load(&user, &request.images).await.unwrap_or_else(|error| {
            let message = format!("cannot read the images of the prompt: {error}");
            outbox.push(Some(&request.turn), EventBody::Warning { message });
            Vec::new()
        })
    }

    /// Asks the agent to cancel the prompt.
    pub(crate) fn interrupt(&mut self) {
        self.tools.cancel_prompt();
        if let Some(line) = self.agent.cancel() {
            self.stdin.send(line);
        }
    }

    /// Sends the user's answer; returns the resulting signals.
    pub(crate) fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        self.last_activity = Instant::now();
        let signals = self.agent.answer(request, answer);
        self.send_replies(signals)
    }

    /// Refuses the unanswered questions; returns the resulting signals.
    pub(crate) fn close_questions(&mut self) -> Vec<Signal> {
        let signals = self.agent.close_questions();
        self.send_replies(signals)
    }

    /// Answers the questions about tools, and remembers what the agent knows during a sync.
    fn gate_tools(&mut self, signals: Vec<Signal>) -> Vec<Signal> {
        let mut rest = Vec::new();
        for signal in signals {
            match signal {
                Signal::AsksForTool(tool) => {
                    let (request, syncing) = (tool.request.clone(), self.during_sync);
                    let decision = self.tools.ask(tool, syncing);
                    rest.extend(self.answer_tool(&request, &decision));
                }
                Signal::ToolWithdrawn { request } => self.tools.withdraw(&request),
                other => {
                    self.observe(&other);
                    rest.push(other);
                }
            }
        }
        rest
    }

    fn answer_tool(&mut self, request: &str, decision: &ToolDecision) -> Vec<Signal> {
        match decision {
            ToolDecision::Wait => Vec::new(),
            ToolDecision::Run => self.agent.answer_tool(request, None),
            ToolDecision::Refuse(why) => self.agent.answer_tool(request, Some(why)),
        }
    }

    fn observe(&mut self, signal: &Signal) {
        match signal {
            Signal::Done(_) | Signal::Repeated => self.in_prompt = false,
            Signal::Event(EventBody::ToolStarted { call, kind, input, .. }) if self.during_sync => {
                self.tools.call_started(call);
                self.remember(*kind, input);
            }
            Signal::Event(EventBody::ToolEnded { call, .. }) => self.tools.call_ended(call),
            _ => {}
        }
    }

    /// Remembers the file that a tool reads or changes.
    fn remember(&self, kind: ToolKind, input: &Value) {
        let sync = &self.context.sandbox.sync;
        let path = PATH_FIELDS.iter().find_map(|field| input[field].as_str());
        match (kind, path) {
            (ToolKind::Read | ToolKind::Edit, Some(path)) => {
                sync.remember_file(&Path::new(&self.context.cwd).join(path));
            }
            (ToolKind::Read | ToolKind::Search, _) => sync.remember_search(),
            _ => {}
        }
    }

    /// Answers what waited for the end of the sync.
    fn release_tools(&mut self) -> Vec<Signal> {
        let sync = &self.context.sandbox.sync;
        if sync.failure().is_some() {
            // The turn is about to be cancelled.
            return Vec::new();
        }
        let note = sync.take_note();
        let told = note.as_deref().filter(|_| self.in_prompt);
        let line = told.and_then(|note| self.agent.tell(note));
        let mut signals = Vec::new();
        for (tool, decision) in self.tools.release(note, line.is_some()) {
            signals.extend(self.answer_tool(&tool.request, &decision));
        }
        signals.splice(0..0, line.map(Signal::Send));
        signals
    }

    fn send_replies(&self, signals: Vec<Signal>) -> Vec<Signal> {
        let mut rest = Vec::new();
        for signal in signals {
            match signal {
                Signal::Send(line) => self.stdin.reply(line),
                Signal::Conversation(id) => self.save_conversation(&id),
                Signal::EarlierTurn => {}
                other => rest.push(other),
            }
        }
        rest
    }

    fn save_conversation(&self, id: &str) {
        let AgentContext { sandbox, outbox, launch, .. } = &self.context;
        let Ok(user) = sandbox.user(Some(AGENT_USER)) else { return };
        let folder = state_folder(sandbox, &user);
        if let Err(error) = conversation::save(&user, &folder, &launch.name, id) {
            let message = format!(
                "cannot save the id of the agent's conversation in {}: {error}; after a restart \
                 the agent begins a new one",
                folder.display()
            );
            outbox.push(None, EventBody::Warning { message });
        }
    }

    /// The next output. Cancel-safe. Waits while the outbox is full, which slows the agent down
    /// (backpressure).
    pub(crate) async fn next(&mut self) -> AgentOutput {
        loop {
            self.during_sync |= self.context.sandbox.sync.is_running();
            if let Some(line) = self.lines.pop() {
                let signals = match line {
                    AgentLine::Complete(line) => self.agent.parse_line(&line),
                    AgentLine::Dropped { head, reason } => {
                        let message = format!("dropped a line of the agent: {reason}");
                        let mut signals = vec![Signal::Event(EventBody::Warning { message })];
                        signals.extend(self.agent.line_dropped(&head));
                        signals
                    }
                };
                if !signals.contains(&Signal::EarlierTurn) {
                    self.last_activity = Instant::now();
                }
                let signals = self.gate_tools(signals);
                let signals = self.send_replies(signals);
                if signals.is_empty() {
                    continue;
                }
                return AgentOutput::Signals(signals);
            }
            if let Some(end) = self.exit {
                return AgentOutput::Exited(self.context.sandbox.exit(end, self.oom_before));
            }
            self.context.outbox.wait_for_space().await;
            let replies = self.stdin.replies();
            tokio::select! {
                biased;
                () = self.context.sandbox.sync.over(), if self.during_sync => {
                    self.during_sync = false;
                    self.last_activity = Instant::now();
                    let signals = self.release_tools();
                    self.send_replies(signals);
                }
                // A pipe that never runs empty would starve the other tasks.
                open = self.lines.fill_after(&replies) => if open {
                    tokio::task::yield_now().await;
                } else {
                    self.exit = Some(match timeout(EXIT_TIMEOUT, self.child.wait()).await {
                        Ok(end) => end,
                        Err(_) => self.child.kill().await,
                    });
                },
                end = self.child.wait() => {
                    // Descendants may hold the output open: read without waiting.
                    self.lines.drain();
                    self.exit = Some(end);
                }
            }
        }
    }

    /// The last lines of stderr, with likely secrets redacted.
    pub(crate) fn stderr_tail(&self) -> String {
        let tail = &self.stderr.tail;
        // Without waiting; after the agent's exit that is everything.
        read_rest(&self.stderr.pipe, |bytes| tail.borrow_mut().push(bytes));
        redact::redact(&tail.borrow_mut().text())
    }

    /// Kills the agent and its descendants.
    ///
    /// True when the launcher has seen all of them exit; without a cgroup that is the proof.
    pub(crate) async fn kill(mut self, limit: Duration) -> bool {
        timeout(limit, self.child.kill()).await.is_ok() && !self.child.launcher_died()
    }

    /// Closes the agent's stdin and waits for its exit; kills it after `limit`.
    pub(crate) async fn close(mut self, limit: Duration) {
        // Dropping the sender closes stdin.
        self.stdin = Stdin::new(None);
        if timeout(limit, self.child.wait()).await.is_err() {
            self.child.kill().await;
        }
    }
}

// The adapter and how it starts its agent.
fn prepare(context: &AgentContext, user: &User, resume: bool) -> (Box<dyn Agent>, Invocation) {
    let AgentContext { sandbox, launch, cwd, .. } = context;
    let mut agent = super::named(&launch.name);
    let folder = state_folder(sandbox, user);
    let saved = || conversation::load(user, &folder, &launch.name);
    let invocation = agent.invocation(&AgentStart {
        launch,
        cwd,
        resume,
        syncing: sandbox.sync.is_running(),
        conversation: resume.then(saved).flatten(),
        env: &sandbox.env(user),
    });
    (agent, invocation)
}

fn state_folder(sandbox: &Sandbox, user: &User) -> PathBuf {
    let home = sandbox.env(user).remove("HOME").unwrap_or_else(|| user.home.clone());
    conversation::state_folder(&home)
}

/// The agent's stderr; only the last lines are kept.
struct Stderr {
    pipe: pipe::Receiver,
    tail: RefCell<Tail>,
}
