//! The API client: finds the server, authenticates, reads responses and errors, follows streams.
//! Prints nothing.

mod calls;
mod events;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use harvest_proto::{
    PromptId, Secret,
    api::{Page, Problem},
};
pub(crate) use harvest_server::in_process::ByteStream;
use harvest_server::in_process::RequestBody;
use reqwest::{
    Method, RequestBuilder, Response, StatusCode,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    config::Config,
    printer::{Advice, ApiRefusal},
    server_process,
};

/// The file in which a running server records its URL and pid.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ServerFile {
    pub(crate) url: String,
    pub(crate) pid: u32,
}

#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    url: String,
    token: Secret<String>,
}

impl Client {
    /// The configured server, else the server that runs from this home.
    pub(crate) fn find(config: &Config) -> Result<Self> {
        let url = match &config.url {
            Some(url) => url.clone(),
            None => local(config)?.url,
        };
        let token = match &config.token {
            Some(token) => token.clone(),
            None => read_token(config)?,
        };
        Self::new(&url, token)
    }

    pub(crate) fn new(url: &str, token: Secret<String>) -> Result<Self> {
        if !is_server_url(url) {
            bail!(Advice::new(
                format!("`{url}` is not a server URL"),
                "write it as http://127.0.0.1:7070"
            ));
        }
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            // Shorter than the server's idle timeout.
            .pool_idle_timeout(Duration::from_secs(20))
            // Proxy variables are not meant for loopback and the user's own server.
            .no_proxy()
            .build()
            .context("cannot set up HTTP")?;
        Ok(Self { http, url: url.trim_end_matches('/').to_owned(), token })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Sends any request; returns the response headers and the body as a stream.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        path: &str,
        sent: RequestBody,
    ) -> Result<(HeaderMap, ByteStream)> {
        let request = self.request(method, path);
        let request = match sent {
            RequestBody::Empty => request,
            RequestBody::Json(document) => {
                request.header("content-type", "application/json").body(document)
            }
            RequestBody::Stream(kind, pieces) => {
                request.header("content-type", kind).body(reqwest::Body::wrap_stream(pieces))
            }
        };
        let response = self.send(request).await?;
        let (headers, body) = (response.headers().clone(), response.bytes_stream());
        Ok((headers, body.map(|piece| piece.map(Vec::from).map_err(std::io::Error::other)).boxed()))
    }

    /// Sends any request; returns the response with any status.
    pub(crate) async fn raw(
        &self,
        method: Method,
        path: &str,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: Option<Vec<u8>>,
    ) -> Result<Response> {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            let json = (CONTENT_TYPE, HeaderValue::from_static("application/json"));
            let given = headers.iter().any(|(name, _)| *name == CONTENT_TYPE);
            request = request.headers(HeaderMap::from_iter((!given).then_some(json))).body(body);
        }
        self.send_unchecked(request.headers(headers.into_iter().collect())).await
    }

    pub(crate) async fn ready(&self) -> bool {
        self.send(self.request(Method::GET, "/readyz")).await.is_ok()
    }

    /// Sends a request whose response is a JSON document.
    pub(crate) async fn call<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        read(self.send(request).await?).await
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.call(self.request(Method::GET, path)).await
    }

    /// The text at a path.
    pub(crate) async fn text(&self, path: &str) -> Result<String> {
        let response = self.send(self.request(Method::GET, path)).await?;
        response.text().await.context("cannot read the server's response")
    }

    pub(crate) async fn delete(&self, path: &str) -> Result<()> {
        self.send(self.request(Method::DELETE, path)).await.map(drop)
    }

    /// Sends an idempotency key, so that the retry after a broken connection creates nothing twice.
    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        let key = PromptId::random().part().to_owned();
        let request =
            || self.request(Method::POST, path).header("idempotency-key", &key).json(body);
        let response = match self.send(request()).await {
            Err(error) if is_connection_error(&error) => self.send(request()).await?,
            other => other?,
        };
        read(response).await
    }

    /// All pages of a list.
    pub(crate) async fn all<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let Page { mut items, mut next_cursor } = self.get::<Page<T>>(path).await?;
        while let Some(cursor) = next_cursor {
            let page: Page<T> = self.get(&with_cursor(path, &cursor)).await?;
            items.extend(page.items);
            next_cursor = page.next_cursor;
        }
        Ok(items)
    }

    /// An authenticated request.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url)).bearer_auth(self.token.expose())
    }

    /// Returns the response with any status.
    async fn send_unchecked(&self, request: RequestBuilder) -> Result<Response> {
        request.send().await.map_err(|error| {
            let message = format!("no response from {}", self.url);
            let hint = "check that the server runs; `harvest up` starts one";
            let error = ConnectionError(root_cause(&error));
            anyhow::Error::new(error).context(Advice::new(message, hint))
        })
    }

    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = self.send_unchecked(request).await?;
        let status = response.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(response);
        }
        // The response to HEAD has no body.
        if response.content_length() == Some(0)
            && let Some(problem) = problem_without_body(status, response.headers())
        {
            return Err(api_error(problem));
        }
        let problem: Problem = response.json().await.map_err(|_| {
            let message = format!("{} returned {status}, but not as a Harvest server", self.url);
            Advice::new(message, "check --url or HARVEST_URL")
        })?;
        Err(api_error(problem))
    }
}

/// A URL-encoded query string.
pub(crate) fn query(pairs: &[(&str, impl AsRef<str>)]) -> String {
    let mut url = reqwest::Url::parse("http://localhost/").expect("the URL is valid");
    url.query_pairs_mut().extend_pairs(pairs);
    url.query().unwrap_or_default().to_owned()
}

/// The path of the next page.
fn with_cursor(path: &str, cursor: &str) -> String {
    let separator = if path.contains('?') { '&' } else { '?' };
    format!("{path}{separator}{}", query(&[("cursor", cursor)]))
}

/// The connection failed; no response was received.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct ConnectionError(String);

/// The innermost cause; the outer errors only repeat that there is one.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// The error of a Harvest response without a body.
pub(crate) fn problem_without_body(status: StatusCode, headers: &HeaderMap) -> Option<Problem> {
    let request_id = headers.get("x-request-id")?.to_str().ok()?.to_owned();
    Some(Problem {
        kind: "about:blank".into(),
        title: status.canonical_reason().unwrap_or("Error").into(),
        status: status.as_u16(),
        detail: format!("the server returned {status}"),
        code: "no_body".into(),
        hint: None,
        request_id,
    })
}

/// The error of a refused request. For 401 it tells where the token comes from.
pub(crate) fn api_error(mut problem: Problem) -> anyhow::Error {
    if problem.status == 401 {
        problem.detail = "the server does not accept this token".into();
        let hint = "set HARVEST_TOKEN to the token `harvest up` printed; on the server's own machine, unset it";
        problem.hint = Some(hint.into());
    }
    ApiRefusal(problem).into()
}

fn is_server_url(url: &str) -> bool {
    reqwest::Url::parse(url).is_ok_and(|url| ["http", "https"].contains(&url.scheme()))
}

fn is_connection_error(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ConnectionError>().is_some()
}

async fn read<T: DeserializeOwned>(response: Response) -> Result<T> {
    response.json().await.context("cannot parse the server's response")
}

/// Checks that a name needs no escaping in a URL path.
pub(crate) fn path_segment(name: &str) -> Result<&str> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.starts_with('.') || !name.bytes().all(is_allowed) {
        bail!(Advice::new(
            format!("`{name}` is not a valid name"),
            "names consist of letters, digits, `.`, `_` and `-`"
        ));
    }
    Ok(name)
}

pub(crate) fn local(config: &Config) -> Result<ServerFile> {
    let none = || {
        Advice::new(
            "no server is running",
            "start one with `harvest up`, or name one with HARVEST_URL",
        )
    };
    let text = std::fs::read_to_string(config.server_file()).map_err(|_| none())?;
    let file: ServerFile = serde_json::from_str(&text).map_err(|_| none())?;
    // The file of a killed server stays behind, and its pid may belong to another process.
    let is_alive = std::path::Path::new(&format!("/proc/{}", file.pid)).exists();
    if is_alive && server_process::home_has_server(&config.home) {
        Ok(file)
    } else {
        Err(none().into())
    }
}

fn read_token(config: &Config) -> Result<Secret<String>> {
    let path = config.token_file();
    let text = std::fs::read_to_string(&path).map_err(|error| {
        let advice = Advice::new(
            "no access token for the server",
            "set HARVEST_TOKEN to the token that `harvest up` printed",
        );
        anyhow::Error::new(error).context(format!("cannot read {}", path.display())).context(advice)
    })?;
    Ok(Secret::new(text.trim().to_owned()))
}

#[cfg(test)]
mod tests;
