//! A WebSocket to a server, by way of the same client as every other request: same token, same TLS, same
//! errors. Knows nothing of what is carried.

use anyhow::{Context, Result, bail};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use harvest_proto::api::{SocketIn, SocketOut};
use reqwest::{Method, StatusCode, Upgraded, header};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::{client::generate_key, derive_accept_key},
        protocol::Role,
    },
};

use crate::client::Client;

/// What comes over a socket.
#[derive(Debug)]
pub(crate) enum Heard {
    Bytes(Vec<u8>),
    Said(SocketOut),
}

/// Where to speak. Apart from the listening: who only speaks while the other side only speaks as well would
/// wait for ever.
pub(crate) struct Speaker(SplitSink<WebSocketStream<Upgraded>, Message>);

/// Where to listen.
pub(crate) struct Listener(SplitStream<WebSocketStream<Upgraded>>);

/// Opens the socket at this path. A server that says no does so as always.
pub(crate) async fn open(client: &Client, path: &str) -> Result<(Speaker, Listener)> {
    let key = generate_key();
    let request = client
        .request(Method::GET, path)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, &key);
    let answer = client.send(request).await?;
    let accepted = answer.headers().get(header::SEC_WEBSOCKET_ACCEPT).map(|value| value.as_bytes());
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS
        || accepted != Some(derive_accept_key(key.as_bytes()).as_bytes())
    {
        bail!("{} answered, and not with a WebSocket", client.url());
    }
    let stream = answer.upgrade().await.context("the connection did not become a WebSocket")?;
    let (speaker, listener) = WebSocketStream::from_raw_socket(stream, Role::Client, None).await.split();
    Ok((Speaker(speaker), Listener(listener)))
}

impl Speaker {
    /// Sends bytes.
    pub(crate) async fn write(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.0.send(Message::Binary(bytes.into())).await.context("the connection to the server broke")
    }

    /// Says something.
    pub(crate) async fn say(&mut self, what: &SocketIn) -> Result<()> {
        let text = serde_json::to_string(what)?;
        self.0.send(Message::text(text)).await.context("the connection to the server broke")
    }

    /// Closes it in order, so that the server need not wait.
    pub(crate) async fn close(mut self) {
        let _ = self.0.close().await;
    }
}

impl Listener {
    /// What comes next. It is an error when the connection ends before the end was said. Cancel-safe.
    pub(crate) async fn hear(&mut self) -> Result<Heard> {
        loop {
            match self.0.next().await {
                Some(Ok(Message::Binary(bytes))) => return Ok(Heard::Bytes(bytes.into())),
                Some(Ok(Message::Text(text))) => {
                    let said =
                        serde_json::from_str(&text).context("the server said what nobody understands")?;
                    return Ok(Heard::Said(said));
                }
                Some(Ok(Message::Close(Some(close)))) if !close.reason.is_empty() => {
                    bail!("{}", close.reason)
                }
                Some(Ok(Message::Close(_))) | None => bail!("the server went away before the command ended"),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error).context("the connection to the server broke"),
            }
        }
    }
}
