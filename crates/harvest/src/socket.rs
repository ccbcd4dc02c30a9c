//! A WebSocket to a server, by way of the same client as every other request: same token, same TLS, same
//! errors; or to this process itself. Knows nothing of what is carried.

use std::{future::Future, io::Read, time::Duration};

use anyhow::{Context, Result, bail};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use harvest_proto::api::{SocketIn, SocketOut};
use harvest_session::provider::BridgeStream;
use reqwest::{
    Method, StatusCode,
    header::{self, HeaderMap, HeaderValue},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::{client::generate_key, derive_accept_key},
        protocol::Role,
    },
};

use crate::{client::Client, printer::Advice};

/// A server says every 20 seconds or sooner that it is there: one that has not for so long is not.
const SILENCE: Duration = Duration::from_secs(90);

/// A close that nobody answers is none.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// What comes over a socket.
#[derive(Debug)]
pub(crate) enum Heard {
    Bytes(Vec<u8>),
    Said(SocketOut),
}

/// Where to speak. Apart from the listening: who only speaks while the other side only speaks as well would
/// wait for ever.
pub(crate) struct Speaker(SplitSink<WebSocketStream<Wire>, Message>);

/// Where to listen.
pub(crate) struct Listener(SplitStream<WebSocketStream<Wire>>);

/// The connection below a socket.
type Wire = Box<dyn BridgeStream>;

/// What asks for a socket, and tells its answer from another.
pub(crate) struct Knock(String);

impl Knock {
    pub(crate) fn new() -> Self {
        Self(generate_key())
    }

    /// The headers of an upgrade.
    pub(crate) fn headers(&self) -> HeaderMap {
        let key = HeaderValue::from_str(&self.0).expect("base64 is ASCII");
        HeaderMap::from_iter([
            (header::CONNECTION, HeaderValue::from_static("Upgrade")),
            (header::UPGRADE, HeaderValue::from_static("websocket")),
            (header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13")),
            (header::SEC_WEBSOCKET_KEY, key),
        ])
    }

    /// Whether these are the headers of its answer.
    pub(crate) fn is_answered(&self, headers: &HeaderMap) -> bool {
        let accepted = headers.get(header::SEC_WEBSOCKET_ACCEPT).map(HeaderValue::as_bytes);
        accepted == Some(derive_accept_key(self.0.as_bytes()).as_bytes())
    }
}

/// Opens the socket at this path. A server that says no does so as always.
pub(crate) async fn open(client: &Client, path: &str) -> Result<(Speaker, Listener)> {
    let knock = Knock::new();
    let answer = client.send(client.request(Method::GET, path).headers(knock.headers())).await?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS || !knock.is_answered(answer.headers()) {
        bail!("{} answered, and not with a WebSocket", client.url());
    }
    let stream = answer.upgrade().await.context("the connection did not become a WebSocket")?;
    Ok(split(Box::new(stream)).await)
}

/// The two sides of a socket on this connection.
pub(crate) async fn split(stream: Wire) -> (Speaker, Listener) {
    let (speaker, listener) =
        WebSocketStream::from_raw_socket(stream, Role::Client, None).await.split();
    (Speaker(speaker), Listener(listener))
}

impl Speaker {
    /// Sends bytes.
    pub(crate) async fn write(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.0
            .send(Message::Binary(bytes.into()))
            .await
            .context("the connection to the server broke")
    }

    /// Says something.
    pub(crate) async fn say(&mut self, what: &SocketIn) -> Result<()> {
        let text = serde_json::to_string(what)?;
        self.0.send(Message::text(text)).await.context("the connection to the server broke")
    }

    /// Closes it in order, so that the server need not wait.
    pub(crate) async fn close(mut self) {
        let _ = timeout(CLOSE_PATIENCE, self.0.close()).await;
    }
}

/// What comes, or a word about a server that is silent for longer than a living one can be.
pub(crate) async fn heard_in_time<T>(coming: impl Future<Output = T>) -> Result<T> {
    heard_within(SILENCE, coming).await
}

async fn heard_within<T>(limit: Duration, coming: impl Future<Output = T>) -> Result<T> {
    timeout(limit, coming).await.map_err(|_| {
        let message = format!("nothing was heard from the server for {} seconds", limit.as_secs());
        Advice::new(message, "is the network there? `harvest` shows what is going on").into()
    })
}

/// What a reader gives, piece by piece, until it ends or nobody wants more. Read in a thread of its own, which
/// ends with this process.
pub(crate) fn pieces(
    mut from: impl Read + Send + 'static,
    longest: usize,
) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(2);
    std::thread::spawn(move || {
        let mut buffer = vec![0; longest];
        loop {
            let piece = match from.read(&mut buffer) {
                Ok(count @ 1..) => buffer[..count].to_vec(),
                // A signal is no end: a window that changes its size sends one.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => return,
            };
            if sender.blocking_send(piece).is_err() {
                return;
            }
        }
    });
    receiver
}

impl Listener {
    /// What comes next. It is an error when the connection ends before the end was said. Cancel-safe.
    pub(crate) async fn hear(&mut self) -> Result<Heard> {
        loop {
            match heard_in_time(self.0.next()).await? {
                Some(Ok(Message::Binary(bytes))) => return Ok(Heard::Bytes(bytes.into())),
                Some(Ok(Message::Text(text))) => {
                    let said = serde_json::from_str(&text)
                        .context("the server said what nobody understands")?;
                    return Ok(Heard::Said(said));
                }
                Some(Ok(Message::Close(Some(close)))) if !close.reason.is_empty() => {
                    bail!("{}", close.reason)
                }
                Some(Ok(Message::Close(_))) | None => {
                    bail!("the server went away before the command ended")
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    return Err(error).context("the connection to the server broke");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_that_is_silent_for_too_long_is_given_up() {
        let (ours, _theirs) = tokio::io::duplex(64);
        let mut socket = WebSocketStream::from_raw_socket(ours, Role::Client, None).await;
        let error = heard_within(Duration::from_millis(1), socket.next()).await.unwrap_err();
        assert!(error.to_string().contains("nothing was heard"), "{error}");
        assert!(heard_in_time(async { 1 }).await.is_ok());
    }

    /// A reader that is interrupted before each piece.
    struct Interrupted(Vec<&'static [u8]>, bool);

    impl Read for Interrupted {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            let Some(piece) = self.0.pop() else { return Ok(0) };
            buffer[..piece.len()].copy_from_slice(piece);
            Ok(piece.len())
        }
    }

    #[tokio::test]
    async fn a_signal_does_not_pass_for_the_end_of_input() {
        let mut pieces = pieces(Interrupted(vec![b"b", b"a"], false), 8);
        assert_eq!(pieces.recv().await.as_deref(), Some(&b"a"[..]));
        assert_eq!(pieces.recv().await.as_deref(), Some(&b"b"[..]));
        assert_eq!(pieces.recv().await, None);
    }
}
