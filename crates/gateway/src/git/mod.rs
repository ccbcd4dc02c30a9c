//! The git door: `http://git.harvest.internal/{name}.git` inside leads to the repository's real place
//! outside, with the credentials the sandbox does not have. Carries fetches as they are; pushes are
//! judged by `push`.

mod pktline;
mod push;

use std::sync::Arc;

use futures_util::StreamExt;
use harvest_proto::Secret;
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};

use crate::{
    door::Door,
    http::{self, Body, Cut},
    ledger::GitAccess,
    vault::{basic_credentials, redact},
};

const GIT_PROTOCOL: HeaderName = HeaderName::from_static("git-protocol");
// A forge explains a refusal in a few lines.
const MAX_ERROR_BYTES: usize = 16 * 1024;

// Everything else the sandbox says, credentials above all, stays behind.
const PASSED_OUT: [HeaderName; 6] = [
    header::ACCEPT,
    header::ACCEPT_LANGUAGE,
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::USER_AGENT,
    GIT_PROTOCOL,
];
// Compression is between git and the forge, except where the gateway has to read along.
const PASSED_OUT_UNREAD: [HeaderName; 2] = [header::ACCEPT_ENCODING, header::CONTENT_ENCODING];
const PASSED_IN: [HeaderName; 5] = [
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::CACHE_CONTROL,
    header::EXPIRES,
    header::PRAGMA,
];

/// What git asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Errand {
    FetchInfo,
    Fetch,
    PushInfo,
    Push,
}

impl Errand {
    const ALL: [Self; 4] = [Self::FetchInfo, Self::Fetch, Self::PushInfo, Self::Push];

    /// What follows the repository in the URL, the query, and how it is asked for.
    const fn spelling(self) -> (&'static str, Option<&'static str>, Method) {
        match self {
            Self::FetchInfo => ("info/refs", Some("service=git-upload-pack"), Method::GET),
            Self::PushInfo => ("info/refs", Some("service=git-receive-pack"), Method::GET),
            Self::Fetch => ("git-upload-pack", None, Method::POST),
            Self::Push => ("git-receive-pack", None, Method::POST),
        }
    }
}

/// Answers one request at the git door.
pub(crate) async fn answer(
    door: Arc<Door>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Cut> {
    let pass = door.pass();
    let (parts, body) = request.into_parts();
    let Some((access, wanted)) = find(&pass.repositories, &parts) else {
        return Ok(http::text(StatusCode::NOT_FOUND, "this session has no such repository"));
    };
    if wanted == Errand::Push {
        return push::answer(door, access.clone(), parts, body).await;
    }
    if wanted == Errand::PushInfo && access.branch.is_none() {
        door.log_refused_push(&access.name, "this session may only read").await;
        return Ok(http::text(StatusCode::FORBIDDEN, "this session may only read this repository"));
    }
    let remote = match Remote::of(&door, access).await {
        Ok(remote) => remote,
        Err(refused) => return Ok(refused),
    };
    let headers = [&PASSED_OUT[..], &PASSED_OUT_UNREAD].concat();
    let body = (wanted == Errand::Fetch).then(|| reqwest::Body::wrap_stream(http::pieces(body)));
    let answered = match remote.ask(&door, wanted, selected(&parts.headers, &headers), body).await {
        Ok(answered) => answered,
        Err(refused) => return Ok(refused),
    };
    let headers = selected(answered.headers(), &PASSED_IN);
    let pieces = answered.bytes_stream().map(|piece| match piece {
        Ok(piece) => Ok(Frame::data(piece)),
        Err(failed) => Err(failed.without_url().into()),
    });
    let mut response = Response::new(StreamBody::new(pieces).boxed_unsync());
    *response.headers_mut() = headers;
    Ok(response)
}

// Names are compared as they are, never decoded: `..` and `%2e` simply match nothing.
fn find<'a>(repositories: &'a [GitAccess], parts: &Parts) -> Option<(&'a GitAccess, Errand)> {
    let path = parts.uri.path().strip_prefix('/')?;
    repositories.iter().find_map(|access| {
        let rest = path.strip_prefix(access.name.as_str())?.strip_prefix(".git/")?;
        let asked = (rest, parts.uri.query(), parts.method.clone());
        Errand::ALL
            .into_iter()
            .find(|request| request.spelling() == asked)
            .map(|request| (access, request))
    })
}

fn selected(headers: &HeaderMap, names: &[HeaderName]) -> HeaderMap {
    let chosen = headers.iter().filter(|(name, _)| names.contains(name));
    chosen.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A repository's real place, and the key to it.
struct Remote {
    name: String,
    url: reqwest::Url,
    secret: Option<(String, Secret<String>)>,
}

impl Remote {
    async fn of(door: &Door, access: &GitAccess) -> Result<Self, Response<Body>> {
        let unusable = || {
            let message =
                format!("the URL registered for `{}` is not an http or https URL", access.name);
            http::text(StatusCode::BAD_GATEWAY, &message)
        };
        let mut url = reqwest::Url::parse(&access.url).map_err(|_| unusable())?;
        // What a URL carries along could be a password; only the named secret is ever sent.
        url.set_username("").and_then(|()| url.set_password(None)).map_err(|()| unusable())?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(unusable());
        }
        let secret = match &access.secret {
            None => None,
            Some(name) => match door.shared.ledger.secret(name).await {
                Some(secret) => Some((name.clone(), secret)),
                None => {
                    let message = format!(
                        "the secret {name} that opens `{}` is not set; set it with `harvest secret set {name}`",
                        access.name
                    );
                    return Err(http::text(StatusCode::FORBIDDEN, &message));
                }
            },
        };
        Ok(Self { name: access.name.clone(), url, secret })
    }

    /// Asks the remote; an answer that is not a good one comes back in our own words.
    async fn ask(
        &self,
        door: &Door,
        wanted: Errand,
        headers: HeaderMap,
        body: Option<reqwest::Body>,
    ) -> Result<reqwest::Response, Response<Body>> {
        let (suffix, query, method) = wanted.spelling();
        let mut url = self.url.clone();
        url.set_path(&format!("{}/{suffix}", self.url.path().trim_end_matches('/')));
        url.set_query(query);
        let mut request = reqwest::Request::new(method, url);
        *request.headers_mut() = headers;
        *request.body_mut() = body;
        let refused = |message: String| http::text(StatusCode::FORBIDDEN, &message);
        if let Some(value) = self.authorization().map_err(refused)? {
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        match door.shared.clients.execute(request).await {
            Ok(answered) if answered.status() == StatusCode::OK => Ok(answered),
            Ok(answered) => Err(self.in_our_words(answered).await),
            Err(failed) => {
                tracing::warn!(repository = self.name, error = %self.clean(&failed.to_string()), "cannot reach a git remote");
                let message =
                    format!("the remote of `{}` could not be reached from this host", self.name);
                Err(http::text(StatusCode::BAD_GATEWAY, &message))
            }
        }
    }

    // The error is what to tell git.
    fn authorization(&self) -> Result<Option<HeaderValue>, String> {
        let Some((name, secret)) = &self.secret else { return Ok(None) };
        let value = format!("Basic {}", basic_credentials(secret.expose().trim()));
        let mut value = HeaderValue::from_str(&value).map_err(|_| {
            format!("the secret {name} holds characters that no token has; set it again")
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn clean(&self, text: &str) -> String {
        let secrets: Vec<_> = self.secret.iter().map(|(_, secret)| secret).collect();
        redact(text, &secrets)
    }

    // A 401 would make git inside ask for a password, a redirect would lead it where it cannot go.
    async fn in_our_words(&self, answered: reqwest::Response) -> Response<Body> {
        let status = answered.status();
        let name = &self.name;
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let hint = match &self.secret {
                    Some((secret, _)) => format!("renew it with `harvest secret set {secret}`"),
                    None => "the repository has no secret".to_owned(),
                };
                http::text(
                    StatusCode::FORBIDDEN,
                    &format!("the remote of `{name}` refused our token; {hint}"),
                )
            }
            StatusCode::NOT_FOUND => {
                let message =
                    format!("the remote of `{name}` does not exist, or its token may not see it");
                http::text(StatusCode::NOT_FOUND, &message)
            }
            _ if status.is_client_error() || status.is_server_error() => {
                let text = self.clean(&first_of(answered).await);
                http::text(status, &format!("the remote of `{name}` answered {status}: {text}"))
            }
            _ => {
                let message = format!(
                    "the remote of `{name}` answered {status}; register the URL it has now"
                );
                http::text(StatusCode::BAD_GATEWAY, &message)
            }
        }
    }
}

async fn first_of(answered: reqwest::Response) -> String {
    let mut text = Vec::new();
    let mut pieces = answered.bytes_stream();
    while let Some(Ok(piece)) = pieces.next().await {
        text.extend_from_slice(&piece);
        if text.len() > MAX_ERROR_BYTES {
            break;
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}
