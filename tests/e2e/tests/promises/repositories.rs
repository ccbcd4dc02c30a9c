//! Repositories as sessions meet them: wrong URLs and branches, failing hooks.

use std::{
    fs,
    io::{Read as _, Write as _},
    process::{Child, Command, Stdio},
};

use harvest_e2e::{Host, binary};
use harvest_proto::{
    EventBody,
    api::{CheckOutcome, SessionState},
    bridge::Exit,
    event::{BootPhase, PhaseStatus},
};
use serde_json::json;

use crate::turn_ended;

/// Registers a folder with one commit, without a build.
fn add(host: &Host, name: &str, files: &[(&str, &str)]) {
    let folder = host.home().join("sources").join(name);
    for (path, content) in [("file", "x\n")].iter().chain(files) {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    for arguments in ["init -q -b main", "add -A", "commit -q -m Begin"] {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=T", "-c", "user.email=t@example.org"]).current_dir(&folder);
        assert!(git.args(arguments.split(' ')).status().unwrap().success());
    }
    let added = host.harvest(["repo", "add", folder.to_str().unwrap()]);
    assert_eq!(added.code, 0, "{added:?}");
}

fn volumes(host: &Host) -> Vec<String> {
    let Ok(entries) = fs::read_dir(host.home().join("volumes")) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !name.starts_with('.')).collect()
}

#[tokio::test]
async fn failing_setup_runs_and_is_reported_once() {
    let host = Host::start().await;
    let setup = "echo no luck; exit 1\n";
    add(&host, "shop", &[(".harvest/setup.sh", setup)]);
    let session = host.scripted("shop", "Begin.", &json!([{ "text": "on" }])).await;
    host.wait_for(&session.id, SessionState::Failed).await;
    let events = host.events(&session.id).await;
    let failed: Vec<_> = events
        .iter()
        .filter(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }))
        .collect();
    let [EventBody::BootPhase { phase: BootPhase::Setup, tail, failure: Some(failure), .. }] =
        failed[..]
    else {
        panic!("{failed:?}")
    };
    assert_eq!(failure.message, ".harvest/setup.sh failed (exit 1)");
    assert_eq!(tail.as_deref(), Some("no luck"));
    let details: Vec<_> = events
        .iter()
        .filter_map(|body| match body {
            EventBody::StateChanged { state: SessionState::Failed, detail, .. } => {
                detail.as_deref()
            }
            _ => None,
        })
        .collect();
    assert_eq!(details, [".harvest/setup.sh failed (exit 1)"]);
}

#[tokio::test]
async fn wrong_url_and_wrong_branch_leave_nothing() {
    // Without a key `run` would fail earlier.
    let host = Host::start_with(&[("ANTHROPIC_API_KEY", "unused")]).await;
    add(&host, "shop", &[]);
    let url = format!("{}/forge/local/nope.git", host.url().unwrap());
    for refused in [host.harvest(["repo", "add", &url]), host.harvest(["run", "-r", &url, "hi"])] {
        assert_eq!(refused.code, 1, "{refused:?}");
        assert!(refused.stderr.contains("is not registered"), "{refused:?}");
    }
    let url = format!("{}/forge/local/shop.git", host.url().unwrap());
    let folder = host.home().display().to_string();
    for (location, why) in [(url, "secret NOPE for repository"), (folder, "a folder has no use")] {
        let refused =
            host.harvest(["repo", "add", &location, "--name", "nope", "--secret", "NOPE"]);
        assert!(refused.code != 0 && refused.stderr.contains(why), "{refused:?}");
    }
    let branch = host.harvest(["run", "-b", "nobranch", "-r", "shop", "hi"]);
    assert_eq!(branch.code, 1, "{branch:?}");
    let expected = "branch nobranch does not exist in local/shop";
    assert!(branch.stderr.contains(expected), "{branch:?}");
    let listed = host.harvest(["repo", "ls", "--json"]).stdout;
    assert!(!listed.contains("nope"), "{listed}");
    assert!(!host.harvest(["ls", "--json"]).stdout.contains("ses_"), "no session was created");
    assert_eq!(volumes(&host), Vec::<String>::new());
}

/// Runs a shell command on a terminal, with the piped input as what is typed.
fn on_terminal(host: &Host, command: &str) -> Child {
    Command::new("script")
        .args(["-qec", command, "/dev/null"])
        .env("HARVEST_HOME", host.home())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn open_question_blocks_no_other_registration() {
    let host = Host::start().await;
    let folder = host.home().join("plain");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("code.py"), "x").unwrap();
    let command = format!("{} repo add {}", binary("harvest").display(), folder.display());
    let mut asked = on_terminal(&host, &command);
    let mut typed = asked.stdin.take().unwrap();
    let mut shown = asked.stdout.take().unwrap();
    let (mut text, mut buffer) = (Vec::new(), [0; 1024]);
    while !String::from_utf8_lossy(&text).contains("Copy them?") {
        let length = shown.read(&mut buffer).unwrap();
        assert!(length > 0, "{}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&buffer[..length]);
    }
    add(&host, "other", &[]);
    typed.write_all(b"y\n").unwrap();
    shown.read_to_end(&mut text).unwrap();
    assert!(asked.wait().unwrap().success(), "{}", String::from_utf8_lossy(&text));
    let listed = host.harvest(["repo", "ls", "--json"]).stdout;
    assert!(listed.contains("local/plain") && listed.contains("local/other"), "{listed}");
}

#[tokio::test]
async fn background_job_is_not_asked() {
    let host = Host::start().await;
    let folder = host.home().join("plain");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("code.py"), "x").unwrap();
    // With `set -m`, the job has the terminal as its input and its own process group.
    let add = format!("{} repo add {}", binary("harvest").display(), folder.display());
    let command = format!("bash -c 'set -m; {add} & wait $!; echo code $?'");
    let output = on_terminal(&host, &command).wait_with_output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("`--all` copies them") && shown.contains("code 2"), "{shown}");
}

#[tokio::test]
async fn terminal_is_asked_before_a_folder_is_copied() {
    let host = Host::start().await;
    let folder = host.home().join("plain");
    fs::create_dir(&folder).unwrap();
    for name in ["code.py", ".env"] {
        fs::write(folder.join(name), "x").unwrap();
    }
    let add = |answer: &str| {
        let command = format!("{} repo add {}", binary("harvest").display(), folder.display());
        let mut typed = on_terminal(&host, &command);
        typed.stdin.take().unwrap().write_all(answer.as_bytes()).unwrap();
        let output = typed.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, shown) = add("n\n");
    assert!(
        code == Some(1) && shown.contains("1 file (1 B) would be copied. Copy them?"),
        "{shown}"
    );
    assert!(shown.contains("left out secrets and installed packages: `.env`"), "{shown}");
    assert!(!host.harvest(["repo", "ls", "--json"]).stdout.contains("plain"));
    let (code, shown) = add("y\n");
    assert!(code == Some(0) && shown.contains("local/plain"), "{shown}");
}

#[tokio::test]
async fn files_left_by_setup_are_no_change() {
    let host = Host::start().await;
    add(&host, "node", &[(".harvest/setup.sh", "echo lock > lock.json; echo y > file\n")]);
    let script = json!([{ "bash": "echo mine > mine" }]);
    let session = host.scripted("node", "Do nothing.", &json!([{ "text": "done" }])).await.id;
    host.follow(session.clone()).until("the turn's end", turn_ended).await;
    host.wait_for(&session, SessionState::Idle).await;
    let id = session.to_string();
    let diff = |arguments: &[&str]| host.harvest([&["diff", &id], arguments].concat()).stdout;
    assert_eq!(diff(&[]), "", "setup's files are no change of the session");
    let turns = host.harvest(["turns", &id, "--json"]).stdout;
    let turns: serde_json::Value = serde_json::from_str(&turns).unwrap();
    assert_eq!(turns[0]["diff"]["files"], 0, "{turns}");
    let second = host.prompt(&session, "Write.", &script).await.id;
    let is_second =
        |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt, .. } if *prompt == second);
    host.follow(session.clone()).until("the second turn's end", is_second).await;
    host.wait_for(&session, SessionState::Idle).await;
    for shown in [diff(&[]), diff(&["-t", "2"])] {
        assert!(shown.contains("+mine") && !shown.contains("lock"), "{shown}");
    }
    let stat = diff(&["--stat"]);
    assert!(stat.contains("mine") && !stat.contains("lock.json"), "{stat}");
    host.harvest(["pause", &id]);
    let shown = diff(&["-t", "1"]);
    assert_eq!(shown, "", "also without the sandbox");
}

#[tokio::test]
async fn check_cannot_be_rewritten_while_it_runs() {
    let host = Host::start().await;
    // Longer than the shell's buffer, so that its last line is read after the tests have run.
    let padding = "# padding\n".repeat(3000);
    let check = format!("#!/usr/bin/env sh\nsh tests.sh\n{padding}exit 1\n");
    let tests = "sed 's/^exit 1$/exit 0/' .harvest/check.sh > /tmp/check\n\
                 cat /tmp/check > .harvest/check.sh\n\
                 mv -f /tmp/check .harvest/check.sh\n\
                 cp /bin/true /proc/$PPID/exe\nkill -9 $(ps -o ppid= -p $PPID)\n\
                 for file in environ mem; do\n\
                 (exec 3< /proc/$PPID/$file) && echo opened $file of the check\ndone\n\
                 git status > /dev/null && touch new && rm new && echo works as before\n";
    // Puts another script in place as soon as this one is sealed.
    let start = "printf '#!/bin/sh\\nexit 0\\n' > /tmp/other; chmod +x /tmp/other\n\
                 while [ ! -e .harvest/check.sh ] || [ -w .harvest/check.sh ]; do sleep 0.01; done\n\
                 for attempt in 1 2 3; do\n\
                 cp /tmp/other .harvest/other; mv -f .harvest/other .harvest/check.sh\n\
                 mv .harvest away && cp -r away .harvest && cp -f /tmp/other .harvest/check.sh\n\
                 cd .. && mv shop away && cp -r away shop && cp -f /tmp/other shop/.harvest/check.sh\n\
                 cd /workspace/shop\ndone\n";
    let start = format!("(\n{start}) > /dev/null 2>&1 &\n");
    let files =
        [(".harvest/check.sh", &*check), (".harvest/start.sh", &start), ("tests.sh", tests)];
    add(&host, "shop", &files);
    let push = "echo y > file && git commit -qam change && git push -q";
    let session = host.scripted("shop", "Push.", &json!([{ "bash": push }])).await.id;
    let is_evidence = |body: &EventBody| matches!(body, EventBody::Evidence(_));
    let event = host.follow(session).until("the evidence", is_evidence).await;
    let EventBody::Evidence(evidence) = event.body else { panic!() };
    assert_eq!((evidence.outcome, evidence.exit), (CheckOutcome::Failed, Exit::Code(1)));
    assert!(!evidence.tail.contains("of the check"), "{}", evidence.tail);
    assert!(evidence.tail.contains("works as before"), "{}", evidence.tail);
}

#[tokio::test]
async fn agent_is_told_about_the_failed_check() {
    let host = Host::start().await;
    add(&host, "shop", &[(".harvest/check.sh", "echo 1 test failed; exit 1\n")]);
    let push = "echo y > file && git commit -qam change && git push -q";
    let script = json!([{ "bash": push }]);
    let session = host.session("shop", "Push.", &script).await.id;
    let is_evidence = |body: &EventBody| matches!(body, EventBody::Evidence(_));
    host.follow(session.clone()).until("the evidence", is_evidence).await;
    let second = host.prompt(&session, "Look.", &json!([{ "text": "seen" }])).await.id;
    let is_second =
        |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt, .. } if *prompt == second);
    host.follow(session.clone()).until("the second turn's end", is_second).await;
    let (_, conversation) =
        host.exec(&session, "harvest", "cat /home/harvest/.claude/projects/*/*.jsonl").await;
    assert!(conversation.contains("Harvest ran .harvest/check.sh on commit "), "{conversation}");
    assert!(conversation.contains("1 test failed"), "{conversation}");
}
