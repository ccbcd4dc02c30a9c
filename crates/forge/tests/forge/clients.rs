//! Programs of others use the forge over TLS: Octokit and gh. `.ci/github-peers` installs them.

use harvest_forge::PermissionLevel::{Read, Write};
use serde_json::{Value, json};
use tokio::process::Command;

use super::{
    TOKEN,
    rest_host::{RestHost, peers},
};

#[tokio::test(flavor = "multi_thread")]
async fn octokit_works_as_an_app() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    // Octokit's clock is the machine's.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    host.set_time(i64::try_from(now.as_secs()).unwrap());
    let app = host
        .register(&[
            ("actions", Read),
            ("contents", Write),
            ("issues", Write),
            ("pull_requests", Write),
            ("statuses", Write),
        ])
        .await;
    let program = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/octokit.mjs");
    let output = Command::new(peers().join("node"))
        .arg(program)
        .arg(format!("{}/api/v3", host.url))
        .arg(peers().join("app.pkcs8.pem"))
        .arg(app.id.to_string())
        .current_dir(peers())
        .env("NODE_EXTRA_CA_CERTS", peers().join("ca.pem"))
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = json!({
        "app": "harvest",
        "installations": 1,
        "repositories": ["local/app"],
        "author": "harvest[bot]",
        "mergeable": true,
        "again": "422 A pull request already exists for local:octokit.",
        "files": [
            ["bytes", "added"], ["docs/renamed", "renamed"], ["gone", "removed"], ["one", "modified"],
        ],
        "status": "success",
        "content": "one\ntwo\n",
        "raw": "one\ntwo\n",
        "diff": true,
        "merged": true,
        "state": ["closed", true, true],
        "comments": ["Looks good"],
        "runs": 0,
    });
    assert_eq!(seen, expected);
    host.validate().await;
}

async fn gh(host: &RestHost, token: &str, arguments: &[&str]) -> (bool, String) {
    let (_, name) = host.url.split_once("://").unwrap();
    let home = host.folder.path().join("gh");
    let output = Command::new(peers().join("venv/bin/gh"))
        .args(arguments)
        .env_clear()
        .env("HOME", &home)
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("GH_CONFIG_DIR", &home)
        .env("GH_HOST", name)
        .env("GH_ENTERPRISE_TOKEN", token)
        .env("GH_NO_UPDATE_NOTIFIER", "1")
        .env("SSL_CERT_FILE", peers().join("ca.pem"))
        .output()
        .await
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output.status.success(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn gh_reads_and_writes_with_its_api_command() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let repository = gh(&host, TOKEN, &["api", "repos/local/app", "--jq", ".full_name"]).await;
    assert_eq!(repository, (true, "local/app\n".to_owned()));
    let create = ["api", "repos/local/app/pulls", "-f", "title=T", "-f", "head=harvest/a"];
    let create = [&create[..], &["-f", "base=main", "--jq", ".number"]].concat();
    assert_eq!(gh(&host, TOKEN, &create).await, (true, "1\n".to_owned()));
    let (created, twice) = gh(&host, TOKEN, &create).await;
    assert!(!created && twice.contains("A pull request already exists for local:harvest/a."));
    let pages = ["api", "--paginate", "repos/local/app/branches?per_page=1", "--jq", ".[].name"];
    assert_eq!(gh(&host, TOKEN, &pages).await, (true, "harvest/a\nmain\n".to_owned()));
    let (_, name) = host.url.split_once("://").unwrap();
    let runs = ["run", "list", "-R", &format!("{name}/local/app"), "--json", "status"];
    assert_eq!(gh(&host, TOKEN, &runs).await, (true, "[]\n".to_owned()));
    let (allowed, refused) = gh(&host, "wr0ng-t0ken", &["api", "repos/local/app"]).await;
    assert!(!allowed && refused.contains("Bad credentials") && !refused.contains("wr0ng"));
    host.validate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gh_works_on_pull_requests_with_a_token() {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let repository = format!("{}/local/app", host.url.split_once("://").unwrap().1);
    let run = async |arguments: &[&str]| {
        gh(&host, TOKEN, &[arguments, &["-R", &repository]].concat()).await
    };
    let create = ["pr", "create", "--title", "T", "--body", "B", "--head", "harvest/a", "--draft"];
    let (created, output) = run(&create).await;
    assert!(created && output.contains("/local/app/pr/1\n"), "{output}");
    let (again, output) = run(&create).await;
    assert!(!again && output.contains("already exists"), "{output}");
    let (_, list) = run(&["pr", "list", "--base", "main", "--state", "all"]).await;
    assert!(list.starts_with("1\tT\tharvest/a\tDRAFT\t"), "{list}");
    let (commented, output) = run(&["pr", "comment", "1", "--body", "Looks good"]).await;
    assert!(commented && output.contains("#issuecomment-"), "{output}");
    let (_, view) = run(&["pr", "view", "1", "--comments"]).await;
    assert!(view.contains("Looks good"), "{view}");
    let (_, view) = run(&["pr", "view", "harvest/a"]).await;
    assert!(view.contains("title:\tT\n") && view.contains("state:\tDRAFT\n"), "{view}");
    for refused in [&["pr", "list", "--search", "x"][..], &["pr", "merge", "1", "--merge"]] {
        let (worked, output) = run(refused).await;
        assert!(!worked && output.contains("only `gh pr create`"), "{output}");
    }
    let wrong = gh(&host, "wr0ng-t0ken", &["pr", "list", "-R", &repository]).await;
    assert!(
        !wrong.0 && wrong.1.contains("Bad credentials") && !wrong.1.contains("wr0ng"),
        "{wrong:?}"
    );
    host.validate().await;
}
