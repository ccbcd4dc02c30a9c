//! The documents: each command in a fenced `sh` block runs on the real binary, page by page and in
//! order, with real Claude Code and a stand-in for the model service. A `text` block after commands
//! is their output. In a page, `<!-- prepare … -->` has commands that only the test needs, and
//! `<!-- model … -->` what the model does.

mod model;
mod page;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use harvest_e2e::{Host, binary};

use self::{
    model::Model,
    page::{Page, Piece},
};

/// Commands that a test cannot run, by their beginning, each with the reason.
const EXCUSED: &[(&str, &str)] = &[
    ("make run", "builds the program; `quickstart_completes_twice_and_cleans_up` runs the rest"),
    ("make build", "builds the program that runs here"),
    ("make dist", "compiles the release program; `packages.rs` makes packages of the debug one"),
    ("apt install ./target/dist/", "`packages.rs` installs the package in a fresh Debian"),
    ("systemctl ", "needs systemd; `packages.rs` checks the unit"),
    ("export HARVEST_HOME=", "names the home of the service"),
    ("mv \"$(harvest config home)\"", "`former_version_refuses_newer_home_and_loads_backup` does"),
    ("harvest backup load before", "`former_version_refuses_newer_home_and_loads_backup` does"),
    ("export PATH=", "the test has the program in its path"),
    ("claude mcp add ", "Claude Code is on a laptop"),
    ("harvest sandbox shell ", "needs a terminal"),
    ("harvest repo add acme/", "needs an account at github.com"),
    ("GITHUB_APP_ID=123456 ", "needs an App at github.com"),
    ("harvest image pull ", "needs a registry; `images_of_skopeo_are_pulled` has one"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> Page {
    Page::parse(&fs::read_to_string(root().join(path)).unwrap_or_else(|_| panic!("{path}")))
}

fn is_excused(line: &str) -> bool {
    EXCUSED.iter().any(|(start, _)| line.trim_start().starts_with(start))
}

/// Whether the test starts a server before the page's first command.
#[derive(PartialEq)]
enum Server {
    Started,
    ByThePage,
}

/// Runs a page in a home and a folder of its own.
async fn run(path: &str, server: Server) {
    run_page(path, &read(path), server).await;
}

/// Runs the commands of a text as if they were on a page; they start the server.
pub(crate) async fn run_text(name: &str, text: &str) {
    run_page(name, &Page::parse(text), Server::ByThePage).await;
}

async fn run_page(path: &str, page: &Page, server: Server) {
    let model = Model::start(page.answers()).await;
    let env = [
        ("ANTHROPIC_API_KEY", "sk-of-the-documents"),
        ("HARVEST_UPSTREAMS_ANTHROPIC_URL", model.url.as_str()),
        ("HARVEST_LISTEN", "127.0.0.1:0"),
        ("GIT_AUTHOR_NAME", "Ada"),
        ("GIT_AUTHOR_EMAIL", "ada@example.org"),
        ("GIT_COMMITTER_NAME", "Ada"),
        ("GIT_COMMITTER_EMAIL", "ada@example.org"),
    ];
    let mut host = Host::start_with(&env).await;
    if server == Server::ByThePage {
        host.kill();
    }
    let output = run_script(&host, &script(page)).await;
    if server == Server::ByThePage {
        host.harvest(["down"]);
    }
    let ended = output.contains("\n@@ end\n");
    assert!(ended, "a command of {path} failed after the last `@@`:\n{output}");
    let ran = |number: &usize| match &page.pieces[*number] {
        Piece::Shell(commands) => commands.lines().any(|line| !is_excused(line)),
        _ => false,
    };
    for (number, expected) in page.outputs().filter(|(number, _)| ran(number)) {
        let printed = section(&output, number);
        if let Some(line) = missing(expected, printed) {
            panic!("{path} shows `{line}`, which block {number} did not print:\n{output}");
        }
    }
}

/// The page as one script that stops at the first failure. `@@ N` begins the output of block N.
fn script(page: &Page) -> String {
    let mut script = "set -euo pipefail\nexec 2>&1\n".to_owned();
    for (number, piece) in page.pieces.iter().enumerate() {
        match piece {
            Piece::Hidden(commands) => script += &format!("echo\necho '@@ hidden'\n{commands}\n"),
            Piece::Shell(commands) => {
                let runs = commands.lines().filter(|line| !is_excused(line));
                let runs: String = runs.map(|line| format!("{line}\n")).collect();
                script += &format!("echo\necho '@@ {number}'\n{runs}");
            }
            Piece::Output(_) | Piece::Other(_) => {}
        }
    }
    script + "echo\necho '@@ end'\n"
}

async fn run_script(host: &Host, script: &str) -> String {
    let folder = host.home().join("work");
    let programs = host.home().join("programs");
    fs::create_dir_all(&folder).unwrap();
    fs::create_dir_all(&programs).unwrap();
    symlink(binary("harvest"), programs.join("harvest")).unwrap();
    let mut bash = Command::new("timeout");
    for (name, value) in host.command().get_envs() {
        match value {
            Some(value) => bash.env(name, value),
            None => bash.env_remove(name),
        };
    }
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    bash.args(["600", "bash", "-c", script]).env("PATH", path);
    bash.current_dir(folder).stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || bash.output().unwrap()).await.unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What block `number` printed.
fn section(output: &str, number: usize) -> &str {
    let (_, rest) = output.split_once(&format!("\n@@ {number}\n")).unwrap_or_default();
    rest.split("\n@@ ").next().unwrap_or_default()
}

/// What a page says that a command prints.
pub(crate) fn output_of(path: &str, command: &str) -> String {
    let page = read(path);
    let is_of = |place: &usize| page.pieces[*place] == Piece::Shell(format!("{command}\n"));
    let mut outputs = page.outputs().filter(|(place, _)| is_of(place));
    outputs.next().unwrap_or_else(|| panic!("{path} has no output of `{command}`")).1.to_owned()
}

/// The first expected line that is not printed after those before it.
pub(crate) fn missing<'a>(expected: &'a str, printed: &str) -> Option<&'a str> {
    let mut lines = printed.lines();
    expected.lines().find(|wanted| !lines.any(|line| matches(wanted, line)))
}

/// Whether a line fits; `…` stands for any text.
fn matches(wanted: &str, line: &str) -> bool {
    let parts: Vec<&str> = wanted.trim_end().split('…').collect();
    let mut rest = line.trim_end();
    for (index, part) in parts.iter().enumerate() {
        let last = index + 1 == parts.len();
        let found = if index == 0 {
            rest.starts_with(part).then_some(0)
        } else if last {
            rest.ends_with(part).then(|| rest.len() - part.len())
        } else {
            rest.find(part)
        };
        let Some(at) = found else { return false };
        rest = &rest[at + part.len()..];
    }
    parts.len() > 1 || rest.is_empty()
}

#[tokio::test]
async fn first_session_commands_work() {
    run("docs/first-session.md", Server::ByThePage).await;
}

#[tokio::test]
async fn own_repository_commands_work() {
    run("docs/own-repository.md", Server::Started).await;
}

#[tokio::test]
async fn secrets_and_network_commands_work() {
    run("docs/secrets-and-network.md", Server::Started).await;
}

#[tokio::test]
async fn images_commands_work() {
    run("docs/images.md", Server::Started).await;
}

#[tokio::test]
async fn snapshots_commands_work() {
    run("docs/snapshots.md", Server::Started).await;
}

#[tokio::test]
async fn memory_and_tools_commands_work() {
    run("docs/memory-and-tools.md", Server::Started).await;
}

#[tokio::test]
async fn mcp_commands_work() {
    run("docs/mcp.md", Server::Started).await;
}

#[tokio::test]
async fn github_commands_work() {
    run("docs/github.md", Server::Started).await;
}

#[tokio::test]
async fn operations_commands_work() {
    run("docs/operations.md", Server::ByThePage).await;
}

#[tokio::test]
async fn staging_commands_work() {
    run("docs/staging.md", Server::ByThePage).await;
}

#[tokio::test]
async fn readme_blocks_work() {
    run("README.md", Server::ByThePage).await;
}

/// The pages whose commands a test of this file runs.
fn pages() -> Vec<String> {
    let mut pages = vec!["README.md".to_owned()];
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") {
            pages.push(format!("docs/{name}"));
        }
    }
    pages.sort();
    pages
}

#[test]
fn every_command_is_run_or_excused() {
    let tests = include_str!("documents.rs");
    let mut excused = BTreeSet::new();
    for path in pages() {
        let page = read(&path);
        let shell = page.pieces.iter().filter_map(|piece| match piece {
            Piece::Shell(commands) => Some(commands),
            _ => None,
        });
        let lines: Vec<&str> = shell.flat_map(|commands| commands.lines()).collect();
        let runs = tests.contains(&format!("run(\"{path}\""));
        assert!(lines.is_empty() || runs, "no test runs the commands of {path}");
        excused.extend(lines.into_iter().filter(|line| is_excused(line)).map(str::to_owned));
        for piece in &page.pieces {
            let Piece::Other(language) = piece else { continue };
            // `clients/python/tests/test_readme.py` runs the programs of these pages.
            let python = language == "python" && ["README.md", "docs/python.md"].contains(&&*path);
            let known = ["", "text", "toml", "ini", "json"].contains(&language.as_str());
            assert!(python || known, "{path}: no test runs a block of `{language}`");
        }
    }
    for (start, _) in EXCUSED {
        let used = excused.iter().any(|line| line.trim_start().starts_with(start));
        assert!(used, "no page has `{start}`");
    }
}

#[test]
fn shown_lines_must_be_printed_in_order() {
    assert!(matches("Opened pull request #1 (…)", "Opened pull request #1 (3 ms)"));
    assert!(matches("…", "anything") && matches("a…c", "abc") && matches("a", "a "));
    assert!(!matches("a", "ab") && !matches("a…", "b") && !matches("…a", "b"));
    assert_eq!(missing("b\nd", "a\nb\nc\nd"), None);
    assert_eq!(missing("d\nb", "a\nb\nc\nd"), Some("b"));
    let output = "\n@@ 1\none\n\n@@ 12\ntwo\n\n@@ end\n";
    assert_eq!((section(output, 1), section(output, 12)), ("one\n", "two\n"));
}
