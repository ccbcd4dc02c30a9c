//! The scripted agent's own process: hears lines, plays the script of each prompt, says lines. It is
//! nobody special: it runs as the agent's user and can do what any agent can.

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

/// The role's entry point.
pub(crate) fn main(conversation: Option<&str>) -> ExitCode {
    match live(conversation.unwrap_or_default()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the scripted agent cannot go on: {error}");
            ExitCode::FAILURE
        }
    }
}

fn live(conversation: &str) -> io::Result<()> {
    let home = std::env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    let memory = Memory::open(Path::new(&home), conversation)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut program = Program::new(memory)?;
        program.serve().await
    })
}

/// Why a prompt is not played to its end.
#[derive(Debug)]
pub(super) enum Stop {
    /// It was told to give up.
    Cancelled,
    /// The script says so, or cannot be played.
    Failed(String),
    /// Nobody speaks with it any more.
    Closed,
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// A running scripted agent.
pub(super) struct Program {
    heard: Lines<BufReader<pipe::Receiver>>,
    /// Heard while it waited for something else.
    waiting: VecDeque<ToProgram>,
    pub(super) memory: Memory,
    /// How many tools it has called.
    pub(super) calls: usize,
}

impl Program {
    fn new(memory: Memory) -> io::Result<Self> {
        let stdin = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        Ok(Self {
            heard: BufReader::new(stdin).lines(),
            waiting: VecDeque::new(),
            memory,
            calls: 0,
        })
    }

    async fn serve(&mut self) -> io::Result<()> {
        self.say(&FromProgram::Ready { remembers: self.memory.prompts() })?;
        loop {
            let order = match self.waiting.pop_front() {
                Some(order) => Some(order),
                None => self.hear().await,
            };
            let (prompt, text) = match order {
                Some(ToProgram::Prompt { prompt, text }) => (prompt, text),
                Some(ToProgram::Answer { .. } | ToProgram::Cancel) => continue,
                None => return Ok(()),
            };
            let earlier = self.memory.prompts();
            self.memory.add(&prompt, &text)?;
            let error = match play::prompt(self, &text, earlier).await {
                Ok(()) => None,
                Err(Stop::Cancelled) => Some("it was told to stop".to_owned()),
                Err(Stop::Failed(reason)) => Some(reason),
                Err(Stop::Closed) => return Ok(()),
            };
            self.say(&FromProgram::Done { error })?;
        }
    }

    /// Says a line. Waits for as long as nobody reads.
    pub(super) fn say(&self, message: &FromProgram) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.write(&line)
    }

    /// Writes to its output as it is.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    // The next line that makes sense; `None` when nobody speaks any more. Cancel-safe.
    async fn hear(&mut self) -> Option<ToProgram> {
        loop {
            let line = self.heard.next_line().await.ok()??;
            match serde_json::from_str(&line) {
                Ok(message) => return Some(message),
                Err(error) => eprintln!("passed over a line: {error}"),
            }
        }
    }

    /// Waits until told to give up; whatever else is said meanwhile waits. Cancel-safe.
    pub(super) async fn interrupted(&mut self) -> Stop {
        loop {
            match self.hear().await {
                Some(ToProgram::Cancel) => return Stop::Cancelled,
                Some(other) => self.waiting.push_back(other),
                None => return Stop::Closed,
            }
        }
    }

    /// Waits so long, unless told to give up.
    pub(super) async fn wait(&mut self, time: Duration) -> Result<(), Stop> {
        tokio::select! {
            () = tokio::time::sleep(time) => Ok(()),
            stop = self.interrupted() => Err(stop),
        }
    }

    /// Waits for the answer to this request.
    pub(super) async fn answered(&mut self, wanted: &str) -> Result<String, Stop> {
        loop {
            match self.hear().await {
                Some(ToProgram::Answer { request, answer }) if request == wanted => {
                    return Ok(answer);
                }
                Some(ToProgram::Cancel) => return Err(Stop::Cancelled),
                Some(ToProgram::Prompt { .. } | ToProgram::Answer { .. }) => {}
                None => return Err(Stop::Closed),
            }
        }
    }
}
