//! Webhooks of the local forge, received by GitHub's own library.

use harvest_forge::{Forge, PermissionLevel::Write, PullRequestSpec, RemoteRepository};
use serde_json::{Value, json};

use super::{
    TOKEN,
    emulate::Peer,
    rest_host::{RestHost, peers, validate},
};

const SECRET: &str = "webh00k-s3cret";
const HOOKS: &str = "/repos/local/app/hooks";

/// The next event of this kind, and all that came before it.
async fn next(receiver: &mut Peer, records: &mut Vec<Value>, event: &str, action: &str) -> Value {
    loop {
        let received = receiver.next().await;
        assert!(received["refused"].is_null(), "{received}");
        records.push(received.clone());
        let payload = &received["payload"];
        if received["event"] == event && payload["action"].as_str().unwrap_or_default() == action {
            return payload.clone();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn octokit_receives_pushes_pull_requests_and_statuses() {
    let host = RestHost::with_branches().await;
    let mut receiver = Peer::start("webhooks.mjs", &["receive", SECRET]);
    let url = format!("http://127.0.0.1:{}/", receiver.next().await["port"]);
    let config = json!({"url": url, "content_type": "json", "secret": SECRET});
    let events = json!(["push", "pull_request", "status"]);
    let hook = json!({"config": config, "events": events});
    let created = host.expect(201, "POST", HOOKS, hook.clone()).await;
    assert_eq!(created["config"]["secret"], "********");
    host.expect(422, "POST", HOOKS, hook).await;
    let mut seen = Vec::new();
    next(&mut receiver, &mut seen, "ping", "").await;
    host.git(&["checkout", "-q", "-b", "harvest/b", "main"]).await.unwrap();
    std::fs::write(host.folder.path().join("work/two"), "two\n").unwrap();
    let commit = host.commit("Add two").await;
    host.git(&["push", "-q", &host.git_url(TOKEN), "harvest/b"]).await.unwrap();
    let push = next(&mut receiver, &mut seen, "push", "").await;
    assert_eq!((&push["ref"], &push["created"]), (&json!("refs/heads/harvest/b"), &json!(true)));
    assert_eq!((&push["after"], &push["commits"][0]["added"]), (&json!(commit), &json!(["two"])));
    let spec = PullRequestSpec {
        title: "Add two".into(),
        body: String::new(),
        branch: "harvest/b".parse().unwrap(),
        base: "main".parse().unwrap(),
        draft: false,
    };
    let remote = RemoteRepository { url: host.forge.url("app"), token: None };
    host.forge.open_pull_request(&remote, spec).await.unwrap();
    let opened = next(&mut receiver, &mut seen, "pull_request", "opened").await;
    assert_eq!(opened["pull_request"]["head"]["sha"], json!(commit));
    let pull = "/repos/local/app/pulls/1";
    host.expect(200, "PATCH", pull, json!({"title": "Better"})).await;
    next(&mut receiver, &mut seen, "pull_request", "edited").await;
    host.expect(200, "PATCH", pull, json!({"state": "closed"})).await;
    next(&mut receiver, &mut seen, "pull_request", "closed").await;
    host.expect(200, "PATCH", pull, json!({"state": "open"})).await;
    next(&mut receiver, &mut seen, "pull_request", "reopened").await;
    let status = json!({"state": "success", "context": "check"});
    host.expect(201, "POST", &format!("/repos/local/app/statuses/{commit}"), status).await;
    next(&mut receiver, &mut seen, "status", "").await;
    host.expect(200, "PUT", &format!("{pull}/merge"), json!({})).await;
    let merged = next(&mut receiver, &mut seen, "pull_request", "closed").await;
    assert_eq!(merged["pull_request"]["merged"], json!(true));
    let lines: String = seen.iter().map(|record| format!("{record}\n")).collect();
    validate(lines).await.unwrap_or_else(|problems| panic!("{problems}"));
    let path = format!("{HOOKS}/{}", created["id"]);
    host.expect(200, "GET", &path, Value::Null).await;
    host.expect(204, "POST", &format!("{path}/pings"), Value::Null).await;
    next(&mut receiver, &mut seen, "ping", "").await;
    host.expect(204, "DELETE", &path, Value::Null).await;
    host.expect(404, "GET", &path, Value::Null).await;
    let hooks = host.expect(200, "GET", HOOKS, Value::Null).await;
    assert_eq!(hooks, json!([]));
    host.validate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn probot_answers_a_pull_request() {
    let host = RestHost::with_branches().await;
    // Probot's clock is the machine's.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    host.set_time(i64::try_from(now.as_secs()).unwrap());
    let app = host.register(&[("issues", Write), ("pull_requests", Write), ("statuses", Write)]);
    let (api, id) = (format!("{}/api/v3", host.url), app.await.id.to_string());
    let key = peers().join("app.pkcs8.pem");
    let key = key.to_str().unwrap();
    let mut probot = Peer::start("probot.mjs", &[&api, key, &id, SECRET]);
    let url = format!("http://127.0.0.1:{}/", probot.next().await["port"]);
    let config = json!({"url": url, "content_type": "json", "secret": SECRET});
    let hook = json!({"config": config, "events": ["pull_request"]});
    host.expect(201, "POST", HOOKS, hook).await;
    let pull = json!({"title": "T", "head": "harvest/a", "base": "main"});
    let pull = host.expect(201, "POST", "/repos/local/app/pulls", pull).await;
    let done = probot.next().await;
    let expected = json!({"comment": "Thank you", "by": "harvest[bot]", "status": "success"});
    assert_eq!(done, expected);
    let comments = host.expect(200, "GET", "/repos/local/app/issues/1/comments", Value::Null).await;
    assert_eq!(comments[0]["body"], "Thank you");
    let sha = pull["head"]["sha"].as_str().unwrap();
    let path = format!("/repos/local/app/commits/{sha}/status");
    let status = host.expect(200, "GET", &path, Value::Null).await;
    assert_eq!(status["statuses"][0]["context"], "probot");
    host.validate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_hooks_are_refused() {
    let host = RestHost::with_branches().await;
    for (config, events) in [
        (json!({"url": "ftp://h/x"}), json!(["push"])),
        (json!({"url": "http://h/x", "content_type": "form"}), json!(["push"])),
        (json!({"url": "http://h/x"}), json!(["nonsense"])),
    ] {
        let hook = json!({"config": config, "events": events});
        host.expect(422, "POST", HOOKS, hook).await;
    }
}
