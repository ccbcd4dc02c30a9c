//! The socket side: how many connections there may be, how long a head may take to come and how long it
//! may be. What a request says is not looked at here.

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

/// A head, or the next one on a connection that is kept, must be there within this time.
const HEAD_PATIENCE: Duration = Duration::from_secs(30);

/// The longest head: 64 KiB is eight times what common servers take.
const HEAD_BYTES: usize = 64 * 1024;

/// Out of descriptors, most likely: some are given back in a moment.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a listener puts up with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Connections at once; more wait in the kernel's queue.
    pub(crate) connections: usize,
    /// How long a head may take.
    pub(crate) head: Duration,
}

impl Bounds {
    pub(crate) const fn of(connections: usize) -> Self {
        Self { connections, head: HEAD_PATIENCE }
    }
}

/// Answers with `router` on `listener` until `shutdown` is cancelled and the last answer is out.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    bounds: Bounds,
    shutdown: CancellationToken,
) {
    let (places, tracker) = (Arc::new(Semaphore::new(bounds.connections)), TaskTracker::new());
    let router = TowerToHyperService::new(router);
    loop {
        let place = Arc::clone(&places).acquire_owned();
        let place = tokio::select! {
            place = place => place.expect("nobody closes it"),
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
                    answer(stream, peer, router, bounds.head, shutdown).await;
                    drop(place);
                });
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    tracker.close();
    tracker.wait().await;
}

async fn answer(
    stream: TcpStream,
    peer: SocketAddr,
    router: TowerToHyperService<Router>,
    head: Duration,
    shutdown: CancellationToken,
) {
    // Events are small and wanted at once; without this the kernel collects them for 40 ms.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(peer));
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .max_header_size(HEAD_BYTES)
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
        tracing::trace!(%peer, %error, "a connection broke");
    }
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const ASK: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    async fn listening(connections: usize, head: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "here" }));
        tokio::spawn(serve(
            listener,
            router,
            Bounds { connections, head },
            CancellationToken::new(),
        ));
        address
    }

    #[tokio::test]
    async fn a_head_that_never_ends_is_not_waited_for() {
        let address = listening(10, Duration::from_millis(20)).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ").await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(!String::from_utf8_lossy(&answer).contains("here"));
    }

    #[tokio::test]
    async fn a_head_that_is_too_long_is_refused() {
        let address = listening(10, HEAD_PATIENCE).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let long = format!("GET / HTTP/1.1\r\nhost: x\r\nx-a: {}\r\n\r\n", "a".repeat(HEAD_BYTES));
        let _ = stream.write_all(long.as_bytes()).await;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 431");
    }

    #[tokio::test]
    async fn one_connection_too_many_waits_until_another_is_gone() {
        let address = listening(1, HEAD_PATIENCE).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        let mut byte = [0; 1];
        first.write_all(ASK).await.unwrap();
        first.read_exact(&mut byte).await.unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(ASK).await.unwrap();
        let early =
            tokio::time::timeout(Duration::from_millis(50), second.read_exact(&mut byte)).await;
        assert!(early.is_err(), "there was room for one only");
        drop(first);
        second.read_exact(&mut byte).await.unwrap();
    }
}
