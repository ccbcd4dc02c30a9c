//! Runs the real binary without a server: help, errors and exit codes.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "cli/images.rs"]
mod images;

use std::process::{Command, Output};

struct Host {
    home: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap() }
    }

    fn harvest(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_harvest"))
            .args(args)
            .env_clear()
            .env("PATH", std::env::var("PATH").unwrap())
            .env("HOME", self.home.path())
            .output()
            .unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn help_lists_every_verb_except_zygote() {
    let output = Host::new().harvest(&["--help"]);
    let help = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0));
    let verbs = "quickstart up doctor run ls show attach send queue stop pause resume fork archive rm diff logs exec \
                 pr repo secret image sandbox snapshot volume df gc";
    for verb in verbs.split_whitespace() {
        assert!(
            help.lines().any(|line| line.starts_with(&format!("  {verb} "))),
            "{verb} is missing:\n{help}"
        );
    }
    assert!(!help.contains("zygote"), "{help}");
    assert!(help.contains("`-` for the newest one"), "{help}");
}

#[test]
fn wrong_usage_exits_with_2() {
    let output = Host::new().harvest(&["run", "fix", "it"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("quote the prompt"), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn missing_server_error_says_how_to_start() {
    let output = Host::new().harvest(&["ls"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "");
    assert_eq!(
        text(&output.stderr),
        "error: no server is running\nhint: start one with `harvest up`, or name one with HARVEST_URL\n"
    );
}

#[test]
fn exec_internal_failure_exits_with_125() {
    assert_eq!(Host::new().harvest(&["exec", "-", "--", "true"]).status.code(), Some(125));
}

#[test]
fn invalid_exec_arguments_are_wrong_usage() {
    let host = Host::new();
    for (arguments, expected) in [
        (&["exec"][..], "<COMMAND>..."),
        (&["exec", "ls"], "<COMMAND>..."),
        (&["exec", "sbx_1", "sbx_2", "--", "true"], "unexpected argument"),
        (&["exec", "--code", "1"], "--lang"),
        (&["exec", "--memory", "lots", "--", "true"], "write it as `512m`"),
        (&["exec", "--volume", "x", "--", "true"], "NAME:/path"),
        (&["exec", "--net", "all", "--", "true"], "possible values: none, trusted, full, host"),
        (&["sandbox", "rm"], "<SANDBOX>"),
        (&["sandbox", "fork", "-n", "0", "x"], "1..=100"),
        (&["volume", "create", "../x"], "invalid volume name"),
    ] {
        let output = host.harvest(arguments);
        let error = text(&output.stderr);
        assert!(
            output.status.code() == Some(2) && error.contains(expected),
            "{arguments:?}: {error}"
        );
    }
    let variable = host.harvest(&["exec", "-e", "=x", "sbx_1", "--", "true"]);
    assert_eq!(variable.status.code(), Some(125));
}

#[test]
fn removing_a_missing_volume_fails() {
    let output = Host::new().harvest(&["volume", "rm", "nothing"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert_eq!(
        error,
        "error: there is no volume `nothing`\nhint: `harvest volume ls` lists volumes\n"
    );
}

#[test]
fn unreachable_server_is_named_with_one_cause() {
    let host = Host::new();
    // Nothing listens on port 1 of loopback: the connection is refused at once.
    let output = Command::new(env!("CARGO_BIN_EXE_harvest"))
        .args(["--url", "http://127.0.0.1:1", "ls"])
        .env("HARVEST_TOKEN", "hv_test")
        .env("HARVEST_HOME", host.home.path())
        .output()
        .unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.starts_with(
            "error: cannot list sessions\n  cause: no response from http://127.0.0.1:1\n"
        ),
        "{error}"
    );
    // The innermost cause, without the errors that wrap it.
    assert_eq!(error.matches("cause:").count(), 2, "{error}");
    assert!(
        error.ends_with("hint: check that the server runs; `harvest up` starts one\n"),
        "{error}"
    );
    assert!(!error.contains("hv_test"), "{error}");
}

#[test]
fn invalid_configuration_names_file_and_key() {
    let host = Host::new();
    let path = host.home.path().join("harvest.toml");
    std::fs::write(&path, "colour = true").unwrap();
    let output = host.harvest(&["--config", path.to_str().unwrap(), "ls"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(error.starts_with(&format!("error: cannot use {}\n", path.display())), "{error}");
    assert!(error.contains("unknown field `colour`"), "{error}");
}

#[test]
fn without_verb_prints_status_and_hint() {
    let host = Host::new();
    let output = host.harvest(&[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).ends_with(": no server is running\n"), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("`harvest quickstart`"), "{}", text(&output.stderr));
    let json: serde_json::Value =
        serde_json::from_slice(&host.harvest(&["--json"]).stdout).unwrap();
    assert!(json["server"].is_null(), "{json}");
}

#[test]
fn invalid_variable_does_not_blame_the_file() {
    let host = Host::new();
    let output = Command::new(env!("CARGO_BIN_EXE_harvest"))
        .arg("ls")
        .env("HOME", host.home.path())
        .env("HARVEST_LISTEN", "x")
        .output()
        .unwrap();
    let error = text(&output.stderr);
    assert!(error.starts_with("error: HARVEST_LISTEN is `x`"), "{error}");
    assert!(!error.contains("harvest.toml"), "{error}");
}

#[test]
fn invalid_secret_name_is_refused_first() {
    let host = Host::new();
    let server = [("HARVEST_URL", "http://127.0.0.1:1"), ("HARVEST_TOKEN", "hv_test")];
    let output = Command::new(env!("CARGO_BIN_EXE_harvest"))
        .args(["secret", "set", "lower-case"])
        .env("HARVEST_HOME", host.home.path())
        .envs(server)
        .output()
        .unwrap();
    let error = text(&output.stderr);
    assert!(
        error.starts_with("error: `lower-case` is not a valid name for a secret\nhint: "),
        "{error}"
    );
}

#[test]
fn plan_of_missing_image_says_how_to_build() {
    let output = Host::new().harvest(&["sandbox", "plan", "--image", "nosuch"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    // A test build may lack the supervisor, which is reported first.
    if !error.contains("built without a supervisor") {
        assert!(error.contains("there is no image `nosuch`"), "{error}");
        assert!(error.contains("harvest image build nosuch"), "{error}");
    }
}

#[test]
fn damaged_sandbox_is_listed_and_can_be_removed() {
    let host = Host::new();
    let folder = host.home.path().join(".local/state/harvest/sandboxes/gdg7h60twnmw");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("record.json"), "").unwrap();
    std::fs::write(
        folder.join("state.json"),
        r#"{"state":"ended","reason":"killed","at":"1970-01-01T00:00:00Z"}"#,
    )
    .unwrap();
    let listed = host.harvest(&["sandbox", "ls"]);
    let notes = text(&listed.stderr);
    assert!(
        listed.status.success() && notes.contains("record.json") && notes.contains("rm --force"),
        "{notes}"
    );
    let output = host.harvest(&["sandbox", "rm", "gdg"]);
    let error = text(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("rm --force"), "{error}");
    let output = host.harvest(&["sandbox", "rm", "--force", "--yes", "gdg"]);
    assert!(output.status.success() && !folder.exists(), "{}", text(&output.stderr));
}

#[test]
fn doctor_prints_json_with_fixes() {
    let output = Host::new().harvest(&["doctor", "--json"]);
    let checks: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let ids: Vec<&str> = checks.iter().filter_map(|check| check["id"].as_str()).collect();
    let engine_failed = ids.contains(&"engine");
    for id in ["git", "git_http_backend", "mmdebstrap"] {
        assert!(ids.contains(&id), "{id} is missing from {ids:?}");
    }
    // A test build may lack the supervisor; then the engine's checks are missing.
    let engine =
        "kernel privileges namespaces overlay id_mapped_mounts cgroups seccomp store disk_home";
    for id in engine.split_whitespace() {
        assert!(engine_failed || ids.contains(&id), "{id} is missing from {ids:?}");
    }
    for check in &checks {
        let has_fix = check["fix"].as_str().is_some_and(|fix| !fix.is_empty());
        assert_eq!(has_fix, check["level"] != "ok", "every problem has a fix: {check}");
    }
    let failed = checks.iter().any(|check| check["level"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(failed)));
}
