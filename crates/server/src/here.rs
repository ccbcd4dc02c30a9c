//! The routes of machines, asked inside this process: no socket, no store, no token. What is asked and
//! answered is the same as over HTTP, streams included; there is nobody to check because whoever can do this
//! can open the home themselves.

use std::io;

use axum::{
    Router,
    body::Body,
    extract::DefaultBodyLimit,
    http::{Method, Request, header},
    middleware,
};
use futures_util::{StreamExt, stream::BoxStream};
use harvest_session::machines::Commands;
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use crate::{
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
    /// The body.
    pub body: Pieces,
}

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
        let router = routes::machines::all()
            .fallback(routes::no_such_route)
            .method_not_allowed_fallback(routes::no_such_method)
            .layer(DefaultBodyLimit::max(extract::MAX_BODY_BYTES))
            .with_state(desk)
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
        let status = answer.status().as_u16();
        let body = answer.into_body().into_data_stream();
        let body = body.map(|piece| piece.map(Vec::from).map_err(io::Error::other)).boxed();
        Ok(Answered { status, body })
    }

    /// Returns when everything that was to go is gone, such as the sandbox of a command that was dropped.
    pub async fn settle(&self) {
        self.commands.settle().await;
    }
}
