//! `harvest up -d` and `harvest down`: the server as a process of its own, with its log in the home.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde_json::json;

use crate::{
    Invocation,
    cli::Up,
    client::{self, Client},
    config::Config,
    printer::{Advice, took},
    wire,
};

/// Taking up hundreds of sessions takes seconds; a minute means that something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often to look whether it is there.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// As much of the log is shown of a server that ended before it was ready.
const LAST_WORDS: u64 = 4096;

/// A log this long is put aside when the next server starts.
const LONG_LOG: u64 = 10 * 1024 * 1024;

/// Starts a server in the background; returns when it is ready.
pub(crate) async fn up(here: &Invocation, args: &Up) -> Result<u8> {
    let config = &here.config;
    if let Ok(server) = client::local(config) {
        let message = format!("a server runs already at {} (pid {})", server.url, server.pid);
        bail!(Advice::new(message, "`harvest down` ends it"));
    }
    let began = Instant::now();
    let first = !config.token_file().exists();
    let log = log_path(config);
    let (file, before) = open_log(config, &log)?;
    let mut server = spawn(here, args, file)?;
    ready(config, &mut server, &log, before).await?;
    let found = client::local(config)?;
    let document = json!({ "url": found.url, "pid": found.pid, "log": log, "home": config.home });
    here.print.result(&document, |_| format!("{}\n", found.url))?;
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    here.print.note(format!(
        "Started in {}: pid {}, log {}",
        took(millis),
        found.pid,
        log.display()
    ));
    if let Some(token) = fs::read_to_string(config.token_file()).ok().filter(|_| first) {
        let file = config.token_file();
        here.print.note(format!("Token {} (shown once; kept in {})", token.trim(), file.display()));
    }
    here.print.hint(
        "`harvest run -r REPOSITORY \"PROMPT\"` starts a session, `harvest down` ends the server",
    );
    Ok(0)
}

fn log_path(config: &Config) -> PathBuf {
    config.home.join("server.log")
}

/// The log and how long it is already. What people prompt may be in it, so it is nobody else's to read.
fn open_log(config: &Config, path: &Path) -> Result<(File, u64)> {
    wire::prepare_home(&config.home)?;
    if fs::metadata(path).is_ok_and(|log| log.len() > LONG_LOG) {
        fs::rename(path, path.with_extension("log.1")).context("cannot put the old log aside")?;
    }
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let length = file.metadata().with_context(|| format!("cannot read {}", path.display()))?.len();
    Ok((file, length))
}

/// The same program with the same settings, without a terminal.
fn spawn(here: &Invocation, args: &Up, log: File) -> Result<Child> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    // The first token is for the terminal, not for the log.
    command.arg("--quiet").arg("--home").arg(&here.config.home);
    if let Some(config) = &here.flags.config {
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

/// Returns when it answers, or says what it said when it ended.
async fn ready(config: &Config, server: &mut Child, log: &Path, before: u64) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        if server.try_wait().context("cannot look after the server")?.is_some() {
            let said = since(log, before).unwrap_or_default();
            let said = said.trim().trim_start_matches("error: ");
            let hint = format!("everything it said is in {}", log.display());
            bail!(Advice::new(format!("the server ended before it was ready: {said}"), hint));
        }
        let ours = client::local(config).is_ok_and(|file| file.pid == server.id());
        if ours && own(config)?.ready().await {
            return Ok(());
        }
        if Instant::now() > end {
            let message = format!("the server is not ready after {}", took(60_000));
            bail!(Advice::new(message, format!("it goes on; look at {}", log.display())));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The server of this home, whichever one the settings name for everything else.
fn own(config: &Config) -> Result<Client> {
    Client::find(&config.at(&config.home))
}

/// The end of what was said since: why it ended is said last.
fn since(path: &Path, before: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let begin = before.max(file.metadata()?.len().saturating_sub(LAST_WORDS));
    file.seek(SeekFrom::Start(begin))?;
    let mut bytes = Vec::new();
    file.take(LAST_WORDS).read_to_end(&mut bytes)?;
    // Whole lines only, unless there is but one.
    let whole = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .filter(|end| begin > before && end + 1 < bytes.len());
    Ok(String::from_utf8_lossy(&bytes[whole.map_or(0, |end| end + 1)..]).into_owned())
}

/// Ends the server of this home as ctrl-c would; returns when it is gone.
pub(crate) async fn down(here: &Invocation) -> Result<u8> {
    let config = &here.config;
    let Ok(server) = client::local(config) else {
        here.print.result(&json!({ "ended": null }), |_| String::new())?;
        here.print.note("No server is running");
        return Ok(0);
    };
    let began = Instant::now();
    let pid =
        i32::try_from(server.pid).ok().and_then(Pid::from_raw).context("the server has no pid")?;
    // Held before anything is looked at: a number can be another process's a moment later.
    let process =
        pidfd_open(pid, PidfdFlags::empty()).context("cannot find the server's process")?;
    if !wire::is_served(&config.home) || client::local(config)?.pid != server.pid {
        bail!(Advice::new(
            "the server has just ended by itself",
            "`harvest` shows what is going on"
        ));
    }
    pidfd_send_signal(&process, Signal::TERM).context("cannot signal the server")?;
    here.print.note(format!("Ending pid {}; what runs is kept first", server.pid));
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
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    here.print.result(&json!({ "ended": server.pid }), |_| String::new())?;
    here.print.note(format!("Ended in {}", took(millis)));
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_of_a_server_are_shown_whatever_came_before() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let long = format!("old\n{}\nerror: the disk is full\n", "ä".repeat(4000));
        fs::write(&log, &long).unwrap();
        assert_eq!(since(&log, 4).unwrap(), "error: the disk is full\n");
        fs::write(&log, "old\nnew\nerror\n").unwrap();
        assert_eq!(since(&log, 4).unwrap(), "new\nerror\n");
        fs::write(&log, "ä".repeat(4001)).unwrap();
        assert!(since(&log, 0).unwrap().ends_with("ää"), "a line without an end is cut");
    }

    #[test]
    fn the_server_of_the_home_is_asked_whichever_one_the_settings_name() {
        // Another test of this process may have been first; one provider is enough.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let home = tempfile::tempdir().unwrap();
        let flags = crate::cli::Global {
            home: Some(home.path().to_owned()),
            ..crate::cli::Global::default()
        };
        let config = Config::load(&flags, &|name| {
            let far = [("HARVEST_URL", "http://far.example"), ("HARVEST_TOKEN", "theirs")];
            far.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        let config = config.unwrap();
        let record =
            client::ServerFile { url: "http://127.0.0.1:1".into(), pid: std::process::id() };
        fs::write(config.server_file(), serde_json::to_vec(&record).unwrap()).unwrap();
        fs::write(config.token_file(), "ours").unwrap();
        let lock = File::create(home.path().join("server.lock")).unwrap();
        lock.lock().unwrap();
        assert_eq!(Client::find(&config).unwrap().url(), "http://far.example");
        assert_eq!(own(&config).unwrap().url(), "http://127.0.0.1:1");
    }
}
