//! A WebSocket on one side, a running command on the other: bytes as binary frames, everything else as text
//! frames of JSON. A client that does not read stalls its own command and nothing else; one that is gone is
//! noticed by pings, and its command ends with it.

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
    inside::{Inside, Running},
};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::{problem::ApiError, valid};

/// Shorter than the idle limits of common proxies, the strictest of which is 30 s.
const PING: Duration = Duration::from_secs(20);

/// Who has not answered four pings is gone.
const SILENCE: Duration = Duration::from_secs(90);

/// How long a client may take to say goodbye. Closing at once could cost it the last bytes.
const GOODBYE: Duration = Duration::from_secs(10);

/// The longest frame of a client: a paste, or a piece of a file.
const MAX_FRAME_BYTES: usize = 1024 * 1024;

type Sender = SplitSink<WebSocket, Message>;
type Receiver = SplitStream<WebSocket>;

/// A request that becomes a WebSocket, and not on behalf of another site's page.
pub(crate) struct Upgrade(pub(crate) WebSocketUpgrade);

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        same_origin(&parts.headers)?;
        let upgrade =
            WebSocketUpgrade::from_request_parts(parts, state).await.map_err(|error| {
                ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", error.body_text())
                    .hint("this route is a WebSocket: send the headers of an upgrade")
            })?;
        Ok(Self(upgrade.max_message_size(MAX_FRAME_BYTES).max_frame_size(MAX_FRAME_BYTES)))
    }
}

/// A browser says whose page asks, and asks even for another site's; only our own may.
fn same_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let Some(origin) = text(header::ORIGIN) else { return Ok(()) };
    let host = text(header::HOST).unwrap_or_default();
    match origin.split_once("://") {
        Some(("http" | "https", site)) if !host.is_empty() && site.eq_ignore_ascii_case(host) => {
            Ok(())
        }
        _ => {
            let detail = format!("a page of `{origin}` may not open a socket here");
            Err(ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", detail))
        }
    }
}

/// What is on the other side of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A terminal: one stream of bytes each way.
    Terminal,
    /// A command, whose outputs are kept apart.
    Command,
}

/// Waits for the command a client wants on its socket, starts it and carries its bytes.
pub(crate) async fn attend(mut socket: WebSocket, inside: Inside, shutdown: CancellationToken) {
    let first = tokio::select! {
        first = timeout(SILENCE, first(&mut socket)) => first.unwrap_or(Err(End::Gone)),
        () = shutdown.cancelled() => Err(End::Server),
    };
    let started = match first {
        Ok(request) => start(inside, request).await,
        Err(end) => Err(end),
    };
    match started {
        Ok((running, input)) => carry(socket, running, input, Kind::Command, shutdown).await,
        Err(end) => {
            let (sender, receiver) = socket.split();
            goodbye(sender, receiver, end).await;
        }
    }
}

async fn first(socket: &mut WebSocket) -> Result<ExecRequest, End> {
    loop {
        match socket.recv().await {
            Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                Ok(SocketIn::Start(request)) if request.stdin.is_none() => return Ok(request),
                _ => {
                    return Err(End::Nonsense("the first frame is the command, without its stdin"));
                }
            },
            Some(Ok(Message::Binary(_))) => {
                return Err(End::Nonsense("the first frame is the command"));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(End::Gone),
        }
    }
}

async fn start(inside: Inside, request: ExecRequest) -> Result<(Running, Option<ExecInput>), End> {
    let failed = |error: ApiError| {
        End::Told(SocketOut::Failed { code: error.code.to_owned(), message: error.detail })
    };
    valid::exec(&request).map_err(failed)?;
    inside.exec(request, true).await.map_err(|error| failed(error.into()))
}

/// Carries bytes both ways until the command has ended, the client is gone or the server ends.
pub(crate) async fn carry(
    socket: WebSocket,
    mut running: Running,
    input: Option<ExecInput>,
    kind: Kind,
    shutdown: CancellationToken,
) {
    let (mut sender, mut receiver) = socket.split();
    let stalled = AtomicBool::new(false);
    let end = tokio::select! {
        end = tell(&mut sender, &mut running, kind, &stalled) => end,
        end = hear(&mut receiver, input, kind, &stalled) => end,
        () = shutdown.cancelled() => End::Server,
    };
    // Now, not after the goodbye: what still runs is killed.
    drop(running);
    goodbye(sender, receiver, end).await;
}

/// Why a socket ends.
enum End {
    /// Everything is said.
    Told(SocketOut),
    /// The client went, or never was one.
    Gone,
    /// The client said something that makes no sense here.
    Nonsense(&'static str),
    /// The server ends, or the token it was opened with is good for nothing any more.
    Server,
}

/// Says why, and waits for the client to hear it.
async fn goodbye(mut sender: Sender, mut receiver: Receiver, end: End) {
    let close = |code, reason: &'static str| {
        Message::Close(Some(CloseFrame { code, reason: reason.into() }))
    };
    let (last, close) = match end {
        End::Gone => return,
        End::Told(out) => (Some(out), close(close_code::NORMAL, "")),
        End::Nonsense(reason) => {
            let out =
                SocketOut::Failed { code: "invalid_frame".to_owned(), message: reason.to_owned() };
            (Some(out), close(close_code::POLICY, reason))
        }
        End::Server => (None, close(close_code::AWAY, "the server ends, or the token was revoked")),
    };
    let farewell = async {
        if let Some(out) = last {
            sender.send(Message::text(json(&out))).await.ok()?;
        }
        sender.send(close).await.ok()?;
        while receiver.next().await?.is_ok() {}
        Some(())
    };
    let _ = timeout(GOODBYE, farewell).await;
}

fn json(out: &SocketOut) -> String {
    serde_json::to_string(out).expect("API bodies hold only maps with text keys")
}

async fn tell(sender: &mut Sender, running: &mut Running, kind: Kind, stalled: &AtomicBool) -> End {
    let mut ping = interval(PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ping.reset();
    loop {
        let message = tokio::select! {
            output = running.next() => match output {
                Some(ExecOutput::Stdout { bytes, .. }) => Message::Binary(framed(bytes, STDOUT, kind).into()),
                Some(ExecOutput::Stderr { bytes, .. }) => Message::Binary(framed(bytes, STDERR, kind).into()),
                Some(ExecOutput::Exited { exit, millis }) => return End::Told(SocketOut::Exited { exit, millis }),
                Some(ExecOutput::End) | None => return End::Told(lost()),
            },
            _ = ping.tick() => Message::Ping(Vec::new().into()),
        };
        stalled.store(true, Ordering::Relaxed);
        if sender.send(message).await.is_err() {
            return End::Gone;
        }
        stalled.store(false, Ordering::Relaxed);
    }
}

fn framed(mut bytes: Vec<u8>, output: u8, kind: Kind) -> Vec<u8> {
    if kind != Kind::Terminal {
        bytes.insert(0, output);
    }
    bytes
}

fn lost() -> SocketOut {
    let message = "the connection to the sandbox was lost; the command may go on".to_owned();
    SocketOut::Failed { code: "lost".to_owned(), message }
}

async fn hear(
    receiver: &mut Receiver,
    mut input: Option<ExecInput>,
    kind: Kind,
    stalled: &AtomicBool,
) -> End {
    loop {
        match next(receiver, stalled).await {
            Some(Message::Binary(bytes)) => {
                if let Some(open) = &mut input
                    && !open.write(&bytes).await
                {
                    // Nobody reads any more; what it says, and its end, still count.
                    input = None;
                }
            }
            Some(Message::Text(text)) => match serde_json::from_str(&text) {
                Ok(SocketIn::Resize { rows, cols }) if kind == Kind::Terminal => {
                    input.iter().for_each(|input| input.resize(rows, cols));
                }
                Ok(SocketIn::End {}) if kind != Kind::Terminal => {
                    input.take().into_iter().for_each(ExecInput::end);
                }
                _ => return End::Nonsense("a text frame that makes no sense here"),
            },
            Some(Message::Ping(_) | Message::Pong(_)) => {}
            Some(Message::Close(_)) | None => return End::Gone,
        }
    }
}

/// What the client says next; `None` when it is gone. One that reads nothing cannot answer pings either, so
/// its silence counts only while nothing waits for it.
async fn next(receiver: &mut Receiver, stalled: &AtomicBool) -> Option<Message> {
    loop {
        match timeout(SILENCE, receiver.next()).await {
            Ok(message) => return message?.ok(),
            Err(_silent) if stalled.load(Ordering::Relaxed) => {}
            Err(_silent) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_pages_and_programs_may_open_a_socket() {
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
