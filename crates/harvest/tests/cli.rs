//! What a person sees of the real binary without a server: help, errors, exit codes.
#![expect(clippy::unwrap_used, reason = "what a test cannot do without may fail loudly")]

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
fn help_names_every_verb_and_hides_the_zygote() {
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
fn wrong_usage_exits_with_2_and_says_what_is_right() {
    let output = Host::new().harvest(&["run"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("<PROMPT>"), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn without_a_server_the_error_says_how_to_start_one() {
    let output = Host::new().harvest(&["ls"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "");
    assert_eq!(
        text(&output.stderr),
        "error: no server is running\nhint: start one with `harvest up`, or name one with HARVEST_URL\n"
    );
}

#[test]
fn a_failure_of_exec_itself_is_not_taken_for_the_commands() {
    assert_eq!(Host::new().harvest(&["exec", "-", "--", "true"]).status.code(), Some(125));
}

#[test]
fn what_exec_cannot_make_sense_of_is_wrong_usage() {
    let host = Host::new();
    for (arguments, words) in [
        (&["exec"][..], "<COMMAND>..."),
        (&["exec", "ls"], "<COMMAND>..."),
        (&["exec", "sbx_1", "sbx_2", "--", "true"], "unexpected argument"),
        (&["exec", "--code", "1"], "--lang"),
        (&["exec", "--memory", "lots", "--", "true"], "write it as `512m`"),
        (&["exec", "--volume", "x", "--", "true"], "NAME:/path"),
        (&["exec", "--net", "all", "--", "true"], "possible values: none, host"),
        (&["sandbox", "rm"], "<SANDBOX>"),
        (&["sandbox", "fork", "-n", "0", "x"], "1..=100"),
        (&["volume", "create", "../x"], "no name for a volume"),
    ] {
        let output = host.harvest(arguments);
        let error = text(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(words), "{arguments:?}: {error}");
    }
    let variable = host.harvest(&["exec", "-e", "=x", "sbx_1", "--", "true"]);
    assert_eq!(variable.status.code(), Some(125));
}

#[test]
fn a_volume_that_is_not_there_is_not_said_to_be_removed() {
    let output = Host::new().harvest(&["volume", "rm", "nothing"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert_eq!(
        error,
        "error: there is no volume `nothing`\nhint: `harvest volume ls` lists those there are\n"
    );
}

#[test]
fn a_server_that_does_not_answer_is_named_with_its_cause() {
    let host = Host::new();
    // Port 1 of loopback: nothing listens there, so the answer is a refusal, not a wait.
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
            "error: cannot list sessions\n  cause: no answer from http://127.0.0.1:1\n"
        ),
        "{error}"
    );
    // One cause that says something, not the stack of those around it.
    assert_eq!(error.matches("cause:").count(), 2, "{error}");
    assert!(error.ends_with("hint: is it running? start it with `harvest up`\n"), "{error}");
    assert!(!error.contains("hv_test"), "{error}");
}

#[test]
fn a_broken_configuration_is_named() {
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
fn alone_it_says_what_is_going_on_and_what_to_do_next() {
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
fn a_wrong_variable_is_not_blamed_on_the_file() {
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
fn a_secret_with_no_name_is_refused_before_its_value_is_asked_for() {
    let host = Host::new();
    let server = [("HARVEST_URL", "http://127.0.0.1:1"), ("HARVEST_TOKEN", "hv_test")];
    let output = Command::new(env!("CARGO_BIN_EXE_harvest"))
        .args(["secret", "set", "lower-case"])
        .env("HARVEST_HOME", host.home.path())
        .envs(server)
        .output()
        .unwrap();
    let error = text(&output.stderr);
    assert!(error.starts_with("error: `lower-case` cannot be stored\nhint: "), "{error}");
}

#[test]
fn a_plan_of_an_image_that_is_not_there_says_how_to_make_it() {
    let output = Host::new().harvest(&["sandbox", "plan", "--image", "nosuch"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    // A test build may come without a supervisor, which is told first.
    if !error.contains("built without a supervisor") {
        assert!(error.contains("there is no image `nosuch`"), "{error}");
        assert!(error.contains("harvest image build nosuch"), "{error}");
    }
}

#[test]
fn a_sandbox_whose_record_is_torn_is_named_and_can_be_thrown_away() {
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
    let said = text(&listed.stderr);
    assert!(
        listed.status.success() && said.contains("record.json") && said.contains("rm --force"),
        "{said}"
    );
    let output = host.harvest(&["sandbox", "rm", "gdg"]);
    let error = text(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("rm --force"), "{error}");
    let output = host.harvest(&["sandbox", "rm", "--force", "gdg"]);
    assert!(output.status.success() && !folder.exists(), "{}", text(&output.stderr));
}

#[test]
fn doctor_speaks_json() {
    let output = Host::new().harvest(&["doctor", "--json"]);
    let checks: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let ids: Vec<&str> = checks.iter().filter_map(|check| check["id"].as_str()).collect();
    let unopened = ids.contains(&"engine");
    for id in ["git", "git_http_backend", "mmdebstrap"] {
        assert!(ids.contains(&id), "{id} is missing from {ids:?}");
    }
    // A test build may come without a supervisor, and then there is no engine to ask.
    let engine =
        "kernel privileges namespaces overlay id_mapped_mounts cgroups seccomp store disk_home";
    for id in engine.split_whitespace() {
        assert!(unopened || ids.contains(&id), "{id} is missing from {ids:?}");
    }
    for check in &checks {
        let mended = check["fix"].as_str().is_some_and(|fix| !fix.is_empty());
        assert_eq!(mended, check["level"] != "ok", "what is not ok says how to mend it: {check}");
    }
    let failed = checks.iter().any(|check| check["level"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(failed)));
}
