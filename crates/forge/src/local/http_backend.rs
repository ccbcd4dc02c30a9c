//! Runs `git http-backend` (CGI) for one request: bodies are streamed, and the process group is
//! killed when the client disconnects. The caller has already checked the token.

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

// git sends a handful of short header lines.
const MAX_HEAD_BYTES: u64 = 16 * 1024;
// Linux's default pipe capacity, so one read empties a full pipe.
const CHUNK_BYTES: usize = 64 * 1024;
// After SIGTERM git needs milliseconds to remove a partial pack.
const GRACE: Duration = Duration::from_secs(2);

/// The CGI variables of a request.
pub(super) struct CgiRequest<'a> {
    /// The folder that holds `repository.git`.
    pub(super) folder: &'a Path,
    /// The part of the URL path after the repository.
    pub(super) endpoint: &'a str,
    pub(super) method: Method,
    pub(super) query: &'a str,
    pub(super) headers: &'a HeaderMap,
}

pub(super) async fn run(
    backend: &Path,
    request: CgiRequest<'_>,
    body: Body,
) -> io::Result<Response<Body>> {
    let mut process = Backend::start(backend, &request)?;
    let (stdin, stdout) =
        process.pipes().ok_or_else(|| io::Error::other("the child has no pipes"))?;
    let mut stdout = BufReader::with_capacity(CHUNK_BYTES, stdout);
    let (upload_failed, mut failure) = mpsc::channel::<()>(1);
    tokio::spawn(upload(stdin, body.into_data_stream(), upload_failed));
    let head = tokio::select! {
        head = read_head(&mut stdout) => head?,
        // The client disconnected during the upload, so the request body is incomplete.
        Some(()) = upload_failure(&mut failure) => {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
    };
    let chunks =
        stream::unfold((stdout, process, failure), |(mut stdout, process, mut failure)| async {
            let mut chunk = vec![0; CHUNK_BYTES];
            let read = tokio::select! {
                read = stdout.read(&mut chunk) => read,
                Some(()) = upload_failure(&mut failure) => {
                    Err(io::ErrorKind::ConnectionAborted.into())
                }
            };
            match read {
                Ok(0) => {
                    process.wait().await;
                    None
                }
                Ok(count) => {
                    chunk.truncate(count);
                    Some((Ok(Bytes::from(chunk)), (stdout, process, failure)))
                }
                Err(error) => Some((Err(error), (stdout, process, failure))),
            }
        });
    let mut response = Response::new(Body::from_stream(chunks));
    (*response.status_mut(), *response.headers_mut()) = head;
    Ok(response)
}

// Resolves when the upload fails; pends forever once the body has been sent completely.
async fn upload_failure(failure: &mut mpsc::Receiver<()>) -> Option<()> {
    match failure.recv().await {
        Some(()) => Some(()),
        None => std::future::pending().await,
    }
}

async fn upload(mut stdin: ChildStdin, mut body: BodyDataStream, failure: mpsc::Sender<()>) {
    while let Some(chunk) = body.next().await {
        let Ok(chunk) = chunk else {
            // The receiver is gone only when the process is being killed anyway.
            let _ = failure.send(()).await;
            return;
        };
        if stdin.write_all(&chunk).await.is_err() {
            // The backend answered without reading the rest; the git client still sends it.
            while let Some(Ok(_)) = body.next().await {}
            return;
        }
    }
}

async fn read_head(stdout: &mut BufReader<ChildStdout>) -> io::Result<(StatusCode, HeaderMap)> {
    let (mut status, mut headers, mut left) = (StatusCode::OK, HeaderMap::new(), MAX_HEAD_BYTES);
    let malformed =
        || io::Error::new(io::ErrorKind::InvalidData, "git http-backend sent malformed headers");
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

/// The backend's process group, killed on drop.
struct Backend {
    // `None` once the child has been reaped or is being killed.
    child: Option<Child>,
    group: Option<Pid>,
}

impl Backend {
    fn start(backend: &Path, request: &CgiRequest<'_>) -> io::Result<Self> {
        let header =
            |name: HeaderName| request.headers.get(name).and_then(|value| value.to_str().ok());
        let mut command = git::isolated(backend);
        command
            .env("GIT_PROJECT_ROOT", request.folder)
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

    async fn wait(mut self) {
        let Some(child) = self.child.as_mut() else { return };
        // The child closed its output, so it is about to exit; if it hangs, drop kills it.
        let exited = child.wait().await;
        self.child = None;
        if !exited.as_ref().is_ok_and(std::process::ExitStatus::success) {
            tracing::debug!(?exited, "git http-backend failed");
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let (Some(mut child), Some(group)) = (self.child.take(), self.group) else { return };
        // On SIGTERM git removes partially received packs. The group id cannot be reused before the
        // leader is reaped, so neither signal can reach other processes.
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
        tracing::debug!(%error, "git http-backend has already exited");
    }
}
