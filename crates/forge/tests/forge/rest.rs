//! The REST API: what it answers, checked against GitHub's description, and who may ask.

use std::sync::{Arc, Mutex};

use harvest_forge::PermissionLevel::{Read, Write};
use serde_json::{Value, json};

use super::{
    TOKEN,
    rest_host::{NOW, RestHost, jwt, validate},
};

const REPO: &str = "/repos/local/app";

/// Every operation of the API, as GitHub's description calls it.
const OPERATIONS: &[&str] = &[
    "DELETE /installation/token",
    "DELETE /repos/{owner}/{repo}/git/refs/{ref}",
    "DELETE /repos/{owner}/{repo}/issues/comments/{comment_id}",
    "GET /",
    "GET /app",
    "GET /app/installations",
    "GET /app/installations/{installation_id}",
    "GET /installation/repositories",
    "GET /meta",
    "GET /rate_limit",
    "GET /repos/{owner}/{repo}",
    "GET /repos/{owner}/{repo}/actions/runs",
    "GET /repos/{owner}/{repo}/branches",
    "GET /repos/{owner}/{repo}/branches/{branch}",
    "GET /repos/{owner}/{repo}/commits",
    "GET /repos/{owner}/{repo}/commits/{ref}",
    "GET /repos/{owner}/{repo}/commits/{ref}/check-runs",
    "GET /repos/{owner}/{repo}/commits/{ref}/status",
    "GET /repos/{owner}/{repo}/commits/{ref}/statuses",
    "GET /repos/{owner}/{repo}/compare/{basehead}",
    "GET /repos/{owner}/{repo}/contents/{path}",
    "GET /repos/{owner}/{repo}/git/matching-refs/{ref}",
    "GET /repos/{owner}/{repo}/git/ref/{ref}",
    "GET /repos/{owner}/{repo}/installation",
    "GET /repos/{owner}/{repo}/issues/comments/{comment_id}",
    "GET /repos/{owner}/{repo}/issues/{issue_number}/comments",
    "GET /repos/{owner}/{repo}/pulls",
    "GET /repos/{owner}/{repo}/pulls/{pull_number}",
    "GET /repos/{owner}/{repo}/pulls/{pull_number}/commits",
    "GET /repos/{owner}/{repo}/pulls/{pull_number}/files",
    "GET /repos/{owner}/{repo}/pulls/{pull_number}/merge",
    "GET /user",
    "PATCH /repos/{owner}/{repo}/git/refs/{ref}",
    "PATCH /repos/{owner}/{repo}/issues/comments/{comment_id}",
    "PATCH /repos/{owner}/{repo}/pulls/{pull_number}",
    "POST /app/installations/{installation_id}/access_tokens",
    "POST /repos/{owner}/{repo}/git/refs",
    "POST /repos/{owner}/{repo}/issues/{issue_number}/comments",
    "POST /repos/{owner}/{repo}/pulls",
    "POST /repos/{owner}/{repo}/statuses/{sha}",
    "PUT /repos/{owner}/{repo}/pulls/{pull_number}/merge",
];

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_follows_githubs_description() {
    let host = RestHost::with_branches().await;
    for path in ["/", "/meta", "/rate_limit", "/user", REPO] {
        host.get(path).await;
    }
    let sha = read_history(&host).await;
    change_references(&host, &sha).await;
    work_on_pull_request(&host).await;
    report_statuses(&host, &sha).await;
    act_as_app(&host).await;
    let counts = host.validate().await;
    let mut seen: Vec<&str> =
        counts.as_object().unwrap().keys().map(|name| name.rsplit_once(' ').unwrap().0).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, OPERATIONS);
}

#[tokio::test(flavor = "multi_thread")]
async fn validator_complains_about_missing_fields() {
    let host = RestHost::with_branches().await;
    let (_, mut body) = host.get(REPO).await;
    body.as_object_mut().unwrap().remove("private").unwrap();
    body["owner"]["id"] = "1".into();
    let record = json!({"method": "GET", "path": REPO, "status": 200, "body": body});
    let problems = validate(format!("{record}\n")).await.unwrap_err();
    assert!(problems.contains("must have required property 'private'"), "{problems}");
    assert!(problems.contains("/owner/id: must be integer"), "{problems}");
}

async fn read_history(host: &RestHost) -> String {
    for path in [
        "/branches?per_page=1",
        "/branches/harvest/a",
        "/branches/harvest%2Fa",
        "/commits?path=one&per_page=1&since=2020-01-01T00:00:00Z",
        "/commits/main",
        "/compare/main...harvest/a",
        "/compare/harvest/a...local:main",
        "/contents",
        "/contents/docs",
        "/contents/docs/long%20name?ref=main",
        "/contents/link",
        "/git/ref/heads/main",
        "/git/matching-refs/heads/har",
        "/actions/runs",
    ] {
        host.expect(200, "GET", &format!("{REPO}{path}"), Value::Null).await;
    }
    for path in ["/branches/none", "/contents/none", "/contents/..%2fapp", "/git/ref/heads/none"] {
        host.expect(404, "GET", &format!("{REPO}{path}"), Value::Null).await;
    }
    host.expect(422, "GET", &format!("{REPO}/commits/none"), Value::Null).await;
    let commit = host.expect(200, "GET", &format!("{REPO}/commits/harvest%2Fa"), Value::Null).await;
    let files = commit["files"].as_array().unwrap();
    let brief: Vec<_> = files
        .iter()
        .map(|file| (file["filename"].as_str().unwrap(), file["status"].as_str().unwrap()))
        .collect();
    let expected =
        [("bytes", "added"), ("docs/renamed", "renamed"), ("gone", "removed"), ("one", "modified")];
    assert_eq!(brief, expected);
    assert_eq!(files[3]["patch"], "@@ -1,2 +1,3 @@\n one\n two\n+three");
    commit["sha"].as_str().unwrap().to_owned()
}

async fn change_references(host: &RestHost, sha: &str) {
    let refs = format!("{REPO}/git/refs");
    let main = host.expect(200, "GET", &format!("{REPO}/git/ref/heads/main"), Value::Null).await;
    let main = main["object"]["sha"].as_str().unwrap();
    let new = json!({"ref": "refs/heads/new", "sha": main});
    host.expect(201, "POST", &refs, new.clone()).await;
    host.expect(422, "POST", &refs, new).await;
    host.expect(422, "POST", &refs, json!({"ref": "refs/harvest/x", "sha": main})).await;
    let path = format!("{refs}/heads/new");
    host.expect(200, "PATCH", &path, json!({"sha": sha})).await;
    host.expect(422, "PATCH", &path, json!({"sha": main})).await;
    host.expect(200, "PATCH", &path, json!({"sha": main, "force": true})).await;
    host.expect(204, "DELETE", &path, Value::Null).await;
    host.expect(422, "DELETE", &path, Value::Null).await;
    let kept = host.get(&format!("{REPO}/git/matching-refs/harvest/kept/")).await.1;
    assert_eq!(kept.as_array().unwrap().len(), 2, "{kept}");
}

async fn work_on_pull_request(host: &RestHost) {
    let pulls = format!("{REPO}/pulls");
    let new = json!({"title": "T", "body": "B", "head": "harvest/a", "base": "main"});
    let pull = host.expect(201, "POST", &pulls, new.clone()).await;
    assert_eq!((&pull["mergeable"], &pull["commits"]), (&json!(true), &json!(1)));
    let refused = host.expect(422, "POST", &pulls, new).await;
    assert_eq!(
        refused["errors"][0]["message"],
        "A pull request already exists for local:harvest/a."
    );
    for wrong in [
        json!({}),
        json!({"title": "T", "head": "none", "base": "main"}),
        json!({"title": "T", "head": "main", "base": "main"}),
        json!({"title": 1}),
    ] {
        host.expect(422, "POST", &pulls, wrong).await;
    }
    let one = format!("{pulls}/1");
    host.expect(200, "PATCH", &one, json!({"title": "New", "state": "closed"})).await;
    host.expect(200, "PATCH", &one, json!({"state": "open"})).await;
    for path in ["", "/files?per_page=2", "/commits"] {
        host.expect(200, "GET", &format!("{one}{path}"), Value::Null).await;
    }
    let found = host.get(&format!("{pulls}?head=local:harvest/a&state=all")).await.1;
    assert_eq!(found[0]["title"], "New");
    let comments = format!("{REPO}/issues/1/comments");
    let comment = host.expect(201, "POST", &comments, json!({"body": "Hello"})).await;
    host.expect(200, "GET", &comments, Value::Null).await;
    host.expect(422, "POST", &comments, json!({"body": ""})).await;
    let comment = format!("{REPO}/issues/comments/{}", comment["id"]);
    host.expect(200, "PATCH", &comment, json!({"body": "Bye"})).await;
    assert_eq!(host.get(&comment).await.1["body"], "Bye");
    host.expect(204, "DELETE", &comment, Value::Null).await;
    host.expect(404, "GET", &comment, Value::Null).await;
    let merge = format!("{one}/merge");
    host.expect(404, "GET", &merge, Value::Null).await;
    host.expect(409, "PUT", &merge, json!({"sha": "0".repeat(40)})).await;
    host.expect(405, "PUT", &merge, json!({"merge_method": "rebase"})).await;
    host.expect(200, "PUT", &merge, json!({})).await;
    host.expect(204, "GET", &merge, Value::Null).await;
    host.expect(405, "PUT", &merge, json!({})).await;
    host.expect(200, "GET", &one, Value::Null).await;
}

async fn report_statuses(host: &RestHost, sha: &str) {
    let path = format!("{REPO}/statuses/{sha}");
    let status = json!({"state": "success", "context": "check", "description": "passed"});
    host.expect(201, "POST", &path, status).await;
    host.expect(201, "POST", &path, json!({"state": "pending", "target_url": "https://x.test"}))
        .await;
    host.expect(422, "POST", &path, json!({"state": "great"})).await;
    host.expect(422, "POST", &format!("{REPO}/statuses/main"), json!({"state": "success"})).await;
    for below in ["statuses", "status", "check-runs"] {
        let path = format!("{REPO}/commits/harvest/a/{below}");
        host.expect(200, "GET", &path, Value::Null).await;
    }
}

async fn act_as_app(host: &RestHost) {
    let app = host.register(&[("contents", Write), ("pull_requests", Write)]).await;
    let token = jwt(app.id, "app.pkcs8.pem", 0);
    let installation = format!("/app/installations/{}", app.id);
    for path in ["/app", "/app/installations", &installation, "/repos/local/app/installation"] {
        assert_eq!(host.send("GET", path, &token, Value::Null).await.0, 200, "{path}");
    }
    let tokens = format!("{installation}/access_tokens");
    let wanted = json!({"repositories": ["app"], "permissions": {"contents": "read"}});
    let (status, answer) = host.send("POST", &tokens, &token, wanted).await;
    assert_eq!(status, 201, "{answer}");
    for wrong in [
        json!({"repositories": ["none"]}),
        json!({"permissions": {"statuses": "write"}}),
        json!({"repository_ids": [1]}),
    ] {
        assert_eq!(host.send("POST", &tokens, &token, wrong).await.0, 422);
    }
    let value = answer["token"].as_str().unwrap();
    let repositories = host.send("GET", "/installation/repositories", value, Value::Null).await;
    assert_eq!((repositories.0, &repositories.1["total_count"]), (200, &json!(1)));
    assert_eq!(host.send("DELETE", "/installation/token", value, Value::Null).await.0, 204);
    assert_eq!(host.send("GET", REPO, value, Value::Null).await.0, 401);
    host.forge.suspend_app(app.id, true).await.unwrap();
    assert_eq!(host.send("POST", &tokens, &token, json!({})).await.0, 403);
    assert_eq!(host.send("GET", &installation, &token, Value::Null).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn merge_makes_commit_with_both_parents() {
    let host = RestHost::with_branches().await;
    let (main, head) = (host.get(&format!("{REPO}/commits/main")).await.1, "harvest/a");
    let new = json!({"title": "T", "head": head, "base": "main"});
    let pull = host.expect(201, "POST", &format!("{REPO}/pulls"), new).await;
    let merge = format!("{REPO}/pulls/1/merge");
    let merged = host.expect(200, "PUT", &merge, json!({"sha": pull["head"]["sha"]})).await;
    let commit = host.get(&format!("{REPO}/commits/main")).await.1;
    assert_eq!(commit["sha"], merged["sha"]);
    let parents = [&commit["parents"][0]["sha"], &commit["parents"][1]["sha"]];
    assert_eq!(parents, [&main["sha"], &pull["head"]["sha"]]);
    assert_eq!(commit["commit"]["message"], "Merge pull request #1 from local/harvest/a\n\nT");
    let after = host.get(&format!("{REPO}/pulls/1")).await.1;
    assert_eq!((&after["merged"], &after["changed_files"]), (&json!(true), &json!(4)));
}

#[tokio::test(flavor = "multi_thread")]
async fn conflicting_branches_are_not_mergeable() {
    let host = RestHost::with_branches().await;
    host.git(&["checkout", "-q", "main"]).await.unwrap();
    std::fs::write(host.folder.path().join("work/one"), "one\ntwo\nother\n").unwrap();
    host.commit("Conflict").await;
    host.git(&["push", "-q", &host.git_url(TOKEN), "main"]).await.unwrap();
    let new = json!({"title": "T", "head": "harvest/a", "base": "main"});
    let pull = host.expect(201, "POST", &format!("{REPO}/pulls"), new).await;
    let state = (&pull["mergeable"], &pull["mergeable_state"]);
    assert_eq!(state, (&json!(false), &json!("dirty")));
    let main = host.get(&format!("{REPO}/git/ref/heads/main")).await;
    host.expect(405, "PUT", &format!("{REPO}/pulls/1/merge"), json!({})).await;
    assert_eq!(host.get(&format!("{REPO}/git/ref/heads/main")).await, main);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_linked_by_page() {
    let host = RestHost::with_branches().await;
    let url = format!("{}/api/v3{REPO}/branches?per_page=1", host.url);
    let answer = host.client.get(&url).bearer_auth(TOKEN).send().await.unwrap();
    let links = answer.headers()["link"].to_str().unwrap();
    assert_eq!(links, format!("<{url}&page=2>; rel=\"next\", <{url}&page=2>; rel=\"last\""));
    let next = links.split(['<', '>']).nth(1).unwrap();
    let answer = host.client.get(next).bearer_auth(TOKEN).send().await.unwrap();
    let branches: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
    assert_eq!(branches[0]["name"], "main");
}

#[tokio::test(flavor = "multi_thread")]
async fn app_tokens_are_checked() {
    let host = RestHost::with_branches().await;
    let app = host.register(&[("contents", Read)]).await;
    let good = jwt(app.id, "app.pkcs8.pem", 0);
    let flipped = format!("{}AAAA", &good[..good.len() - 4]);
    for (token, status, message) in [
        (good, 200, ""),
        (jwt(app.id, "app.pkcs8.pem", 60), 200, ""),
        (jwt(app.id, "app.pkcs8.pem", 121), 401, "'Issued at' claim ('iat')"),
        (jwt(app.id, "app.pkcs8.pem", -540), 401, "'Expiration time' claim ('exp')"),
        (jwt(app.id, "other.pkcs8.pem", 0), 401, "A JSON web token could not be decoded"),
        (jwt(app.id + 1, "app.pkcs8.pem", 0), 404, "Integration not found"),
        (flipped, 401, "A JSON web token could not be decoded"),
        (TOKEN.to_owned(), 401, "A JSON web token could not be decoded"),
    ] {
        let (got, answer) = host.send("GET", "/app", &token, Value::Null).await;
        assert_eq!(got, status, "{answer}");
        assert!(answer["message"].as_str().unwrap_or_default().starts_with(message), "{answer}");
    }
}

async fn token(host: &RestHost, app: u64, wanted: Value) -> String {
    let path = format!("/app/installations/{app}/access_tokens");
    let (status, answer) = host.send("POST", &path, &jwt(app, "app.pkcs8.pem", 0), wanted).await;
    assert_eq!(status, 201, "{answer}");
    answer["token"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn installation_token_is_limited_to_its_scope() {
    let host = RestHost::with_branches().await;
    let other = harvest_proto::Secret::new("0ther".to_owned());
    host.forge.create("other", &other).await.unwrap();
    let app = host.register(&[("contents", Write), ("pull_requests", Write)]).await;
    let wanted = json!({"repositories": ["app"], "permissions": {"contents": "read"}});
    let read = token(&host, app.id, wanted).await;
    let answer = |method: &'static str, path: &'static str, token: String| {
        let host = &host;
        async move { host.send(method, path, &token, json!({})).await.0 }
    };
    assert_eq!(answer("GET", "/repos/local/app/commits", read.clone()).await, 200);
    assert_eq!(answer("GET", "/repos/local/app/pulls", read.clone()).await, 403);
    assert_eq!(answer("POST", "/repos/local/app/git/refs", read.clone()).await, 403);
    assert_eq!(answer("PUT", "/repos/local/app/pulls/1/merge", read.clone()).await, 403);
    assert_eq!(answer("GET", "/repos/local/other", read.clone()).await, 404);
    assert_eq!(answer("GET", "/repos/local/none", read.clone()).await, 404);
    assert_eq!(answer("GET", "/user", read.clone()).await, 403);
    // The token of a repository opens no other, and an unknown one nothing.
    assert_eq!(answer("GET", "/repos/local/app", "0ther".to_owned()).await, 404);
    assert_eq!(answer("GET", "/repos/local/app", "unknown".to_owned()).await, 401);
    assert_eq!(answer("GET", "/repos/local/none", "unknown".to_owned()).await, 401);
    let url = host.git_url(&read);
    assert!(host.git(&["ls-remote", &url]).await.is_ok());
    let refused = host.git(&["push", &url, "main:refs/heads/x"]).await.unwrap_err();
    assert!(refused.contains("403") && !refused.contains(&read), "{refused}");
    assert!(host.git(&["ls-remote", &url.replace("/app.git", "/other.git")]).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_or_suspended_token_is_refused() {
    let host = RestHost::with_branches().await;
    let app = host.register(&[("contents", Write)]).await;
    let value = token(&host, app.id, json!({})).await;
    let status = async || host.send("GET", REPO, &value, Value::Null).await.0;
    let push = format!("main:refs/heads/at-{NOW}");
    let url = host.git_url(&value);
    assert_eq!(status().await, 200);
    host.forge.suspend_app(app.id, true).await.unwrap();
    assert_eq!(status().await, 401);
    host.forge.suspend_app(app.id, false).await.unwrap();
    host.pass(3599);
    assert_eq!(status().await, 200);
    host.pass(1);
    assert_eq!(status().await, 401);
    let refused = host.git(&["push", &url, &push]).await.unwrap_err();
    assert!(refused.contains("Authentication failed") && !refused.contains(&value), "{refused}");
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_appear_in_no_log_or_file() {
    let log = Log::default();
    let writer = log.clone();
    let filter = tracing_subscriber::EnvFilter::new("harvest_forge=trace,axum=trace");
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(move || writer.clone()).init();
    let host = RestHost::with_branches().await;
    let app = host.register(&[("contents", Read)]).await;
    let good = token(&host, app.id, json!({})).await;
    let signed = jwt(app.id, "other.pkcs8.pem", 0);
    let record = host.forge.suspend_app(app.id, false).await.unwrap();
    tracing::warn!(target: "harvest_forge", ?record, "the log works");
    // A record that cannot be read is logged.
    let records = host.folder.path().join("forge/.tokens");
    for value in [TOKEN, &good, &signed, "ghs_unkn0wn", "wr0ng"] {
        for (method, path) in [("GET", REPO), ("GET", "/app"), ("POST", "/repos/local/app/pulls")] {
            host.send(method, path, value, json!({})).await;
        }
        let answer = host.git(&["push", &host.git_url(value), "main:refs/heads/main"]).await;
        assert!(!format!("{answer:?}").contains(value));
        if value == good {
            let file = std::fs::read_dir(&records).unwrap().next().unwrap().unwrap().path();
            std::fs::write(file, "damaged").unwrap();
            assert_eq!(host.send("GET", REPO, value, Value::Null).await.0, 500);
        }
    }
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("the log works") && text.contains("the forge failed"), "{text}");
    let answers = format!("{:?}", host.records.lock().unwrap());
    for value in [TOKEN, &good, &signed, "ghs_unkn0wn", "wr0ng"] {
        assert!(!text.contains(value), "{text}");
        // The answer that created a token contains it.
        assert!(answers.matches(value).count() <= usize::from(value == good), "{value}");
        let found = std::process::Command::new("grep")
            .args(["-r", "-l", value])
            .arg(host.folder.path().join("forge"))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(found.stdout).unwrap(), "");
    }
}
