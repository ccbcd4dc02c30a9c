//! A command in a sandbox of this machine's engine, without a server. A fresh sandbox belongs to this
//! process: whatever becomes of it, the sandbox goes too.

use std::{
    io::Read,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use harvest_engine::{
    Engine, EngineError, Origin, Owner, SandboxState, Spec,
    guest::{Guest, GuestError, Heard, Input},
};
use harvest_proto::{SandboxId, bridge::Command};
use tokio::signal::unix::{SignalKind, signal};

use super::{
    outcome::{Outcome, Sink},
    variables,
};
use crate::{
    Invocation,
    begin::begin,
    cli::{Exec, Language},
    images,
    printer::{Advice, Printer, reader_left},
    resolve, wire,
};

/// As long as a tool call of an agent may take.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// By signal 9.
const KILLED: u8 = 128 + 9;

/// SIGPIPE, which the command would have got from a pipe of its own.
const READER_LEFT: u8 = 128 + 13;

pub(super) async fn run(here: &Invocation, args: Exec, sink: Sink) -> Result<u8> {
    let engine = wire::open_engine(&here.config)?;
    let job = match &args.place {
        Some(_) if args.limits.any() || args.volumes.any() => {
            let hint = "leave the sandbox out for a fresh one";
            bail!(Advice::new("a sandbox has the limits and volumes it was made with", hint));
        }
        Some(place) => Job::new(resolve::sandbox(&engine, place)?, None, &args)?,
        None => {
            let image = images::ensure(&engine, &here.config.home, &args.image, here.print).await?;
            Job::new(SandboxId::random(), Some(fresh(&args, image)), &args)?
        }
    };
    let (id, is_fresh) = (job.id.clone(), job.fresh.is_some());
    let (worker, print) = (engine.clone(), here.print);
    let mut work = tokio::task::spawn_blocking(move || job.run(&worker, sink, print));
    let code = tokio::select! {
        done = &mut work => {
            let (sink, outcome) = match done? {
                Err(error) if reader_left(&error) => return end(engine, id, is_fresh, Ok(READER_LEFT)).await,
                Err(error) => return end(engine, id, is_fresh, Err(error)).await,
                Ok(done) => done,
            };
            sink.finish(here.print, &outcome, Some(id.to_string().as_str()))
        }
        // Our end closes the bridge, and with it everything the command started dies.
        code = asked_to_end() => code,
    };
    end(engine, id, is_fresh, code).await
}

/// Takes a fresh sandbox away. Where that fails, the zygote does it when this process is gone.
async fn end(engine: Engine, id: SandboxId, is_fresh: bool, code: Result<u8>) -> Result<u8> {
    if is_fresh {
        let removed = tokio::task::spawn_blocking(move || engine.remove(&id)).await?;
        if let Err(error) = removed {
            tracing::warn!(%error, "the sandbox is left to the zygote");
        }
    }
    code
}

/// Answers the exit code when a signal asks this process to end.
async fn asked_to_end() -> Result<u8> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
        _ = hangup.recv() => 129,
    })
}

fn fresh(args: &Exec, image: String) -> Spec {
    Spec {
        id: SandboxId::random(),
        from: Origin::Image(image),
        limits: args.limits.limits(),
        network: args.net.network(),
        owner: Owner::Process(std::process::id()),
        binds: Vec::new(),
        volumes: args.volumes.volumes.clone(),
        env: Default::default(),
    }
}

/// What is to be run, and where.
struct Job {
    id: SandboxId,
    /// To be started first.
    fresh: Option<Spec>,
    command: Command,
    code: Option<(Language, String)>,
    stdin: bool,
    with_state: bool,
}

impl Job {
    fn new(id: SandboxId, fresh: Option<Spec>, args: &Exec) -> Result<Self> {
        let limit = args.timeout.unwrap_or(TIMEOUT);
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let command = Command {
            argv: args.command.clone(),
            env: variables(&args.env)?,
            cwd: args.workdir.clone(),
            user: args.user.clone(),
            timeout_millis: (millis > 0).then_some(millis),
            ..Command::default()
        };
        let code = args.lang.zip(args.code.clone());
        let fresh = fresh.map(|spec| Spec { id: id.clone(), ..spec });
        Ok(Self { id, fresh, command, code, stdin: args.stdin, with_state: !args.volumes.no_state })
    }

    /// Runs it to its end; blocks.
    fn run(mut self, engine: &Engine, mut sink: Sink, print: Printer) -> Result<(Sink, Outcome)> {
        let began = Instant::now();
        let running = match &self.fresh {
            Some(spec) => begin(engine, spec.clone(), self.with_state, print)?,
            None => match engine.find(&self.id)? {
                SandboxState::Running(running) => running,
                _ => {
                    let hint = format!("`harvest sandbox start {}` starts it with the disk it left", self.id);
                    bail!(Advice::new(format!("{} does not run", self.id), hint));
                }
            },
        };
        let ran = self.run_in(&running.bridge, &mut sink);
        let outcome = match ran {
            Ok(outcome) => match engine.stopped(&self.id) {
                // By whom a signal 9 was sent, the command cannot say.
                Ok(Some(stopped)) if outcome.code == KILLED && self.fresh.is_some() => {
                    outcome.because(format!("disk: {} bytes may be written", stopped.limit_bytes))
                }
                _ => outcome,
            },
            Err(Failed::Refused(fault)) => Outcome::refused(&fault),
            Err(Failed::Bridge) => {
                let reason = match engine.find(&self.id) {
                    Ok(SandboxState::Dead { reason }) => reason,
                    Ok(SandboxState::Gone) => "removed".to_owned(),
                    _ => "its supervisor closed the bridge".to_owned(),
                };
                let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                Outcome::crashed(&reason, millis)
            }
            Err(Failed::Ours(error)) => return Err(error),
        };
        Ok((sink, outcome))
    }

    fn run_in(&mut self, bridge: &Path, sink: &mut Sink) -> Result<Outcome, Failed> {
        let written = self.write_code(bridge)?;
        let ran = self.follow(bridge, sink);
        // In a fresh sandbox it goes with everything else.
        if let Some(path) = written.filter(|_| self.fresh.is_none()) {
            let _ = Guest::dial(bridge).and_then(|mut guest| guest.remove(&path));
        }
        ran
    }

    /// Puts `--code` into a file, for the command line is everybody's to read and has an end.
    fn write_code(&mut self, bridge: &Path) -> Result<Option<String>, Failed> {
        let Some((language, code)) = &self.code else { return Ok(None) };
        let (program, extension) = match language {
            Language::Python => ("python3", "py"),
            Language::Node => ("node", "js"),
            Language::Bash => ("bash", "sh"),
        };
        let path = format!("/tmp/harvest-{}.{extension}", SandboxId::random().part());
        let user = self.command.user.as_deref();
        let mut guest = Guest::dial(bridge)?;
        if let Err(error) = guest.write(&path, 0o600, user, &mut code.as_bytes()) {
            let error = anyhow::Error::new(error).context("cannot write the code into the sandbox");
            return Err(Failed::Ours(error));
        }
        let arguments = std::mem::take(&mut self.command.argv);
        self.command.argv = [program.to_owned(), path.clone()].into_iter().chain(arguments).collect();
        Ok(Some(path))
    }

    fn follow(&mut self, bridge: &Path, sink: &mut Sink) -> Result<Outcome, Failed> {
        let guest = Guest::dial(bridge)?;
        let (mut live, input) = guest.live(std::mem::take(&mut self.command), self.stdin)?;
        if let Some(input) = input {
            // Nobody waits for it: it may be reading from a terminal when the command has long ended.
            std::thread::spawn(move || feed(input));
        }
        loop {
            match live.listen()? {
                Heard::Output(output, bytes) => sink.take(output, &bytes).map_err(Failed::Ours)?,
                Heard::Exited { exit, millis } => return Ok(Outcome::exited(exit, millis)),
            }
        }
    }
}

/// Sends our standard input as it comes.
fn feed(mut input: Input) {
    let mut stdin = std::io::stdin().lock();
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        match stdin.read(&mut buffer) {
            Ok(length @ 1..) => match input.write(&buffer[..length]) {
                Ok(true) => {}
                // The command is over, or the bridge: whoever follows it knows.
                Ok(false) | Err(_) => return,
            },
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
        }
    }
    let _ = input.end();
}

/// Why there is no end to tell of.
enum Failed {
    /// The supervisor did not start it.
    Refused(harvest_proto::bridge::Fault),
    /// The sandbox went away.
    Bridge,
    /// This side.
    Ours(anyhow::Error),
}

impl From<GuestError> for Failed {
    fn from(error: GuestError) -> Self {
        match error {
            GuestError::Refused(fault) => Self::Refused(fault),
            GuestError::Broken(_) | GuestError::Dial { .. } => Self::Bridge,
            other => {
                Self::Ours(anyhow!(EngineError::Bridge { doing: "follow the command".into(), source: other }))
            }
        }
    }
}
