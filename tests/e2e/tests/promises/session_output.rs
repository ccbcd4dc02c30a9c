//! Snapshots of what the session verbs print with a server: each verb's success and its most common
//! error. `INSTA_UPDATE=always` rewrites the snapshots.

use std::{fs, path::Path, process::Command};

use harvest_e2e::Host;
use harvest_proto::{SessionId, api::SessionState};
use serde_json::json;

const FILES: &[(&str, &str)] = &[
    ("greeting.txt", "hello\n"),
    (".harvest/check.sh", "#!/bin/sh\ngrep -q world greeting.txt\n"),
];

/// A full id that no session has.
const UNKNOWN: &str = "ses_000000000000";

/// A server and the ids that were printed so far.
struct Terminal {
    host: Host,
    ids: Vec<String>,
}

impl Terminal {
    /// The commands, their exit codes and their output, with everything replaced that differs
    /// between runs.
    fn run(&mut self, commands: &[&[&str]]) -> String {
        commands.iter().map(|args| self.run_one(args)).collect()
    }

    fn run_one(&mut self, args: &[&str]) -> String {
        let ran = self.host.harvest(args);
        let mut text = format!("$ harvest{}\n", args.iter().map(shown).collect::<String>());
        for (name, printed) in [("stdout", ran.stdout), ("stderr", ran.stderr)] {
            if !printed.is_empty() {
                text += &format!("----- {name} -----\n{printed}");
            }
        }
        let text = self.filtered(&text);
        format!("{text}exit code: {}\n\n", ran.code)
    }

    /// The first session.
    fn session(&self) -> SessionId {
        self.ids.iter().find(|id| id.starts_with("ses_")).unwrap().parse().unwrap()
    }

    fn filtered(&mut self, text: &str) -> String {
        let text = text.replace(self.host.home().to_str().unwrap(), "[HOME]");
        let text = text.replace(&self.host.url().unwrap(), "http://[SERVER]");
        text.lines().map(|line| self.line(line) + "\n").collect()
    }

    /// Columns are as wide as their longest cell, ids and times included: between columns, two
    /// spaces remain.
    fn line(&mut self, line: &str) -> String {
        // Phases of less than a millisecond are left out.
        if line.starts_with("start ") {
            return "start  [PHASES]".to_owned();
        }
        let indent = line.len() - line.trim_start().len();
        let columns = line.trim().split("  ").filter(|column| !column.is_empty());
        let column = |column: &str| {
            let words = column.trim().split(' ').map(|word| self.word(word));
            words.collect::<Vec<_>>().join(" ")
        };
        " ".repeat(indent) + &columns.map(column).collect::<Vec<_>>().join("  ")
    }

    /// Replaces ids, commits, times and durations; punctuation stays.
    fn word(&mut self, word: &str) -> String {
        if word.len() == 24 && word.ends_with('Z') && word.as_bytes()[10] == b'T' {
            return "[AT]".to_owned();
        }
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || "_.".contains(letter);
        let (mut text, mut rest) = (String::new(), word);
        while !rest.is_empty() {
            let end = rest.find(|letter| !is_part(letter)).unwrap_or(rest.len());
            text += &self.part(&rest[..end]);
            let next = rest[end..].find(is_part).map_or(rest.len(), |next| end + next);
            text += &rest[end..next];
            rest = &rest[next..];
        }
        text
    }

    fn part(&mut self, part: &str) -> String {
        let id = part.split_once('_').filter(|(kind, id)| kind.len() == 3 && id.len() == 12);
        if let Some((kind, _)) = id {
            let of_kind = |known: &&String| known.starts_with(kind);
            let position = self.ids.iter().filter(of_kind).position(|known| known == part);
            let number = position.unwrap_or_else(|| {
                self.ids.push(part.to_owned());
                self.ids.iter().filter(of_kind).count() - 1
            });
            return format!("{kind}_[{}]", number + 1);
        }
        // A branch ends with the session's id without its kind.
        let session = format!("ses_{part}");
        if self.ids.contains(&session) {
            return self.part(&session);
        }
        let is_hash = part.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hash && [7, 40].contains(&part.len()) {
            return "[COMMIT]".to_owned();
        }
        let is_time = part.starts_with(|first: char| first.is_ascii_digit())
            && part.ends_with(['s', 'm', 'h', 'd'])
            && part.chars().all(|letter| letter.is_ascii_digit() || ".smhd".contains(letter));
        if is_time { "[TIME]".to_owned() } else { part.to_owned() }
    }
}

/// An argument as one would type it; only the first line of a prompt.
fn shown(argument: &&str) -> String {
    match argument.lines().next() {
        Some(first) if argument.contains('\n') => format!(" '{first}…'"),
        Some(first) if first.contains(' ') => format!(" '{first}'"),
        None => " ''".to_owned(),
        Some(first) => format!(" {first}"),
    }
}

fn write_files(folder: &Path) {
    for (path, content) in FILES {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    for arguments in ["init -q -b main", "add -A", "commit -q -m Begin"] {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=T", "-c", "user.email=t@example.org"]).current_dir(folder);
        assert!(git.args(arguments.split(' ')).status().unwrap().success());
    }
}

#[tokio::test]
async fn session_verbs_print_results_and_errors() {
    let env = [
        ("HARVEST_AUTHOR_NAME", "Ada"),
        ("HARVEST_AUTHOR_EMAIL", "ada@example.org"),
        // Without a key `run` would fail earlier.
        ("ANTHROPIC_API_KEY", "unused"),
    ];
    let mut terminal = Terminal { host: Host::start_with(&env).await, ids: Vec::new() };
    let folder = terminal.host.home().join("hello");
    write_files(&folder);
    let folder = folder.to_str().unwrap().to_owned();
    let push = json!([
        { "text": "I add the name." },
        { "bash": "echo world >> greeting.txt && git commit -qam 'Greet the world' && git push -q" },
        { "text": "Done." },
    ]);
    let greet = format!("Greet the world.\nscript: {push}");
    let look = format!("Look again.\nscript: {}", json!([{ "text": "All is well." }]));
    let run = ["run", "-r", &folder, "--agent", "scripted", "--net", "none"];
    let output = terminal.run(&[
        &["ls"],
        &["repo", "ls"],
        &[&run[..], &[""]].concat(),
        &["run", "-r", "nosuch", "Greet."],
        &[&run[..], &[&greet]].concat(),
        &["send", "-f", "-", &look],
        &["send", "-", ""],
        &["send", UNKNOWN, "Go on."],
    ]);
    insta::assert_snapshot!("started", output);
    let output = terminal.run(&[
        &["ls"],
        &["ls", "--state", "nosuch"],
        &["ls", "--key", "nosuch"],
        &["show", "-"],
        &["show", UNKNOWN],
        &["turns", "-"],
        &["turns", "zzz"],
        &["diff", "--stat", "-"],
        &["diff", "-"],
        &["diff", "--stat", "-t", "9", "-"],
        &["logs", "-"],
        &["logs", UNKNOWN],
        &["repo", "ls"],
        &["repo", "rm", "nosuch"],
        &["pr", "show", "-"],
        &["pr", "show", UNKNOWN],
    ]);
    insta::assert_snapshot!("read", output);
    let session = terminal.session();
    let endless = json!([{ "bash": "while :; do sleep 0.1; done" }]);
    terminal.host.prompt(&session, "Wait.", &endless).await;
    terminal.host.wait_for(&session, SessionState::Running).await;
    let mut output = terminal.run(&[&["send", "-", "Later."]]);
    let queued = terminal.ids.last().unwrap().clone();
    output += &terminal.run(&[
        &["queue", "ls", "-"],
        &["queue", "mv", "-", "zzz", "1"],
        &["queue", "rm", "-", &queued],
        &["queue", "rm", "-", &queued],
        &["stop", "-"],
        &["stop", "-"],
        &["stop", UNKNOWN],
    ]);
    insta::assert_snapshot!("queued", output);
    let output = terminal.run(&[
        &["pause", "-"],
        &["pause", UNKNOWN],
        &["resume", "-"],
        &["resume", UNKNOWN],
        &["archive", "-"],
        &["archive", UNKNOWN],
        &["send", "-", "Go on."],
        &["rm", "-"],
        &["rm", "--yes", "-"],
        &["rm", "--yes", UNKNOWN],
        &["ls"],
    ]);
    insta::assert_snapshot!("ended", output);
}
