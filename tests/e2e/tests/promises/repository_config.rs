//! `.harvest/config.toml`: what the base branch declares is used, and gives no rights by itself.

use std::{fs, process::Command};

use harvest_e2e::Host;
use harvest_proto::{
    EventBody, NetworkPolicy,
    api::{CheckOutcome, SessionState},
};
use serde_json::json;

const CONFIG: &str = r#"
packages = ["hello"]
setup = "hello > greeting && echo $COLOR >> greeting"
test = "grep -q Hello greeting"
check = "grep -q good verdict"
ports = [3000]
budget = "1.50"

[env]
COLOR = "blue"

[policy]
network = "none"
allow = ["api.example.org:8443"]
"#;

/// Registers a folder with these files, or copies it again.
pub(crate) fn add(host: &Host, files: &[(&str, &str)]) {
    let folder = host.home().join("sources/shop");
    for (path, content) in files {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    for arguments in ["init -q -b main", "add -A", "commit -q --allow-empty -m Change"] {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=T", "-c", "user.email=t@example.org"]).current_dir(&folder);
        assert!(git.args(arguments.split(' ')).status().unwrap().success());
    }
    let added = host.harvest(["repo", "add", folder.to_str().unwrap()]);
    assert_eq!(added.code, 0, "{added:?}");
}

#[tokio::test]
async fn declared_settings_are_used_within_limits() {
    let host = Host::start().await;
    let files =
        [(".harvest/config.toml", CONFIG), ("verdict", "bad\n"), (".gitignore", "greeting\n")];
    add(&host, &files);
    let built = host.harvest(["repo", "build", "shop"]);
    assert_eq!(built.code, 0, "{built:?}");
    for line in [
        "✓ apt-get install hello",
        "running `check` in .harvest/config.toml",
        "`policy.allow` names api.example.org",
        "`harvest net allow -r local/shop 'api.example.org:8443'`",
    ] {
        assert!(built.stderr.to_lowercase().contains(&line.to_lowercase()), "{line}: {built:?}");
    }
    let shown = host.harvest(["repo", "show", "shop"]).stdout;
    assert!(shown.contains("ports 3000") && shown.contains("check         failed"), "{shown}");

    // The branch adds a script that would be its own judge.
    let script = "cat greeting; echo color $COLOR; mkdir -p .harvest; \
                  echo 'exit 0' > .harvest/check.sh; echo 'check = \"true\"' > .harvest/config.toml; \
                  git add -A; git commit -qm change; git push -q";
    let session = host.scripted("shop", "Go.", &json!([{ "bash": script }])).await;
    assert_eq!(session.network, NetworkPolicy::None);
    assert_eq!(session.budget_micros.map(u64::from), Some(1_500_000));
    let mut stream = host.follow(session.id.clone());
    let is_evidence = |body: &EventBody| matches!(body, EventBody::Evidence(_));
    let EventBody::Evidence(evidence) = stream.until("the evidence", is_evidence).await.body else {
        panic!()
    };
    assert_eq!(evidence.outcome, CheckOutcome::Failed, "{evidence:?}");
    assert_eq!(evidence.check, "`check` in .harvest/config.toml");
    host.wait_for(&session.id, SessionState::Idle).await;
    let events = host.events(&session.id).await;
    let output = events.iter().find_map(|event| match event {
        EventBody::ToolEnded { output, .. } => Some(output.clone()),
        _ => None,
    });
    assert_eq!(output.unwrap().trim_end(), "Hello, world!\nblue\ncolor blue");
}

#[tokio::test]
async fn broken_file_keeps_the_previous_build() {
    let host = Host::start().await;
    add(&host, &[("file", "1")]);
    assert_eq!(host.harvest(["repo", "build", "shop"]).code, 0);
    let before = host.harvest(["repo", "show", "shop", "--json"]).stdout;
    add(&host, &[(".harvest/config.toml", "ports = [3000]\npackage = [\"hello\"]\n")]);
    let built = host.harvest(["repo", "build", "shop"]);
    assert_eq!(built.code, 1, "{built:?}");
    for part in ["line 2", "unknown field `package`", "`packages`"] {
        assert!(built.stderr.contains(part), "{part}: {built:?}");
    }
    assert_eq!(host.harvest(["repo", "show", "shop", "--json"]).stdout, before);
}
