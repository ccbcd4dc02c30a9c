//! What sandboxes take over from the host's network: certificates and mirrors, without credentials.

use std::{fs, path::Path, process::Command};

use harvest_e2e::Host;
use harvest_proto::bridge::Exit;
use serde_json::json;

use crate::completed;

/// Creates a certificate authority: `ca.pem` and `ca.key`.
pub(crate) fn certificate_authority(folder: &Path) {
    let arguments =
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=corp -keyout ca.key -out ca.pem";
    let made = Command::new("openssl").args(arguments.split(' ')).current_dir(folder).output();
    assert!(made.as_ref().is_ok_and(|made| made.status.success()), "{made:?}");
}

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
