//! Sends requests about sandboxes, images and volumes to a server, if one is configured or runs
//! from this home, otherwise to the API in this process. Requests and responses are the same.

use std::{
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use harvest_engine::Engine;
use harvest_proto::api::Problem;
use harvest_server::in_process::{
    ByteStream, InProcessApi, InProcessResponse, RequestBody, WebSocketResult,
};
use harvest_session::Sandboxes;
use reqwest::{Method, StatusCode, header::HeaderMap};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    client::{self, Client},
    config::Config,
    follow::Lines,
    in_process_doors::InProcessDoors,
    server_process,
    socket::{self, Handshake, SocketReader, SocketWriter},
};

// Loopback connects at once, except on an overloaded machine.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) enum Backend {
    /// A server; `same_host` when it runs on this machine from this home.
    Remote { client: Client, same_host: bool },
    /// This process, when no server runs.
    InProcess { api: InProcessApi, engine: Engine },
}

impl Backend {
    /// The configured server, else the server of this home, else this process.
    pub(crate) fn find(config: &Config) -> Result<Self> {
        let local = || client::local(config).is_ok_and(|file| accepts_connections(&file.url));
        if config.url.is_some() || local() {
            let same_host = config.url.is_none();
            return Ok(Self::Remote { client: Client::find(config)?, same_host });
        }
        let engine = server_process::open_engine(config)?;
        let provider = server_process::local_provider(engine.clone(), config, String::new());
        let doors = Arc::new(InProcessDoors::new(config));
        let api = InProcessApi::new(Sandboxes::without_server(provider).with_doors(doors));
        Ok(Self::InProcess { api, engine })
    }

    /// A server on this machine that this process already talks to.
    pub(crate) fn from_client(client: Client) -> Self {
        Self::Remote { client, same_host: true }
    }

    /// Whether a local path names the same file on the backend.
    pub(crate) fn shares_filesystem(&self) -> bool {
        matches!(self, Self::InProcess { .. } | Self::Remote { same_host: true, .. })
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        read_json(self.exchange(Method::GET, path, RequestBody::Empty).await?.1).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        match self {
            // The client adds an idempotency key: a retry creates nothing twice.
            Self::Remote { client, .. } => client.post(path, body).await,
            Self::InProcess { .. } => {
                let body = RequestBody::Json(serde_json::to_vec(body)?);
                read_json(self.exchange(Method::POST, path, body).await?.1).await
            }
        }
    }

    pub(crate) async fn delete(&self, path: &str) -> Result<()> {
        self.exchange(Method::DELETE, path, RequestBody::Empty).await.map(drop)
    }

    /// Sends a request whose response is JSON lines.
    pub(crate) async fn lines(
        &self,
        method: Method,
        path: &str,
        sent: RequestBody,
    ) -> Result<Lines> {
        Ok(Lines::of(self.exchange(method, path, sent).await?.1))
    }

    /// Waits for the in-process work of a response that was dropped before its end. No request may
    /// follow.
    pub(crate) async fn wait_for_cleanup(&self) {
        if let Self::InProcess { api, .. } = self {
            api.settle().await;
        }
    }

    /// Stops the zygote if no sandbox needs it. A server does so itself.
    pub(crate) async fn stop_idle_zygote(&self) -> Result<()> {
        if let Self::InProcess { engine, .. } = self {
            let engine = engine.clone();
            tokio::task::spawn_blocking(move || engine.stop_if_idle())
                .await?
                .context("cannot stop the process that runs sandboxes")?;
        }
        Ok(())
    }

    /// Sends any request; returns the response headers and the body as a stream.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        path: &str,
        sent: RequestBody,
    ) -> Result<(HeaderMap, ByteStream)> {
        match self {
            Self::Remote { client, .. } => client.exchange(method, path, sent).await,
            Self::InProcess { api, .. } => {
                let response = api.request(method, path, sent).await?;
                match response.status {
                    ..400 => Ok((response.headers, response.body)),
                    _ => Err(response_error(response).await),
                }
            }
        }
    }

    /// Opens a WebSocket at this path.
    pub(crate) async fn socket(&self, path: &str) -> Result<(SocketWriter, SocketReader)> {
        let api = match self {
            Self::Remote { client, .. } => return socket::open(client, path).await,
            Self::InProcess { api, .. } => api,
        };
        let handshake = Handshake::new();
        match api.open_websocket(path, handshake.headers()).await? {
            WebSocketResult::Socket(headers, stream) if handshake.is_accepted(&headers) => {
                Ok(socket::split(stream).await)
            }
            WebSocketResult::Socket(..) => bail!("the response is not a WebSocket"),
            WebSocketResult::Rejected(response) => Err(response_error(response).await),
        }
    }
}

async fn response_error(response: InProcessResponse) -> anyhow::Error {
    let status = StatusCode::from_u16(response.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    match read_json::<Problem>(response.body).await {
        Ok(problem) => client::api_error(problem),
        // The response to HEAD has no body.
        Err(error) => {
            client::problem_without_body(status, &response.headers).map_or(error, client::api_error)
        }
    }
}

/// Whether a server listens at `url`. The file of a killed server stays behind, and its pid may
/// belong to another process by now.
fn accepts_connections(url: &str) -> bool {
    let address =
        url.strip_prefix("http://").and_then(|address| address.parse::<SocketAddr>().ok());
    address.is_none_or(|address| TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).is_ok())
}

/// Reads a streamed JSON document.
pub(crate) async fn read_json<T: DeserializeOwned>(mut body: ByteStream) -> Result<T> {
    let mut bytes = Vec::new();
    while let Some(chunk) = body.next().await {
        bytes.append(&mut chunk.context("the response broke off")?);
    }
    serde_json::from_slice(&bytes).context("cannot parse the response")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopped_server_accepts_no_connections() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        assert!(accepts_connections(&url));
        drop(listener);
        assert!(!accepts_connections(&url));
    }
}
