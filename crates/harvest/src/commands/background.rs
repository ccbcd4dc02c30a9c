//! `harvest up -d` and `harvest down`: the server as a background process, with its log in the
//! home.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use harvest_proto::api::SessionState;
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde_json::json;

use crate::{
    Invocation,
    cli::UpArgs,
    client::{self, Client},
    config::Config,
    printer::{Advice, count, human_elapsed, human_millis},
    server_process,
};

// Recovering hundreds of sessions takes seconds.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

// The counts of running sessions are only told to the user.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Part of the log that is shown when the server exits before it is ready.
const LOG_TAIL_BYTES: u64 = 4096;

/// A larger log is rotated when the next server starts.
const MAX_LOG_BYTES: u64 = 10 * 1024 * 1024;

/// Starts a server in the background; returns once it is ready.
pub(crate) async fn up(ctx: &Invocation, args: &UpArgs) -> Result<u8> {
    let config = &ctx.config;
    if let Ok(server) = client::local(config) {
        let message = format!("a server is already running at {} (pid {})", server.url, server.pid);
        bail!(Advice::new(message, "`harvest down` stops it"));
    }
    let began = Instant::now();
    let first = !config.token_file().exists();
    let log = log_path(config);
    let (file, before) = open_log(config, &log)?;
    let mut server = spawn(ctx, args, file)?;
    ready(config, &mut server, &log, before).await?;
    let found = client::local(config)?;
    let document = json!({ "url": found.url, "pid": found.pid, "log": log, "home": config.home });
    ctx.print.result(&document, |_| format!("{}\n", found.url))?;
    let time = human_elapsed(began);
    ctx.print.note(format!("Started in {}: pid {}, log {}", time, found.pid, log.display()));
    if let Some(token) = fs::read_to_string(config.token_file()).ok().filter(|_| first) {
        let file = config.token_file();
        ctx.print.note(format!(
            "Token {} (shown once; stored in {})",
            token.trim(),
            file.display()
        ));
    }
    ctx.print.hint(
        "`harvest run -r REPOSITORY \"PROMPT\"` starts a session, `harvest down` stops the server",
    );
    Ok(0)
}

fn log_path(config: &Config) -> PathBuf {
    config.home.join("server.log")
}

/// Opens the log; returns it with its current length. It may contain prompts, so only the owner can
/// read it.
fn open_log(config: &Config, path: &Path) -> Result<(File, u64)> {
    server_process::prepare_home(&config.home)?;
    if fs::metadata(path).is_ok_and(|log| log.len() > MAX_LOG_BYTES) {
        fs::rename(path, path.with_extension("log.1")).context("cannot rotate the log")?;
    }
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let length = file.metadata().with_context(|| format!("cannot read {}", path.display()))?.len();
    Ok((file, length))
}

/// Starts this program again with the same settings and without a terminal.
fn spawn(ctx: &Invocation, args: &UpArgs, log: File) -> Result<Child> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    // Quiet: the first token must not be in the log.
    command.arg("--quiet").arg("--home").arg(&ctx.config.home);
    if let Some(config) = &ctx.flags.config {
        command.arg("--config").arg(config);
    }
    command.args(["up", "--detached"]);
    if let Some(listen) = args.listen {
        command.args(["--listen", &listen.to_string()]);
    }
    for host in &args.hosts {
        command.args(["--host", host]);
    }
    if args.keep {
        command.arg("--keep");
    }
    let errors = log.try_clone().context("cannot open the log twice")?;
    command
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .context("cannot start the server")
}

/// Waits until the server is ready. If it exits first, the error contains the end of its log.
async fn ready(config: &Config, server: &mut Child, log: &Path, before: u64) -> Result<()> {
    let end = Instant::now() + READY_TIMEOUT;
    loop {
        if server.try_wait().context("cannot check the server's process")?.is_some() {
            let output = log_tail(log, before).unwrap_or_default();
            let output = output.trim().trim_start_matches("error: ");
            let hint = format!("its log is {}", log.display());
            bail!(Advice::new(format!("the server exited before it was ready: {output}"), hint));
        }
        let is_ours = client::local(config).is_ok_and(|file| file.pid == server.id());
        if is_ours && own_server(config)?.ready().await {
            return Ok(());
        }
        if Instant::now() > end {
            let message = format!("the server is not ready after {}", human_millis(60_000));
            bail!(Advice::new(
                message,
                format!("it is still starting; its log is {}", log.display())
            ));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The server of this home, even if the settings name another one.
fn own_server(config: &Config) -> Result<Client> {
    Client::find(&config.at(&config.home))
}

/// The end of the log after offset `before`.
fn log_tail(path: &Path, before: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let begin = before.max(file.metadata()?.len().saturating_sub(LOG_TAIL_BYTES));
    file.seek(SeekFrom::Start(begin))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
    // Skip a partial first line, unless it is the only one.
    let partial = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .filter(|end| begin > before && end + 1 < bytes.len());
    Ok(String::from_utf8_lossy(&bytes[partial.map_or(0, |end| end + 1)..]).into_owned())
}

/// Stops the server of this home like Ctrl-C; returns once it has exited.
pub(crate) async fn down(ctx: &Invocation) -> Result<u8> {
    let config = &ctx.config;
    let Ok(server) = client::local(config) else {
        ctx.print.document(&json!({ "ended": null }))?;
        ctx.print.note("No server is running");
        return Ok(0);
    };
    let began = Instant::now();
    let pid =
        i32::try_from(server.pid).ok().and_then(Pid::from_raw).context("the server has no pid")?;
    // The pidfd is opened before the check: the pid could belong to another process a moment later.
    let process =
        pidfd_open(pid, PidfdFlags::empty()).context("cannot find the server's process")?;
    if !server_process::home_has_server(&config.home) || client::local(config)?.pid != server.pid {
        bail!(Advice::new("the server has just exited", "`harvest` shows the status"));
    }
    let kept = kept_work(config).await;
    pidfd_send_signal(&process, Signal::TERM).context("cannot signal the server")?;
    ctx.print.note(format!("Stopping the server (pid {}){kept}", server.pid));
    tokio::task::spawn_blocking(move || {
        loop {
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], None) {
                Err(rustix::io::Errno::INTR) => {}
                other => return other.map(drop),
            }
        }
    })
    .await?
    .context("cannot wait for the server")?;
    let time = human_elapsed(began);
    ctx.print.document(&json!({ "ended": server.pid }))?;
    ctx.print.note(format!("Stopped in {time}"));
    Ok(0)
}

/// What the server keeps as it stops, for the user. Best effort: a server that does not answer is
/// stopped all the same.
async fn kept_work(config: &Config) -> String {
    let counts = async {
        let client = own_server(config)?;
        let count = |state| client.session_count(state);
        let running = tokio::try_join!(
            count(SessionState::Running),
            count(SessionState::NeedsInput),
            count(SessionState::Idle)
        );
        running.map(|(running, asking, idle)| (running + asking, idle))
    };
    match tokio::time::timeout(COUNT_TIMEOUT, counts).await {
        Ok(Ok((turns, idle))) => describe_kept(turns, idle),
        _ => "; saving its running sandboxes".to_owned(),
    }
}

/// `turns` sandboxes run a turn, `idle` ones do not.
fn describe_kept(turns: u64, idle: u64) -> String {
    let saving = match turns + idle {
        0 => return String::new(),
        running => format!("; saving {}", count(running, "running sandbox")),
    };
    match turns {
        0 => saving,
        _ => format!("{saving}; the next `harvest up` continues {}", count(turns, "turn")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn down_tells_what_is_kept() {
        assert_eq!(describe_kept(0, 0), "");
        assert_eq!(describe_kept(0, 3), "; saving 3 running sandboxes");
        let one = "; saving 1 running sandbox; the next `harvest up` continues 1 turn";
        assert_eq!(describe_kept(1, 0), one);
    }

    #[test]
    fn log_tail_skips_old_and_partial_lines() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let long = format!("old\n{}\nerror: the disk is full\n", "ä".repeat(4000));
        fs::write(&log, &long).unwrap();
        assert_eq!(log_tail(&log, 4).unwrap(), "error: the disk is full\n");
        fs::write(&log, "old\nnew\nerror\n").unwrap();
        assert_eq!(log_tail(&log, 4).unwrap(), "new\nerror\n");
        fs::write(&log, "ä".repeat(4001)).unwrap();
        assert!(log_tail(&log, 0).unwrap().ends_with("ää"), "a single long line is truncated");
    }

    #[test]
    fn own_server_ignores_the_configured_url() {
        // Another test of this process may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let home = tempfile::tempdir().unwrap();
        let flags = crate::cli::GlobalFlags {
            home: Some(home.path().to_owned()),
            ..crate::cli::GlobalFlags::default()
        };
        let config = Config::load(&flags, &|name| {
            let other = [("HARVEST_URL", "http://other.example"), ("HARVEST_TOKEN", "theirs")];
            other.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        let config = config.unwrap();
        let record =
            client::ServerFile { url: "http://127.0.0.1:1".into(), pid: std::process::id() };
        fs::write(config.server_file(), serde_json::to_vec(&record).unwrap()).unwrap();
        fs::write(config.token_file(), "ours").unwrap();
        let lock = File::create(home.path().join("server.lock")).unwrap();
        lock.lock().unwrap();
        assert_eq!(Client::find(&config).unwrap().url(), "http://other.example");
        assert_eq!(own_server(&config).unwrap().url(), "http://127.0.0.1:1");
    }
}
