//! Snapshots of what the real binary prints without a server: the help of every verb, and typical
//! results and errors. `INSTA_UPDATE=always cargo nextest run -p harvest` rewrites the snapshots.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

const SERVER: &[&str] = &[
    "quickstart",
    "up",
    "down",
    "doctor",
    "help",
    "version",
    "token",
    "api",
    "mcp",
    "completion",
    "config",
];
const SESSIONS: &[&str] = &[
    "run",
    "ls",
    "show",
    "attach",
    "send",
    "queue",
    "stop",
    "pause",
    "resume",
    "fork",
    "restore",
    "sync",
    "terminate",
    "archive",
    "rm",
];
const HISTORY: &[&str] = &["turns", "diff", "logs", "events", "artifacts", "pull", "pr", "verify"];
const SANDBOXES: &[&str] = &["exec", "shell", "cp", "sandbox"];
const STORAGE: &[&str] = &["image", "snapshot", "volume", "backup", "df", "gc"];
const REPOSITORIES: &[&str] =
    &["repo", "schedule", "memory", "secret", "models", "budget", "stats", "net", "user"];

/// Runs the binary in an empty home.
struct Host {
    home: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap() }
    }

    /// The command, its exit code and its output, with paths, ids, times and sizes replaced.
    fn run(&self, args: &[&str]) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_harvest"))
            .args(args)
            .env_clear()
            .env("PATH", std::env::var("PATH").unwrap())
            .env("HOME", self.home.path())
            .env("HARVEST_TOKEN", "hv_test")
            // A test build may lack the embedded supervisor; no sandbox is started here.
            .env("HARVEST_SUPERVISOR", env!("CARGO_BIN_EXE_harvest"))
            .current_dir(self.home.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let quoted = |arg: &&str| match arg.is_empty() || arg.contains(' ') {
            true => format!(" '{arg}'"),
            false => format!(" {arg}"),
        };
        let mut text = format!("$ harvest{}\n", args.iter().map(quoted).collect::<String>());
        for (name, bytes) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
            let printed = String::from_utf8(bytes.clone()).unwrap();
            if !printed.is_empty() {
                text += &format!("----- {name} -----\n{printed}");
            }
        }
        let text = filtered(&text, self.home.path());
        format!("{text}exit code: {}\n", output.status.code().unwrap())
    }

    fn run_all(&self, commands: &[&[&str]]) -> String {
        commands.iter().map(|args| self.run(args)).collect::<Vec<_>>().join("\n")
    }

    /// The help of these verbs and their subcommands.
    fn help(&self, verbs: &[&str]) -> String {
        let mut text = String::new();
        for verb in verbs {
            let help = self.run(&[verb, "--help"]);
            text += &format!("{help}\n");
            for inner in commands_in(&help) {
                text += &(self.run(&[verb, &inner, "--help"]) + "\n");
            }
        }
        text
    }
}

/// The verbs below `Commands:` of a help text.
fn commands_in(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| line.starts_with("  "));
    lines.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
}

/// Replaces everything that differs between runs and machines.
fn filtered(text: &str, home: &Path) -> String {
    let text = text.replace(home.to_str().unwrap(), "[HOME]");
    let text = text.replace(env!("CARGO_PKG_VERSION"), "[VERSION]");
    let line = |line: &str| {
        let mut words: Vec<String> = line.split(' ').map(word).collect();
        for index in 1..words.len() {
            let is_number = words[index - 1].parse::<f64>().is_ok();
            if is_number && ["B", "kB", "MB", "GB"].contains(&words[index].trim_end_matches(',')) {
                words[index - 1] = "[SIZE]".to_owned();
            }
        }
        words.join(" ")
    };
    text.lines().map(|text| line(text) + "\n").collect()
}

/// Replaces an image id or a duration such as `12ms` or `1.1s`.
fn word(word: &str) -> String {
    if word.starts_with("img_") {
        return "img_[ID]".to_owned();
    }
    let number = word.trim_end_matches("ms").trim_end_matches('s');
    match number != word && number.parse::<f64>().is_ok() {
        true => "[TIME]".to_owned(),
        false => word.to_owned(),
    }
}

#[test]
fn every_verb_is_in_one_group() {
    let help = Host::new().run(&["--help"]);
    let groups = [SERVER, SESSIONS, HISTORY, SANDBOXES, STORAGE, REPOSITORIES].concat();
    let listed =
        help.lines().filter(|line| line.starts_with("  ") && !line.trim().starts_with('-'));
    assert_eq!(groups.len(), listed.count());
    for verb in groups {
        assert!(help.contains(&format!("\n  {verb} ")), "{verb}");
    }
}

#[test]
fn top_level() {
    let host = Host::new();
    insta::assert_snapshot!(
        "top_level",
        host.run_all(&[
            &[],
            &["--help"],
            &["--version"],
            &["version"],
            &["help", "queue", "mv"],
            &["help", "nosuch"],
            &["nosuch"],
            &["sesions"],
        ])
    );
}

#[test]
fn server_verbs() {
    let host = Host::new();
    insta::assert_snapshot!("server_help", host.help(SERVER));
    let output = host.run_all(&[
        &["quickstart", "--clean"],
        &["up", "--listen", "nowhere"],
        &["up", "--home", "/dev/null/home"],
        &["down"],
        &["token", "ls"],
        &["api", "GET", "me"],
        &["mcp"],
        &["completion", "nosuch"],
        &["config", "image"],
        &["config", "nosuch"],
    ]);
    insta::assert_snapshot!("server_output", output);
}

#[test]
fn session_verbs() {
    let host = Host::new();
    insta::assert_snapshot!("session_help", host.help(SESSIONS));
    let output = host.run_all(&[
        &["run"],
        &["run", "fix it"],
        &["ls"],
        &["--url", "http://127.0.0.1:1", "ls"],
        &["--url", "nowhere", "ls"],
        &["show", "-"],
        &["attach", "-"],
        &["send", "-", ""],
        &["send", "-", "go on"],
        &["queue", "ls", "-"],
        &["stop", "-"],
        &["pause", "-"],
        &["resume", "-"],
        &["fork", "-@1", "-n", "99"],
        &["fork", "-@1"],
        &["restore", "-@1"],
        &["terminate", "-"],
        &["archive", "-"],
        &["rm", "-"],
    ]);
    insta::assert_snapshot!("session_output", output);
}

#[test]
fn history_verbs() {
    let host = Host::new();
    insta::assert_snapshot!("history_help", host.help(HISTORY));
    let output = host.run_all(&[
        &["turns", "-"],
        &["diff", "-"],
        &["diff", "-", "-t", "x"],
        &["logs", "-"],
        &["events", "-", "--types", "nosuch"],
        &["events", "-"],
        &["pr", "show", "-"],
        &["verify", "-"],
        &["verify", "local/app@main"],
        &["verify", "app#x"],
    ]);
    insta::assert_snapshot!("history_output", output);
}

#[test]
fn sandbox_verbs() {
    let host = Host::new();
    insta::assert_snapshot!("sandbox_help", host.help(SANDBOXES));
    let output = host.run_all(&[
        &["exec", "--image", "nosuch", "--", "true"],
        &["exec", "--memory", "lots", "--", "true"],
        &["exec", "-", "--", "true"],
        &["shell", "-"],
        &["cp", "here", "there"],
        &["cp", "a:/x", "b:/y"],
        &["sandbox", "ls"],
        &["sandbox", "inspect", "-"],
        &["sandbox", "inspect", "sbx_zz"],
        &["sandbox", "create", "--image", "nosuch"],
        &["sandbox", "rm", "--all"],
        &["sandbox", "plan", "--image", "nosuch"],
    ]);
    insta::assert_snapshot!("sandbox_output", output);
}

#[test]
fn storage_verbs() {
    let host = Host::new();
    let root = host.home.path().join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    insta::assert_snapshot!("storage_help", host.help(STORAGE));
    let output = host.run_all(&[
        &["image", "build", "nosuch"],
        &["image", "inspect", "tiny"],
        &["image", "import", "tiny", "root"],
        &["image", "rm", "tiny"],
        &["image", "pull", "debian:12"],
        &["snapshot", "ls"],
        &["snapshot", "rm", "snp_zz"],
        &["snapshot", "pin", "-"],
        &["volume", "ls"],
        &["volume", "create", "../x"],
        &["volume", "rm", "data"],
        &["df"],
        &["gc", "--dry-run"],
        &["gc"],
        &["backup", "create", "b.tar.gz"],
        &["backup", "load", "b.tar.gz"],
        &["--home", "new", "backup", "load", "nosuch.tar.gz"],
        &["--home", "new", "backup", "load", "root"],
    ]);
    insta::assert_snapshot!("storage_output", output);
}

#[test]
fn repository_verbs() {
    let host = Host::new();
    insta::assert_snapshot!("repository_help", host.help(REPOSITORIES));
    let output = host.run_all(&[
        &["repo", "add", "https://git.example.org/me/app.git"],
        &["repo", "ls"],
        &["--url", "http://127.0.0.1:1", "repo", "add", "nosuch"],
        &["--url", "http://127.0.0.1:1", "repo", "build", "a/b/c"],
        &["secret", "ls"],
        &["--url", "http://127.0.0.1:1", "secret", "set", "lower-case"],
        &["--url", "http://127.0.0.1:1", "secret", "set", "EMPTY"],
    ]);
    insta::assert_snapshot!("repository_output", output);
}
