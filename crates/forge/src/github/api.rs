//! Requests to GitHub's REST API, and what their failures mean. Answers are limited in size;
//! redirects are not followed, because they could send a token to another host.

use std::{sync::OnceLock, time::Duration};

use futures_util::StreamExt;
use harvest_proto::Secret;
use reqwest::{
    Method, StatusCode, Url,
    header::{self, HeaderMap},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::settings::RepositoryPath;
use crate::{ForgeFailure, Operation};

const TIMEOUT: Duration = Duration::from_secs(30);
// A page of a hundred pull requests with bodies has at most a few megabytes.
const MAX_ANSWER_BYTES: usize = 16 << 20;
const MAX_MESSAGE_CHARACTERS: usize = 300;
const VERSION: &str = "2022-11-28";

/// A request about a repository.
#[derive(Debug, Clone)]
pub(super) struct Call<'a> {
    pub(super) method: Method,
    /// The part of the path after the repository.
    pub(super) route: &'a str,
    pub(super) query: &'a [(&'a str, &'a str)],
    pub(super) body: Option<&'a Value>,
    pub(super) etag: Option<&'a str>,
    pub(super) operation: Operation,
    /// For messages, followed by the repository: `open a pull request in`.
    pub(super) doing: &'static str,
}

impl<'a> Call<'a> {
    const fn new(
        method: Method,
        route: &'a str,
        operation: Operation,
        doing: &'static str,
    ) -> Self {
        Self { method, route, query: &[], body: None, etag: None, operation, doing }
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
    pub(super) not_modified: bool,
    pub(super) etag: Option<String>,
    body: Vec<u8>,
}

impl Answer {
    pub(super) fn json<T: DeserializeOwned>(
        &self,
        path: &RepositoryPath,
    ) -> Result<T, ForgeFailure> {
        serde_json::from_slice(&self.body).map_err(|error| {
            tracing::warn!(%error, repository = %path, "GitHub's answer has another form");
            ForgeFailure::other(error)
        })
    }
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
        let text = [vec![self.message.clone()], details].concat().join("; ");
        text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARACTERS).collect()
    }
}

impl RawAnswer {
    pub(super) fn problem(&self) -> Problem {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, ForgeFailure> {
        serde_json::from_slice(&self.body).map_err(ForgeFailure::other)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Whether the limit of requests is used up, and for how long.
    pub(super) fn rate_limit(&self) -> Option<ForgeFailure> {
        let limited = self.status == StatusCode::TOO_MANY_REQUESTS
            || (self.status == StatusCode::FORBIDDEN
                && (self.header("x-ratelimit-remaining") == Some("0")
                    || self.header("retry-after").is_some()));
        limited.then(|| ForgeFailure::RateLimited {
            seconds: self.header("retry-after").and_then(|text| text.parse().ok()),
        })
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
        let unreachable =
            |failed: reqwest::Error| ForgeFailure::Unreachable(failed.without_url().into());
        let request = self
            .client()?
            .request(method, format!("{}{path}", self.base))
            .bearer_auth(token.expose().trim())
            .header(header::ACCEPT, "application/vnd.github+json")
            .header(header::USER_AGENT, "harvest")
            .header("x-github-api-version", VERSION);
        let answered = adjust(request).send().await.map_err(unreachable)?;
        let (status, headers) = (answered.status(), answered.headers().clone());
        let (mut body, mut chunks) = (Vec::new(), answered.bytes_stream());
        while let Some(chunk) = chunks.next().await {
            body.extend_from_slice(&chunk.map_err(unreachable)?);
            if body.len() > MAX_ANSWER_BYTES {
                return Err(ForgeFailure::other("GitHub's answer is too long"));
            }
        }
        Ok(RawAnswer { status, headers, body })
    }

    /// Sends a request about a repository. `of_app` tells whose token it is, for messages.
    pub(super) async fn send(
        &self,
        path: &RepositoryPath,
        call: &Call<'_>,
        token: &Secret<String>,
        of_app: bool,
    ) -> Result<Answer, ForgeFailure> {
        let route = format!("/repos/{path}{}{}", call.route, encoded_query(call.query));
        let answer = self.request(call.method.clone(), &route, token, |mut request| {
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
        if answer.status.is_success() || not_modified {
            let etag = answer.header(header::ETAG.as_str()).map(str::to_owned);
            return Ok(Answer { not_modified, etag, body: answer.body });
        }
        Err(failure(path, call.doing, of_app, &answer))
    }
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
