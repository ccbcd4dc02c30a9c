//! The API of the session's repositories: `https://git.harvest.internal/api/v3` and `/api/graphql`
//! inside, as GitHub Enterprise Server has them, for `gh`. TLS ends here, with a certificate of the
//! home's authority, because `gh` knows no other scheme. Requests are bounded and taken apart; what
//! is answered, and with which credential, is up to [`Tools::forge`]. Nothing is passed on.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use harvest_proto::door::GIT_NAME;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::OwnedSemaphorePermit,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use url::form_urlencoded;

use crate::{
    authority::Authority,
    door::Door,
    http::{self, Abort, Body},
    ledger::{ForgeAnswer, ForgeCall, Tools},
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
// A description of 30,000 characters, with escapes.
const MAX_BODY_BYTES: usize = 512 * 1024;
const MAX_PATH_BYTES: usize = 4096;
// An answer is sent in pieces of this size, which are all that is kept of one that was read.
const PIECE_BYTES: usize = 32 * 1024;
// How long a client may take to read a piece.
const PIECE_TIMEOUT: Duration = Duration::from_secs(60);

const REST: &str = "/api/v3/";
const GRAPHQL: &str = "/api/graphql";

/// The version of GitHub Enterprise Server whose abilities `gh` may expect.
const VERSION: &str = "3.19.0";

/// Serves the requests of a connection until it ends.
pub(crate) async fn serve(
    door: &Door,
    tools: &dyn Tools,
    authority: &Authority,
    stream: impl AsyncRead + AsyncWrite + Unpin,
) {
    let config = match authority.server_config(GIT_NAME) {
        Ok(config) => config,
        Err(error) => return tracing::error!(%error, "cannot issue a certificate"),
    };
    let accepting = TlsAcceptor::from(config).accept(stream);
    if let Ok(Ok(stream)) = timeout(HANDSHAKE_TIMEOUT, accepting).await {
        http::serve(stream, |request| answer(door, tools, request)).await;
    }
}

async fn answer(
    door: &Door,
    tools: &dyn Tools,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    let call = Arc::clone(&door.forge_calls).acquire_owned().await.map_err(|_| Abort)?;
    let (parts, body) = request.into_parts();
    let (path, is_head) = (parts.uri.path().to_owned(), parts.method == Method::HEAD);
    let accept = parts.headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let accept = accept.unwrap_or_default();
    let answer = match target(&parts.method, &path, parts.uri.query().unwrap_or_default(), accept) {
        Ok(Target::Meta) => ForgeAnswer {
            status: 200,
            is_json: true,
            body: format!("{{\"installed_version\":\"{VERSION}\"}}").into_bytes(),
            next: None,
        },
        Ok(Target::Call(call)) => tools.forge(call).await,
        Ok(Target::Graphql) => match http::read_body(body, MAX_BODY_BYTES).await? {
            Some(body) => tools.forge(ForgeCall::Graphql { body: body.to_vec() }).await,
            None => {
                let message = format!("the request is longer than {MAX_BODY_BYTES} bytes");
                let refused = ForgeAnswer::refused(413, &message);
                let mut refused = response(&path, refused, false, call);
                let close = HeaderValue::from_static("close");
                refused.headers_mut().insert(header::CONNECTION, close);
                return Ok(refused);
            }
        },
        Err((status, message)) => ForgeAnswer::refused(status, message),
    };
    Ok(response(&path, answer, is_head, call))
}

#[derive(Debug, PartialEq, Eq)]
enum Target {
    Meta,
    Call(ForgeCall),
    /// Its body is the request.
    Graphql,
}

/// What a request is for; the error is a status with a message for the user of `gh`.
fn target(
    method: &Method,
    path: &str,
    query: &str,
    accept: &str,
) -> Result<Target, (u16, &'static str)> {
    if path == GRAPHQL {
        let message = "GraphQL requests are sent with POST";
        return if *method == Method::POST { Ok(Target::Graphql) } else { Err((405, message)) };
    }
    let below = path.strip_prefix(REST).ok_or((404, "the API is at /api/v3 and /api/graphql"))?;
    if ![Method::GET, Method::HEAD].contains(method) {
        return Err((
            403,
            "the API is read-only in a sandbox; `gh pr create` and `gh pr comment` write",
        ));
    }
    // `gh auth status` reads the root.
    if matches!(below, "" | "meta") {
        return Ok(Target::Meta);
    }
    let invalid = (400, "the path is not valid");
    if path.len() + query.len() > MAX_PATH_BYTES {
        return Err(invalid);
    }
    let segments = below.strip_suffix('/').unwrap_or(below).split('/').map(decoded);
    let path = segments.collect::<Option<Vec<String>>>().ok_or(invalid)?;
    let query = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
    Ok(Target::Call(ForgeCall::Read { path, query, accept: accept.to_owned() }))
}

/// A segment of a path without percent-encoding; `None` when it is not valid.
fn decoded(segment: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(segment.len());
    let mut bytes = segment.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let value = digit()? * 16 + digit()?;
        decoded.push(u8::try_from(value).ok()?);
    }
    String::from_utf8(decoded).ok()
}

fn response(
    path: &str,
    answer: ForgeAnswer,
    is_head: bool,
    call: OwnedSemaphorePermit,
) -> Response<Body> {
    let kind = match answer.is_json {
        true => "application/json; charset=utf-8",
        false => "text/plain; charset=utf-8",
    };
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let content_type = (header::CONTENT_TYPE, HeaderValue::from_static(kind));
    let mut headers = HeaderMap::from_iter([content_type]);
    let body = if is_head {
        http::full(Vec::new())
    } else {
        // A client that gets less notices it.
        headers.insert(header::CONTENT_LENGTH, answer.body.len().into());
        in_pieces(answer.body, call, PIECE_TIMEOUT)
    };
    let mut response = http::response(status, headers, body);
    if let Some(next) = answer.next {
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(next).finish();
        let link = format!("<https://{GIT_NAME}{path}?{query}>; rel=\"next\"");
        // A path of printable signs is always a valid value.
        if let Ok(link) = HeaderValue::from_str(&link) {
            response.headers_mut().insert(header::LINK, link);
        }
    }
    response
}

/// A body that holds its call until the client has read it, or reads no more.
fn in_pieces(bytes: Vec<u8>, call: OwnedSemaphorePermit, piece_timeout: Duration) -> Body {
    let (sender, body) = http::streamed();
    tokio::spawn(async move {
        let _call = call;
        for piece in bytes.chunks(PIECE_BYTES) {
            // A copy: a part of the same bytes would hold all of them.
            let sending = sender.send(Ok(Bytes::copy_from_slice(piece)));
            let Ok(Ok(())) = timeout(piece_timeout, sending).await else { return };
        }
    });
    body
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use proptest::prelude::*;
    use tokio::sync::Semaphore;

    use super::*;

    type Read = (Vec<String>, Vec<(String, String)>);

    fn read(path: &str, query: &str) -> Result<Read, u16> {
        match target(&Method::GET, path, query, "") {
            Ok(Target::Call(ForgeCall::Read { path, query, .. })) => Ok((path, query)),
            Ok(_) => Err(200),
            Err((status, _)) => Err(status),
        }
    }

    #[test]
    fn paths_and_parameters_are_decoded() {
        let (path, query) = read("/api/v3/repos/a/b/contents/x%2Fy%20z", "ref=a%2Fb&x=1").unwrap();
        assert_eq!(path, ["repos", "a", "b", "contents", "x/y z"]);
        assert_eq!(query, [("ref", "a/b"), ("x", "1")].map(|(n, v)| (n.into(), v.into())));
        for path in ["/", "/api/v3", "/local/app.git/info/refs"] {
            assert_eq!(read(path, ""), Err(404), "{path}");
        }
        for path in ["/api/v3/repos/%", "/api/v3/repos/%2", "/api/v3/repos/%zz", "/api/v3/%ff"] {
            assert_eq!(read(path, ""), Err(400), "{path}");
        }
    }

    #[test]
    fn writes_are_refused_with_the_commands_that_write() {
        for method in [Method::POST, Method::PATCH, Method::PUT, Method::DELETE] {
            let refused = target(&method, "/api/v3/repos/a/b/pulls", "", "").unwrap_err();
            assert!(refused.0 == 403 && refused.1.contains("gh pr create"), "{refused:?}");
        }
        assert_eq!(target(&Method::GET, GRAPHQL, "", "").unwrap_err().0, 405);
        assert_eq!(target(&Method::POST, GRAPHQL, "", ""), Ok(Target::Graphql));
    }

    #[tokio::test]
    async fn call_ends_when_its_answer_is_read() {
        let calls = Arc::new(Semaphore::new(1));
        let call = Arc::clone(&calls).acquire_owned().await.unwrap();
        let bytes: Vec<u8> = (0..40 * PIECE_BYTES + 7).map(|at| (at % 251) as u8).collect();
        let answer = ForgeAnswer { status: 200, is_json: true, body: bytes.clone(), next: None };
        let mut response = response("/api/v3/repos/a/b", answer, false, call);
        let length: usize = response.headers()["content-length"].to_str().unwrap().parse().unwrap();
        let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!((first.len(), length), (PIECE_BYTES, bytes.len()));
        assert_eq!(calls.available_permits(), 0, "it is not read to its end");
        let rest = response.into_body().collect().await.unwrap().to_bytes();
        assert!([first, rest].concat() == bytes);
        drop(calls.acquire().await.unwrap());
    }

    #[tokio::test]
    async fn call_ends_when_answer_stays_unread() {
        let calls = Arc::new(Semaphore::new(1));
        let call = Arc::clone(&calls).acquire_owned().await.unwrap();
        let body = in_pieces(vec![b'x'; 40 * PIECE_BYTES], call, Duration::from_millis(1));
        drop(calls.acquire().await.unwrap());
        // What was sent before is all that is left of it.
        let rest = body.collect().await.unwrap().to_bytes();
        assert_eq!(rest.len(), 2 * PIECE_BYTES);
    }

    #[tokio::test]
    async fn next_page_stays_at_the_door() {
        let calls = Arc::new(Semaphore::new(1));
        let call = calls.acquire_owned().await.unwrap();
        let next = Some(vec![("page".to_owned(), "2".to_owned())]);
        let answer = ForgeAnswer { status: 200, is_json: true, body: b"[]".to_vec(), next };
        let response = response("/api/v3/repos/a/b/pulls", answer, false, call);
        let expected = "<https://git.harvest.internal/api/v3/repos/a/b/pulls?page=2>; rel=\"next\"";
        assert_eq!(response.headers()[header::LINK], expected);
    }

    proptest! {
        #[test]
        fn any_path_is_taken_apart_or_refused(path in "/api/v3/[%a-f0-9/.]{0,40}") {
            if let Ok((segments, _)) = read(&path, "") {
                prop_assert!(segments.len() <= path.matches('/').count());
            }
        }
    }
}
