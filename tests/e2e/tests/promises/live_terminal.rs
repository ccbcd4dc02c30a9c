//! What the session verbs show on a terminal: the live line, colours, the pager, typed answers; and
//! what they leave out elsewhere.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    time::Instant,
};

use harvest_e2e::{Host, PATIENCE};
use harvest_proto::{SessionId, bridge::Exit};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use serde_json::{Value, json};

use crate::SAMPLE;

/// A verb that runs on a pseudo-terminal, and its output that was not consumed yet.
struct Terminal {
    child: Child,
    screen: File,
    output: String,
}

impl Terminal {
    fn run(host: &Host, variables: &[(&str, &str)], arguments: &[&str]) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
        let size = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&ours, size).unwrap();
        let side = || Stdio::from(theirs.try_clone().unwrap());
        let child = Command::new(harvest_e2e::binary("harvest"))
            .args(arguments)
            .env("HARVEST_HOME", host.home())
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .envs(variables.iter().copied())
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .unwrap();
        Self { child, screen: ours.into(), output: String::new() }
    }

    fn type_in(&mut self, text: &str) {
        self.screen.write_all(text.as_bytes()).unwrap();
    }

    /// Reads until this text appears and returns the output up to it.
    fn shows(&mut self, wanted: &str) -> String {
        let end = Instant::now() + PATIENCE;
        while !self.output.contains(wanted) {
            assert!(self.read(end), "{wanted:?} is not shown: {:?}", self.output);
        }
        let end = self.output.find(wanted).unwrap() + wanted.len();
        self.output.drain(..end).collect()
    }

    /// The rest of the output, and the exit code.
    fn ends(mut self) -> (String, Option<i32>) {
        let end = Instant::now() + PATIENCE;
        while self.read(end) {}
        (self.output, self.child.wait().unwrap().code())
    }

    /// Whether there was more; reads fail once no process has the terminal open.
    fn read(&mut self, end: Instant) -> bool {
        let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).unwrap();
        let ready = poll(&mut [PollFd::new(&self.screen, PollFlags::IN)], Some(&left)).unwrap();
        let mut buffer = [0; 4096];
        let count = if ready > 0 { self.screen.read(&mut buffer).unwrap_or(0) } else { 0 };
        self.output += &String::from_utf8_lossy(&buffer[..count]);
        count > 0
    }
}

const RUN: [&str; 6] = ["run", "-r", "calc", "--agent", "scripted", "--net=none"];

async fn host() -> Host {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    host
}

fn prompt(steps: Value) -> String {
    format!("Go.\nscript: {steps}")
}

#[tokio::test]
async fn running_tool_is_shown_with_a_clock() {
    let host = host().await;
    let wait = "until test -e /tmp/go; do sleep 0.1; done; echo finished";
    let script =
        prompt(json!([{ "text": "I **wait**.\n" }, { "bash": wait }, { "text": "`Done`" }]));
    let mut terminal = Terminal::run(&host, &[], &[&RUN[..], &[&script]].concat());
    terminal.shows("Created ");
    let created = terminal.shows(" on ");
    let session: SessionId = created.trim_end_matches(" on ").parse().unwrap();
    terminal.shows("I \u{1b}[1mwait\u{1b}[0m.");
    let tool = "Bash until test -e /tmp/go";
    terminal.shows(tool);
    terminal.shows("  1s");
    assert_eq!(host.exec(&session, "root", "touch /tmp/go").await.0, Exit::Code(0));
    // The final line comes after the live line was erased.
    let before = terminal.shows("\u{1b}[32m  ✓\u{1b}[0m ");
    assert!(before.ends_with("\u{1b}[2K\u{1b}[32m  ✓\u{1b}[0m "), "{before:?}");
    terminal.shows("→ finished");
    terminal.shows("\u{1b}[36mDone\u{1b}[0m");
    let (rest, code) = terminal.ends();
    assert!(rest.contains("\u{1b}[32mCompleted\u{1b}[0m turn 1 in "), "{rest:?}");
    assert_eq!(code, Some(0));
}

#[tokio::test]
async fn diff_is_paged_and_coloured_on_a_terminal() {
    let host = host().await;
    let script = prompt(json!([{ "write": { "path": "new.txt", "content": "hello\n" } }]));
    let ran = host.harvest([&RUN[..], &[&script]].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("Write new.txt") && ran.stderr.contains(" → +1\n"),
        "{}",
        ran.stderr
    );
    assert!(!ran.stderr.contains('\u{1b}') && !ran.stderr.contains("⠋"), "{:?}", ran.stderr);

    let pager = ("HARVEST_PAGER", "sed s/^/page:/");
    let (shown, code) = Terminal::run(&host, &[pager], &["diff", "-"]).ends();
    assert!(shown.contains("page:\u{1b}[32m+hello\u{1b}[0m"), "{shown:?}");
    assert_eq!(code, Some(0));
    let dumb = [pager, ("TERM", "dumb")];
    let (shown, _) = Terminal::run(&host, &dumb, &["diff", "-"]).ends();
    assert!(shown.contains("+hello") && !shown.contains("page:"), "{shown:?}");
    for verb in ["logs", "show", "diff"] {
        let (shown, _) = Terminal::run(&host, &dumb, &[verb, "-"]).ends();
        assert!(!shown.is_empty() && !shown.contains('\u{1b}'), "{verb}: {shown:?}");
        let (shown, _) = Terminal::run(&host, &[], &[verb, "-", "--json"]).ends();
        assert!(!shown.is_empty() && !shown.contains('\u{1b}'), "{verb} --json: {shown:?}");
    }
}

#[tokio::test]
async fn question_is_answered_on_the_terminal() {
    let host = host().await;
    let ask = json!({ "ask": { "question": "Tabs or spaces?", "options": ["tabs", "spaces"] } });
    let script = prompt(json!([ask]));
    let mut terminal = Terminal::run(&host, &[], &[&RUN[..], &[&script]].concat());
    terminal.shows("2. spaces");
    terminal.shows("answer> ");
    terminal.type_in("\n");
    terminal.shows("answer> ");
    terminal.type_in("2\n");
    terminal.shows("Answered “spaces”");
    terminal.shows("The answer is spaces.");
    let (rest, code) = terminal.ends();
    assert!(rest.contains("turn 1 in "), "{rest:?}");
    assert_eq!(code, Some(0));
}

#[tokio::test]
async fn question_without_terminal_exits_with_3() {
    let host = host().await;
    let ask = json!({ "ask": { "question": "Tabs or spaces?", "options": ["tabs", "spaces"] } });
    let wait = json!({ "bash": "sleep 98765" });
    let script = prompt(json!([{ "bash": "true" }, ask, wait]));
    let ran = host.harvest([&RUN[..], &[&script]].concat());
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: answer with `harvest send ses_"), "{}", ran.stderr);
    let attached = host.harvest(["attach", "-"]);
    assert_eq!(attached.code, 3, "{}", attached.stderr);
    assert!(
        attached.stderr.contains("hint: answer with `harvest send ses_"),
        "{}",
        attached.stderr
    );
    let sent = host.harvest(["send", "-", "tabs"]);
    assert!(sent.stderr.starts_with("Answered ses_"), "{}", sent.stderr);

    // The turn and its tool began before this follower.
    let followed = host.harvest(["send", "--now", "-f", "-", &prompt(json!([{ "text": "Hi." }]))]);
    assert_eq!(followed.code, 0, "{}", followed.stderr);
    assert!(followed.stderr.contains("Stopped turn 1 in "), "{}", followed.stderr);
    assert!(followed.stderr.contains("Completed turn 2 in "), "{}", followed.stderr);
    assert!(!followed.stderr.contains("A tool"), "{}", followed.stderr);
}
