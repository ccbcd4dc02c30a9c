//! The process of the scripted agent: reads lines, runs the script of each prompt, writes lines. It
//! runs as the agent's user without extra privileges.

use std::{
    collections::VecDeque,
    io::{self, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    net::unix::pipe,
};

use super::{
    memory::Memory,
    play,
    wire::{FromProgram, ToProgram},
};

pub(crate) fn main(conversation: Option<&str>) -> ExitCode {
    match run(conversation.unwrap_or_default()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the scripted agent failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(conversation: &str) -> io::Result<()> {
    let home = std::env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    let memory = Memory::open(Path::new(&home), conversation)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut program = Program::new(memory)?;
        program.serve().await
    })
}

/// Why a script was not completed.
#[derive(Debug)]
pub(super) enum Stop {
    Cancelled,
    /// The script is invalid or demands a failure.
    Failed(String),
    /// Stdin was closed.
    Closed,
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

pub(super) struct Program {
    input: Lines<BufReader<pipe::Receiver>>,
    /// Messages received while waiting for something else.
    waiting: VecDeque<ToProgram>,
    memory: Memory,
    /// The number of tool calls and questions.
    calls: usize,
    /// Whether tools of this prompt need a permission.
    asks_for_tools: bool,
}

impl Program {
    fn new(memory: Memory) -> io::Result<Self> {
        let stdin = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        Ok(Self {
            input: BufReader::new(stdin).lines(),
            waiting: VecDeque::new(),
            memory,
            calls: 0,
            asks_for_tools: false,
        })
    }

    async fn serve(&mut self) -> io::Result<()> {
        self.send(&FromProgram::Ready { remembers: self.memory.prompts })?;
        loop {
            let message = match self.waiting.pop_front() {
                Some(message) => Some(message),
                None => self.receive().await,
            };
            let (prompt, text) = match message {
                Some(ToProgram::Prompt { prompt, text, ask }) => {
                    self.asks_for_tools = ask;
                    (prompt, text)
                }
                Some(ToProgram::Answer { .. } | ToProgram::Tool { .. } | ToProgram::Cancel) => {
                    continue;
                }
                None => return Ok(()),
            };
            let earlier = self.memory.prompts;
            self.memory.add(&prompt, &text)?;
            let error = match play::prompt(self, &text, earlier).await {
                Ok(()) => None,
                Err(Stop::Cancelled) => Some("cancelled".to_owned()),
                Err(Stop::Failed(reason)) => Some(reason),
                Err(Stop::Closed) => return Ok(()),
            };
            self.send(&FromProgram::Done { error })?;
        }
    }

    /// A new id. The prompt count keeps it unique across processes of the same conversation.
    pub(super) fn new_id(&mut self, kind: &str) -> String {
        self.calls += 1;
        format!("{kind}_{}_{}", self.memory.prompts, self.calls)
    }

    /// Writes a line; blocks while the supervisor does not read.
    pub(super) fn send(&self, message: &FromProgram) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.write(&line)
    }

    /// Writes raw bytes to stdout.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    // The next valid message; `None` at the end of stdin. Cancel-safe.
    async fn receive(&mut self) -> Option<ToProgram> {
        loop {
            let line = self.input.next_line().await.ok()??;
            match serde_json::from_str(&line) {
                Ok(message) => return Some(message),
                Err(error) => eprintln!("ignored an invalid line: {error}"),
            }
        }
    }

    /// Waits for a cancel; other messages are queued. Cancel-safe.
    pub(super) async fn cancelled(&mut self) -> Stop {
        loop {
            match self.receive().await {
                Some(ToProgram::Cancel) => return Stop::Cancelled,
                Some(other) => self.waiting.push_back(other),
                None => return Stop::Closed,
            }
        }
    }

    /// Sleeps unless cancelled.
    pub(super) async fn sleep(&mut self, time: Duration) -> Result<(), Stop> {
        tokio::select! {
            () = tokio::time::sleep(time) => Ok(()),
            stop = self.cancelled() => Err(stop),
        }
    }

    /// Waits until a tool may run; returns why it may not.
    pub(super) async fn wait_for_permission(
        &mut self,
        wanted: &str,
    ) -> Result<Option<String>, Stop> {
        while self.asks_for_tools {
            match self.receive().await {
                Some(ToProgram::Tool { call, refusal }) if call == wanted => return Ok(refusal),
                Some(ToProgram::Cancel) => return Err(Stop::Cancelled),
                Some(_) => {}
                None => return Err(Stop::Closed),
            }
        }
        Ok(None)
    }

    pub(super) async fn wait_for_answer(&mut self, wanted: &str) -> Result<String, Stop> {
        loop {
            match self.receive().await {
                Some(ToProgram::Answer { request, answer }) if request == wanted => {
                    return Ok(answer);
                }
                Some(ToProgram::Cancel) => return Err(Stop::Cancelled),
                Some(_) => {}
                None => return Err(Stop::Closed),
            }
        }
    }
}
