//! Accepts connections: limits their number and the time and size of request headers.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, extract::ConnectInfo};
use hyper::{body::Incoming, server::conn::http1, service::Service as _};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

// Applies to the first request of a connection and to the next one on a kept-alive connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

// Eight times the limit of common servers.
const MAX_HEADER_BYTES: usize = 64 * 1024;

// Most likely out of file descriptors: some are freed in a moment.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionLimits {
    /// Concurrent connections; further ones wait in the kernel's queue.
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
    loop {
        let permit = Arc::clone(&permits).acquire_owned();
        let permit = tokio::select! {
            permit = permit => permit.expect("the semaphore is never closed"),
            () = shutdown.cancelled() => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.cancelled() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (router, shutdown) = (router.clone(), shutdown.clone());
                tracker.spawn(async move {
                    serve_connection(stream, peer, router, limits.header_timeout, shutdown).await;
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

async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: TowerToHyperService<Router>,
    header_timeout: Duration,
    shutdown: CancellationToken,
) {
    // Events are small: without this the kernel would delay them by up to 40 ms.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(peer));
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_header_size(MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::trace!(%peer, %error, "connection closed with an error");
    }
}

fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    async fn start(connections: usize, header_timeout: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "hello" }));
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
        let mut byte = [0; 1];
        first.write_all(REQUEST).await.unwrap();
        first.read_exact(&mut byte).await.unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(REQUEST).await.unwrap();
        let early =
            tokio::time::timeout(Duration::from_millis(50), second.read_exact(&mut byte)).await;
        assert!(early.is_err(), "the limit is one connection");
        drop(first);
        second.read_exact(&mut byte).await.unwrap();
    }
}
