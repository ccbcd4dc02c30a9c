//! The routes of machines, asked inside this process: no socket, no store, no token. What is asked and
//! answered is the same as over HTTP, streams included; there is nobody to check because whoever can do this
//! can open the home themselves.

use std::io;

use axum::{
    Extension, Router,
    body::Body,
    extract::DefaultBodyLimit,
    http::{HeaderMap, Method, Request, Response, StatusCode, header},
    middleware,
};
use futures_util::{StreamExt, stream::BoxStream};
use harvest_session::{machines::Commands, provider::BridgeStream};
use hyper::{client, server};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use crate::{
    auth::Ending,
    extract, problem,
    routes::{self, machines::Desk},
};

/// Bytes as they come.
pub type Pieces = BoxStream<'static, io::Result<Vec<u8>>>;

/// What is sent along with a request.
pub enum Sent {
    /// Nothing.
    Nothing,
    /// A JSON document.
    Json(Vec<u8>),
    /// Something of this type, as it comes.
    Stream(&'static str, Pieces),
}

/// An answer; its body may still be on its way.
pub struct Answered {
    /// The HTTP status.
    pub status: u16,
    /// What it says about itself.
    pub headers: HeaderMap,
    /// The body.
    pub body: Pieces,
}

/// What became of a request for a WebSocket.
pub enum Opened {
    /// The connection, which is a WebSocket's from here on, and the headers that say so.
    Socket(HeaderMap, Box<dyn BridgeStream>),
    /// It is none.
    Refused(Answered),
}

// What is on its way inside this process: a frame or two of the bridge.
const PIPE_BYTES: usize = 128 * 1024;

/// The routes of machines, without a server.
#[derive(Clone)]
pub struct Here {
    router: Router,
    commands: Commands,
}

impl Here {
    /// On these machines.
    #[must_use]
    pub fn new(commands: Commands) -> Self {
        let desk = Desk { commands: commands.clone(), shutdown: CancellationToken::new() };
        // No token that could be revoked, no server that could end.
        let ending = Extension(Ending(desk.shutdown.clone()));
        let router = routes::machines::all()
            .fallback(routes::no_such_route)
            .method_not_allowed_fallback(routes::no_such_method)
            .layer(DefaultBodyLimit::max(extract::MAX_BODY_BYTES))
            .with_state(desk)
            .layer(ending)
            .layer(middleware::from_fn(problem::finish_unlogged))
            .layer(middleware::from_fn(problem::name_request));
        Self { router, commands }
    }

    /// Asks; answers as soon as the head of the answer is there.
    ///
    /// # Errors
    /// When the path is none.
    pub async fn ask(&self, method: Method, path: &str, sent: Sent) -> io::Result<Answered> {
        let request = Request::builder().method(method).uri(path);
        let request = match sent {
            Sent::Nothing => request.body(Body::empty()),
            Sent::Json(document) => {
                request.header(header::CONTENT_TYPE, "application/json").body(Body::from(document))
            }
            Sent::Stream(kind, pieces) => {
                request.header(header::CONTENT_TYPE, kind).body(Body::from_stream(pieces))
            }
        };
        let request = request.map_err(io::Error::other)?;
        let answer = self.router.clone().call(request).await.unwrap_or_else(|never| match never {});
        Ok(answered(answer.map(Body::new)))
    }

    /// Opens a WebSocket. It needs a connection, so one is made inside this process.
    ///
    /// # Errors
    /// When the path is none, or the connection breaks.
    pub async fn open(&self, path: &str, headers: HeaderMap) -> io::Result<Opened> {
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        let router = TowerToHyperService::new(self.router.clone());
        let serving =
            server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), router);
        tokio::spawn(serving.with_upgrades());
        let (mut sender, asking) =
            client::conn::http1::handshake(TokioIo::new(ours)).await.map_err(io::Error::other)?;
        tokio::spawn(asking.with_upgrades());
        let mut request = Request::builder().uri(path).header(header::HOST, "localhost");
        request.headers_mut().into_iter().for_each(|all| all.extend(headers.clone()));
        let request = request.body(Body::empty()).map_err(io::Error::other)?;
        let answer = sender.send_request(request).await.map_err(io::Error::other)?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(Opened::Refused(answered(answer.map(Body::new))));
        }
        let headers = answer.headers().clone();
        let socket = hyper::upgrade::on(answer).await.map_err(io::Error::other)?;
        Ok(Opened::Socket(headers, Box::new(TokioIo::new(socket))))
    }

    /// Returns when everything that was to go is gone, such as the sandbox of a command that was dropped.
    pub async fn settle(&self) {
        self.commands.settle().await;
    }
}

fn answered(answer: Response<Body>) -> Answered {
    let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
    let body = answer.into_body().into_data_stream();
    let body = body.map(|piece| piece.map(Vec::from).map_err(io::Error::other)).boxed();
    Answered { status, headers, body }
}
