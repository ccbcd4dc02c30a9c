//! Harvest's client of GitHub against a server that answers wrongly: lost, moved, endless, limited
//! or with things that are not its business.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{Response, StatusCode},
};
use harvest_forge::{
    Forge, ForgeFailure, GitHub, GitHubSettings, Operation, PullRequestChange, RemoteRepository,
    SignIn,
};
use harvest_proto::{Hint, Secret};
use serde_json::{Value, json};
use tokio::net::TcpListener;

const TOKEN: &str = "ghp_s3cret";

/// A request that the server got: its line, whether it had the token, and its body.
type Seen = (String, bool, Value);

#[derive(Clone, Default)]
struct Answers {
    next: Arc<Mutex<VecDeque<Response<Body>>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

struct WrongServer {
    url: String,
    answers: Answers,
}

async fn answer(State(answers): State<Answers>, request: Request) -> Response<Body> {
    let line = format!("{} {}", request.method(), request.uri());
    let authorization = request.headers().get("authorization").cloned();
    let has_token = authorization.is_some_and(|value| value == format!("Bearer {TOKEN}"));
    let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    answers.seen.lock().unwrap().push((line, has_token, body));
    let next = answers.next.lock().unwrap().pop_front();
    next.unwrap_or_else(|| with(500, &[], "no more answers"))
}

fn with(status: u16, headers: &[(&str, &str)], body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::builder().status(StatusCode::from_u16(status).unwrap());
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    response.body(body.into()).unwrap()
}

fn pull(draft: bool) -> Value {
    let side = |name: &str| json!({"ref": name, "sha": "c0ffee", "repo": {"full_name": "a/b"}});
    json!({
        "number": 7, "node_id": "PR_7", "html_url": "https://evil.example/7", "state": "open",
        "title": "t", "body": null, "draft": draft, "head": side("mine"), "base": side("main"),
    })
}

impl WrongServer {
    async fn new(answers: impl IntoIterator<Item = Response<Body>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let next = Arc::new(Mutex::new(answers.into_iter().collect()));
        let answers = Answers { next, ..Answers::default() };
        let router = Router::new().fallback(answer).with_state(answers.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, answers }
    }

    fn github(&self) -> GitHub {
        let sign_in = SignIn::Token(Secret::new(TOKEN.to_owned()));
        GitHub::new(GitHubSettings { sign_in, ..GitHubSettings::new(&self.url) }).unwrap()
    }

    fn remote(&self) -> RemoteRepository {
        RemoteRepository { url: format!("{}/a/b.git", self.url), token: None }
    }

    fn lines(&self) -> Vec<String> {
        self.answers.seen.lock().unwrap().iter().map(|(line, ..)| line.clone()).collect()
    }

    /// How it fails to read a pull request, with the whole chain of messages.
    async fn failure(&self) -> (ForgeFailure, String) {
        let failure = self.github().pull_request(&self.remote(), 7).await.unwrap_err();
        let mut text = format!("{failure:?}");
        let mut next: Option<&dyn std::error::Error> = Some(&failure);
        while let Some(error) = next {
            text += &format!("; {error}");
            next = error.source();
        }
        (failure, text)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn draft_is_changed_and_failures_have_types() {
    let done = || with(200, &[], r#"{"data":{}}"#);
    let refused = |kind: &str| {
        let errors = json!({"errors": [{"type": kind, "message": "no\u{1b}[2J"}]});
        with(200, &[], errors.to_string())
    };
    let read = || with(200, &[], pull(true).to_string());
    let server = WrongServer::new([
        read(),
        done(),
        with(200, &[], pull(false).to_string()),
        read(),
        refused("FORBIDDEN"),
        read(),
        refused("UNPROCESSABLE"),
        with(200, &[], pull(false).to_string()),
        done(),
    ])
    .await;
    let (github, remote) = (server.github(), server.remote());
    assert!(!github.set_draft(&remote, 7, false).await.unwrap().draft);
    let seen = server.answers.seen.lock().unwrap()[1].clone();
    assert_eq!((seen.0.as_str(), seen.1), ("POST /api/graphql", true));
    assert_eq!(seen.2["variables"], json!({"id": "PR_7"}));
    assert!(seen.2["query"].as_str().unwrap().contains("{markPullRequestReadyForReview("));
    // It is ready already: nothing is sent.
    assert!(!github.set_draft(&remote, 7, false).await.unwrap().draft);
    assert_eq!(server.lines().len(), 3);
    let failed = github.set_draft(&remote, 7, false).await.unwrap_err();
    assert!(matches!(failed, ForgeFailure::TokenForbidden { .. }), "{failed:?}");
    let failed = github.set_draft(&remote, 7, false).await.unwrap_err().to_string();
    assert!(failed.ends_with("no[2J"), "{failed:?}");
    assert!(github.set_draft(&remote, 7, true).await.unwrap().draft);
    let last = server.answers.seen.lock().unwrap().last().unwrap().clone();
    assert!(last.2["query"].as_str().unwrap().contains("{convertPullRequestToDraft("));
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_all_kinds_are_recognised() {
    let secondary = r#"{"message":"You have exceeded a secondary rate limit."}"#;
    let past = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "5")];
    for (answer, seconds) in [
        (with(429, &[("retry-after", "30")], ""), Some(30)),
        (with(403, &[("retry-after", "60")], "{}"), Some(60)),
        (with(403, &[("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")], "{}"), None),
        (with(403, &past, "{}"), None),
        (with(403, &[], secondary), None),
    ] {
        let (failure, _) = WrongServer::new([answer]).await.failure().await;
        let ForgeFailure::RateLimited { seconds: found } = failure else { panic!("{failure:?}") };
        assert_eq!(found, seconds);
        assert!(failure.may_pass() && !failure.is_brief());
    }
    let far = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "99999999999")];
    let (failure, _) = WrongServer::new([with(403, &far, "{}")]).await.failure().await;
    assert!(failure.hint().unwrap().starts_with("GitHub takes requests again in "), "{failure:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_in_no_error_even_if_quoted() {
    for (status, body) in [
        (422, format!(r#"{{"message":"Bearer {TOKEN} is odd"}}"#)),
        (403, format!(r#"{{"message":"{TOKEN}"}}"#)),
        (200, format!(r#""{TOKEN}""#)),
        (200, format!(r#"{{"number":"{TOKEN}"}}"#)),
    ] {
        let server = WrongServer::new([with(status, &[], body.clone())]).await;
        let (_, text) = server.failure().await;
        assert!(!text.contains("s3cret"), "{status} {body}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_follows_no_redirect() {
    let elsewhere = WrongServer::new([]).await;
    let to = format!("{}/repos/a/b/pulls/7", elsewhere.url);
    for status in [301, 302, 307, 308] {
        let server = WrongServer::new([with(status, &[("location", &to)], "")]).await;
        let (failure, _) = server.failure().await;
        assert!(failure.to_string().contains("register its current URL"), "{failure}");
    }
    assert_eq!(elsewhere.lines(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_answer_is_cut_off() {
    let piece = bytes::Bytes::from(vec![b' '; 1 << 20]);
    let endless = futures_util::stream::repeat_with(move || Ok::<_, std::io::Error>(piece.clone()));
    let (failure, text) =
        WrongServer::new([with(200, &[], Body::from_stream(endless))]).await.failure().await;
    assert!(matches!(failure, ForgeFailure::Other(_)) && text.contains("too long"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_pages_are_not_followed() {
    let server = WrongServer::new([]).await;
    let next = format!("<{}/repos/a/b/pulls?page=2>; rel=\"next\"", server.url);
    let page = with(200, &[("link", &next)], "[]");
    server.answers.next.lock().unwrap().push_back(page);
    let (github, remote, branch) = (server.github(), server.remote(), "mine".parse().unwrap());
    assert_eq!(github.find_pull_request(&remote, &branch).await.unwrap(), None);
    assert_eq!(server.lines().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn page_at_another_host_is_not_shown() {
    let server = WrongServer::new([with(200, &[], pull(false).to_string())]).await;
    let read = server.github().pull_request(&server.remote(), 7).await.unwrap();
    assert_eq!(read.url, format!("{}/a/b/pull/7", server.url));
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_answer_is_a_brief_failure() {
    let broken = || {
        let parts = [Ok("{\"number\""), Err(std::io::Error::other("cut"))];
        with(200, &[], Body::from_stream(futures_util::stream::iter(parts)))
    };
    let server = WrongServer::new([broken(), broken()]).await;
    let change = PullRequestChange { title: Some("New".into()), ..Default::default() };
    let failed = server.github().update_pull_request(&server.remote(), 7, change).await;
    assert!(failed.unwrap_err().is_brief());
    let credential = server.github().credential(&server.remote().url, Operation::Push).await;
    assert_eq!(credential.unwrap().unwrap().expose(), TOKEN);
}
