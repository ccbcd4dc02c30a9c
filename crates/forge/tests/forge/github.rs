//! Harvest's client of GitHub against the local forge over TLS, as if it were an Enterprise server.

use std::sync::atomic::Ordering;

use harvest_forge::{
    App, AppKey, CheckState, CheckStatus, Forge, ForgeFailure, Forges, GitHub, GitHubSettings,
    Operation,
    PermissionLevel::{self, Read, Write},
    PullRequestChange, PullRequestSpec, ReadForm, ReadRoute, RemoteRepository, SignIn,
};
use harvest_proto::{Hint, Secret, api::PullRequestState};
use serde_json::Value;

use super::{
    TOKEN,
    rest_host::{RestHost, key, peers},
};

const ALL: &[(&str, PermissionLevel)] =
    &[("contents", Write), ("pull_requests", Write), ("statuses", Write)];

fn sign_in(id: u64, file: &str) -> SignIn {
    let key = AppKey::parse(&key(file)).unwrap();
    SignIn::App { id, key, installation: None }
}

impl RestHost {
    fn github(&self, sign_in: SignIn, ahead: i64) -> GitHub {
        let mut settings = GitHubSettings::new(&self.url);
        settings.certificate = Some(std::fs::read(peers().join("ca.pem")).unwrap());
        settings.sign_in = sign_in;
        GitHub::with_clock(settings, self.clock(ahead)).unwrap()
    }

    fn signed_in(&self, app: &App) -> GitHub {
        self.github(sign_in(app.id, "app.pkcs8.pem"), 0)
    }

    fn remote(&self) -> RemoteRepository {
        RemoteRepository { url: self.forge.url("app"), token: None }
    }
}

fn spec() -> PullRequestSpec {
    PullRequestSpec {
        title: "Change files".into(),
        body: "Because".into(),
        branch: "harvest/a".parse().unwrap(),
        base: "main".parse().unwrap(),
        draft: false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn app_works_on_pull_request_over_tls() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    let github = host.github(sign_in(app.id, "app.pkcs1.pem"), 0);
    let remote = host.remote();
    assert!(github.owns(&remote.url) && !github.owns("https://github.com/local/app"));
    let branch = "harvest/a".parse().unwrap();
    assert_eq!(github.find_pull_request(&remote, &branch).await.unwrap(), None);
    let opened = github.open_pull_request(&remote, spec()).await.unwrap();
    assert_eq!((opened.number, opened.state, opened.draft), (1, PullRequestState::Open, false));
    let found = github.find_pull_request(&remote, &branch).await.unwrap();
    assert_eq!(found, Some(opened.clone()));
    let again = github.open_pull_request(&remote, spec()).await.unwrap();
    assert_eq!(again, opened, "a branch has one open pull request");
    let change = PullRequestChange { body: Some("Better".into()), ..Default::default() };
    let changed = github.update_pull_request(&remote, 1, change).await.unwrap();
    assert_eq!((changed.title.as_str(), changed.body.as_str()), ("Change files", "Better"));
    github.comment(&remote, 1, "Looks good").await.unwrap();
    let (state, context) = (CheckState::Success, "harvest/check".to_owned());
    let status = CheckStatus { state, context, description: "é".repeat(200) };
    github.set_status(&remote, &opened.commit, status).await.unwrap();
    let (_, combined) = host.get(&format!("/repos/local/app/commits/{branch}/status")).await;
    assert_eq!(combined["state"], "success");
    let (_, shown) = host.get("/repos/local/app/pulls/1").await;
    assert_eq!(shown["user"]["login"], "harvest[bot]");
    let elsewhere = github.merge_pull_request(&remote, 1).await.unwrap_err();
    assert!(elsewhere.to_string().ends_with(&opened.url), "{elsewhere}");
    Forge::merge_pull_request(&host.forge, &remote, 1).await.unwrap();
    let merged = github.pull_request(&remote, 1).await.unwrap();
    assert_eq!(merged.state, PullRequestState::Merged);
    host.validate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_of_both_forges_are_the_same() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(&[ALL, &[("actions", Read), ("checks", Read)]].concat()).await;
    let (github, remote) = (host.signed_in(&app), host.remote());
    github.open_pull_request(&remote, spec()).await.unwrap();
    let route = |path: &str, query: &[(&str, &str)], form| {
        let segments = path.split('/').filter(|one| !one.is_empty()).map(str::to_owned).collect();
        let query = query.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        ReadRoute::new(segments, query, form).unwrap()
    };
    for (path, status) in [
        ("", 200),
        ("pulls", 200),
        ("pulls/1", 200),
        ("pulls/1/reviews", 200),
        ("pulls/1/files", 200),
        ("pulls/99", 404),
        ("branches/harvest%2Fa", 404),
        ("branches/harvest/a", 200),
        ("commits/main/status", 200),
        ("commits/main/check-runs", 200),
        ("actions/runs", 200),
    ] {
        let route = route(path, &[], ReadForm::Json);
        let there = github.read(&remote, &route).await.unwrap();
        let here = Forge::read(&host.forge, &remote, &route).await.unwrap();
        assert_eq!(there.status, status, "{path}");
        assert_eq!(here, there, "{path}");
    }
    let first = route("branches", &[("per_page", "1")], ReadForm::Json);
    let there = github.read(&remote, &first).await.unwrap();
    let next = there.next.clone().unwrap();
    assert!(next.contains(&("page".to_owned(), "2".to_owned())), "{next:?}");
    assert_eq!(Forge::read(&host.forge, &remote, &first).await.unwrap(), there);
    let diff = route("pulls/1", &[], ReadForm::Diff);
    let there = github.read(&remote, &diff).await.unwrap();
    assert!(there.body.starts_with(b"diff --git"), "a diff is no JSON");
    assert_eq!(Forge::read(&host.forge, &remote, &diff).await.unwrap(), there);
    host.validate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_files_are_not_read_for_sandboxes() {
    let host = RestHost::with_branches().await;
    let long = std::fs::File::create(host.folder.path().join("work/long")).unwrap();
    long.set_len(9 << 20).unwrap();
    host.commit("Add a long file").await;
    host.git(&["push", "-q", &host.git_url(TOKEN), "HEAD:main"]).await.unwrap();
    let segments = vec!["contents".to_owned(), "long".to_owned()];
    let route = |form| ReadRoute::new(segments.clone(), Vec::new(), form).unwrap();
    let raw = Forge::read(&host.forge, &host.remote(), &route(ReadForm::Raw)).await.unwrap();
    let text = String::from_utf8(raw.body).unwrap();
    assert!(raw.status == 403 && text.contains("up to 8 MiB"), "{text}");
    let object = Forge::read(&host.forge, &host.remote(), &route(ReadForm::Json)).await.unwrap();
    assert_eq!(object.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answer_opens_no_second_pull_request() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    host.loses_answer.store(true, Ordering::SeqCst);
    let opened = host.signed_in(&app).open_pull_request(&host.remote(), spec()).await.unwrap();
    assert!(!host.loses_answer.load(Ordering::SeqCst), "the answer was lost");
    assert_eq!(opened.number, 1);
    // A server that was killed before it recorded the pull request starts anew.
    let later = host.signed_in(&app).open_pull_request(&host.remote(), spec()).await.unwrap();
    assert_eq!(later, opened);
    assert_eq!(host.forge.pull_requests("app").await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn unchanged_pull_request_is_answered_with_304() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    let github = host.signed_in(&app);
    let opened = github.open_pull_request(&host.remote(), spec()).await.unwrap();
    for _ in 0..2 {
        assert_eq!(github.pull_request(&host.remote(), 1).await.unwrap(), opened);
    }
    let change = PullRequestChange { title: Some("New".into()), ..Default::default() };
    github.update_pull_request(&host.remote(), 1, change).await.unwrap();
    assert_eq!(github.pull_request(&host.remote(), 1).await.unwrap().title, "New");
    let statuses: Vec<u64> = {
        let records = host.records.lock().unwrap();
        let reads = records.iter().filter(|one| one["path"] == "/repos/local/app/pulls/1");
        let reads = reads.filter(|one| one["method"] == "GET");
        reads.map(|one| one["status"].as_u64().unwrap()).collect()
    };
    assert_eq!(statuses, [200, 304, 200]);
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_renewed_five_minutes_before_end() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    let github = host.signed_in(&app);
    let url = host.remote().url;
    let token = async || github.credential(&url, Operation::Push).await.unwrap().unwrap();
    let first = token().await;
    host.pass(3600 - 301);
    assert_eq!(token().await, first);
    // Git asks where to push with the first token and pushes with the second.
    let push = async |token: &Secret<String>| {
        let url = host.git_url(token.expose());
        host.git(&["push", "-q", &url, "HEAD:refs/heads/late"]).await
    };
    host.pass(2);
    let second = token().await;
    assert_ne!(second, first);
    host.pass(301);
    assert!(push(&first).await.is_err(), "the first token has ended");
    push(&second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn token_opens_one_repository_for_one_operation() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    host.forge.create("other", &Secret::new("0ther-t0ken".into())).await.unwrap();
    let github = host.signed_in(&app);
    let url = host.remote().url;
    let token = async |operation| github.credential(&url, operation).await.unwrap().unwrap();
    let reading = token(Operation::Fetch).await;
    let get = async |path: &str, token: &Secret<String>| {
        host.send("GET", path, token.expose(), Value::Null).await.0
    };
    assert_eq!(get("/repos/local/app/branches", &reading).await, 200);
    assert_eq!(get("/repos/local/app/pulls", &reading).await, 403);
    assert_eq!(get("/repos/local/other", &reading).await, 404);
    let git_url = host.git_url(reading.expose());
    let push = ["push", "-q", &git_url, "HEAD:refs/heads/x"];
    assert!(host.git(&push).await.is_err(), "a token for reading cannot push");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_wrong_sign_in_has_its_own_hint() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    let few = host.register(&[("contents", Read)]).await;
    let suspended = host.register(ALL).await;
    host.forge.suspend_app(suspended.id, true).await.unwrap();
    let good = |id| sign_in(id, "app.pkcs8.pem");
    let installation = |id| SignIn::App {
        id: app.id,
        key: AppKey::parse(&key("app.pkcs8.pem")).unwrap(),
        installation: Some(id),
    };
    let mut hints = Vec::new();
    for (sign_in, ahead, expected) in [
        (sign_in(app.id, "other.pkcs8.pem"), 0, "GitHub refused the key of App"),
        (good(999), 0, "GitHub knows no App with the id 999"),
        (good(few.id), 0, "has no permission to write pull requests of local/app"),
        (good(suspended.id), 0, "for local/app is suspended"),
        (installation(few.id), 0, "the GitHub App has no access to local/app"),
        (SignIn::None, 0, "there is no sign-in to GitHub for local/app"),
        (SignIn::Token(Secret::new("wr0ng-t0ken".into())), 0, "refused the token for local/app"),
        (good(app.id), 3600, "'iat'"),
    ] {
        let github = host.github(sign_in, ahead);
        let failed = github.open_pull_request(&host.remote(), spec()).await.unwrap_err();
        let text = failed.to_string();
        assert!(text.contains(expected), "{text}");
        hints.push(failed.hint().unwrap().into_owned());
        let all = format!("{github:?} {failed:?} {text}");
        assert!(!all.contains("wr0ng") && !all.contains("BEGIN"), "{all}");
    }
    hints.pop();
    let count = hints.len();
    hints.sort();
    hints.dedup();
    assert_eq!(hints.len(), count);
    // A clock that is 50 s ahead is tolerated: the token was issued a minute ago.
    host.github(good(app.id), 50).open_pull_request(&host.remote(), spec()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_token_is_replaced_once() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    let github = host.signed_in(&app);
    let url = host.remote().url;
    let branch = "harvest/a".parse().unwrap();
    let token = github.credential(&url, Operation::PullRequests).await.unwrap().unwrap();
    let revoked = host.send("DELETE", "/installation/token", token.expose(), Value::Null).await;
    assert_eq!(revoked.0, 204);
    assert_eq!(github.find_pull_request(&host.remote(), &branch).await.unwrap(), None);
    let later = github.credential(&url, Operation::PullRequests).await.unwrap().unwrap();
    assert_ne!(later, token);
}

#[tokio::test(flavor = "multi_thread")]
async fn own_token_comes_before_the_app() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let app = host.register(ALL).await;
    let forges = Forges::new(host.forge.clone(), GitHub::anonymous());
    assert!(forges.is_local(&host.remote().url));
    let remote = RemoteRepository { token: Some(Secret::new(TOKEN.into())), ..host.remote() };
    host.signed_in(&app).open_pull_request(&remote, spec()).await.unwrap();
    let (_, shown) = host.get("/repos/local/app/pulls/1").await;
    assert_eq!(shown["user"]["login"], "local");
    let unknown = RemoteRepository { url: "https://git.example.org/a/b".into(), token: None };
    let failed = forges.open_pull_request(&unknown, spec()).await.unwrap_err();
    assert!(matches!(failed, ForgeFailure::NoApi { .. }), "{failed}");
}
