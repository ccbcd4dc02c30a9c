//! Talks to a server: finds it, shows the token, reads answers and problems, follows streams.
//! Knows nothing about what is printed.

mod calls;
mod events;

use std::{future::Future, time::Duration};

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use harvest_proto::{
    PromptId, Secret,
    api::{Page, Problem},
};
use harvest_server::here::{Pieces, Sent};
use reqwest::{
    Method, RequestBuilder, Response, StatusCode,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    config::Config,
    printer::{Advice, Refused},
    wire,
};

/// Where a server on this machine is, as it wrote it down itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ServerFile {
    pub(crate) url: String,
    pub(crate) pid: u32,
}

/// A server and the right to ask it.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    url: String,
    token: Secret<String>,
}

impl Client {
    /// The server of this configuration: the one it names, else the one that runs from its home.
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
        if !names_server(url) {
            bail!(Advice::new(
                format!("`{url}` is not a server's URL"),
                "write it as http://127.0.0.1:7070"
            ));
        }
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            // Sooner than the server closes what is not used.
            .pool_idle_timeout(Duration::from_secs(20))
            // Loopback and one's own server: a proxy variable is not meant for them.
            .no_proxy()
            .build()
            .context("cannot set up HTTP")?;
        Ok(Self { http, url: url.trim_end_matches('/').to_owned(), token })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Any request; the answer's head, and its body as it comes.
    pub(crate) async fn carry(
        &self,
        method: Method,
        path: &str,
        sent: Sent,
    ) -> Result<(HeaderMap, Pieces)> {
        let request = self.request(method, path);
        let request = match sent {
            Sent::Nothing => request,
            Sent::Json(document) => {
                request.header("content-type", "application/json").body(document)
            }
            Sent::Stream(kind, pieces) => {
                request.header("content-type", kind).body(reqwest::Body::wrap_stream(pieces))
            }
        };
        let answer = self.send(request).await?;
        let (headers, body) = (answer.headers().clone(), answer.bytes_stream());
        Ok((headers, body.map(|piece| piece.map(Vec::from).map_err(std::io::Error::other)).boxed()))
    }

    /// Any request; the answer as it is, whatever its status.
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
        self.ask(request.headers(headers.into_iter().collect())).await
    }

    /// Whether the server takes work.
    pub(crate) async fn ready(&self) -> bool {
        self.send(self.request(Method::GET, "/readyz")).await.is_ok()
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        read(self.send(self.request(Method::GET, path)).await?).await
    }

    /// Creating POSTs carry a key, so that a retry after a broken connection creates nothing twice.
    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        let key = PromptId::random().part().to_owned();
        let request =
            || self.request(Method::POST, path).header("idempotency-key", &key).json(body);
        let answer = match self.send(request()).await {
            Err(error) if is_broken(&error) => self.send(request()).await?,
            other => other?,
        };
        read(answer).await
    }

    async fn all<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let mut items = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let page: Page<T> = match &next {
                None => self.get(path).await?,
                Some(cursor) => self.get(&from_cursor(path, cursor)).await?,
            };
            items.extend(page.items);
            match page.next_cursor {
                Some(cursor) => next = Some(cursor),
                None => return Ok(items),
            }
        }
    }

    /// A request with the token on it.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url)).bearer_auth(self.token.expose())
    }

    /// The answer, whatever it says.
    fn ask(
        &self,
        request: RequestBuilder,
    ) -> impl Future<Output = Result<Response>> + Send + use<> {
        let url = self.url.clone();
        async move {
            request.send().await.map_err(|error| {
                let advice = Advice::new(
                    format!("no answer from {url}"),
                    "is it running? start it with `harvest up`",
                );
                anyhow::Error::new(Broken(innermost(&error))).context(advice)
            })
        }
    }

    pub(crate) fn send(
        &self,
        request: RequestBuilder,
    ) -> impl Future<Output = Result<Response>> + Send + use<> {
        let (url, answer) = (self.url.clone(), self.ask(request));
        async move {
            let answer = answer.await?;
            if answer.status().is_success() || answer.status() == StatusCode::SWITCHING_PROTOCOLS {
                return Ok(answer);
            }
            let status = answer.status();
            // An answer to HEAD has no body to say it in.
            if answer.content_length() == Some(0)
                && let Some(problem) = bodiless(status, answer.headers())
            {
                return Err(refused(problem));
            }
            let problem: Problem = answer.json().await.map_err(|_| {
                let message = format!("{url} answered {status}, and not as a Harvest server does");
                Advice::new(message, "does --url or HARVEST_URL name the right one?")
            })?;
            Err(refused(problem))
        }
    }
}

/// Words as the query of a path.
pub(crate) fn query(words: &[(&str, &str)]) -> String {
    let mut url = reqwest::Url::parse("http://localhost/").expect("it is one");
    url.query_pairs_mut().extend_pairs(words);
    url.query().unwrap_or_default().to_owned()
}

/// The same path, from where the last page ended.
fn from_cursor(path: &str, cursor: &str) -> String {
    let joint = if path.contains('?') { '&' } else { '?' };
    format!("{path}{joint}{}", query(&[("cursor", cursor)]))
}

/// The connection failed rather than the request.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Broken(String);

/// The cause that says something; those around it only say that there is one.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// The problem of an answer that is a server's of ours and has no body.
pub(crate) fn bodiless(status: StatusCode, headers: &HeaderMap) -> Option<Problem> {
    let request_id = headers.get("x-request-id")?.to_str().ok()?.to_owned();
    Some(Problem {
        kind: "about:blank".into(),
        title: status.canonical_reason().unwrap_or("Error").into(),
        status: status.as_u16(),
        detail: format!("the server answered {status}"),
        code: "no_body".into(),
        hint: None,
        request_id,
    })
}

/// The server's hint is for any client; ours knows where a person's token comes from.
pub(crate) fn refused(mut problem: Problem) -> anyhow::Error {
    if problem.status == 401 {
        problem.detail = "the server does not know this token".into();
        let hint = "set HARVEST_TOKEN to the one `harvest up` printed; on the server's own machine, unset it";
        problem.hint = Some(hint.into());
    }
    Refused(problem).into()
}

fn names_server(url: &str) -> bool {
    reqwest::Url::parse(url).is_ok_and(|url| ["http", "https"].contains(&url.scheme()))
}

/// Whether the connection failed rather than the request.
fn is_broken(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Broken>().is_some()
}

async fn read<T: DeserializeOwned>(answer: Response) -> Result<T> {
    answer.json().await.context("cannot make sense of the server's answer")
}

/// A name as part of a path; anything that would need escaping is no name of ours.
pub(crate) fn segment(name: &str) -> Result<&str> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.starts_with('.') || !name.bytes().all(sound) {
        bail!(Advice::new(
            format!("`{name}` is not a name"),
            "names are letters, digits, `.`, `_` and `-`"
        ));
    }
    Ok(name)
}

/// The server that runs from this home.
pub(crate) fn local(config: &Config) -> Result<ServerFile> {
    let none = || {
        Advice::new(
            "no server is running",
            "start one with `harvest up`, or name one with HARVEST_URL",
        )
    };
    let text = std::fs::read_to_string(config.server_file()).map_err(|_| none())?;
    let file: ServerFile = serde_json::from_str(&text).map_err(|_| none())?;
    // The file of a server that was killed stays behind, and its number may be anybody's now.
    let there = std::path::Path::new(&format!("/proc/{}", file.pid)).exists();
    if there && wire::is_served(&config.home) { Ok(file) } else { Err(none().into()) }
}

fn read_token(config: &Config) -> Result<Secret<String>> {
    let path = config.token_file();
    let text = std::fs::read_to_string(&path).map_err(|error| {
        let advice = Advice::new(
            "no token to show the server",
            "set HARVEST_TOKEN; `harvest up` printed it once",
        );
        anyhow::Error::new(error).context(format!("cannot read {}", path.display())).context(advice)
    })?;
    Ok(Secret::new(text.trim().to_owned()))
}

#[cfg(test)]
mod tests;
