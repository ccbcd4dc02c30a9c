//! A running agent: its process in the agent's cgroup, its lines both ways, its last words.

use std::{cell::RefCell, fmt, io, rc::Rc, time::Duration};

use harvest_proto::{
    EventBody,
    bridge::{AgentLaunch, Exit, PromptOrder},
    redact,
};
use tokio::{io::AsyncWriteExt, net::unix::pipe, sync::mpsc, time::timeout};

use super::{Agent, Signal};
use crate::{
    capture::describe,
    cut::Tail,
    exec::{pipes, read_rest},
    git::NEVER_ASK,
    processes::{Child, End},
    supervisor::Supervisor,
    users::AGENT_USER,
};

// From exec to its word that it is ready: 0.4 s for Claude on an idle machine, minutes on a drowning one.
const START_LIMIT: Duration = Duration::from_secs(120);

// Between the end of its output and its own end.
const EXIT_LIMIT: Duration = Duration::from_secs(5);

// A line carries at most one tool's result; an image in one has a few megabytes as text.
const MAX_LINE_BYTES: usize = 8 * 1024 * 1024;

/// Why an agent did not start.
#[derive(Debug)]
pub(crate) enum StartError {
    /// There was never a process of it.
    NoProcess(String),
    /// It ended, or was killed, before it took prompts.
    Ended { exit: Exit, tail: String },
}

impl StartError {
    /// How it ended; a program that cannot be started is what shells call 127.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::NoProcess(_) => Exit::Code(127),
            Self::Ended { exit, .. } => *exit,
        }
    }

    /// Its last words, or ours about it.
    pub(crate) fn tail(&self) -> &str {
        let (Self::NoProcess(tail) | Self::Ended { tail, .. }) = self;
        tail
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoProcess(reason) => out.write_str(reason),
            Self::Ended { exit, tail } => write!(out, "{tail}\nthe agent {}", describe(*exit)),
        }
    }
}

/// What came from a running agent.
#[derive(Debug)]
pub(crate) enum News {
    Signals(Vec<Signal>),
    Exited(Exit),
}

/// A running agent.
pub(crate) struct AgentProcess {
    supervisor: Rc<Supervisor>,
    child: Child,
    lines: Lines,
    say: mpsc::UnboundedSender<Vec<u8>>,
    words: Rc<Words>,
    agent: Box<dyn Agent>,
    oom_before: u64,
    end: Option<End>,
}

impl AgentProcess {
    /// Starts the agent and waits until it takes prompts. Where the wanted way of opening the
    /// conversation fails (nothing to resume, or the id is taken) the other way is tried.
    pub(crate) async fn start(
        supervisor: &Rc<Supervisor>,
        launch: &AgentLaunch,
        cwd: &str,
        resume: bool,
    ) -> Result<Self, StartError> {
        match Self::start_once(supervisor, launch, cwd, resume).await {
            Err(StartError::Ended { exit: Exit::Code(_), .. }) => {
                Self::start_once(supervisor, launch, cwd, !resume).await
            }
            other => other,
        }
    }

    async fn start_once(
        supervisor: &Rc<Supervisor>,
        launch: &AgentLaunch,
        cwd: &str,
        resume: bool,
    ) -> Result<Self, StartError> {
        let mut agent = Self::spawn(supervisor, launch, cwd, resume).await?;
        if let Some(line) = agent.agent.greeting() {
            agent.send(line);
        }
        let ready = timeout(START_LIMIT, async {
            loop {
                match agent.next().await {
                    News::Signals(signals) if signals.contains(&Signal::Ready) => return Ok(()),
                    News::Signals(_) => {}
                    News::Exited(exit) => return Err(exit),
                }
            }
        });
        let exit = match ready.await {
            Ok(Ok(())) => return Ok(agent),
            Ok(Err(exit)) => exit,
            Err(_) => Exit::Timeout,
        };
        let tail = agent.last_words();
        agent.child.kill().await;
        Err(StartError::Ended { exit, tail })
    }

    async fn spawn(
        supervisor: &Rc<Supervisor>,
        launch: &AgentLaunch,
        cwd: &str,
        resume: bool,
    ) -> Result<Self, StartError> {
        let failed = StartError::NoProcess;
        let user = supervisor.user(Some(AGENT_USER)).map_err(|fault| failed(fault.message))?;
        let agent = super::named(&launch.name).map_err(failed)?;
        let invocation = agent.invocation(launch, cwd, resume);
        let mut order = supervisor.order(invocation.argv, &user, cwd);
        order.env.extend(
            NEVER_ASK
                .iter()
                .chain(invocation.env)
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
        );
        let oom_before = supervisor.oom.read();
        let (ours, theirs) = pipes(&order, true).map_err(|error| failed(error.to_string()))?;
        let joins = &supervisor.agent_group.joins;
        let started = supervisor.processes.start_joined(order, theirs, joins).await;
        let child = started.map_err(|fault| failed(fault.message))?;
        let words = Rc::new(Words { stderr: ours.stderr, tail: RefCell::default() });
        tokio::task::spawn_local(listen(Rc::clone(&words)));
        let (say, queue) = mpsc::unbounded_channel();
        if let Some(stdin) = ours.stdin {
            tokio::task::spawn_local(write(stdin, queue));
        }
        Ok(Self {
            supervisor: Rc::clone(supervisor),
            child,
            lines: Lines::new(ours.stdout),
            say,
            words,
            agent,
            oom_before,
            end: None,
        })
    }

    fn send(&self, mut line: String) {
        line.push('\n');
        // A dead agent is noticed by its exit.
        let _agent_is_gone = self.say.send(line.into_bytes());
    }

    /// Hands a prompt over.
    pub(crate) fn prompt(&mut self, order: &PromptOrder) {
        let line = self.agent.prompt(order);
        self.send(line);
    }

    /// Asks it to give up the prompt.
    pub(crate) fn interrupt(&self) {
        self.send(self.agent.cancel());
    }

    /// Hands a person's answer over; what follows from it.
    pub(crate) fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        let signals = self.agent.answer(request, answer);
        self.send_replies(signals)
    }

    /// The requests nobody has answered.
    pub(crate) fn open_requests(&mut self) -> Vec<String> {
        self.agent.drop_requests()
    }

    fn send_replies(&self, signals: Vec<Signal>) -> Vec<Signal> {
        let (said, rest): (Vec<_>, Vec<_>) =
            signals.into_iter().partition(|signal| matches!(signal, Signal::Say(_)));
        for signal in said {
            if let Signal::Say(line) = signal {
                self.send(line);
            }
        }
        rest
    }

    /// What it says next. Cancel-safe. Waits while the outbox is full: that is how the agent is
    /// slowed down.
    pub(crate) async fn next(&mut self) -> News {
        loop {
            if let Some(line) = self.lines.pop() {
                let signals = match line {
                    Line::Whole(line) => self.agent.hear(&line),
                    Line::TooLong => vec![Signal::Event(EventBody::Warning {
                        message: "a line of the agent was too long and is left out".to_owned(),
                    })],
                };
                let signals = self.send_replies(signals);
                if signals.is_empty() {
                    continue;
                }
                return News::Signals(signals);
            }
            if let Some(end) = self.end {
                return News::Exited(self.supervisor.exit(end, self.oom_before));
            }
            self.supervisor.outbox.room().await;
            tokio::select! {
                biased;
                // A pipe that is always full never makes us wait: everybody else would.
                open = self.lines.fill() => if open {
                    tokio::task::yield_now().await;
                } else {
                    self.end = Some(match timeout(EXIT_LIMIT, self.child.wait()).await {
                        Ok(end) => end,
                        Err(_) => self.child.kill().await,
                    });
                },
                end = self.child.wait() => {
                    // What it started may hold its output open: take what is there, wait for no more.
                    self.lines.drain();
                    self.end = Some(end);
                }
            }
        }
    }

    /// The last lines of its stderr, without what looks like a secret.
    pub(crate) fn last_words(&self) -> String {
        self.words.take_all();
        redact::cover(&self.words.tail.borrow_mut().text())
    }

    /// Kills it with everything below it, for at most `limit`.
    ///
    /// True when its launcher has seen all of it end: where there is no cgroup, that is the proof.
    pub(crate) async fn kill(mut self, limit: Duration) -> bool {
        timeout(limit, self.child.kill()).await.is_ok() && !self.child.was_abandoned()
    }

    /// Lets it end by itself, for at most `limit`, then kills it.
    pub(crate) async fn close(mut self, limit: Duration) {
        // Its stdin ends with the last sender.
        self.say = mpsc::unbounded_channel().0;
        if timeout(limit, self.child.wait()).await.is_err() {
            self.child.kill().await;
        }
    }
}

async fn write(mut stdin: pipe::Sender, mut queue: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(line) = queue.recv().await {
        if stdin.write_all(&line).await.is_err() {
            return;
        }
    }
}

/// The agent's stderr, of which the last lines are kept.
struct Words {
    stderr: pipe::Receiver,
    tail: RefCell<Tail>,
}

impl Words {
    // Everything that is there now: after its end this is everything it has said.
    fn take_all(&self) {
        read_rest(&self.stderr, |bytes| self.tail.borrow_mut().push(bytes));
    }
}

async fn listen(words: Rc<Words>) {
    let mut buffer = [0u8; 4096];
    while words.stderr.readable().await.is_ok() {
        match words.stderr.try_read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                words.tail.borrow_mut().push(&buffer[..count]);
                // A pipe that is always full never makes us wait: everybody else would.
                tokio::task::yield_now().await;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

enum Line {
    Whole(Vec<u8>),
    TooLong,
}

/// Cuts the agent's output into lines of bounded length.
struct Lines {
    receiver: pipe::Receiver,
    buffer: Vec<u8>,
    searched: usize,
    skipping: bool,
}

impl Lines {
    fn new(receiver: pipe::Receiver) -> Self {
        Self { receiver, buffer: Vec::new(), searched: 0, skipping: false }
    }

    fn pop(&mut self) -> Option<Line> {
        let end = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(end) = end.map(|end| self.searched + end) else {
            self.searched = self.buffer.len();
            if self.buffer.len() > MAX_LINE_BYTES {
                self.skipping = true;
                self.buffer = Vec::new();
                self.searched = 0;
            }
            return None;
        };
        let rest = self.buffer.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.buffer, rest);
        line.pop();
        self.searched = 0;
        if std::mem::take(&mut self.skipping) {
            Some(Line::TooLong)
        } else {
            Some(Line::Whole(line))
        }
    }

    // False at the end of the output. Cancel-safe.
    async fn fill(&mut self) -> bool {
        if self.receiver.readable().await.is_err() {
            return false;
        }
        let mut piece = [0u8; 8192];
        match self.receiver.try_read(&mut piece) {
            Ok(0) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&piece[..count]);
                true
            }
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    fn drain(&mut self) {
        read_rest(&self.receiver, |bytes| self.buffer.extend_from_slice(bytes));
    }
}
