//! `harvest quickstart` succeeds twice in a row and with each agent, prints what the README shows,
//! and cleans up. The next steps that it names work.

use std::{fs, path::Path, process::Command};

use harvest_e2e::binary;

use crate::documents::{missing, output_of, run_text};

/// Runs the quickstart in a home. Both outputs are one, in the order of a terminal.
fn quickstart(home: &Path, arguments: &[&str]) -> String {
    let ran = Command::new("sh")
        .args(["-c", "exec \"$0\" quickstart \"$@\" 2>&1"])
        .arg(binary("harvest"))
        .args(arguments)
        .env("HARVEST_HOME", home)
        .env_remove("ANTHROPIC_API_KEY")
        // A machine where git has no identity.
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{text}");
    text
}

/// What is printed whatever the agent.
fn shows_everything(text: &str, product: &str) {
    for wanted in [
        product,
        "scripted",
        "return a + b",
        "Quickstart (Harvest) <quickstart@localhost>",
        "✓ Double by shifting the bits",
        "✗ Add bit by bit",
        "its tests passed: OK",
        "its tests failed: FAILED (failures=2)",
    ] {
        assert!(text.contains(wanted), "no `{wanted}` in:\n{text}");
    }
    for line in next_steps().lines() {
        let command = line.split("   #").next().unwrap_or(line);
        let shown = command.split("{key}").next().unwrap_or(command);
        assert!(text.contains(shown), "no `{shown}` in:\n{text}");
    }
}

fn next_steps() -> String {
    let path = "../../crates/harvest/src/quickstart/next_steps.txt";
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn home() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("hv").tempdir().unwrap()
}

#[test]
fn quickstart_completes_twice_and_cleans_up() {
    let home = home();
    for _ in 0..2 {
        let text = quickstart(home.path(), &[]);
        shows_everything(&text, "real Claude Code");
        let shown = output_of("README.md", "make run");
        assert_eq!(missing(&shown, &text), None, "the README shows it; printed was:\n{text}");
    }
    quickstart(home.path(), &["--clean"]);
    let left: Vec<_> =
        fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn quickstart_runs_with_opencode() {
    let home = home();
    shows_everything(&quickstart(home.path(), &["-a", "opencode"]), "real OpenCode");
    quickstart(home.path(), &["--clean"]);
}

#[test]
fn quickstart_runs_with_codex() {
    let home = home();
    shows_everything(&quickstart(home.path(), &["-a", "codex"]), "real Codex");
    quickstart(home.path(), &["--clean"]);
}

#[tokio::test]
async fn next_steps_of_quickstart_work() {
    // `test_quickstart_installs_the_client` of the Python client runs the command of pip.
    let steps = next_steps();
    let commands = steps.lines().filter(|line| line.starts_with("  harvest "));
    let commands: Vec<_> = commands.map(str::trim_start).collect();
    assert_eq!(commands.len(), 3, "{steps}");
    let commands = commands.join("\n").replace("{key}", "ANTHROPIC_API_KEY < ../key.txt");
    let page = format!(
        "<!-- model\n\
         make the failing test pass => sed -i 's/a - b/a + b/' calc.py && git commit -qam 'Add'\n\
         -->\n\n\
         <!-- prepare\n\
         echo sk-ant-of-the-page > key.txt\n\
         mkdir app && cd app && git init -q -b main\n\
         printf 'def add(a, b):\\n    return a - b\\n' > calc.py\n\
         git add -A && git commit -qm Begin\n\
         -->\n\n\
         ```sh\n{commands}\nharvest exec - -- cat calc.py\n```\n\n\
         ```text\n    return a + b\n```\n"
    );
    run_text("the quickstart", &page).await;
}
