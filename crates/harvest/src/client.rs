//! Talks to a server: finds it, shows the token, reads answers and problems, follows streams.
//! Knows nothing about what is printed.

use std::{future::Future, time::Duration};

use anyhow::{Context, Result, bail};
use futures_util::{Stream, StreamExt, stream};
use harvest_proto::{
    BlobId, PromptId, Secret, SessionId, SnapshotId,
    api::{
        AddRepository, CreatePrompt, CreateSession, CreateToken, CreatedToken, DiffFiles, ExecRequest,
        ForkSession, MachineChanges, Me, MovePrompt, Page, PinSnapshot, Problem, Prompt, Pull, Repository,
        RestoreSession, Retained, Session, Snapshot, Token, Turn,
    },
};
use harvest_server::here::{Pieces, Sent};
use reqwest::{
    Method, RequestBuilder, Response, StatusCode,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    config::Config,
    follow::{Lines, Update, parse_frame},
    printer::{Advice, Refused},
    socket::heard_in_time,
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
            bail!(Advice::new(format!("`{url}` is not a server's URL"), "write it as http://127.0.0.1:7070"));
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

    pub(crate) async fn sessions(&self) -> Result<Vec<Session>> {
        self.all("/v1/sessions?limit=200").await
    }

    /// Those that fit all of these words of the query.
    pub(crate) async fn sessions_with(&self, wanted: &[(&str, String)]) -> Result<Vec<Session>> {
        let mut query = reqwest::Url::parse("http://x/v1/sessions?limit=200").context("that is a URL")?;
        query.query_pairs_mut().extend_pairs(wanted);
        self.all(&format!("/v1/sessions?{}", query.query().unwrap_or_default())).await
    }

    pub(crate) async fn session(&self, id: &SessionId) -> Result<Session> {
        self.get(&format!("/v1/sessions/{id}")).await
    }

    pub(crate) async fn create(&self, body: &CreateSession) -> Result<Session> {
        self.post("/v1/sessions", body).await
    }

    pub(crate) async fn fork(&self, id: &SessionId, body: &ForkSession) -> Result<Vec<Session>> {
        let page: Page<Session> = self.post(&format!("/v1/sessions/{id}/fork"), body).await?;
        Ok(page.items)
    }

    pub(crate) async fn delete(&self, id: &SessionId) -> Result<()> {
        self.send(self.request(Method::DELETE, &format!("/v1/sessions/{id}"))).await.map(drop)
    }

    /// `stop`, `resume`, `terminate` or `archive`.
    pub(crate) async fn act(&self, id: &SessionId, verb: &str) -> Result<Session> {
        self.post(&format!("/v1/sessions/{id}/{verb}"), &json!({})).await
    }

    pub(crate) async fn restore(&self, id: &SessionId, turn: u32) -> Result<Session> {
        self.post(&format!("/v1/sessions/{id}/restore"), &RestoreSession { turn }).await
    }

    /// Answers the session and the snapshot it goes on from.
    pub(crate) async fn pause(&self, id: &SessionId) -> Result<Value> {
        self.post(&format!("/v1/sessions/{id}/pause"), &json!({})).await
    }

    pub(crate) async fn prompts(&self, id: &SessionId) -> Result<Vec<Prompt>> {
        self.all(&format!("/v1/sessions/{id}/prompts")).await
    }

    pub(crate) async fn prompt(&self, id: &SessionId, body: &CreatePrompt) -> Result<Prompt> {
        self.post(&format!("/v1/sessions/{id}/prompts"), body).await
    }

    pub(crate) async fn prompt_cancel(&self, id: &SessionId, prompt: &PromptId) -> Result<Prompt> {
        let request = self.request(Method::DELETE, &format!("/v1/sessions/{id}/prompts/{prompt}"));
        read(self.send(request).await?).await
    }

    pub(crate) async fn prompt_move(
        &self,
        id: &SessionId,
        prompt: &PromptId,
        position: u32,
    ) -> Result<Prompt> {
        let request = self.request(Method::PATCH, &format!("/v1/sessions/{id}/prompts/{prompt}"));
        read(self.send(request.json(&MovePrompt { position })).await?).await
    }

    pub(crate) async fn turns(&self, id: &SessionId) -> Result<Vec<Turn>> {
        self.all(&format!("/v1/sessions/{id}/turns")).await
    }

    /// `range` is a query, or empty.
    pub(crate) async fn diff(&self, id: &SessionId, range: &str) -> Result<String> {
        let answer = self.send(self.request(Method::GET, &format!("/v1/sessions/{id}/diff{range}"))).await?;
        answer.text().await.context("cannot read the difference to its end")
    }

    pub(crate) async fn diff_files(&self, id: &SessionId, range: &str) -> Result<DiffFiles> {
        self.get(&format!("/v1/sessions/{id}/diff/files{range}")).await
    }

    pub(crate) async fn diff_machine(&self, id: &SessionId, range: &str) -> Result<MachineChanges> {
        self.get(&format!("/v1/sessions/{id}/diff/machine{range}")).await
    }

    /// What sessions hold, and what would go.
    pub(crate) async fn retention(&self) -> Result<Retained> {
        self.get("/v1/retention").await
    }

    /// Has it go.
    pub(crate) async fn retain(&self) -> Result<Retained> {
        self.post("/v1/retention", &json!({})).await
    }

    pub(crate) async fn snapshots(&self, id: &SessionId) -> Result<Vec<Snapshot>> {
        self.all(&format!("/v1/sessions/{id}/snapshots")).await
    }

    pub(crate) async fn snapshot_pin(
        &self,
        id: &SessionId,
        snapshot: &SnapshotId,
        pinned: bool,
    ) -> Result<Snapshot> {
        let request = self.request(Method::PUT, &format!("/v1/sessions/{id}/snapshots/{snapshot}"));
        read(self.send(request.json(&PinSnapshot { pinned })).await?).await
    }

    pub(crate) async fn pull(&self, id: &SessionId) -> Result<Pull> {
        self.get(&format!("/v1/sessions/{id}/pull")).await
    }

    /// A page of events after `after`, and whether there are more.
    pub(crate) async fn events(&self, id: &SessionId, after: u64) -> Result<Page<harvest_proto::Event>> {
        self.get(&format!("/v1/sessions/{id}/events?after={after}&limit=1000")).await
    }

    /// The whole of what an event holds only the ends of.
    pub(crate) async fn blob(&self, id: &SessionId, blob: &BlobId) -> Result<String> {
        let answer = self.send(self.request(Method::GET, &format!("/v1/sessions/{id}/blobs/{blob}"))).await?;
        answer.text().await.context("cannot read the blob to its end")
    }

    pub(crate) async fn exec(&self, id: &SessionId, body: &ExecRequest) -> Result<Lines> {
        let request = self.request(Method::POST, &format!("/v1/sessions/{id}/exec")).json(body);
        Ok(Lines::new(self.send(request).await?))
    }

    pub(crate) async fn repositories(&self) -> Result<Vec<Repository>> {
        self.all("/v1/repositories").await
    }

    pub(crate) async fn repository_add(&self, body: &AddRepository) -> Result<Repository> {
        self.post("/v1/repositories", body).await
    }

    pub(crate) async fn repository_delete(&self, name: &str) -> Result<()> {
        let path = format!("/v1/repositories/{}", segment(name)?);
        self.send(self.request(Method::DELETE, &path)).await.map(drop)
    }

    pub(crate) async fn repository_build(&self, name: &str) -> Result<Lines> {
        let path = format!("/v1/repositories/{}/build", segment(name)?);
        Ok(Lines::new(self.send(self.request(Method::POST, &path)).await?))
    }

    pub(crate) async fn secrets(&self) -> Result<Vec<String>> {
        self.all("/v1/secrets").await
    }

    pub(crate) async fn secret_set(&self, name: &str, value: &Secret<String>) -> Result<()> {
        let path = format!("/v1/secrets/{}", segment(name)?);
        let request = self.request(Method::PUT, &path).json(&json!({ "value": value.expose() }));
        self.send(request).await.map(drop)
    }

    pub(crate) async fn secret_delete(&self, name: &str) -> Result<()> {
        let path = format!("/v1/secrets/{}", segment(name)?);
        self.send(self.request(Method::DELETE, &path)).await.map(drop)
    }

    pub(crate) async fn tokens(&self) -> Result<Vec<Token>> {
        self.all("/v1/tokens").await
    }

    pub(crate) async fn token_create(&self, body: &CreateToken) -> Result<CreatedToken> {
        // Without a key: the answer would be kept with it, and with the answer the value.
        read(self.send(self.request(Method::POST, "/v1/tokens").json(body)).await?).await
    }

    pub(crate) async fn token_delete(&self, name: &str) -> Result<()> {
        let path = format!("/v1/tokens/{}", segment(name)?);
        self.send(self.request(Method::DELETE, &path)).await.map(drop)
    }

    pub(crate) async fn me(&self) -> Result<Me> {
        self.get("/v1/me").await
    }

    /// The session as it stands, then every event after `after`, as they come; comes back by itself
    /// when the connection breaks, without a gap and without a repeat.
    pub(crate) fn follow(&self, id: &SessionId, after: u64) -> impl Stream<Item = Result<Update>> + use<> {
        let start =
            Follower { client: self.clone(), path: format!("/v1/sessions/{id}/events"), after, lines: None };
        stream::try_unfold(start, |mut follower| async move {
            let update = follower.next().await?;
            Ok(Some((update, follower)))
        })
    }

    /// Any request; the answer's head, and its body as it comes.
    pub(crate) async fn carry(&self, method: Method, path: &str, sent: Sent) -> Result<(HeaderMap, Pieces)> {
        let request = self.request(method, path);
        let request = match sent {
            Sent::Nothing => request,
            Sent::Json(document) => request.header("content-type", "application/json").body(document),
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
    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let key = PromptId::random().part().to_owned();
        let request = || self.request(Method::POST, path).header("idempotency-key", &key).json(body);
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
    fn ask(&self, request: RequestBuilder) -> impl Future<Output = Result<Response>> + Send + use<> {
        let url = self.url.clone();
        async move {
            request.send().await.map_err(|error| {
                let advice =
                    Advice::new(format!("no answer from {url}"), "is it running? start it with `harvest up`");
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

/// Where a stream of events stands.
struct Follower {
    client: Client,
    path: String,
    after: u64,
    lines: Option<Lines>,
}

impl Follower {
    async fn next(&mut self) -> Result<Update> {
        // About a minute in all: long enough for a restart of the server.
        let mut waits = [250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 20_000].into_iter();
        loop {
            let broke = match self.frame().await {
                Ok(frame) => match parse_frame(&frame)? {
                    Some(Update::Event(event)) if event.seq <= self.after => continue,
                    Some(update) => {
                        if let Update::Event(event) = &update {
                            self.after = event.seq;
                        }
                        return Ok(update);
                    }
                    None => continue,
                },
                Err(error) => error,
            };
            self.lines = None;
            match waits.next() {
                Some(millis) if may_pass(&broke) => tokio::time::sleep(Duration::from_millis(millis)).await,
                _ => return Err(broke),
            }
        }
    }

    /// The next frame of the connection there is, or of a new one.
    async fn frame(&mut self) -> Result<Vec<String>> {
        let lines = match self.lines.take() {
            Some(lines) => lines,
            None => self.connect().await?,
        };
        // Only a heartbeat when nothing happens; a network that is gone says nothing at all.
        let frame = heard_in_time(self.lines.insert(lines).frame()).await??;
        frame.context("the server ended the stream")
    }

    async fn connect(&self) -> Result<Lines> {
        let request = self.client.request(Method::GET, &format!("{}?after={}", self.path, self.after));
        let answer = self.client.send(request.header("accept", "text/event-stream")).await?;
        Ok(Lines::new(answer))
    }
}

/// Whether it may be better in a moment: everything but a server that understood and said no.
fn may_pass(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refused>().is_none_or(|refused| refused.0.status == 503)
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
        bail!(Advice::new(format!("`{name}` is not a name"), "names are letters, digits, `.`, `_` and `-`"));
    }
    Ok(name)
}

/// The server that runs from this home.
pub(crate) fn local(config: &Config) -> Result<ServerFile> {
    let none =
        || Advice::new("no server is running", "start one with `harvest up`, or name one with HARVEST_URL");
    let text = std::fs::read_to_string(config.server_file()).map_err(|_| none())?;
    let file: ServerFile = serde_json::from_str(&text).map_err(|_| none())?;
    // The file of a server that was killed stays behind, and its number may be anybody's now.
    let there = std::path::Path::new(&format!("/proc/{}", file.pid)).exists();
    if there && wire::is_served(&config.home) { Ok(file) } else { Err(none().into()) }
}

fn read_token(config: &Config) -> Result<Secret<String>> {
    let path = config.token_file();
    let text = std::fs::read_to_string(&path).map_err(|error| {
        let advice =
            Advice::new("no token to show the server", "set HARVEST_TOKEN; `harvest up` printed it once");
        anyhow::Error::new(error).context(format!("cannot read {}", path.display())).context(advice)
    })?;
    Ok(Secret::new(text.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_url_names_a_server() {
        assert!(names_server("http://127.0.0.1:7070/") && names_server("https://agents.example.org"));
        for bad in ["", "notaurl", "127.0.0.1:7070", "file:///etc/passwd", "ftp://h/"] {
            assert!(!names_server(bad), "{bad}");
        }
    }

    #[test]
    fn the_next_page_is_asked_for_whether_or_not_the_path_has_a_query() {
        assert_eq!(from_cursor("/v1/tokens", "a=b"), "/v1/tokens?cursor=a%3Db");
        assert_eq!(from_cursor("/v1/sessions?limit=2", "c"), "/v1/sessions?limit=2&cursor=c");
    }

    #[test]
    fn a_server_that_is_gone_is_not_found_though_its_number_is_somebodys() {
        let home = tempfile::tempdir().unwrap();
        let flags =
            crate::cli::Global { home: Some(home.path().to_owned()), ..crate::cli::Global::default() };
        let config = Config::load(&flags, &|_| None).unwrap();
        let file = ServerFile { url: "http://127.0.0.1:1".into(), pid: std::process::id() };
        std::fs::write(config.server_file(), serde_json::to_vec(&file).unwrap()).unwrap();
        assert!(local(&config).is_err(), "nobody serves from here");
        let lock = std::fs::File::create(home.path().join("server.lock")).unwrap();
        assert!(local(&config).is_err(), "the lock of a server that was killed stays behind, too");
        lock.lock().unwrap();
        assert_eq!(local(&config).unwrap().pid, std::process::id());
    }

    #[test]
    fn a_name_that_would_lead_elsewhere_is_refused() {
        assert!(segment("calc.py-2_x").is_ok());
        for bad in ["", "..", "a/b", "a?b", "a b", "%2e"] {
            assert!(segment(bad).is_err(), "{bad}");
        }
    }
}
