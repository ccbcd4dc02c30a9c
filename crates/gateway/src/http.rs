//! The HTTP the gateway speaks: a server on a door's connections, clients towards upstreams, and the
//! bodies between them. Knows neither models nor git.

use std::{
    convert::Infallible,
    future::Future,
    net::IpAddr,
    sync::{Once, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::{self, HeaderName, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;

use crate::door::Stream;

/// What goes wrong in the middle of a body. The other side sees its connection cut.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;
/// A body of any origin.
pub(crate) type Body = UnsyncBoxBody<Bytes, BodyError>;
/// Feeds a streamed body. A body whose reader is slow makes its feeder wait.
pub(crate) type Feed = mpsc::Sender<Result<Bytes, BodyError>>;

// What one connection may make the host hold; a request's head must fit.
const MAX_BUFFER_BYTES: usize = 64 * 1024;

// RFC 9110, 7.6.1, and the names that were used before it.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// The connection is cut without an answer.
#[derive(Debug, thiserror::Error)]
#[error("the connection is cut on purpose")]
pub(crate) struct Cut;

/// Answers the requests of one connection until it ends.
pub(crate) async fn serve<Answering, Answered>(stream: Stream, answer: Answering)
where
    Answering: Fn(Request<Incoming>) -> Answered,
    Answered: Future<Output = Result<Response<Body>, Cut>>,
{
    // No clock on idle connections: agents keep theirs for hours, and a door has only so many.
    let mut server = http1::Builder::new();
    server.max_buf_size(MAX_BUFFER_BYTES);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service_fn(answer)).await {
        tracing::debug!(%error, "a connection at the door ended early");
    }
}

/// A whole body at once.
pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

/// A body that is fed piece by piece. Two pieces may wait for a slow reader.
pub(crate) fn streamed() -> (Feed, Body) {
    let (feed, mut pieces) = mpsc::channel(2);
    let pieces = stream::poll_fn(move |context| pieces.poll_recv(context));
    let frames = futures_util::StreamExt::map(pieces, |piece: Result<Bytes, BodyError>| {
        piece.map(Frame::data)
    });
    (feed, StreamBody::new(frames).boxed_unsync())
}

/// An answer in plain words.
pub(crate) fn text(status: StatusCode, message: &str) -> Response<Body> {
    with_type(status, "text/plain; charset=utf-8", format!("{message}\n"))
}

/// A whole answer of this type.
pub(crate) fn with_type(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Body> {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// The headers that go on to the next hop, without these.
pub(crate) fn passed_on(headers: &HeaderMap, without: &[HeaderName]) -> HeaderMap {
    let named: Vec<_> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse::<HeaderName>().ok())
        .collect();
    let stays = |name: &HeaderName| {
        HOP_BY_HOP.contains(name) || named.contains(name) || without.contains(name)
    };
    headers
        .iter()
        .filter(|(name, _)| !stays(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// The rest of a body as pieces.
pub(crate) fn pieces(
    body: Incoming,
) -> impl futures_util::Stream<Item = Result<Bytes, hyper::Error>> + Send + 'static {
    http_body_util::BodyDataStream::new(body)
}

/// The clients towards upstreams. What is on this machine is never asked for through a proxy.
#[derive(Debug)]
pub(crate) struct Clients {
    loopback: reqwest::Client,
    // Made on first use: it reads the host's certificates, and a host without any can still do the rest.
    outside: OnceLock<Option<reqwest::Client>>,
}

impl Clients {
    pub(crate) fn new() -> Self {
        static PROVIDER: Once = Once::new();
        // An error means that somebody else has chosen a provider for the whole process: as good.
        PROVIDER.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
        let loopback = builder().no_proxy().tls_certs_only([]).build();
        let loopback =
            loopback.expect("a client that reads nothing from the host can always be built");
        Self { loopback, outside: OnceLock::new() }
    }

    /// Sends the request with the client for its URL. The error never shows the URL.
    pub(crate) async fn execute(
        &self,
        request: reqwest::Request,
    ) -> Result<reqwest::Response, BodyError> {
        let client = match is_plain_loopback(request.url()) {
            true => &self.loopback,
            false => self
                .outside()
                .ok_or("no client can be made; are there CA certificates on this host?")?,
        };
        client.execute(request).await.map_err(|failed| failed.without_url().into())
    }

    fn outside(&self) -> Option<&reqwest::Client> {
        let make = || {
            let made = builder().build();
            made.inspect_err(
                |error| tracing::error!(%error, "cannot make a client for the outside"),
            )
            .ok()
        };
        self.outside.get_or_init(make).as_ref()
    }
}

fn is_plain_loopback(url: &reqwest::Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let local =
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    local && url.scheme() == "http"
}

fn builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        // A redirect could carry a secret to another host.
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .connect_timeout(Duration::from_secs(20))
        // A model may think for minutes, and a large push is silent while it goes up; half an hour is
        // as long as a command may take at all.
        .read_timeout(Duration::from_secs(1800))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_for_one_hop_stay_behind_with_those_the_sender_named() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Mine"),
            ("x-mine", "1"),
            ("te", "x"),
            ("cookie", "c"),
            ("a", "b"),
        ] {
            headers.insert(
                HeaderName::from_static(name.to_ascii_lowercase().leak()),
                HeaderValue::from_static(value),
            );
        }
        let passed = passed_on(&headers, &[header::COOKIE]);
        assert_eq!(passed.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["a"]);
    }
}
