//! Runs `git http-backend` for one request: bytes stream in and out, and when the client goes away the
//! whole process group goes with it. Knows nothing of tokens; whoever calls has checked them.

use std::{io, path::Path, process::Stdio, time::Duration};

use axum::{
    body::{Body, BodyDataStream, Bytes},
    http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header},
};
use futures_util::{StreamExt, stream};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout},
    runtime::Handle,
    sync::mpsc,
};

use super::git;

// The program sends a handful of short lines before the body.
const MAX_HEAD_BYTES: u64 = 16 * 1024;
// Linux's default pipe capacity, so one read empties a full pipe.
const PIECE_BYTES: usize = 64 * 1024;
// Removing half a pack takes git milliseconds.
const GRACE: Duration = Duration::from_secs(2);

/// What a request is, in the words of CGI.
pub(super) struct Request<'a> {
    /// The folder that holds `repository.git`.
    pub(super) place: &'a Path,
    /// What follows the repository in the URL.
    pub(super) endpoint: &'a str,
    pub(super) method: Method,
    pub(super) query: &'a str,
    pub(super) headers: &'a HeaderMap,
}

/// Runs the program and answers with what it says.
pub(super) async fn run(
    backend: &Path,
    request: Request<'_>,
    body: Body,
) -> io::Result<Response<Body>> {
    let mut running = Running::start(backend, &request)?;
    let (stdin, stdout) =
        running.pipes().ok_or_else(|| io::Error::other("the child has no pipes"))?;
    let mut stdout = BufReader::with_capacity(PIECE_BYTES, stdout);
    let (broken_end, mut broken) = mpsc::channel::<()>(1);
    tokio::spawn(feed(stdin, body.into_data_stream(), broken_end));
    let head = tokio::select! {
        head = read_head(&mut stdout) => head?,
        // The client hung up in mid-request: what it sent is half of something.
        Some(()) = broken_message(&mut broken) => return Err(io::ErrorKind::ConnectionAborted.into()),
    };
    let pieces = stream::unfold(
        (stdout, running, broken),
        |(mut stdout, running, mut broken)| async {
            let mut piece = vec![0; PIECE_BYTES];
            let read = tokio::select! {
                read = stdout.read(&mut piece) => read,
                Some(()) = broken_message(&mut broken) => Err(io::ErrorKind::ConnectionAborted.into()),
            };
            match read {
                Ok(0) => {
                    running.end().await;
                    None
                }
                Ok(count) => {
                    piece.truncate(count);
                    Some((Ok(Bytes::from(piece)), (stdout, running, broken)))
                }
                Err(error) => Some((Err(error), (stdout, running, broken))),
            }
        },
    );
    let mut response = Response::new(Body::from_stream(pieces));
    (*response.status_mut(), *response.headers_mut()) = head;
    Ok(response)
}

// `None` once the body is through: from then on nothing can break.
async fn broken_message(broken: &mut mpsc::Receiver<()>) -> Option<()> {
    match broken.recv().await {
        Some(()) => Some(()),
        None => std::future::pending().await,
    }
}

async fn feed(mut stdin: ChildStdin, mut body: BodyDataStream, broken: mpsc::Sender<()>) {
    while let Some(piece) = body.next().await {
        let Ok(piece) = piece else {
            // Whoever listened has gone when this fails; then the program is being ended anyway.
            let _ = broken.send(()).await;
            return;
        };
        if stdin.write_all(&piece).await.is_err() {
            // The program has made up its mind without the rest; git still wants to send it.
            while let Some(Ok(_)) = body.next().await {}
            return;
        }
    }
}

async fn read_head(stdout: &mut BufReader<ChildStdout>) -> io::Result<(StatusCode, HeaderMap)> {
    let (mut status, mut headers, mut left) = (StatusCode::OK, HeaderMap::new(), MAX_HEAD_BYTES);
    let malformed =
        || io::Error::new(io::ErrorKind::InvalidData, "git http-backend gave no proper head");
    loop {
        let mut line = String::new();
        let count = (&mut *stdout).take(left).read_line(&mut line).await?;
        left -= count as u64;
        if !line.ends_with('\n') {
            return Err(malformed());
        }
        let line = line.trim_end();
        if line.is_empty() {
            return Ok((status, headers));
        }
        let (name, value) = line.split_once(':').ok_or_else(malformed)?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("status") {
            let code = value.split(' ').next().unwrap_or_default();
            status = code.parse().map_err(|_| malformed())?;
        } else {
            let name: HeaderName = name.parse().map_err(|_| malformed())?;
            headers.append(name, HeaderValue::from_str(value).map_err(|_| malformed())?);
        }
    }
}

/// The program and everything it started. Ends with this value.
struct Running {
    // Taken when it has ended or is being ended.
    child: Option<Child>,
    group: Option<Pid>,
}

impl Running {
    fn start(backend: &Path, request: &Request<'_>) -> io::Result<Self> {
        let header =
            |name: HeaderName| request.headers.get(name).and_then(|value| value.to_str().ok());
        let mut command = git::bare(backend);
        command
            .env("GIT_PROJECT_ROOT", request.place)
            .env("PATH_INFO", format!("/repository.git/{}", request.endpoint))
            .env("GIT_HTTP_EXPORT_ALL", "1")
            .env("REQUEST_METHOD", request.method.as_str())
            .env("QUERY_STRING", request.query)
            .env("REMOTE_USER", "harvest")
            .env("REMOTE_ADDR", "127.0.0.1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0);
        for (variable, name) in [
            ("CONTENT_TYPE", header::CONTENT_TYPE),
            ("CONTENT_LENGTH", header::CONTENT_LENGTH),
            ("HTTP_CONTENT_ENCODING", header::CONTENT_ENCODING),
            ("GIT_PROTOCOL", HeaderName::from_static("git-protocol")),
        ] {
            if let Some(value) = header(name) {
                command.env(variable, value);
            }
        }
        let child = command.spawn()?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Ok(Self { child: Some(child), group })
    }

    fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        let child = self.child.as_mut()?;
        Some((child.stdin.take()?, child.stdout.take()?))
    }

    async fn end(mut self) {
        let Some(child) = self.child.as_mut() else { return };
        // It has closed its output, so it is about to end; if it hangs, dropping us ends it.
        let ended = child.wait().await;
        self.child = None;
        if !ended.as_ref().is_ok_and(std::process::ExitStatus::success) {
            tracing::debug!(?ended, "git http-backend failed");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let (Some(mut child), Some(group)) = (self.child.take(), self.group) else { return };
        // Asked first, git removes what it has received so far. Until the leader is reaped, the group's
        // number is its own, so both signals reach nobody else.
        let Ok(runtime) = Handle::try_current() else { return signal(group, Signal::KILL) };
        signal(group, Signal::TERM);
        runtime.spawn(async move {
            tokio::time::sleep(GRACE).await;
            signal(group, Signal::KILL);
            if let Err(error) = child.wait().await {
                tracing::warn!(%error, "cannot reap git http-backend");
            }
        });
    }
}

fn signal(group: Pid, signal: Signal) {
    if let Err(error) = kill_process_group(group, signal) {
        tracing::debug!(%error, "git http-backend has already gone");
    }
}
