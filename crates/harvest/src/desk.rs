//! Who is asked for sandboxes, images and volumes: the server of this home or the one that was named, and
//! without any this process itself. The requests and answers are the same.

use std::{
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use harvest_engine::Engine;
use harvest_proto::api::Problem;
use harvest_server::here::{Answered, Here, Opened, Pieces, Sent};
use harvest_session::machines::Commands;
use reqwest::{Method, StatusCode, header::HeaderMap};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    client::{self, Client},
    config::Config,
    follow::Lines,
    socket::{self, Knock, Listener, Speaker},
    wire,
};

/// Loopback answers at once; a machine that is very busy does not.
const KNOCK: Duration = Duration::from_secs(5);

/// Who is asked.
pub(crate) enum Desk {
    /// A server; `ours` when it is on this machine and works in this home.
    Server { client: Client, ours: bool },
    /// Nobody but us.
    Here { here: Here, engine: Engine },
}

impl Desk {
    /// The server that was named, else the one that runs from this home, else this process.
    pub(crate) fn find(config: &Config) -> Result<Self> {
        if config.url.is_some() || client::local(config).is_ok_and(|file| answers(&file.url)) {
            return Ok(Self::Server { client: Client::find(config)?, ours: config.url.is_none() });
        }
        let engine = wire::open_engine(config)?;
        let commands = Commands::new(wire::machines(engine.clone(), &config.home));
        Ok(Self::Here { here: Here::new(commands), engine })
    }

    /// A server that this process has started.
    pub(crate) fn of(client: Client) -> Self {
        Self::Server { client, ours: true }
    }

    /// Whether a path means the same to whoever is asked.
    pub(crate) fn shares_our_files(&self) -> bool {
        matches!(self, Self::Here { .. } | Self::Server { ours: true, .. })
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        whole(self.carry(Method::GET, path, Sent::Nothing).await?.1).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        match self {
            // With a key: a retry after a broken connection makes nothing twice.
            Self::Server { client, .. } => client.post(path, body).await,
            Self::Here { .. } => {
                let body = Sent::Json(serde_json::to_vec(body)?);
                whole(self.carry(Method::POST, path, body).await?.1).await
            }
        }
    }

    pub(crate) async fn delete(&self, path: &str) -> Result<()> {
        self.carry(Method::DELETE, path, Sent::Nothing).await.map(drop)
    }

    /// An answer of JSON lines.
    pub(crate) async fn lines(&self, method: Method, path: &str, sent: Sent) -> Result<Lines> {
        Ok(Lines::of(self.carry(method, path, sent).await?.1))
    }

    /// Waits for what goes on after an answer was not read to its end. Nothing may be asked afterwards.
    pub(crate) async fn settle(&self) {
        if let Self::Here { here, .. } = self {
            here.settle().await;
        }
    }

    /// Lets the zygote go if nothing else may need it; a server does so itself.
    pub(crate) async fn rest(&self) -> Result<()> {
        if let Self::Here { engine, .. } = self {
            let engine = engine.clone();
            tokio::task::spawn_blocking(move || engine.rest())
                .await?
                .context("cannot let the zygote go")?;
        }
        Ok(())
    }

    /// Any request; the answer's head, and its body as it comes.
    pub(crate) async fn carry(
        &self,
        method: Method,
        path: &str,
        sent: Sent,
    ) -> Result<(HeaderMap, Pieces)> {
        match self {
            Self::Server { client, .. } => client.carry(method, path, sent).await,
            Self::Here { here, .. } => {
                let answer = here.ask(method, path, sent).await?;
                match answer.status {
                    ..400 => Ok((answer.headers, answer.body)),
                    _ => Err(refused(answer).await),
                }
            }
        }
    }

    /// A WebSocket at this path.
    pub(crate) async fn socket(&self, path: &str) -> Result<(Speaker, Listener)> {
        let here = match self {
            Self::Server { client, .. } => return socket::open(client, path).await,
            Self::Here { here, .. } => here,
        };
        let knock = Knock::new();
        match here.open(path, knock.headers()).await? {
            Opened::Socket(headers, stream) if knock.is_answered(&headers) => {
                Ok(socket::split(stream).await)
            }
            Opened::Socket(..) => bail!("the answer is not a WebSocket"),
            Opened::Refused(answer) => Err(refused(answer).await),
        }
    }
}

async fn refused(answer: Answered) -> anyhow::Error {
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    match whole::<Problem>(answer.body).await {
        Ok(problem) => client::refused(problem),
        // An answer to HEAD has no body to say it in.
        Err(error) => client::bodiless(status, &answer.headers).map_or(error, client::refused),
    }
}

/// Whether somebody listens there. The file of a server that was killed stays behind, and its number may be
/// another process's by now; without a server we do as well ourselves.
fn answers(url: &str) -> bool {
    let address =
        url.strip_prefix("http://").and_then(|address| address.parse::<SocketAddr>().ok());
    address.is_none_or(|address| TcpStream::connect_timeout(&address, KNOCK).is_ok())
}

/// The document that comes in pieces.
pub(crate) async fn whole<T: DeserializeOwned>(mut pieces: Pieces) -> Result<T> {
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        bytes.append(&mut piece.context("the answer broke off")?);
    }
    serde_json::from_slice(&bytes).context("cannot make sense of the answer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_gone_does_not_answer() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        assert!(answers(&url));
        drop(listener);
        assert!(!answers(&url));
    }
}
