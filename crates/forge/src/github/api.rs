//! Requests to GitHub's REST API, and what their failures mean. Answers are limited in size;
//! redirects are not followed, because they could send a token to another host.

use std::{
    sync::OnceLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::StreamExt;
use harvest_proto::Secret;
use reqwest::{
    Method, StatusCode, Url,
    header::{self, HeaderMap},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::settings::RepositoryPath;
use crate::{ForgeFailure, Operation, ReadForm, read_route::MAX_READ_BYTES};

const TIMEOUT: Duration = Duration::from_secs(30);
const MAX_MESSAGE_CHARACTERS: usize = 300;
const VERSION: &str = "2022-11-28";

/// A request about a repository.
#[derive(Debug, Clone)]
pub(super) struct Call<'a> {
    pub(super) method: Method,
    /// The part of the path after the repository; `None` for the GraphQL API.
    pub(super) route: Option<&'a str>,
    pub(super) query: &'a [(&'a str, &'a str)],
    pub(super) body: Option<&'a Value>,
    pub(super) etag: Option<&'a str>,
    pub(super) operation: Operation,
    /// For messages, followed by the repository: `open a pull request in`.
    pub(super) doing: &'static str,
    pub(super) form: ReadForm,
    /// Whether a refusal that concerns the request alone is an answer, and no failure.
    pub(super) passes_refusals: bool,
}

impl<'a> Call<'a> {
    const fn new(
        method: Method,
        route: &'a str,
        operation: Operation,
        doing: &'static str,
    ) -> Self {
        let (route, body, etag) = (Some(route), None, None);
        let (form, passes_refusals) = (ReadForm::Json, false);
        Self { method, route, query: &[], body, etag, operation, doing, form, passes_refusals }
    }

    pub(super) const fn get(route: &'a str, operation: Operation, doing: &'static str) -> Self {
        Self::new(Method::GET, route, operation, doing)
    }

    pub(super) const fn post(route: &'a str, operation: Operation, doing: &'static str) -> Self {
        Self::new(Method::POST, route, operation, doing)
    }

    pub(super) const fn patch(route: &'a str, operation: Operation, doing: &'static str) -> Self {
        Self::new(Method::PATCH, route, operation, doing)
    }

    pub(super) fn graphql(body: &'a Value, operation: Operation, doing: &'static str) -> Self {
        Self { route: None, body: Some(body), ..Self::new(Method::POST, "", operation, doing) }
    }

    pub(super) fn with_query(self, query: &'a [(&'a str, &'a str)]) -> Self {
        Self { query, ..self }
    }

    pub(super) fn with_body(self, body: &'a Value) -> Self {
        Self { body: Some(body), ..self }
    }
}

/// A successful answer, or one that says that nothing has changed.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) not_modified: bool,
    pub(super) etag: Option<String>,
    pub(super) link: Option<String>,
    pub(super) body: Vec<u8>,
}

impl Answer {
    pub(super) fn json<T: DeserializeOwned>(
        &self,
        path: &RepositoryPath,
    ) -> Result<T, ForgeFailure> {
        parse(&self.body).inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, repository = %path, "GitHub's answer has another form");
        })
    }
}

// The parser's own message quotes values, such as a token in an unexpected place.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ForgeFailure> {
    serde_json::from_slice(body).map_err(|error| {
        let (kind, line, column) = (error.classify(), error.line(), error.column());
        let what = format!("GitHub's answer has another form: {kind:?} at {line}:{column}");
        ForgeFailure::other(what)
    })
}

/// An answer of any status.
#[derive(Debug)]
pub(super) struct RawAnswer {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

/// GitHub's form of errors.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Problem {
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    errors: Vec<Value>,
}

impl Problem {
    /// The message with its details, cut, and without control characters.
    pub(super) fn text(&self) -> String {
        let detail = |error: &Value| {
            let field = error.get("message").or_else(|| error.get("field"));
            field.and_then(Value::as_str).or_else(|| error.as_str()).map(str::to_owned)
        };
        let details: Vec<String> = self.errors.iter().filter_map(detail).collect();
        plain(&[vec![self.message.clone()], details].concat().join("; "))
    }
}

/// A message of GitHub's, cut, and without control characters.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARACTERS).collect()
}

/// The URL of the GraphQL API beside this REST API: an Enterprise server has both below `/api`.
fn graphql_url(rest: &str) -> String {
    match rest.strip_suffix("/v3") {
        Some(api) if api.ends_with("/api") => format!("{api}/graphql"),
        _ => format!("{rest}/graphql"),
    }
}

impl RawAnswer {
    pub(super) fn problem(&self) -> Problem {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, ForgeFailure> {
        parse(&self.body)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Whether the limit of requests is used up, and for how long.
    pub(super) fn rate_limit(&self) -> Option<ForgeFailure> {
        // The secondary limits may come without headers.
        let limited = self.status == StatusCode::TOO_MANY_REQUESTS
            || (self.status == StatusCode::FORBIDDEN
                && (self.header("x-ratelimit-remaining") == Some("0")
                    || self.header("retry-after").is_some()
                    || self.problem().message.contains("rate limit")));
        limited.then(|| ForgeFailure::RateLimited { seconds: self.wait() })
    }

    /// For how many seconds GitHub asks to wait, which it says in one of two ways.
    fn wait(&self) -> Option<u64> {
        if let Some(seconds) = self.header("retry-after") {
            return seconds.parse().ok();
        }
        let reset: i64 = self.header("x-ratelimit-reset")?.parse().ok()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
        u64::try_from(reset).ok()?.checked_sub(now)
    }
}

/// The HTTP client of one API.
#[derive(Debug)]
pub(super) struct Api {
    base: String,
    certificate: Option<Vec<u8>>,
    // Created on first use: it reads the machine's CA certificates.
    client: OnceLock<Option<reqwest::Client>>,
}

impl Api {
    pub(super) const fn new(base: String, certificate: Option<Vec<u8>>) -> Self {
        Self { base, certificate, client: OnceLock::new() }
    }

    fn client(&self) -> Result<&reqwest::Client, ForgeFailure> {
        let client = self.client.get_or_init(|| {
            // Fails when the process has a provider already, which is fine.
            drop(rustls::crypto::ring::default_provider().install_default());
            let mut builder = reqwest::Client::builder()
                .redirect(reqwest::redirect::Policy::none())
                .referer(false)
                .timeout(TIMEOUT);
            let certificates = self.certificate.as_deref().map(reqwest::Certificate::from_pem);
            for certificate in certificates.into_iter().flatten() {
                builder = builder.tls_certs_merge([certificate]);
            }
            // A proxy would see the plain requests to this machine.
            if self.base.starts_with("http://") {
                builder = builder.no_proxy();
            }
            let built = builder.build();
            built.inspect_err(|error| tracing::error!(%error, "cannot create an HTTPS client")).ok()
        });
        client.as_ref().ok_or_else(|| {
            let why = "no HTTPS client; are there CA certificates on this machine?";
            ForgeFailure::Unreachable(why.into())
        })
    }

    /// Sends a request with a bearer token. The path starts with a slash.
    pub(super) async fn request(
        &self,
        method: Method,
        path: &str,
        token: &Secret<String>,
        adjust: impl FnOnce(reqwest::RequestBuilder) -> reqwest::RequestBuilder,
    ) -> Result<RawAnswer, ForgeFailure> {
        self.request_at(method, format!("{}{path}", self.base), token, adjust).await
    }

    async fn request_at(
        &self,
        method: Method,
        url: String,
        token: &Secret<String>,
        adjust: impl FnOnce(reqwest::RequestBuilder) -> reqwest::RequestBuilder,
    ) -> Result<RawAnswer, ForgeFailure> {
        let unreachable =
            |failed: reqwest::Error| ForgeFailure::Unreachable(failed.without_url().into());
        let request = self
            .client()?
            .request(method, url)
            .bearer_auth(token.expose().trim())
            .header(header::USER_AGENT, "harvest")
            .header("x-github-api-version", VERSION);
        let answered = adjust(request).send().await.map_err(unreachable)?;
        let (status, headers) = (answered.status(), answered.headers().clone());
        let (mut body, mut chunks) = (Vec::new(), answered.bytes_stream());
        while let Some(chunk) = chunks.next().await {
            body.extend_from_slice(&chunk.map_err(unreachable)?);
            if body.len() > MAX_READ_BYTES {
                return Err(ForgeFailure::other("GitHub's answer is too long"));
            }
        }
        Ok(RawAnswer { status, headers, body: without(body, token) })
    }

    /// Sends a request about a repository. `of_app` tells whose token it is, for messages.
    pub(super) async fn send(
        &self,
        path: &RepositoryPath,
        call: &Call<'_>,
        token: &Secret<String>,
        of_app: bool,
    ) -> Result<Answer, ForgeFailure> {
        let url = match call.route {
            Some(route) => {
                format!("{}/repos/{path}{route}{}", self.base, encoded_query(call.query))
            }
            None => graphql_url(&self.base),
        };
        let answer = self.request_at(call.method.clone(), url, token, |mut request| {
            request = request.header(header::ACCEPT, call.form.accept());
            if let Some(etag) = call.etag {
                request = request.header(header::IF_NONE_MATCH, etag);
            }
            match call.body {
                Some(body) => {
                    request.header(header::CONTENT_TYPE, "application/json").body(body.to_string())
                }
                None => request,
            }
        });
        let answer = answer.await?;
        let not_modified = answer.status == StatusCode::NOT_MODIFIED && call.etag.is_some();
        if call.route.is_none() && answer.status.is_success() {
            graphql_failure(path, call.doing, of_app, &answer)?;
        }
        let passed = call.passes_refusals && concerns_request(answer.status);
        if answer.status.is_success() || not_modified || passed {
            let text = |name: &str| answer.header(name).map(str::to_owned);
            let (etag, link) = (text(header::ETAG.as_str()), text(header::LINK.as_str()));
            let RawAnswer { status, body, .. } = answer;
            return Ok(Answer { status, not_modified, etag, link, body });
        }
        Err(failure(path, call.doing, of_app, &answer))
    }
}

/// A body that does not repeat the token: a server may quote the request in its answer, and parts
/// of an answer reach sandboxes and messages.
fn without(body: Vec<u8>, token: &Secret<String>) -> Vec<u8> {
    let token = token.expose().trim();
    let repeats =
        !token.is_empty() && body.windows(token.len()).any(|part| part == token.as_bytes());
    match repeats {
        true => String::from_utf8_lossy(&body).replace(token, "***").into_bytes(),
        false => body,
    }
}

/// Whether a refusal is about what was asked for, and not about who asked or the server.
fn concerns_request(status: StatusCode) -> bool {
    [400, 404, 406, 409, 410, 415, 422, 451].contains(&status.as_u16())
}

/// The query of a URL with its question mark; empty without parameters.
fn encoded_query(parameters: &[(&str, &str)]) -> String {
    if parameters.is_empty() {
        return String::new();
    }
    let mut url = Url::parse("http://localhost").expect("a constant URL");
    url.query_pairs_mut().extend_pairs(parameters);
    format!("?{}", url.query().unwrap_or_default())
}

/// What a refusal by GraphQL means, which has the status 200.
fn graphql_failure(
    path: &RepositoryPath,
    doing: &'static str,
    of_app: bool,
    answer: &RawAnswer,
) -> Result<(), ForgeFailure> {
    #[derive(Deserialize)]
    struct Answered {
        #[serde(default)]
        errors: Vec<GraphQlError>,
    }
    #[derive(Deserialize)]
    struct GraphQlError {
        #[serde(default, rename = "type")]
        kind: String,
        #[serde(default)]
        message: String,
    }
    let Some(error) = answer.json::<Answered>()?.errors.into_iter().next() else { return Ok(()) };
    let repository = path.to_string();
    Err(match error.kind.as_str() {
        "FORBIDDEN" if of_app => ForgeFailure::MissingPermission { repository, doing },
        "FORBIDDEN" | "INSUFFICIENT_SCOPES" => ForgeFailure::TokenForbidden { repository, doing },
        "RATE_LIMITED" => ForgeFailure::RateLimited { seconds: None },
        _ => ForgeFailure::Rejected { repository, doing, message: plain(&error.message) },
    })
}

/// What a refusal means.
fn failure(
    path: &RepositoryPath,
    doing: &'static str,
    of_app: bool,
    answer: &RawAnswer,
) -> ForgeFailure {
    if let Some(limited) = answer.rate_limit() {
        return limited;
    }
    let repository = path.to_string();
    let problem = answer.problem();
    match answer.status {
        StatusCode::UNAUTHORIZED => ForgeFailure::TokenRefused { repository },
        StatusCode::FORBIDDEN if problem.message.contains("suspended") => {
            ForgeFailure::Suspended { repository }
        }
        StatusCode::FORBIDDEN if of_app => ForgeFailure::MissingPermission { repository, doing },
        StatusCode::FORBIDDEN => ForgeFailure::TokenForbidden { repository, doing },
        StatusCode::NOT_FOUND => ForgeFailure::NoRepository { repository },
        status if status.is_redirection() => {
            let message = "it has moved; register its current URL".to_owned();
            ForgeFailure::Rejected { repository, doing, message }
        }
        status if status.is_client_error() => {
            ForgeFailure::Rejected { repository, doing, message: problem.text() }
        }
        status => ForgeFailure::Unexpected { repository, doing, status: status.as_u16() },
    }
}
