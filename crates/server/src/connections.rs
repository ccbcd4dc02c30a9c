//! Accepts connections: limits their number and the time and size of request headers. When all
//! places are taken, a connection without a valid token is closed for a new one.

mod unproven;
mod write_timeout;

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::ConnectInfo,
    http::{HeaderValue, header},
};
use hyper::{body::Incoming, server::conn::http1, service::Service as _};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use socket2::SockRef;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::rate_limit::ipv6_prefix;
use unproven::{Unproven, UnprovenGuard};
use write_timeout::{WriteLimits, WriteTimeout};

// Applies to the first request of a connection and to the next one on a kept-alive connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

// The client of an event stream resumes with its cursor; others start again.
const WRITE_LIMITS: WriteLimits =
    WriteLimits { event_stream: Duration::from_secs(120), other: Duration::from_secs(30 * 60) };

// The share of the places that the connections of one address without a token may take.
const ADDRESS_SHARE: usize = 4;

// Eight times the limit of common servers.
const MAX_HEADER_BYTES: usize = 64 * 1024;

// What hyper buffers for a client that does not read; by default 400 KB.
const MAX_BUFFER_BYTES: usize = 2 * MAX_HEADER_BYTES;

// Unsent bytes in the kernel; without a limit it would hold up to 4 MB for a client that does not
// read. Bytes in flight do not count, so a fast connection stays fast.
const MAX_UNSENT_BYTES: u32 = 128 * 1024;

// Most likely out of file descriptors: some are freed in a moment.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Marks a response to a request whose token is valid.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenAccepted;

#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionLimits {
    /// Concurrent connections. A further one waits unless one without a token can be closed.
    pub(crate) connections: usize,
    pub(crate) header_timeout: Duration,
}

impl ConnectionLimits {
    pub(crate) const fn new(connections: usize) -> Self {
        Self { connections, header_timeout: HEADER_TIMEOUT }
    }
}

/// Serves `router` on `listener` until `shutdown` is cancelled and the last response is sent.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    shutdown: CancellationToken,
) {
    let (permits, tracker) = (Arc::new(Semaphore::new(limits.connections)), TaskTracker::new());
    let router = TowerToHyperService::new(router);
    let unproven = Unproven::new(limits.connections / ADDRESS_SHARE);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.cancelled() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                if permits.available_permits() == 0 {
                    unproven.close_oldest();
                }
                let permit = tokio::select! {
                    permit = Arc::clone(&permits).acquire_owned() => permit,
                    () = shutdown.cancelled() => break,
                };
                let permit = permit.expect("the semaphore is never closed");
                let connection = Connection {
                    peer,
                    router: router.clone(),
                    guard: Arc::new(unproven.enter(ipv6_prefix(peer.ip()))),
                    shutdown: shutdown.clone(),
                };
                tracker.spawn(async move {
                    connection.serve(stream, limits.header_timeout).await;
                    drop(permit);
                });
            }
            Err(error) if concerns_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
    drop(listener);
    tracker.close();
    tracker.wait().await;
}

struct Connection {
    peer: SocketAddr,
    router: TowerToHyperService<Router>,
    guard: Arc<UnprovenGuard>,
    shutdown: CancellationToken,
}

impl Connection {
    async fn serve(self, stream: TcpStream, header_timeout: Duration) {
        let Self { peer, router, guard, shutdown } = self;
        // Events are small: without this the kernel would delay them by up to 40 ms.
        let _ = stream.set_nodelay(true);
        let _ = SockRef::from(&stream).set_tcp_notsent_lowat(MAX_UNSENT_BYTES);
        let (following, closed) = (Arc::new(AtomicBool::new(false)), guard.closed());
        let stream = WriteTimeout::new(stream, WRITE_LIMITS, Arc::clone(&following));
        let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            guard.set_busy(true);
            let (guard, following) = (Arc::clone(&guard), Arc::clone(&following));
            let response = router.call(request);
            async move {
                let response = response.await?;
                if response.extensions().get::<TokenAccepted>().is_some() {
                    guard.prove();
                }
                following.store(is_event_stream(&response), Ordering::Relaxed);
                guard.set_busy(false);
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(header_timeout)
            .max_header_size(MAX_HEADER_BYTES)
            .max_buf_size(MAX_BUFFER_BYTES)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = closed.cancelled() => Ok(()),
            () = shutdown.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::trace!(%peer, %error, "connection closed with an error");
        }
    }
}

fn is_event_stream<B>(response: &hyper::Response<B>) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.map(HeaderValue::as_bytes).is_some_and(|kind| kind.starts_with(b"text/event-stream"))
}

fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{http::HeaderMap, response::IntoResponse, routing::get};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    const WITH_TOKEN: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\nauthorization: ok\r\n\r\n";

    async fn hello(headers: HeaderMap) -> axum::response::Response {
        let mut response = "hello".into_response();
        if headers.contains_key(header::AUTHORIZATION) {
            response.extensions_mut().insert(TokenAccepted);
        }
        response
    }

    /// Sends a request and reads the beginning of the response.
    async fn exchange(stream: &mut TcpStream, request: &[u8]) {
        stream.write_all(request).await.unwrap();
        stream.read_exact(&mut [0; 1]).await.unwrap();
    }

    async fn start(connections: usize, header_timeout: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(hello));
        tokio::spawn(serve(
            listener,
            router,
            ConnectionLimits { connections, header_timeout },
            CancellationToken::new(),
        ));
        address
    }

    #[tokio::test]
    async fn incomplete_headers_time_out() {
        let address = start(10, Duration::from_millis(20)).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ").await.unwrap();
        let mut response = Vec::new();
        let _ = stream.read_to_end(&mut response).await;
        assert!(!String::from_utf8_lossy(&response).contains("hello"));
    }

    #[tokio::test]
    async fn oversized_headers_are_rejected() {
        let address = start(10, HEADER_TIMEOUT).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let long =
            format!("GET / HTTP/1.1\r\nhost: x\r\nx-a: {}\r\n\r\n", "a".repeat(MAX_HEADER_BYTES));
        let _ = stream.write_all(long.as_bytes()).await;
        let mut response = [0; 12];
        stream.read_exact(&mut response).await.unwrap();
        assert_eq!(&response, b"HTTP/1.1 431");
    }

    #[tokio::test]
    async fn excess_connection_waits_until_another_closes() {
        let address = start(1, HEADER_TIMEOUT).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        exchange(&mut first, WITH_TOKEN).await;
        let mut second = TcpStream::connect(address).await.unwrap();
        let early =
            tokio::time::timeout(Duration::from_millis(50), exchange(&mut second, REQUEST)).await;
        assert!(early.is_err(), "the limit is one connection");
        drop(first);
        second.read_exact(&mut [0; 1]).await.unwrap();
    }

    #[tokio::test]
    async fn silent_connections_make_room_for_callers() {
        let address = start(4, HEADER_TIMEOUT).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        exchange(&mut first, WITH_TOKEN).await;
        let mut silent = Vec::new();
        for _ in 0..20 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut caller = TcpStream::connect(address).await.unwrap();
        exchange(&mut caller, REQUEST).await;
        exchange(&mut first, WITH_TOKEN).await;
    }
}
