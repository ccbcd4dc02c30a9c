//! What sandboxes take over from the host's network: certificates and mirrors, without credentials.

mod corp;

use std::{fs, path::Path};

use harvest_e2e::Host;
use harvest_proto::{SessionId, bridge::Exit};
use serde_json::json;

use crate::{completed, secrets::set_secret, turn_ended};
use corp::Corp;
pub(crate) use corp::certificate_authority;

/// As in `mirror.py`.
const GITHUB_TOKEN: &str = "github-planted-of-ada";

/// Prints the settings, and fails unless the bundle has more than the host's certificate.
const SETTINGS: &str = "echo $PIP_INDEX_URL; cat $npm_config_globalconfig /.cargo/config.toml; \
    cat $GIT_SSL_CAINFO; test $(grep -c BEGIN $SSL_CERT_FILE) -gt 1";

#[tokio::test]
async fn host_settings_reach_sessions_and_builds() {
    let folder = tempfile::tempdir().unwrap();
    certificate_authority(folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let npmrc =
        "registry=https://user:hidden@npm.corp.example/\n//npm.corp.example/:_authToken=hidden\n";
    fs::write(path("npmrc"), npmrc).unwrap();
    let cargo = "[source.crates-io]\nreplace-with = \"corp\"\n[source.corp]\n\
        registry = \"sparse+https://crates.corp.example/\"\n";
    fs::write(path("config.toml"), cargo).unwrap();
    let mut host = Host::start_with(&[
        ("SSL_CERT_FILE", &path("ca.pem")),
        ("NPM_CONFIG_USERCONFIG", &path("npmrc")),
        ("CARGO_HOME", folder.path().to_str().unwrap()),
        ("PIP_INDEX_URL", "https://user:hidden@pip.corp.example/simple"),
    ])
    .await;
    let setup = format!("#!/bin/sh\n({SETTINGS}) > /tmp/build\n");
    host.repository("calc", &[("a", "a"), (".harvest/setup.sh", &setup)]).await;
    let session = host.session("calc", "Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;

    let certificate = fs::read_to_string(path("ca.pem")).unwrap();
    let expected = [
        "https://pip.corp.example/simple",
        "registry=https://npm.corp.example/",
        "registry = \"sparse+https://crates.corp.example/\"",
        certificate.trim(),
    ];
    let (_, built) = host.exec(&session, "root", "cat /tmp/build").await;
    let (exit, settings) = host.exec(&session, "harvest", SETTINGS).await;
    assert_eq!(exit, Exit::Code(0), "{settings}");
    host.kill();
    host.up().await;
    let (_, after_restart) = host.exec(&session, "harvest", SETTINGS).await;
    for shown in [built, settings, after_restart] {
        for words in expected {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        assert!(!shown.contains("hidden"), "{shown}");
    }
    let (exit, _) = host.exec(&session, "root", "touch /run/harvest/ca.pem").await;
    assert_ne!(exit, Exit::Code(0), "the settings can be changed inside");
}

/// A session whose first turn has ended.
async fn session(host: &Host, network: &str) -> SessionId {
    let prompt = "Begin.\nscript: [{\"text\": \"ready\"}]";
    let body = json!({ "agent": "scripted", "network": network, "prompt": prompt });
    let session = host.post("/v1/sessions", body).await;
    let id: SessionId = session["id"].as_str().unwrap().parse().unwrap();
    host.follow(id.clone()).until("the first turn", turn_ended).await;
    id
}

// The proxy behind tinyproxy runs in this process, also while the CLI does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packages_install_behind_proxy_and_private_mirror() {
    let corp = Corp::start().await;
    let path = |name: &str| corp.folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("npmrc"), "registry=https://mirror.corp.example/npm/\n").unwrap();
    let crates = "[source.crates-io]\nreplace-with = \"corp\"\n[source.corp]\n\
        registry = \"sparse+https://mirror.corp.example/cargo/\"\n";
    fs::write(path("config.toml"), crates).unwrap();
    let list = "deb https://user:hidden@mirror.corp.example/debian bookworm main\n";
    let host = Host::start_with(&[
        ("SSL_CERT_FILE", &path("ca.pem")),
        ("NPM_CONFIG_USERCONFIG", &path("npmrc")),
        ("PIP_INDEX_URL", "https://mirror.corp.example/simple"),
        ("CARGO_HOME", corp.folder.path().to_str().unwrap()),
        ("APT_CONFIG", &apt_sources(corp.folder.path(), list)),
        ("HTTPS_PROXY", &corp.proxy),
    ])
    .await;
    let session = session(&host, "trusted").await;
    copy_cargo(&host, &session);
    let npm = "mkdir -p /tmp/app && cd /tmp/app && echo '{\"dependencies\": {\"tiny\": \"1.0.0\"}}' > package.json && \
        npm install --package-lock-only --no-audit && npm ci --no-audit && node -p 'require(\"tiny\")'";
    let pip = "python3 -m venv /tmp/env && /tmp/env/bin/pip install --no-cache-dir tiny && \
        /tmp/env/bin/python -c 'import tiny; print(tiny.NAME)'";
    let cargo = format!("{} && cat vendor/tiny/src/lib.rs", vendor("tiny", "1.0.0"));
    // The mirror has no signature: what its keys would prove is not tested here.
    let apt = "apt-get -o Acquire::AllowInsecureRepositories=true update && \
        apt-get install -y --allow-unauthenticated tiny && tiny";
    for (user, command, words) in [
        ("harvest", npm, "tiny from npm"),
        ("harvest", pip, "tiny from pip"),
        ("harvest", &cargo, "tiny from cargo"),
        ("root", apt, "tiny from apt"),
    ] {
        let (exit, output) = host.exec(&session, user, command).await;
        assert!(exit == Exit::Code(0) && output.contains(words), "{command}: {exit:?} {output}");
    }
    let (_, env) = host.exec(&session, "harvest", "env; cat /run/harvest/*").await;
    assert!(!env.contains("hidden") && !env.to_lowercase().contains("https_proxy"), "{env}");
    let seen = corp.seen.lock().unwrap().concat();
    assert!(seen.contains("CONNECT mirror.corp.example:443"), "{seen}");
}

/// The configuration of an apt whose only sources are this list.
fn apt_sources(folder: &Path, list: &str) -> String {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    fs::write(path("list"), list).unwrap();
    let paths = format!(
        "Dir::Etc::sourcelist \"{}\";\nDir::Etc::sourceparts \"{}\";\n",
        path("list"),
        path("none")
    );
    fs::write(path("apt.conf"), paths).unwrap();
    path("apt.conf")
}

/// Debian's cargo reads a git index. The one that runs the tests reads that of today.
fn copy_cargo(host: &Host, session: &SessionId) {
    let cargo = std::env::var("CARGO").unwrap();
    let copied = host.harvest(["cp", &cargo, &format!("{session}:/tmp/cargo")]);
    assert_eq!(copied.code, 0, "{copied:?}");
}

/// Fetches a crate into `vendor`.
fn vendor(name: &str, version: &str) -> String {
    format!(
        "mkdir -p /tmp/crate/src && cd /tmp/crate && touch src/lib.rs && printf \
         '[package]\\nname = \"app\"\\nversion = \"1.0.0\"\\n[dependencies]\\n{name} = \"={version}\"\\n' \
         > Cargo.toml && CARGO_HOME=/tmp/cargo-home /tmp/cargo vendor --respect-source-config"
    )
}

#[tokio::test]
async fn cargo_and_apt_fetch_through_the_door() {
    let host = Host::start().await;
    let session = session(&host, "trusted").await;
    copy_cargo(&host, &session);
    let fetch = format!("{} && cat vendor/itoa/Cargo.toml", vendor("itoa", "1.0.11"));
    let apt = "apt-get update && apt-get install -y --no-install-recommends hello && hello";
    for (user, command, words) in
        [("harvest", fetch.as_str(), "version = \"1.0.11\""), ("root", apt, "Hello, world!")]
    {
        let (exit, output) = host.exec(&session, user, command).await;
        assert!(exit == Exit::Code(0) && output.contains(words), "{command}: {exit:?} {output}");
    }
}

#[tokio::test]
async fn root_finds_the_hosts_debian_mirror() {
    let folder = tempfile::tempdir().unwrap();
    let list = "deb https://user:hidden@mirror.corp.example/debian bookworm main\n";
    let mut host = Host::start_with(&[("APT_CONFIG", &apt_sources(folder.path(), list))]).await;
    let session = session(&host, "trusted").await;
    let flags = ["sandbox", "create", "--image", "agents", "--no-state", "--net", "trusted"];
    let created = host.harvest(flags);
    assert_eq!(created.code, 0, "{created:?}");
    let sandbox = created.stdout.trim().to_owned();
    let uris = "apt-get indextargets --format '$(SITE)'; cat /etc/apt/sources.list.d/*; \
        getent hosts mirror.corp.example";
    let seen = |host: &Host, sandbox: &str| {
        let ran = host.harvest(["exec", sandbox, "--user", "root", "--", "sh", "-c", uris]);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.stdout.contains("https://mirror.corp.example/debian"), "{ran:?}");
        for words in ["hidden", "deb.debian.org"] {
            assert!(!ran.stdout.contains(words), "{words}: {ran:?}");
        }
    };
    seen(&host, &sandbox);
    seen(&host, &session.to_string());
    host.kill();
    host.up().await;
    for verb in ["stop", "start"] {
        assert_eq!(host.harvest(["sandbox", verb, &sandbox]).code, 0, "{verb}");
    }
    seen(&host, &sandbox);
}

#[tokio::test]
async fn public_git_dependency_is_fetched_but_not_pushed() {
    let corp = Corp::start().await;
    let path = |name: &str| corp.folder.path().join(name).to_str().unwrap().to_owned();
    let host =
        Host::start_with(&[("SSL_CERT_FILE", &path("ca.pem")), ("HTTPS_PROXY", &corp.proxy)]).await;
    let open = session(&host, "trusted").await;
    for url in [
        "https://github.com/acme/lib",
        "git@github.com:acme/lib.git",
        "ssh://git@github.com/acme/lib.git",
    ] {
        let clone =
            format!("rm -rf /tmp/lib && git clone -q {url} /tmp/lib && cat /tmp/lib/README");
        let (exit, output) = host.exec(&open, "harvest", &clone).await;
        assert_eq!((exit, output.as_str()), (Exit::Code(0), "a public library\n"), "{url}");
    }
    let (exit, output) = host.exec(&open, "harvest", "git -C /tmp/lib push origin HEAD:x").await;
    assert!(exit != Exit::Code(0) && output.contains("session's own"), "{output}");
    let closed = session(&host, "none").await;
    let clone = "git clone https://github.com/acme/lib /tmp/lib";
    let (exit, output) = host.exec(&closed, "harvest", clone).await;
    assert!(exit != Exit::Code(0) && output.contains("network policy"), "{output}");
}

// The proxy behind tinyproxy runs in this process, also while the CLI does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn github_token_of_user_opens_private_repository() {
    let corp = Corp::start().await;
    let path = |name: &str| corp.folder.path().join(name).to_str().unwrap().to_owned();
    let host =
        Host::start_with(&[("SSL_CERT_FILE", &path("ca.pem")), ("HTTPS_PROXY", &corp.proxy)]).await;
    let add = ["repo", "add", "https://github.com/acme/private.git"];
    // A token for all users is not sent to a repository that any of them names.
    set_secret(&host, &["GITHUB_TOKEN"], GITHUB_TOKEN);
    let refused = host.harvest(add);
    assert!(refused.code == 1 && refused.stderr.contains("needs a token"), "{refused:?}");
    set_secret(&host, &["GITHUB_TOKEN", "--user"], GITHUB_TOKEN);
    let added = host.harvest(add);
    assert_eq!(added.code, 0, "{added:?}");
    let body = json!({
        "agent": "scripted", "repository": "acme/private", "base": "main",
        "prompt": "Begin.\nscript: [{\"text\": \"ready\"}]",
    });
    let session = host.post("/v1/sessions", body).await;
    let id: SessionId = session["id"].as_str().unwrap().parse().unwrap();
    host.follow(id.clone()).until("the first turn", turn_ended).await;
    let (_, readme) = host.exec(&id, "harvest", "cat /workspace/private/README").await;
    assert_eq!(readme, "a public library\n");
}

// As above.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn build_reads_private_repository_with_shared_token() {
    let corp = Corp::start().await;
    let path = |name: &str| corp.folder.path().join(name).to_str().unwrap().to_owned();
    let mut host =
        Host::start_with(&[("SSL_CERT_FILE", &path("ca.pem")), ("HTTPS_PROXY", &corp.proxy)]).await;
    set_secret(&host, &["GITHUB_TOKEN", "--user"], GITHUB_TOKEN);
    let added = host.harvest(["repo", "add", "https://github.com/acme/private.git"]);
    assert_eq!(added.code, 0, "{added:?}");
    let build = ["repo", "build", "acme/private", "--force"];
    // Every session may start from a build: a token of one user does not open it.
    let refused = host.harvest(build);
    assert!(refused.code == 1 && refused.stderr.contains("needs a token"), "{refused:?}");
    let of_repository = ["GITHUB_TOKEN", "--repository", "acme/private"];
    set_secret(&host, &of_repository, GITHUB_TOKEN);
    let built = host.harvest(build);
    assert_eq!(built.code, 0, "{built:?}");
    let removed = host.harvest([&["secret", "rm"], &of_repository[..]].concat());
    assert_eq!(removed.code, 0, "{removed:?}");
    assert_eq!(host.harvest(build).code, 1);
    // The server's own token, once it is shared with all users.
    host.kill();
    host.set("GITHUB_TOKEN", GITHUB_TOKEN);
    host.up().await;
    assert_eq!(host.harvest(build).code, 1);
    host.kill();
    host.set("HARVEST_GITHUB_SHARED_TOKEN", "true");
    host.up().await;
    let built = host.harvest(build);
    assert_eq!(built.code, 0, "{built:?}");
}
