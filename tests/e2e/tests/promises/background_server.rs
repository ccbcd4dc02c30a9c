//! The server in the background, with several users and a redacted log.

use std::{
    fs,
    process::{Command, Output},
};

use harvest_e2e::{Host, binary};
use serde_json::{Value, json};

/// A home whose server is started and stopped through the CLI only.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::Builder::new().prefix("hv").tempdir().unwrap())
    }

    fn run(&self, arguments: &[&str], env: &[(&str, &str)]) -> Output {
        let mut command = Command::new(binary("harvest"));
        command
            .args(arguments)
            .env("HARVEST_HOME", self.0.path())
            .env("HARVEST_LISTEN", "127.0.0.1:0");
        command.env_remove("HARVEST_URL").env_remove("HARVEST_TOKEN").envs(env.iter().copied());
        command.output().unwrap()
    }

    /// A verb's JSON output, or its raw output if that is not JSON.
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat(), &[]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.run(&["down"], &[]);
    }
}

#[test]
fn background_server_starts_and_stops_synchronously() {
    let home = Home::new();
    let up = home.run(&["up", "-d"], &[]);
    assert!(up.status.success(), "{up:?}");
    let said = String::from_utf8_lossy(&up.stderr);
    let token = fs::read_to_string(home.0.path().join("token")).unwrap();
    assert!(said.contains(token.trim()), "the first token is shown: {said}");
    let url = String::from_utf8_lossy(&up.stdout).trim().to_owned();
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    assert_eq!(home.json(&["api", "GET", "/readyz"]), json!({ "ready": true }));
    assert_eq!(home.json(&["api", "GET", "me"])["role"], "admin");
    let again = home.run(&["up", "-d"], &[]);
    assert!(
        !again.status.success() && String::from_utf8_lossy(&again.stderr).contains("harvest down")
    );
    let log = fs::read_to_string(home.0.path().join("server.log")).unwrap();
    assert!(!log.contains(token.trim()), "{log}");

    let pid =
        serde_json::from_slice::<Value>(&fs::read(home.0.path().join("server.json")).unwrap())
            .unwrap();
    let pid = pid["pid"].as_u64().unwrap();
    assert_eq!(home.json(&["down"])["ended"], pid);
    // A zombie does not count: its parent is gone and init reaps it.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    assert!(status.is_empty() || status.contains("State:\tZ"), "{status}");
    assert_eq!(home.json(&["down"])["ended"], Value::Null);
}

#[test]
fn failed_background_start_reports_its_reason() {
    let home = Home::new();
    let up = home.run(&["up", "-d", "--listen", "192.0.2.1:7070"], &[]);
    assert_eq!(up.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&up.stderr).contains("cannot listen on 192.0.2.1:7070"),
        "{up:?}"
    );
}

#[tokio::test]
async fn member_token_works_until_revoked() {
    let host = Host::start().await;
    let made = host.harvest([
        "token",
        "create",
        "bob",
        "--user-name",
        "Bob",
        "--email",
        "bob@example.org",
    ]);
    assert_eq!(made.code, 0, "{made:?}");
    let bob = made.stdout.trim().to_owned();
    let ask = |arguments: &[&str]| {
        let mut command = Command::new(binary("harvest"));
        command.args(arguments).env("HARVEST_HOME", host.home()).env("HARVEST_TOKEN", &bob);
        command.env_remove("HARVEST_URL").output().unwrap()
    };
    let me = ask(&["api", "GET", "me"]);
    assert!(String::from_utf8_lossy(&me.stdout).contains("bob@example.org"), "{me:?}");
    let refused = ask(&["schedule", "pause"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(1) && said.contains("only admins") && said.contains("hint:"),
        "{said}"
    );
    assert_eq!(host.harvest(["token", "rm", "bob"]).code, 0);
    let refused = ask(&["api", "GET", "me"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stdout).contains("\"status\":401"), "{refused:?}");
}

#[tokio::test]
async fn json_log_is_line_delimited_and_redacted() {
    let planted = "planted-7b1d40c3";
    let host = Host::start_with(&[("HARVEST_LOG", "trace"), ("HARVEST_LOG_FORMAT", "json")]).await;
    let json = |body: Value| host.request(reqwest::Method::PUT, "/v1/secrets/KEY").json(&body);
    assert!(json(json!({ "value": planted })).send().await.unwrap().status().is_success());
    // The secret is sent to the server in every place that might echo it.
    for path in [format!("/v1/sessions/{planted}"), format!("/{planted}?token={planted}")] {
        let answer = host.get(&path).header("x-planted", planted).send().await.unwrap();
        assert_eq!(answer.status(), 404);
    }
    let log = fs::read_to_string(host.home().join("up.log")).unwrap();
    // The first token is printed once at startup, outside the log.
    let lines: Vec<&str> = log.lines().filter(|line| !line.starts_with(['L', 'T', 'h'])).collect();
    assert!(
        lines.iter().all(|line| !line.contains(planted) && !line.contains(&host.token())),
        "{log}"
    );
    let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Statements of the store are logged in the span too; only the answer has a status.
    let of_route = |line: &&Value| line["span"]["route"] == "/v1/secrets/{name}";
    let answered = lines.iter().filter(of_route).find(|line| line["status"].is_u64());
    let answered = answered.expect("a line");
    assert_eq!(
        (answered["status"].as_u64(), answered["span"]["method"].as_str()),
        (Some(204), Some("PUT"))
    );
    assert!(answered["span"]["id"].as_str().unwrap().starts_with("req_"), "{answered}");
}
