//! The routes of standalone sandboxes called inside the process: no socket, no store, no token.
//! Requests and responses, streams included, are the same as over HTTP. Nothing is authorised,
//! because a process that can do this has access to the home folder anyway.

use std::io;

use axum::{
    Extension, Router,
    body::Body,
    extract::DefaultBodyLimit,
    http::{HeaderMap, Method, Request, Response, StatusCode, header},
    middleware,
};
use futures_util::{StreamExt, stream::BoxStream};
use harvest_session::{Sandboxes, sandboxes::BridgeStream};
use hyper::{client, server};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use crate::{
    auth::RevokedOrShutdown,
    extract, problem,
    routes::{self, sandboxes::SandboxState},
};

pub type ByteStream = BoxStream<'static, io::Result<Vec<u8>>>;

pub enum RequestBody {
    Empty,
    Json(Vec<u8>),
    /// A stream with its content type.
    Stream(&'static str, ByteStream),
}

/// A response whose body may still be in flight.
pub struct InProcessResponse {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: ByteStream,
}

/// The result of a WebSocket upgrade.
pub enum WebSocketResult {
    /// The response headers and the upgraded connection.
    Socket(HeaderMap, Box<dyn BridgeStream>),
    Rejected(InProcessResponse),
}

// Buffer of the in-memory connection: one or two frames of the bridge.
const PIPE_BYTES: usize = 128 * 1024;

/// The routes of standalone sandboxes without a server.
#[derive(Clone)]
pub struct InProcessApi {
    router: Router,
    sandboxes: Sandboxes,
}

impl InProcessApi {
    #[must_use]
    pub fn new(sandboxes: Sandboxes) -> Self {
        let state =
            SandboxState { sandboxes: sandboxes.clone(), shutdown: CancellationToken::new() };
        // Never cancelled: there is no token to revoke and no server to shut down.
        let never_cancelled = Extension(RevokedOrShutdown(state.shutdown.clone()));
        let router = routes::sandboxes::routes()
            .unguarded()
            .fallback(routes::no_such_route)
            .method_not_allowed_fallback(routes::method_not_allowed)
            .layer(DefaultBodyLimit::max(extract::MAX_BODY_BYTES))
            .with_state(state)
            .layer(never_cancelled)
            .layer(middleware::from_fn_with_state(false, problem::render))
            .layer(middleware::from_fn(problem::assign_request_id));
        Self { router, sandboxes }
    }

    /// Sends a request; returns when the response headers are there.
    ///
    /// # Errors
    /// When the path is invalid.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> io::Result<InProcessResponse> {
        let request = Request::builder().method(method).uri(path);
        let request = match body {
            RequestBody::Empty => request.body(Body::empty()),
            RequestBody::Json(document) => {
                request.header(header::CONTENT_TYPE, "application/json").body(Body::from(document))
            }
            RequestBody::Stream(content_type, chunks) => {
                request.header(header::CONTENT_TYPE, content_type).body(Body::from_stream(chunks))
            }
        };
        let request = request.map_err(io::Error::other)?;
        let response =
            self.router.clone().call(request).await.unwrap_or_else(|never| match never {});
        Ok(in_process_response(response.map(Body::new)))
    }

    /// Opens a WebSocket over an in-memory connection.
    ///
    /// # Errors
    /// When the path is invalid or the connection breaks.
    pub async fn open_websocket(
        &self,
        path: &str,
        headers: HeaderMap,
    ) -> io::Result<WebSocketResult> {
        let (client_end, server_end) = tokio::io::duplex(PIPE_BYTES);
        let router = TowerToHyperService::new(self.router.clone());
        let server =
            server::conn::http1::Builder::new().serve_connection(TokioIo::new(server_end), router);
        tokio::spawn(server.with_upgrades());
        let (mut sender, client) = client::conn::http1::handshake(TokioIo::new(client_end))
            .await
            .map_err(io::Error::other)?;
        tokio::spawn(client.with_upgrades());
        let mut request = Request::builder().uri(path).header(header::HOST, "localhost");
        request.headers_mut().into_iter().for_each(|all| all.extend(headers.clone()));
        let request = request.body(Body::empty()).map_err(io::Error::other)?;
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(WebSocketResult::Rejected(in_process_response(response.map(Body::new))));
        }
        let headers = response.headers().clone();
        let socket = hyper::upgrade::on(response).await.map_err(io::Error::other)?;
        Ok(WebSocketResult::Socket(headers, Box::new(TokioIo::new(socket))))
    }

    /// Waits until pending removals are done, such as that of a dropped command's sandbox.
    pub async fn settle(&self) {
        self.sandboxes.settle().await;
    }
}

fn in_process_response(response: Response<Body>) -> InProcessResponse {
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let body = response.into_body().into_data_stream();
    let body = body.map(|chunk| chunk.map(Vec::from).map_err(io::Error::other)).boxed();
    InProcessResponse { status, headers, body }
}
