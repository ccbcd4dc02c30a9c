//! Harvest's client of GitHub against `emulate`, a GitHub of others: REST and webhooks, no git.

use std::process::Stdio;

use axum::{Router, body::Bytes, http::HeaderMap, routing::post};
use harvest_forge::{
    AppKey, Forge, GitHub, GitHubSettings, Operation, PullRequestChange, PullRequestSpec,
    RemoteRepository, SignIn, WebhookHeaders, WebhookNews,
};
use harvest_proto::{Secret, api::PullRequestState};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, ChildStdout, Command},
    sync::mpsc,
};

use super::rest_host::{key, peers};

const SECRET: &str = "webh00k-s3cret";

/// A program of `tests/peers` that prints one JSON object a line.
pub(super) struct Peer {
    // Killed on drop.
    _child: Child,
    lines: tokio::io::Lines<BufReader<ChildStdout>>,
}

impl Peer {
    pub(super) fn start(program: &str, arguments: &[&str]) -> Self {
        let program =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/").join(program);
        let mut child = Command::new(peers().join("node"))
            .arg(program)
            .args(arguments)
            .current_dir(peers())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { _child: child, lines }
    }

    pub(super) async fn next(&mut self) -> Value {
        let line = tokio::time::timeout(std::time::Duration::from_secs(60), self.lines.next_line());
        let line = line.await.expect("the program prints a line").unwrap();
        serde_json::from_str(&line.expect("the program runs")).unwrap()
    }
}

type Delivery = (HeaderMap, Bytes);

/// An address for webhooks, and what arrives there.
async fn receiver() -> (String, mpsc::UnboundedReceiver<Delivery>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let take = move |headers: HeaderMap, body: Bytes| {
        let sent = sender.send((headers, body));
        async move { drop(sent) }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hooks", listener.local_addr().unwrap());
    let router = Router::new().route("/hooks", post(take));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, receiver)
}

#[tokio::test(flavor = "multi_thread")]
async fn client_works_with_githubs_emulator() {
    let (hook_url, mut deliveries) = receiver().await;
    let key_file = peers().join("app.pkcs8.pem");
    let mut emulator = Peer::start("emulate.mjs", &[key_file.to_str().unwrap(), &hook_url, SECRET]);
    let url = emulator.next().await["url"].as_str().unwrap().to_owned();
    let settings = GitHubSettings {
        // The emulator has its API at the root.
        api: Some(url.clone()),
        sign_in: SignIn::App {
            id: 7,
            key: AppKey::parse(&key("app.pkcs8.pem")).unwrap(),
            installation: None,
        },
        webhook_secret: Some(Secret::new(SECRET.to_owned())),
        ..GitHubSettings::new(&url)
    };
    let github = GitHub::new(settings).unwrap();
    let remote = RemoteRepository { url: format!("{url}/acme/shop.git"), token: None };
    let branch = "harvest/a".parse().unwrap();
    assert_eq!(github.find_pull_request(&remote, &branch).await.unwrap(), None);
    let spec = PullRequestSpec {
        title: "Add one".into(),
        body: "Because".into(),
        branch: branch.clone(),
        base: "main".parse().unwrap(),
        draft: false,
    };
    let opened = github.open_pull_request(&remote, spec).await.unwrap();
    assert_eq!((opened.state, opened.commit.len()), (PullRequestState::Open, 40));
    let found = github.find_pull_request(&remote, &branch).await.unwrap();
    assert_eq!(found, Some(opened.clone()));
    let change = PullRequestChange { body: Some("Better".into()), ..Default::default() };
    let changed = github.update_pull_request(&remote, opened.number, change).await.unwrap();
    assert_eq!(changed.body, "Better");
    github.comment(&remote, opened.number, "Looks good").await.unwrap();
    // The emulator has no commit statuses.
    let token = github.credential(&remote.url, Operation::Push).await.unwrap().unwrap();
    let merge = format!("{url}/repos/acme/shop/pulls/{}/merge", opened.number);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let merged = client.put(merge).bearer_auth(token.expose()).header("user-agent", "test");
    let merged = merged.body(json!({}).to_string()).send().await.unwrap();
    assert!(merged.status().is_success(), "{merged:?}");
    let merged = github.pull_request(&remote, opened.number).await.unwrap();
    assert_eq!(merged.state, PullRequestState::Merged);
    // The emulator tells of it by webhook.
    loop {
        let wait = tokio::time::timeout(std::time::Duration::from_secs(60), deliveries.recv());
        let (headers, body) = wait.await.expect("a webhook arrives").unwrap();
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let signed = WebhookHeaders {
            signature: text("x-hub-signature-256"),
            event: text("x-github-event"),
            delivery: text("x-github-delivery"),
        };
        let webhook = github.read_webhook(signed, &body).unwrap();
        if webhook.event == "pull_request" && webhook.action == "closed" {
            assert_eq!(webhook.news, WebhookNews::PullRequest { number: opened.number });
            let named = github.owns(webhook.repository.as_deref().unwrap());
            assert!(named, "{webhook:?}");
            break;
        }
    }
}
