//! The git door: forwards `http://git.harvest.internal/{owner}/{name}.git` to the repository's real
//! remote, with the credentials that the sandbox does not have. Fetches pass unchanged; `push`
//! checks pushes. `public` finds the repositories of public hosts, which can only be fetched.

mod ancestry;
mod lease;
mod look;
mod pktline;
mod public;
mod push;
mod remote_url;

use std::sync::Arc;

use futures_util::StreamExt;
use harvest_proto::{RepositoryName, Secret, SecretOwner};
use http_body_util::{BodyDataStream, BodyExt, StreamBody};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};

use public::PublicRequest;
pub use remote_url::{RemoteUrlError, normalize_remote_url};

use crate::{
    Shared,
    door::Door,
    egress::{PRIVATE_ADDRESS, PrivateAddress},
    http::{self, Abort, Body, BodyError, Reach},
    ledger::GitAccess,
    private_hosts,
    vault::{basic_credentials, redact},
};

const GITHUB_TOKEN: &str = "GITHUB_TOKEN";

const GIT_PROTOCOL: HeaderName = HeaderName::from_static("git-protocol");
// A forge explains an error in a few lines.
const MAX_ERROR_BYTES: usize = 16 * 1024;

// All other headers of the sandbox are dropped, above all credentials.
const TO_REMOTE: [HeaderName; 6] = [
    header::ACCEPT,
    header::ACCEPT_LANGUAGE,
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::USER_AGENT,
    GIT_PROTOCOL,
];
// Git may compress its request, except where the gateway has to read the body. No compressed
// response is requested, and none accepted for a token: it could not be masked.
const TO_REMOTE_UNREAD: [HeaderName; 1] = [header::CONTENT_ENCODING];
const FROM_REMOTE: [HeaderName; 5] = [
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::CACHE_CONTROL,
    header::EXPIRES,
    header::PRAGMA,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GitRequest {
    FetchInfo,
    Fetch,
    PushInfo,
    Push,
}

impl GitRequest {
    const ALL: [Self; 4] = [Self::FetchInfo, Self::Fetch, Self::PushInfo, Self::Push];

    /// The path after the repository, the query and the method.
    const fn route(self) -> (&'static str, Option<&'static str>, Method) {
        match self {
            Self::FetchInfo => ("info/refs", Some("service=git-upload-pack"), Method::GET),
            Self::PushInfo => ("info/refs", Some("service=git-receive-pack"), Method::GET),
            Self::Fetch => ("git-upload-pack", None, Method::POST),
            Self::Push => ("git-receive-pack", None, Method::POST),
        }
    }
}

pub(crate) async fn answer(
    door: Arc<Door>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    let (parts, body) = request.into_parts();
    let repositories = &door.policy.repositories;
    let public = PublicRequest::find(&door.shared.config.git_hosts, &parts);
    let found = find(repositories, &parts).or_else(|| {
        let public = public.as_ref()?;
        Some((public.registered(repositories)?, public.wanted))
    });
    match (found, public) {
        (Some((access, wanted)), _) => repository(&door, access, wanted, parts, body).await,
        (None, Some(public)) => {
            let wanted = public.wanted;
            let remote = public.allowed(&door).await;
            let body = (wanted == GitRequest::Fetch).then_some(body);
            Ok(fetch(&door, remote, wanted, &parts, body).await)
        }
        (None, None) => Ok(http::text(
            StatusCode::NOT_FOUND,
            "this session does not have that repository; start one with `harvest run -r REPOSITORY`",
        )),
    }
}

/// Answers a request for one of the session's repositories.
async fn repository(
    door: &Arc<Door>,
    access: &GitAccess,
    wanted: GitRequest,
    parts: Parts,
    body: Incoming,
) -> Result<Response<Body>, Abort> {
    if wanted == GitRequest::Push {
        return push::answer(Arc::clone(door), access.clone(), parts, body).await;
    }
    if wanted == GitRequest::PushInfo && access.branch.is_none() {
        door.log_refused_push(&access.name, "this session has read-only access").await;
        let message = "this session has read-only access to this repository";
        return Ok(http::text(StatusCode::FORBIDDEN, message));
    }
    let push = wanted == GitRequest::PushInfo;
    let resolve = || Remote::resolve(&door.shared, access, &door.policy.secrets, push);
    let remote = resolve().await;
    if wanted == GitRequest::Fetch {
        return Ok(fetch(door, remote, wanted, &parts, Some(body)).await);
    }
    // A token of the server's may have ended early: the next one is new. Requests with a body are
    // not sent twice; each of them follows one without.
    let answered = fetch(door, remote, wanted, &parts, None).await;
    match answered.extensions().get::<CredentialRefused>() {
        Some(CredentialRefused) => Ok(fetch(door, resolve().await, wanted, &parts, None).await),
        None => Ok(answered),
    }
}

/// Marks a response that says that the remote refused the server's own credential.
#[derive(Clone)]
struct CredentialRefused;

/// Marks a response that says that the remote did not let git read the request. After any other
/// failure, the remote may have taken a push.
#[derive(Clone)]
struct NothingTaken;

/// Forwards a request that changes nothing.
async fn fetch(
    door: &Door,
    remote: Result<Remote, Response<Body>>,
    wanted: GitRequest,
    parts: &Parts,
    body: Option<Incoming>,
) -> Response<Body> {
    let mut headers = filter_headers(&parts.headers, &[&TO_REMOTE[..], &TO_REMOTE_UNREAD].concat());
    let body = body.map(|body| reqwest::Body::wrap_stream(BodyDataStream::new(body)));
    if body.is_none() {
        // The remote would wait for the announced bytes, and take them from the next request of a
        // connection that all sessions share.
        headers.remove(header::CONTENT_LENGTH);
    }
    let sent = async {
        let remote = remote?;
        let answered = remote.send(&door.shared, wanted, headers, body).await?;
        Ok::<_, Response<Body>>((remote, answered))
    };
    let (remote, answered) = match sent.await {
        Ok(sent) => sent,
        Err(refused) => {
            if let Some(private) = refused.extensions().get::<PrivateRemote>().cloned() {
                log_private(door, private).await;
            }
            return refused;
        }
    };
    let headers = filter_headers(answered.headers(), &FROM_REMOTE);
    let chunks = http::upstream_chunks(answered, &remote.secrets());
    let chunks = chunks.map(|chunk| chunk.map(Frame::data));
    http::response(StatusCode::OK, headers, StreamBody::new(chunks).boxed_unsync())
}

// Names are compared undecoded: `..` and `%2e` match nothing.
fn find<'a>(repositories: &'a [GitAccess], parts: &Parts) -> Option<(&'a GitAccess, GitRequest)> {
    let path = parts.uri.path().strip_prefix('/')?;
    repositories.iter().find_map(|access| {
        let rest = path.strip_prefix(access.name.as_str())?.strip_prefix(".git/")?;
        let route = (rest, parts.uri.query(), parts.method.clone());
        let request = GitRequest::ALL.into_iter().find(|request| request.route() == route)?;
        Some((access, request))
    })
}

fn filter_headers(headers: &HeaderMap, names: &[HeaderName]) -> HeaderMap {
    let chosen = headers.iter().filter(|(name, _)| names.contains(name));
    chosen.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Marks a response that refuses a remote at a private address.
#[derive(Clone)]
struct PrivateRemote {
    host: String,
}

fn refuse_private(repository: &str, url: &reqwest::Url) -> Response<Body> {
    let host = url.host_str().unwrap_or_default().to_owned();
    let hint = private_hosts::hint(&host);
    let message = format!("the remote of `{repository}` is at a private address; {hint}");
    let mut refused = http::text(StatusCode::FORBIDDEN, &message);
    refused.extensions_mut().insert(PrivateRemote { host });
    refused
}

/// Records the refusal of a remote at a private address.
async fn log_private(door: &Door, PrivateRemote { host }: PrivateRemote) {
    door.log_refusal(&host, PRIVATE_ADDRESS, Some(private_hosts::hint(&host))).await;
}

// The resolver's error is the cause of the client's.
fn is_private(failed: &BodyError) -> bool {
    let first: &(dyn std::error::Error + 'static) = failed.as_ref();
    std::iter::successors(Some(first), |error| error.source())
        .any(|error| error.is::<PrivateAddress>())
}

/// Whose secrets may be sent to a repository's remote: not those of the session's others.
fn owners_for(owners: &[SecretOwner], repository: &RepositoryName) -> Vec<SecretOwner> {
    let is_other =
        |owner: &SecretOwner| matches!(owner, SecretOwner::Repository(name) if name != repository);
    owners.iter().filter(|owner| !is_other(owner)).cloned().collect()
}

/// The token of the session, its repository or its user for a repository without a secret. A global
/// one is not sent to any repository that a user names.
async fn own_token(
    shared: &Shared,
    url: &reqwest::Url,
    owners: &[SecretOwner],
) -> Option<GitCredential> {
    if !shared.ledger.takes_github_token(url.as_str()) {
        return None;
    }
    let value = shared.ledger.secret(&without_global(owners), GITHUB_TOKEN).await?;
    Some(GitCredential { value, secret: Some(GITHUB_TOKEN.to_owned()) })
}

fn without_global(owners: &[SecretOwner]) -> Vec<SecretOwner> {
    owners.iter().filter(|one| **one != SecretOwner::Global).cloned().collect()
}

/// What a remote is shown.
struct GitCredential {
    value: Secret<String>,
    /// The secret's name; `None` for the server's own credential.
    secret: Option<String>,
}

/// The real remote of a repository, with its credential.
struct Remote {
    name: String,
    url: reqwest::Url,
    reach: Reach,
    credential: Option<GitCredential>,
}

impl Remote {
    async fn resolve(
        shared: &Shared,
        access: &GitAccess,
        owners: &[SecretOwner],
        push: bool,
    ) -> Result<Self, Response<Body>> {
        let url = remote_url::parse(&access.url).map_err(|error| {
            let message = format!("the URL registered for `{}` is refused: {error}", access.name);
            http::text(StatusCode::BAD_GATEWAY, &message)
        })?;
        let reach = if access.local { Reach::ThisMachine } else { Reach::Public };
        let private = remote_url::check_host(&url, &shared.config.private_hosts).is_err()
            || url.host_str().is_some_and(|host| shared.clients.is_proxy(host));
        if private && !access.local {
            return Err(refuse_private(access.name.as_str(), &url));
        }
        let owners = owners_for(owners, &access.name);
        let credential = match &access.secret {
            None if access.local => None,
            None => match own_token(shared, &url, &owners).await {
                Some(own) => Some(own),
                None => {
                    let own = shared.ledger.git_credential(url.as_str(), push).await;
                    let own = own.map_err(|why| http::text(StatusCode::FORBIDDEN, &why))?;
                    own.map(|value| GitCredential { value, secret: None })
                }
            },
            Some(name) => match shared.ledger.secret(&owners, name).await {
                Some(value) => Some(GitCredential { value, secret: Some(name.clone()) }),
                None => {
                    let message = format!(
                        "secret {name} for repository `{}` is not set; set it with `harvest secret set {name}`",
                        access.name
                    );
                    return Err(http::text(StatusCode::FORBIDDEN, &message));
                }
            },
        };
        Ok(Self { name: access.name.to_string(), url, reach, credential })
    }

    /// Sends a request to the remote. Any other response than 200 becomes an error response.
    async fn send(
        &self,
        shared: &Shared,
        wanted: GitRequest,
        headers: HeaderMap,
        body: Option<reqwest::Body>,
    ) -> Result<reqwest::Response, Response<Body>> {
        let (suffix, query, method) = wanted.route();
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
        match shared.clients.execute(request, self.reach).await {
            Ok(answered) if answered.status() == StatusCode::OK => match &self.credential {
                Some(_) if answered.headers().contains_key(header::CONTENT_ENCODING) => {
                    let message =
                        format!("the remote of `{}` compressed its response unasked", self.name);
                    Err(http::text(StatusCode::BAD_GATEWAY, &message))
                }
                _ => Ok(answered),
            },
            Ok(answered) => {
                let redirected = public::redirect(&shared.config.git_hosts, &answered);
                match redirected
                    .filter(|_| self.credential.is_none() && self.reach == Reach::Public)
                {
                    Some(redirected) => Err(redirected),
                    None => {
                        let is_locked = [401, 403, 404].contains(&answered.status().as_u16());
                        let mut refused = self.error_response(shared, answered).await;
                        if is_locked {
                            refused.extensions_mut().insert(NothingTaken);
                        }
                        Err(refused)
                    }
                }
            }
            Err(failed) if is_private(&failed) => Err(refuse_private(&self.name, &self.url)),
            Err(failed) => {
                tracing::warn!(repository = self.name, error = %self.redact(&failed.to_string()), "cannot reach a git remote");
                let message =
                    format!("cannot reach the remote of `{}` from this machine", self.name);
                Err(http::text(StatusCode::BAD_GATEWAY, &message))
            }
        }
    }

    // The error is a message for git.
    fn authorization(&self) -> Result<Option<HeaderValue>, String> {
        let Some(GitCredential { value, secret }) = &self.credential else { return Ok(None) };
        let value = format!("Basic {}", basic_credentials(value.expose().trim()));
        let mut value = HeaderValue::from_str(&value).map_err(|_| match secret {
            Some(name) => format!(
                "secret {name} contains characters that are invalid in a token; set it again"
            ),
            None => "the server's token contains characters that are invalid in one".to_owned(),
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn secrets(&self) -> Vec<&Secret<String>> {
        self.credential.iter().map(|credential| &credential.value).collect()
    }

    fn redact(&self, text: &str) -> String {
        redact(text, &self.secrets())
    }

    // A 401 would make git ask for a password, and a redirect would lead to an unreachable host.
    async fn error_response(&self, shared: &Shared, answered: reqwest::Response) -> Response<Body> {
        let status = answered.status();
        let name = &self.name;
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let why = match &self.credential {
                    Some(GitCredential { secret: Some(secret), .. }) => {
                        format!("refused the token; renew it with `harvest secret set {secret}`")
                    }
                    Some(GitCredential { secret: None, value }) => {
                        shared.ledger.git_credential_refused(self.url.as_str(), value);
                        "refused the server's sign-in to GitHub; try again, or check that it has \
                         access to contents"
                            .to_owned()
                    }
                    None => {
                        "does not exist or needs a token; the repository has no secret".to_owned()
                    }
                };
                let message = format!("the remote of `{name}` {why}");
                let mut refused = http::text(StatusCode::FORBIDDEN, &message);
                if self.credential.as_ref().is_some_and(|one| one.secret.is_none()) {
                    refused.extensions_mut().insert(CredentialRefused);
                }
                refused
            }
            StatusCode::NOT_FOUND => {
                let message = format!(
                    "the remote of `{name}` does not exist, or the token has no access to it"
                );
                http::text(StatusCode::NOT_FOUND, &message)
            }
            _ if status.is_client_error() || status.is_server_error() => {
                let text = self.redact(&http::read_text(answered, MAX_ERROR_BYTES).await);
                http::text(status, &format!("the remote of `{name}` responded {status}: {text}"))
            }
            _ => {
                let message =
                    format!("the remote of `{name}` responded {status}; register its current URL");
                http::text(StatusCode::BAD_GATEWAY, &message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn github_gets_no_global_token() {
        let own = SecretOwner::user("ada@example.org");
        assert_eq!(without_global(&[own.clone(), SecretOwner::Global]), [own]);
    }

    #[test]
    fn token_of_another_repository_is_not_sent() {
        let repository = |name: &str| SecretOwner::Repository(name.parse().unwrap());
        let owners = [repository("a/one"), repository("a/two"), SecretOwner::Global];
        let kept = owners_for(&owners, &"a/two".parse().unwrap());
        assert_eq!(kept, [repository("a/two"), SecretOwner::Global]);
    }
}
