//! Connects a WebSocket with a running command: bytes are binary frames, everything else is JSON in
//! text frames. A client that does not read stalls only its own command. A client that disappears
//! is detected by pings, and its command is killed.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use axum::{
    extract::{
        FromRequestParts,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code},
    },
    http::{HeaderMap, StatusCode, header, request::Parts},
};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use harvest_proto::api::{ExecRequest, STDERR, STDOUT, SocketIn, SocketOut};
use harvest_session::{
    bridge::{ExecInput, ExecOutput},
    sandboxes::{CommandHandle, SandboxHandle},
};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::{problem::ApiError, validate};

// Shorter than the idle timeouts of common proxies, the strictest of which is 30 s.
const PING_INTERVAL: Duration = Duration::from_secs(20);

// A client that misses four pings is considered gone.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(90);

// Time for the client to answer the close frame; closing at once could cost it the last bytes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

// Enough for a paste or a chunk of a file.
const MAX_FRAME_BYTES: usize = 1024 * 1024;

type Sender = SplitSink<WebSocket, Message>;
type Receiver = SplitStream<WebSocket>;

/// A WebSocket upgrade request from the same origin or from a program.
pub(crate) struct Upgrade(pub(crate) WebSocketUpgrade);

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        same_origin(&parts.headers)?;
        let upgrade =
            WebSocketUpgrade::from_request_parts(parts, state).await.map_err(|error| {
                ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", error.body_text())
                    .hint("this route is a WebSocket: send the upgrade headers")
            })?;
        Ok(Self(upgrade.max_message_size(MAX_FRAME_BYTES).max_frame_size(MAX_FRAME_BYTES)))
    }
}

/// Browsers open WebSockets across origins and send the page's origin: only our own is allowed.
fn same_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let Some(origin) = text(header::ORIGIN) else { return Ok(()) };
    let host = text(header::HOST).unwrap_or_default();
    match origin.split_once("://") {
        Some(("http" | "https", site)) if !host.is_empty() && site.eq_ignore_ascii_case(host) => {
            Ok(())
        }
        _ => {
            let detail = format!("pages of `{origin}` may not open WebSockets on this server");
            Err(ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", detail))
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketKind {
    /// One stream of bytes each way.
    Terminal,
    /// Stdout and stderr are separate.
    Command,
}

/// Reads the command from the first frame, starts it and relays its bytes.
pub(crate) async fn serve_exec(
    mut socket: WebSocket,
    sandbox: SandboxHandle,
    shutdown: CancellationToken,
) {
    let request = tokio::select! {
        request = timeout(CLIENT_TIMEOUT, read_request(&mut socket)) => {
            request.unwrap_or(Err(CloseReason::ClientGone))
        }
        () = shutdown.cancelled() => Err(CloseReason::ServerClosing),
    };
    let started = match request {
        Ok(request) => start(sandbox, request).await,
        Err(reason) => Err(reason),
    };
    match started {
        Ok((running, input)) => relay(socket, running, input, SocketKind::Command, shutdown).await,
        Err(reason) => {
            let (sender, receiver) = socket.split();
            close(sender, receiver, reason).await;
        }
    }
}

async fn read_request(socket: &mut WebSocket) -> Result<ExecRequest, CloseReason> {
    loop {
        match socket.recv().await {
            Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                Ok(SocketIn::Start(request)) if request.stdin.is_none() => return Ok(request),
                _ => {
                    return Err(CloseReason::InvalidFrame(
                        "the first frame must be `start`, without `stdin`",
                    ));
                }
            },
            Some(Ok(Message::Binary(_))) => {
                return Err(CloseReason::InvalidFrame("the first frame must be `start`"));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(CloseReason::ClientGone),
        }
    }
}

async fn start(
    sandbox: SandboxHandle,
    request: ExecRequest,
) -> Result<(CommandHandle, Option<ExecInput>), CloseReason> {
    let failed = |error: ApiError| {
        CloseReason::Finished(SocketOut::Failed {
            code: error.code.to_owned(),
            message: error.detail,
        })
    };
    validate::exec(&request).map_err(failed)?;
    sandbox.start(request, true).await.map_err(|error| failed(error.into()))
}

/// Relays bytes both ways until the command exits, the client disconnects or the server shuts down.
pub(crate) async fn relay(
    socket: WebSocket,
    mut running: CommandHandle,
    input: Option<ExecInput>,
    kind: SocketKind,
    shutdown: CancellationToken,
) {
    let (mut sender, mut receiver) = socket.split();
    let stalled = AtomicBool::new(false);
    let reason = tokio::select! {
        reason = send_output(&mut sender, &mut running, kind, &stalled) => reason,
        reason = receive_input(&mut receiver, input, kind, &stalled) => reason,
        () = shutdown.cancelled() => CloseReason::ServerClosing,
    };
    // Kills a command that still runs, before the close handshake.
    drop(running);
    close(sender, receiver, reason).await;
}

enum CloseReason {
    /// The command ended; the last frame says how.
    Finished(SocketOut),
    ClientGone,
    InvalidFrame(&'static str),
    /// The server shuts down, or the token was revoked.
    ServerClosing,
}

/// Sends the last frame and the close frame, and waits for the client's close frame.
async fn close(mut sender: Sender, mut receiver: Receiver, reason: CloseReason) {
    let close = |code, reason: &'static str| {
        Message::Close(Some(CloseFrame { code, reason: reason.into() }))
    };
    let (last, close) = match reason {
        CloseReason::ClientGone => return,
        CloseReason::Finished(out) => (Some(out), close(close_code::NORMAL, "")),
        CloseReason::InvalidFrame(reason) => {
            let out =
                SocketOut::Failed { code: "invalid_frame".to_owned(), message: reason.to_owned() };
            (Some(out), close(close_code::POLICY, reason))
        }
        CloseReason::ServerClosing => {
            (None, close(close_code::AWAY, "the server is shutting down, or the token was revoked"))
        }
    };
    let handshake = async {
        if let Some(out) = last {
            sender.send(Message::text(json(&out))).await.ok()?;
        }
        sender.send(close).await.ok()?;
        while receiver.next().await?.is_ok() {}
        Some(())
    };
    let _ = timeout(CLOSE_TIMEOUT, handshake).await;
}

fn json(out: &SocketOut) -> String {
    serde_json::to_string(out).expect("API bodies hold only maps with text keys")
}

async fn send_output(
    sender: &mut Sender,
    running: &mut CommandHandle,
    kind: SocketKind,
    stalled: &AtomicBool,
) -> CloseReason {
    let mut ping = interval(PING_INTERVAL);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ping.reset();
    loop {
        let message = tokio::select! {
            output = running.next() => match output {
                Some(ExecOutput::Stdout { bytes, .. }) => output_frame(bytes, STDOUT, kind),
                Some(ExecOutput::Stderr { bytes, .. }) => output_frame(bytes, STDERR, kind),
                Some(ExecOutput::Exited { exit, millis }) => {
                    return CloseReason::Finished(SocketOut::Exited { exit, millis });
                }
                Some(ExecOutput::End) | None => return CloseReason::Finished(connection_lost()),
            },
            _ = ping.tick() => Message::Ping(Vec::new().into()),
        };
        stalled.store(true, Ordering::Relaxed);
        if sender.send(message).await.is_err() {
            return CloseReason::ClientGone;
        }
        stalled.store(false, Ordering::Relaxed);
    }
}

fn output_frame(mut bytes: Vec<u8>, stream: u8, kind: SocketKind) -> Message {
    if kind != SocketKind::Terminal {
        bytes.insert(0, stream);
    }
    Message::Binary(bytes.into())
}

fn connection_lost() -> SocketOut {
    let message =
        "the connection to the sandbox was lost; the command may still be running".to_owned();
    SocketOut::Failed { code: "lost".to_owned(), message }
}

async fn receive_input(
    receiver: &mut Receiver,
    mut input: Option<ExecInput>,
    kind: SocketKind,
    stalled: &AtomicBool,
) -> CloseReason {
    loop {
        match next_message(receiver, stalled).await {
            Some(Message::Binary(bytes)) => {
                if let Some(open) = &mut input
                    && !open.write(&bytes).await
                {
                    // The command closed its stdin; its output still matters.
                    input = None;
                }
            }
            Some(Message::Text(text)) => match serde_json::from_str(&text) {
                Ok(SocketIn::Resize { rows, cols }) if kind == SocketKind::Terminal => {
                    input.iter().for_each(|input| input.resize(rows, cols));
                }
                Ok(SocketIn::End {}) if kind != SocketKind::Terminal => {
                    input.take().into_iter().for_each(ExecInput::end);
                }
                _ => return CloseReason::InvalidFrame("unexpected text frame"),
            },
            Some(Message::Ping(_) | Message::Pong(_)) => {}
            Some(Message::Close(_)) | None => return CloseReason::ClientGone,
        }
    }
}

/// The next message; `None` when the client is gone. A client that does not read cannot answer
/// pings, so the timeout counts only while no output is waiting for it.
async fn next_message(receiver: &mut Receiver, stalled: &AtomicBool) -> Option<Message> {
    loop {
        match timeout(CLIENT_TIMEOUT, receiver.next()).await {
            Ok(message) => return message?.ok(),
            Err(_timeout) if stalled.load(Ordering::Relaxed) => {}
            Err(_timeout) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_same_origin_pages_may_open_websockets() {
        let check = |origin: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, "localhost:7070".parse().unwrap());
            origin
                .into_iter()
                .for_each(|origin| drop(headers.insert(header::ORIGIN, origin.parse().unwrap())));
            same_origin(&headers).map_err(|error| error.status.as_u16())
        };
        assert_eq!((check(None), check(Some("http://LOCALHOST:7070"))), (Ok(()), Ok(())));
        for foreign in
            ["http://localhost:8080", "https://evil.example", "null", "", "file://localhost:7070"]
        {
            assert_eq!(check(Some(foreign)), Err(403), "{foreign}");
        }
    }
}
