//! Which names sandboxes may reach, how a user learns it, and that repositories lead to no private
//! address.

use harvest_e2e::Host;
use harvest_proto::api::{NameSource, NetworkRules};
use serde_json::{Value, json};
use tokio::net::TcpListener;

#[tokio::test]
async fn effective_names_are_listed_with_their_source() {
    let host = Host::start_with(&[("HARVEST_TRUSTED", "*.corp.example")]).await;
    let rules: NetworkRules =
        serde_json::from_str(&host.harvest(["net", "ls", "--json"]).stdout).unwrap();
    let source = |name: &str| {
        rules.names.iter().find(|allowed| allowed.name == name).map(|allowed| allowed.source)
    };
    assert_eq!(source("files.pythonhosted.org"), Some(NameSource::BuiltIn));
    assert_eq!(source("*.corp.example"), Some(NameSource::Config));
    let listed = host.harvest(["net", "ls"]).stdout;
    assert!(listed.contains("built in (pip)") && listed.contains("config"), "{listed}");
}

#[tokio::test]
async fn build_says_how_to_allow_refused_names() {
    let host = Host::start().await;
    let setup = "#!/bin/sh\ngetent hosts forbidden.example.org || true\n";
    host.repository("calc", &[("a", "a"), (".harvest/setup.sh", setup)]).await;
    let built = host.harvest(["repo", "build", "calc", "--force"]);
    assert_eq!(built.code, 0, "{built:?}");
    for words in [
        "Refused a connection to forbidden.example.org",
        "harvest net allow -r local/calc forbidden.example.org",
    ] {
        assert!(built.stderr.contains(words), "{words}: {built:?}");
    }
}

#[tokio::test]
async fn repository_on_loopback_is_refused_and_never_dialled() {
    let host = Host::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    for name in ["127.0.0.1", "loc%61lhost", "lo\u{ad}calhost", "\u{ff11}27.0.0.1"] {
        let url = format!("http://{name}:{port}/a.git");
        for body in [json!({ "repository": url }), json!({ "repositories": [{ "url": url }] })] {
            let mut body = body;
            body["agent"] = "scripted".into();
            body["network"] = "none".into();
            let request = host.request(reqwest::Method::POST, "/v1/sessions").json(&body);
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), 422, "{url}");
            let problem: Value = response.json().await.unwrap();
            assert_eq!(problem["code"], "private_address", "{url}: {problem}");
        }
    }
    assert_eq!(host.harvest(["repo", "ls", "--json"]).stdout.trim(), "[]");
    let dialled = tokio::time::timeout(std::time::Duration::ZERO, listener.accept()).await;
    assert!(dialled.is_err(), "{dialled:?}");
}

#[tokio::test]
async fn ssh_and_short_addresses_are_read_over_https() {
    let host = Host::start().await;
    // Refused before it is dialled, so that the address shows.
    for (address, url) in [
        ("git@127.0.0.1:acme/app.git", "https://127.0.0.1/acme/app.git"),
        ("ssh://git@localhost:2222/acme/app", "https://localhost/acme/app"),
    ] {
        for verb in [&["repo", "add"][..], &["run", "-d", "-a", "scripted", "x", "-r"]] {
            let ran = host.harvest(verb.iter().chain(&[address]));
            assert_ne!(ran.code, 0, "{ran:?}");
            assert!(ran.stderr.contains(&format!("read over HTTPS: {url}")), "{ran:?}");
            assert!(ran.stderr.contains("private address"), "{ran:?}");
        }
        for body in
            [json!({ "repository": address }), json!({ "repositories": [{ "url": address }] })]
        {
            let request = host.request(reqwest::Method::POST, "/v1/sessions").json(&body);
            let problem: Value = request.send().await.unwrap().json().await.unwrap();
            assert_eq!(problem["code"], "private_address", "{address}: {problem}");
        }
    }
    let request = host.request(reqwest::Method::POST, "/v1/repositories");
    let problem = request.json(&json!({ "url": "ada@host:app" })).send().await.unwrap();
    let problem: Value = problem.json().await.unwrap();
    assert_eq!(problem["code"], "invalid_url");
    assert!(problem["detail"].as_str().unwrap().contains("git@HOST:OWNER/NAME"), "{problem}");
    let typed = host.harvest(["repo", "add", "ada@host:app"]);
    assert!(typed.stderr.contains("`ada@host:app` is no address of a repository"), "{typed:?}");
}
