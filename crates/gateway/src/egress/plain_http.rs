//! Plain HTTP to an allowed name, also inside of a TLS connection that the gateway ended. Every
//! request of a connection is parsed, judged by its host and sent anew: a server with several names
//! may answer on a kept-alive connection for any of them. Upgrades to other protocols are not
//! forwarded. A proxy of the host gets each request in absolute form.

use std::sync::OnceLock;

use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode, Uri, Version,
    body::Incoming,
    client::conn::http1::{self as client, SendRequest},
    header::{self, HeaderValue},
    http::uri::Scheme,
    server::conn::http1 as server,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Mutex,
};

use super::{
    FIRST_BYTES_TIMEOUT, RefusalReason,
    intercept::{self, Interception},
    proxy::Proxy,
};
use crate::{
    http::{self, Abort, Body},
    policy,
};

// Twice what common servers accept as a request's head.
const MAX_BUFFER_BYTES: usize = 16 * 1024;

/// How the requests of a connection are sent on.
#[derive(Clone, Copy)]
pub(super) enum SendMode<'a> {
    Direct,
    /// In absolute form, to a proxy of the host.
    Proxied(&'a Proxy),
    WithSecrets(&'a Interception<'a>),
}

/// Forwards the requests of a connection until it ends, or until one names another host.
pub(super) async fn forward(
    inside: impl AsyncRead + AsyncWrite + Unpin,
    outside: impl AsyncRead + AsyncWrite + Unpin,
    name: &str,
    port: u16,
    mode: SendMode<'_>,
) -> Result<(), RefusalReason> {
    let Ok((sender, upstream)) = client::handshake(TokioIo::new(outside)).await else {
        return Ok(());
    };
    let (sender, refused) = (&Mutex::new(sender), &OnceLock::new());
    let handler = |mut request: Request<Incoming>| async move {
        let (method, headers) = (request.method(), request.headers());
        if let Err(reason) = check(method, request.uri(), headers, name, port) {
            let _ = refused.set(reason);
            return Err(Abort);
        }
        let upgrade = headers.contains_key(header::UPGRADE);
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = forwarded(request.headers());
        match mode {
            SendMode::Direct => send(sender, request).await,
            SendMode::Proxied(proxy) => {
                address_proxy(&mut request, proxy)?;
                send(sender, request).await
            }
            SendMode::WithSecrets(_) if upgrade => {
                let message = "requests with a secret cannot change the protocol";
                Ok(intercept::refusal(StatusCode::NOT_IMPLEMENTED, message))
            }
            SendMode::WithSecrets(interception) => match interception.prepare(&mut request).await {
                Ok(secrets) if secrets.is_empty() => send(sender, request).await,
                Ok(secrets) => intercept::masked(send(sender, request).await?, &secrets),
                Err(refused) => Ok(refused),
            },
        }
    };
    let mut server = server::Builder::new();
    server.max_buf_size(MAX_BUFFER_BYTES).half_close(true);
    server.timer(TokioTimer::new()).header_read_timeout(FIRST_BYTES_TIMEOUT);
    let served = server.serve_connection(TokioIo::new(inside), service_fn(handler));
    let mut served = std::pin::pin!(served);
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        _ = upstream => {
            // The last response is still sent, but no further request is accepted.
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::trace!(name, %error, "a forwarded connection ended early");
    }
    refused.get().map_or(Ok(()), |reason: &&'static str| Err((*reason).into()))
}

async fn send(
    sender: &Mutex<SendRequest<Incoming>>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    let mut sender = sender.lock().await;
    sender.ready().await.map_err(|_| Abort)?;
    let answered = sender.send_request(request).await.map_err(|_| Abort)?;
    let (parts, body) = answered.into_parts();
    let body = body.map_err(Into::into).boxed_unsync();
    let mut headers = http::forwarded_headers(&parts.headers, &[]);
    if sender.is_closed() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(http::response(parts.status, headers, body))
}

/// Puts a request that was judged into the form that a proxy takes.
fn address_proxy(request: &mut Request<Incoming>, proxy: &Proxy) -> Result<(), Abort> {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let authority = host.and_then(|host| host.parse().ok()).ok_or(Abort)?;
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    (parts.scheme, parts.authority) = (Some(Scheme::HTTP), Some(authority));
    *request.uri_mut() = Uri::from_parts(parts).map_err(|_| Abort)?;
    if let Some(authorization) = proxy.authorization() {
        request.headers_mut().insert(header::PROXY_AUTHORIZATION, authorization);
    }
    Ok(())
}

/// The headers to send on. `Connection: host` would remove the judged host, and the server would
/// answer for its default one.
fn forwarded(headers: &HeaderMap) -> HeaderMap {
    let mut forwarded = http::forwarded_headers(headers, &[header::EXPECT]);
    if let Some(host) = headers.get(header::HOST) {
        forwarded.insert(header::HOST, host.clone());
    }
    forwarded
}

/// Checks that a request names the host that was looked up, and no other.
fn check(
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    name: &str,
    port: u16,
) -> Result<(), &'static str> {
    if *method == Method::CONNECT || uri.scheme().is_some() || uri.authority().is_some() {
        return Err("the request's target is not a path");
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Err("the request does not have exactly one host header");
    };
    let host = host.to_str().unwrap_or_default();
    let host = policy::normalize(host.strip_suffix(&format!(":{port}")).unwrap_or(host));
    match host.is_some() && host == policy::normalize(name) {
        true => Ok(()),
        false => Err("the connection names another host than the one looked up"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(method: &str, target: &str, hosts: &[&'static str]) -> bool {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, HeaderValue::from_static(host));
        }
        let (method, uri) = (method.parse().unwrap(), target.parse().unwrap());
        check(&method, &uri, &headers, "Example.org", 80).is_ok()
    }

    #[test]
    fn connection_header_cannot_remove_the_host() {
        let headers = [(header::HOST, "example.org"), (header::CONNECTION, "host, x-hop")]
            .map(|(name, value)| (name, HeaderValue::from_static(value)));
        let headers = forwarded(&HeaderMap::from_iter(headers));
        assert_eq!(headers.get(header::HOST).unwrap(), "example.org");
        assert_eq!(headers.len(), 1);
    }

    #[test]
    fn request_must_name_the_looked_up_host_once() {
        for hosts in [["example.org"], ["EXAMPLE.org."], ["example.org:80"]] {
            assert!(judge("GET", "/a", &hosts), "{hosts:?}");
        }
        assert!(judge("OPTIONS", "*", &["example.org"]));
        for (method, target, hosts) in [
            ("GET", "/", &[][..]),
            ("GET", "/", &[""]),
            ("GET", "/", &["evil.org"]),
            ("GET", "/", &["example.org", "evil.org"]),
            ("GET", "/", &["example.org", "example.org"]),
            ("GET", "/", &["example.org:8080"]),
            ("GET", "http://evil.org/", &["example.org"]),
            ("CONNECT", "evil.org:443", &["example.org"]),
        ] {
            assert!(!judge(method, target, hosts), "{method} {target} {hosts:?}");
        }
    }
}
