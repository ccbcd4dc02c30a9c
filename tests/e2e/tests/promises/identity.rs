//! The author of commits: from the request, else its token's user, else git's configuration of the
//! caller. Without any of them a request is refused; an address is never made up.

use harvest_e2e::Host;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

/// A host on a machine where git has no identity.
async fn anonymous() -> Host {
    let unset = [("HARVEST_AUTHOR_NAME", ""), ("HARVEST_AUTHOR_EMAIL", "")];
    Host::start_with(&[&unset[..], &[("GIT_CONFIG_GLOBAL", "/dev/null")]].concat()).await
}

async fn answer(host: &Host, method: Method, path: &str, body: Value) -> (StatusCode, Value) {
    let response = host.request(method, path).json(&body).send().await.unwrap();
    (response.status(), response.json().await.unwrap())
}

#[tokio::test]
async fn request_without_an_author_is_refused() {
    let host = anonymous().await;
    let new = json!({ "agent": "scripted", "network": "none" });
    let (status, problem) = answer(&host, Method::POST, "/v1/sessions", new.clone()).await;
    assert_eq!((status, &problem["code"]), (StatusCode::CONFLICT, &json!("no_author")));
    assert!(problem["hint"].as_str().unwrap().contains("git config --global user.email"));
    let refused = host.harvest(["run", "-d", "-a", "scripted", "--net", "none", "begin"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("git config --global user.name NAME"), "{refused:?}");
    let (status, _) = answer(&host, Method::POST, "/v1/tokens", json!({ "name": "bot" })).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let mut named = new;
    named["author"] = json!({ "name": "Ada", "email": "ada@example.org" });
    let (status, session) = answer(&host, Method::POST, "/v1/sessions", named).await;
    assert_eq!((status, &session["author"]["name"]), (StatusCode::CREATED, &json!("Ada")));
    let folder = host.home().join("plain");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("file"), "text").unwrap();
    let added = host.harvest(["repo", "add", "--all", folder.to_str().unwrap()]);
    assert!(added.code == 1 && added.stderr.contains("needs an author"), "{added:?}");
}

#[tokio::test]
async fn identity_of_the_callers_git_is_used() {
    let mut host = anonymous().await;
    let config = host.home().join("gitconfig");
    std::fs::write(&config, "[user]\n\tname = Grace\n\temail = grace@example.org\n").unwrap();
    let config = config.to_str().unwrap().to_owned();
    let grace = [("GIT_CONFIG_GLOBAL", config.as_str())];
    let run = ["run", "-d", "--json", "-a", "scripted", "--net", "none", "begin"];
    let created = host.harvest_with(&grace, run);
    let session: Value = serde_json::from_str(&created.stdout).unwrap_or_default();
    assert_eq!(session["author"]["email"], "grace@example.org", "{created:?}");
    let sent = host.harvest_with(&grace, ["send", "--json", "-", "go on"]);
    let prompt: Value = serde_json::from_str(&sent.stdout).unwrap_or_default();
    assert_eq!(prompt["author"]["name"], "Grace", "{sent:?}");
    // A server that learns of the identity later takes it over.
    host.kill();
    host.set("GIT_CONFIG_GLOBAL", &config);
    host.up().await;
    let me: Value = host.get("/v1/me").send().await.unwrap().json().await.unwrap();
    assert_eq!(me["user"]["email"], "grace@example.org");
}

#[tokio::test]
async fn commits_in_a_shell_are_the_authors() {
    let host = Host::start().await;
    let session = host.bare("begin", &json!([{ "text": "Done." }])).await;
    let commit =
        "git init -q r && cd r && git commit -q --allow-empty -m x && git log --format=%an:%ae";
    let ran = host.harvest(["exec", &session.id.to_string(), "--", "sh", "-c", commit]);
    assert_eq!(ran.stdout.trim(), "Test (Harvest):test@example.org", "{ran:?}");
}
