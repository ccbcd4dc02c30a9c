//! A WebSocket to a server, opened with the same client as every other request (token, TLS,
//! errors), or to the in-process API. Knows nothing about the payload.

use std::{future::Future, io::Read, time::Duration};

use anyhow::{Context, Result, bail};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use harvest_proto::api::{SocketIn, SocketOut};
use harvest_session::sandboxes::BridgeStream;
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

// The server sends a ping at least every 20 seconds.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(90);

const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) enum Incoming {
    Bytes(Vec<u8>),
    Message(SocketOut),
}

/// The sending half. Separate from the reading half: a client that only writes while the server
/// only writes would deadlock.
pub(crate) struct SocketWriter(SplitSink<WebSocketStream<DuplexStream>, Message>);

/// The receiving half.
pub(crate) struct SocketReader(SplitStream<WebSocketStream<DuplexStream>>);

type DuplexStream = Box<dyn BridgeStream>;

/// The client side of a WebSocket handshake.
pub(crate) struct Handshake(String);

impl Handshake {
    pub(crate) fn new() -> Self {
        Self(generate_key())
    }

    /// The headers of the upgrade request.
    pub(crate) fn headers(&self) -> HeaderMap {
        let key = HeaderValue::from_str(&self.0).expect("base64 is ASCII");
        HeaderMap::from_iter([
            (header::CONNECTION, HeaderValue::from_static("Upgrade")),
            (header::UPGRADE, HeaderValue::from_static("websocket")),
            (header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13")),
            (header::SEC_WEBSOCKET_KEY, key),
        ])
    }

    /// Whether the response headers accept this handshake.
    pub(crate) fn is_accepted(&self, headers: &HeaderMap) -> bool {
        let accepted = headers.get(header::SEC_WEBSOCKET_ACCEPT).map(HeaderValue::as_bytes);
        accepted == Some(derive_accept_key(self.0.as_bytes()).as_bytes())
    }
}

/// Opens the socket at this path. A refusal is the usual API error.
pub(crate) async fn open(client: &Client, path: &str) -> Result<(SocketWriter, SocketReader)> {
    let handshake = Handshake::new();
    let response =
        client.send(client.request(Method::GET, path).headers(handshake.headers())).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS
        || !handshake.is_accepted(response.headers())
    {
        bail!("{} did not open a WebSocket", client.url());
    }
    let stream = response.upgrade().await.context("the connection did not become a WebSocket")?;
    Ok(split(Box::new(stream)).await)
}

pub(crate) async fn split(stream: DuplexStream) -> (SocketWriter, SocketReader) {
    let (writer, reader) =
        WebSocketStream::from_raw_socket(stream, Role::Client, None).await.split();
    (SocketWriter(writer), SocketReader(reader))
}

impl SocketWriter {
    pub(crate) async fn write(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.0
            .send(Message::Binary(bytes.into()))
            .await
            .context("the connection to the server broke")
    }

    pub(crate) async fn send(&mut self, message: &SocketIn) -> Result<()> {
        let text = serde_json::to_string(message)?;
        self.0.send(Message::text(text)).await.context("the connection to the server broke")
    }

    /// Sends a close frame, so that the server does not wait for a timeout.
    pub(crate) async fn close(mut self) {
        let _ = timeout(CLOSE_TIMEOUT, self.0.close()).await;
    }
}

/// Fails when nothing arrives for longer than a live server is ever silent.
pub(crate) async fn with_silence_timeout<T>(future: impl Future<Output = T>) -> Result<T> {
    with_timeout(SILENCE_TIMEOUT, future).await
}

async fn with_timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T> {
    timeout(limit, future).await.map_err(|_| {
        let message = format!("no data from the server for {} seconds", limit.as_secs());
        Advice::new(message, "check the network; `harvest` shows the server's status").into()
    })
}

/// Reads in chunks until the reader ends or the receiver is dropped. A separate thread reads, since
/// the read may block for ever; it ends with this process.
pub(crate) fn read_chunks(
    mut from: impl Read + Send + 'static,
    max_chunk: usize,
) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(2);
    std::thread::spawn(move || {
        let mut buffer = vec![0; max_chunk];
        loop {
            let chunk = match from.read(&mut buffer) {
                Ok(count @ 1..) => buffer[..count].to_vec(),
                // A signal (SIGWINCH, for example) is not the end of input.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => return,
            };
            if sender.blocking_send(chunk).is_err() {
                return;
            }
        }
    });
    receiver
}

impl SocketReader {
    /// The next message. The end of the connection is an error: the last message comes before it.
    /// Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Incoming> {
        loop {
            match with_silence_timeout(self.0.next()).await? {
                Some(Ok(Message::Binary(bytes))) => return Ok(Incoming::Bytes(bytes.into())),
                Some(Ok(Message::Text(text))) => {
                    let message =
                        serde_json::from_str(&text).context("cannot parse the server's message")?;
                    return Ok(Incoming::Message(message));
                }
                Some(Ok(Message::Close(Some(close)))) if !close.reason.is_empty() => {
                    bail!("{}", close.reason)
                }
                Some(Ok(Message::Close(_))) | None => {
                    bail!("the server closed the connection before the command ended")
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
    async fn silent_server_times_out() {
        let (stream, _server) = tokio::io::duplex(64);
        let mut socket = WebSocketStream::from_raw_socket(stream, Role::Client, None).await;
        let error = with_timeout(Duration::from_millis(1), socket.next()).await.unwrap_err();
        assert!(error.to_string().contains("no data"), "{error}");
        assert!(with_silence_timeout(async { 1 }).await.is_ok());
    }

    /// A reader that is interrupted before each chunk.
    struct Interrupted(Vec<&'static [u8]>, bool);

    impl Read for Interrupted {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            let Some(chunk) = self.0.pop() else { return Ok(0) };
            buffer[..chunk.len()].copy_from_slice(chunk);
            Ok(chunk.len())
        }
    }

    #[tokio::test]
    async fn interrupted_read_is_not_end_of_input() {
        let mut read_chunks = read_chunks(Interrupted(vec![b"b", b"a"], false), 8);
        assert_eq!(read_chunks.recv().await.as_deref(), Some(&b"a"[..]));
        assert_eq!(read_chunks.recv().await.as_deref(), Some(&b"b"[..]));
        assert_eq!(read_chunks.recv().await, None);
    }
}
