//! HTTP server for connections of a door, HTTP clients for upstreams, and bodies. Knows neither
//! models nor git.

use std::{
    convert::Infallible,
    future::Future,
    net::IpAddr,
    sync::{Once, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use harvest_proto::Secret;
use http_body_util::{
    BodyDataStream, BodyExt, Full, LengthLimitError, Limited, StreamBody,
    combinators::UnsyncBoxBody,
};
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::{self, HeaderName, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};

use crate::{egress::PublicResolver, redact_stream::StreamRedactor};

/// An error in the middle of a body. The receiver sees its connection cut.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type Body = UnsyncBoxBody<Bytes, BodyError>;
/// Sends the chunks of a streamed body. Waits while the receiver is slow.
pub(crate) type BodySender = mpsc::Sender<Result<Bytes, BodyError>>;

// Buffer of a connection; a request's head must fit.
const MAX_BUFFER_BYTES: usize = 64 * 1024;

// For the head of a request, from the open connection or the end of the last response: a client
// that sends a byte now and then must not occupy a connection for ever. Longer than HTTP clients
// keep an unused connection (at most five minutes), so that it is never closed under a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10 * 60);

// RFC 9110, 7.6.1, and older headers of the same kind.
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

/// Closes the connection without a response.
#[derive(Debug, thiserror::Error)]
#[error("the gateway closed the connection")]
pub(crate) struct Abort;

/// Serves the requests of a connection until it ends.
pub(crate) async fn serve<Stream, Handler, Handled>(stream: Stream, handler: Handler)
where
    Stream: AsyncRead + AsyncWrite + Unpin,
    Handler: Fn(Request<Incoming>) -> Handled,
    Handled: Future<Output = Result<Response<Body>, Abort>>,
{
    serve_with(stream, handler, HEAD_TIMEOUT).await;
}

async fn serve_with<Stream, Handler, Handled>(
    stream: Stream,
    handler: Handler,
    head_timeout: Duration,
) where
    Stream: AsyncRead + AsyncWrite + Unpin,
    Handler: Fn(Request<Incoming>) -> Handled,
    Handled: Future<Output = Result<Response<Body>, Abort>>,
{
    let mut server = http1::Builder::new();
    server.max_buf_size(MAX_BUFFER_BYTES);
    server.timer(TokioTimer::new()).header_read_timeout(head_timeout);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service_fn(handler)).await {
        tracing::debug!(%error, "a connection to the door ended early");
    }
}

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

/// A body that is sent chunk by chunk. Two chunks are buffered for a slow receiver.
pub(crate) fn streamed() -> (BodySender, Body) {
    let (sender, mut chunks) = mpsc::channel(2);
    let chunks = stream::poll_fn(move |context| chunks.poll_recv(context));
    (sender, StreamBody::new(chunks.map_ok(Frame::data)).boxed_unsync())
}

pub(crate) fn text(status: StatusCode, message: &str) -> Response<Body> {
    with_type(status, "text/plain; charset=utf-8", format!("{message}\n"))
}

pub(crate) fn with_type(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Body> {
    let content_type = (header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response(status, HeaderMap::from_iter([content_type]), full(body))
}

pub(crate) fn response(status: StatusCode, headers: HeaderMap, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// The headers to forward: all but hop-by-hop headers and `without`.
pub(crate) fn forwarded_headers(headers: &HeaderMap, without: &[HeaderName]) -> HeaderMap {
    let named: Vec<_> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse::<HeaderName>().ok())
        .collect();
    let dropped = |name: &HeaderName| {
        HOP_BY_HOP.contains(name) || named.contains(name) || without.contains(name)
    };
    headers
        .iter()
        .filter(|(name, _)| !dropped(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// The chunks of an upstream's response, with these secrets masked. An error does not contain the
/// URL.
pub(crate) fn upstream_chunks(
    response: reqwest::Response,
    secrets: &[&Secret<String>],
) -> impl Stream<Item = Result<Bytes, BodyError>> + Send + Unpin + use<> {
    masked(response.bytes_stream().map_err(|failed| failed.without_url().into()), secrets)
}

/// A body with these secrets masked, and without trailers.
pub(crate) fn masked_body(body: Body, secrets: &[&Secret<String>]) -> Body {
    let chunks = masked(BodyDataStream::new(body), secrets);
    StreamBody::new(chunks.map_ok(Frame::data)).boxed_unsync()
}

fn masked<S>(
    chunks: S,
    secrets: &[&Secret<String>],
) -> impl Stream<Item = Result<Bytes, BodyError>> + Send + Unpin + use<S>
where
    S: Stream<Item = Result<Bytes, BodyError>> + Send + Unpin,
{
    let mut redactor = StreamRedactor::new(secrets);
    let chunks = chunks.map(Some).chain(stream::iter([None]));
    chunks.filter_map(move |chunk| {
        let masked = match chunk {
            Some(Ok(chunk)) => Ok(redactor.push(chunk)),
            Some(Err(failed)) => Err(failed),
            None => Ok(redactor.finish()),
        };
        let empty = masked.as_ref().is_ok_and(Bytes::is_empty);
        std::future::ready((!empty).then_some(masked))
    })
}

/// A request's body; `None` when it is longer. The rest of it is not read, so the connection cannot
/// be used again.
pub(crate) async fn read_body(body: Incoming, max: usize) -> Result<Option<Bytes>, Abort> {
    match Limited::new(body, max).collect().await {
        Ok(collected) => Ok(Some(collected.to_bytes())),
        Err(failed) if failed.is::<LengthLimitError>() => Ok(None),
        Err(_) => Err(Abort),
    }
}

/// The text of an upstream's response, cut after about `max` bytes.
pub(crate) async fn read_text(response: reqwest::Response, max: usize) -> String {
    let mut text = Vec::new();
    let mut chunks = response.bytes_stream();
    while let Some(Ok(chunk)) = chunks.next().await {
        text.extend_from_slice(&chunk);
        if text.len() > max {
            break;
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Whether a request failed before the service could read it.
pub(crate) fn is_unsent(failed: &BodyError) -> bool {
    failed
        .downcast_ref::<reqwest::Error>()
        .is_none_or(|error| error.is_connect() || error.is_builder())
}

/// Clients for upstreams. Requests to this machine never go through a proxy.
#[derive(Debug)]
pub(crate) struct Clients {
    loopback: reqwest::Client,
    // Created on first use: they read the machine's CA certificates, and a machine without any can
    // still do the rest.
    external: OnceLock<Option<reqwest::Client>>,
    public: OnceLock<Option<reqwest::Client>>,
    resolver: PublicResolver,
}

/// Which hosts a request may be sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Any host: the URL comes from the operator.
    Any,
    /// Hosts with public addresses, and those that the operator allows.
    Public,
    /// This machine only: the local forge.
    ThisMachine,
}

impl Clients {
    pub(crate) fn new(resolver: PublicResolver) -> Self {
        static PROVIDER: Once = Once::new();
        // Fails when the process has a provider already, which is fine.
        PROVIDER.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
        let loopback = builder().no_proxy().tls_certs_only([]).build();
        let loopback =
            loopback.expect("a client that reads nothing from the host can always be built");
        Self { loopback, external: OnceLock::new(), public: OnceLock::new(), resolver }
    }

    /// Sends a request. The error does not contain the URL.
    pub(crate) async fn execute(
        &self,
        request: reqwest::Request,
        reach: Reach,
    ) -> Result<reqwest::Response, BodyError> {
        let client = match reach {
            Reach::ThisMachine => Some(&self.loopback),
            Reach::Any if is_plain_loopback(request.url()) => Some(&self.loopback),
            Reach::Any => self.external.get_or_init(|| build(builder())).as_ref(),
            Reach::Public => {
                self.resolver.judge_proxied(request.url()).await?;
                let (resolver, proxies) = (self.resolver.clone(), self.resolver.proxies());
                let public = || build(builder().dns_resolver(resolver).proxy(proxies));
                self.public.get_or_init(public).as_ref()
            }
        };
        let client = client.ok_or("no HTTPS client; are there CA certificates on this machine?")?;
        client.execute(request).await.map_err(|failed| failed.without_url().into())
    }

    /// Whether a name is that of the host's own proxy.
    pub(crate) fn is_proxy(&self, name: &str) -> bool {
        self.resolver.is_proxy(name)
    }
}

fn build(builder: reqwest::ClientBuilder) -> Option<reqwest::Client> {
    let built = builder.build();
    built.inspect_err(|error| tracing::error!(%error, "cannot create an HTTPS client")).ok()
}

fn is_plain_loopback(url: &reqwest::Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let local =
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    local && url.scheme() == "http"
}

fn builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        // A redirect could send a secret to another host.
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .connect_timeout(Duration::from_secs(20))
        // A model may think for minutes, and a large push is silent while it uploads; half an hour
        // is the default timeout of a command.
        .read_timeout(Duration::from_secs(1800))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn request_head_must_arrive_in_time() {
        let (mut client, server) = tokio::io::duplex(1024);
        let handler = |_| std::future::ready(Ok(text(StatusCode::OK, "unexpected")));
        let serve = serve_with(server, handler, Duration::from_millis(1));
        client.write_all(b"GET / HTTP/1.1\r\nx-slow: ").await.unwrap();
        // Both end only because the server closes the connection.
        let mut rest = Vec::new();
        let (_, read) = tokio::join!(serve, client.read_to_end(&mut rest));
        assert!(read.is_ok() && !String::from_utf8_lossy(&rest).contains("200"), "{rest:?}");
    }

    #[test]
    fn hop_by_hop_headers_are_not_forwarded() {
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
        let forwarded = forwarded_headers(&headers, &[header::COOKIE]);
        assert_eq!(forwarded.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["a"]);
    }
}
