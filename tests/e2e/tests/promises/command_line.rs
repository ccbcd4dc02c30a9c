//! How verbs take their input and what they refuse: prompts from everywhere, confirmations, names.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    os::unix::ffi::OsStrExt,
    process::{Command, Stdio},
};

use harvest_e2e::{Host, OfflineHome};

use crate::SAMPLE;

const RUN: [&str; 6] = ["run", "-d", "--agent", "scripted", "--net", "none"];

/// Runs a command with this input; returns its exit code, stdout and stderr.
fn piped(mut command: Command, input: &str) -> (i32, String, String) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

async fn get(host: &Host, path: &str) -> serde_json::Value {
    host.get(path).send().await.unwrap().json().await.unwrap()
}

/// The texts of a session's prompts.
async fn prompts(host: &Host, session: &str) -> Vec<String> {
    let page = get(host, &format!("/v1/sessions/{}/prompts", session.trim())).await;
    let text = |item: &serde_json::Value| item["text"].as_str().unwrap().to_owned();
    page["items"].as_array().unwrap().iter().map(text).collect()
}

#[tokio::test]
async fn prompts_come_from_stdin_files_and_editors() {
    let host = Host::start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.md");
    fs::write(&file, "from a file\n").unwrap();
    let run = |more: &[&str]| {
        let mut command = host.command();
        command.args(RUN).args(more).current_dir(folder.path());
        command
    };
    for arguments in [&["-"][..], &[]] {
        let (code, id, error) = piped(run(arguments), "from\nstdin\n");
        assert_eq!((code, prompts(&host, &id).await), (0, vec!["from\nstdin".into()]), "{error}");
    }
    let (code, id, error) = piped(run(&["@prompt.md"]), "");
    assert_eq!((code, prompts(&host, &id).await), (0, vec!["from a file".into()]), "{error}");
    let mut command = run(&["-i"]);
    command.env("EDITOR", format!("cp {}", file.display())).env_remove("VISUAL");
    let (code, id, error) = piped(command, "");
    assert_eq!((code, prompts(&host, &id).await), (0, vec!["from a file".into()]), "{error}");
    // Ctrl-C reaches both, but is for the editor, which a shell starts.
    let editor = folder.path().join("editor");
    let script = "parent=$PPID\ngrep -q harvest /proc/$parent/comm || parent=$(ps -o ppid= -p $PPID)\n\
                  kill -INT $parent; echo after Ctrl-C > \"$1\"\n";
    fs::write(&editor, script).unwrap();
    let mut command = run(&["-i"]);
    command.env("EDITOR", format!("sh {}", editor.display())).env_remove("VISUAL");
    command.env("TMPDIR", folder.path());
    let (code, id, error) = piped(command, "");
    assert_eq!((code, prompts(&host, &id).await), (0, vec!["after Ctrl-C".into()]), "{error}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "the temporary file is removed");
    let mut send = host.command();
    send.args(["send", "-f", id.trim(), "-"]);
    let (_, said, error) = piped(send, "say it\nscript: [{\"text\": \"Said.\"}]");
    assert!(said.contains("Said."), "{error}");
    let mut fork = host.command();
    fork.args(["fork", id.trim(), "-n2", "-"]);
    let (code, forks, error) = piped(fork, "try it");
    assert_eq!((code, forks.lines().count()), (0, 2), "{error}");
    for fork in forks.lines() {
        assert_eq!(prompts(&host, fork).await, ["try it"]);
    }
}

#[tokio::test]
async fn wrong_prompts_create_no_session() {
    let host = Host::start().await;
    for (arguments, input, reason) in [
        (&["fix", "the", "test"][..], "", "hint: quote the prompt: \"fix the test\""),
        (&["-"], " \n", "error: prompt is empty"),
        (&[], "", "error: prompt is empty"),
        (&["@nosuch.md"], "", "error: cannot read the prompt from nosuch.md"),
    ] {
        let mut command = host.command();
        command.args(RUN).args(arguments);
        let (code, id, error) = piped(command, input);
        assert!(code != 0 && id.is_empty() && error.contains(reason), "{arguments:?}: {error}");
    }
    assert_eq!(get(&host, "/v1/sessions").await["items"], serde_json::json!([]));
}

#[tokio::test]
async fn removing_history_needs_confirmation() {
    let host = Host::start().await;
    let id = host.harvest(RUN.iter().chain(&["keep me"])).stdout;
    let refused = host.harvest(["rm", "-"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(
        refused.stderr.contains("keep me") && refused.stderr.contains("`--yes`"),
        "{refused:?}"
    );
    assert_eq!(host.harvest(["show", id.trim()]).code, 0, "the session is still there");
    assert_eq!(host.harvest(["rm", "--yes", "-"]).code, 0);
    assert_eq!(host.harvest(["show", id.trim()]).code, 1);
}

#[tokio::test]
async fn unset_variables_do_not_name_newest_session() {
    let host = Host::start().await;
    host.harvest(RUN.iter().chain(&["stay"]));
    for arguments in
        [&["cp", "/etc/hostname", ":/x"][..], &["restore", "@1"], &["sandbox", "cp", ":/x", "y"]]
    {
        let refused = host.harvest(arguments);
        assert!(refused.code == 2 && refused.stderr.contains("names no session"), "{refused:?}");
    }
}

#[test]
fn refused_copies_say_why() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    offline.line(&["sandbox", "stop", &sandbox]);
    let from = format!("{sandbox}:/etc/passwd");
    let refused = offline.harvest(["sandbox", "cp", &from, "x"]);
    assert!(refused.code == 1 && refused.stderr.contains("is not running"), "{refused:?}");
}

#[test]
fn copies_name_every_file_left_out() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    let script = "mkdir /tmp/t && cd /tmp/t && echo 1 > ok && echo 2 > \"$(printf 'bad\\377')\" && \
                  ln -s \"$(printf '\\377')\" link";
    offline.line(&["exec", &sandbox, "--", "sh", "-c", script]);
    let out = offline.path("out");
    let from = format!("{sandbox}:/tmp/t");
    let copied = offline.harvest(["cp", "-r", &from, out.to_str().unwrap()]);
    assert_eq!(copied.code, 1, "{copied:?}");
    assert!(
        copied.stderr.contains("bad\u{fffd}") && copied.stderr.contains("t/link"),
        "{copied:?}"
    );
    assert_eq!(fs::read_to_string(out.join("ok")).unwrap(), "1\n");
    let source = offline.path("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("ok"), "1").unwrap();
    fs::write(source.join(OsStr::from_bytes(b"bad\xff")), "2").unwrap();
    let to = format!("{sandbox}:/tmp/u");
    let copied = offline.harvest(["cp", "-r", source.to_str().unwrap(), &to]);
    assert!(copied.code == 1 && copied.stderr.contains("source/bad\u{fffd}"), "{copied:?}");
    assert_eq!(offline.line(&["exec", &sandbox, "--", "cat", "/tmp/u/ok"]), "1");
}

#[tokio::test]
async fn list_is_one_page_of_newest_sessions() {
    let host = Host::start().await;
    let mut ids = Vec::new();
    for _ in 0..22 {
        let session = host.post("/v1/sessions", serde_json::json!({ "agent": "scripted" })).await;
        ids.push(session["id"].as_str().unwrap().to_owned());
    }
    let listed = host.harvest(["ls"]);
    let shown: Vec<&str> =
        listed.stdout.lines().skip(1).filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(shown, ids.iter().rev().take(20).collect::<Vec<_>>());
    assert!(listed.stderr.starts_with("and 2 more\n"), "{listed:?}");
    assert_eq!(host.harvest(["archive", &ids[0]]).code, 0);
    let archived = host.harvest(["ls", "-n", "30"]);
    assert!(!archived.stdout.contains(&ids[0]), "{archived:?}");
    assert!(archived.stderr.starts_with("and 1 archived\n"), "{archived:?}");
    let all = host.harvest(["ls", "--all", "--json"]);
    let all: Vec<serde_json::Value> = serde_json::from_str(&all.stdout).unwrap();
    assert_eq!(all.len(), 22);
    let prefix = &ids[3][4..14];
    let found = host.harvest(["show", prefix]);
    assert!(found.stdout.contains(&ids[3]), "{found:?}");
    let wrong = host.harvest(["ls", "-s", "wrong"]);
    assert!(wrong.code == 2 && wrong.stderr.contains("possible values: queued,"), "{wrong:?}");
}

#[tokio::test]
async fn forks_are_distinguishable_in_the_list() {
    let host = Host::start().await;
    let prompt = "a title\nscript: [{\"text\": \"done\"}]";
    let run = ["run", "--agent", "scripted", "--net", "none", prompt];
    assert_eq!(host.harvest(run).code, 0);
    let parent = host.harvest(["ls", "--json"]);
    let parent: serde_json::Value = serde_json::from_str(&parent.stdout).unwrap();
    let parent = parent[0]["id"].as_str().unwrap();
    assert_eq!(host.harvest(["fork", "-@1"]).code, 0);
    let listed = host.harvest(["ls"]);
    let fork = format!("↳{}@1 a title", &parent[4..8]);
    assert!(listed.stdout.contains(&fork), "{listed:?}");
}

#[tokio::test]
async fn every_listing_is_json_on_request() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let run = ["run", "-d", "-r", "calc", "-m", "scripted", "--net", "none", "begin"];
    assert_eq!(host.harvest(run).code, 0);
    for verb in [
        &["ls"][..],
        &["show", "-"],
        &["queue", "ls", "-"],
        &["repo", "ls"],
        &["secret", "ls"],
        &["image", "ls"],
        &["doctor"],
        &["sandbox", "plan"],
        &["sandbox", "ls"],
        &["snapshot", "ls"],
        &["volume", "ls"],
        &["df"],
        &["gc", "--dry-run"],
    ] {
        let ran = host.harvest(verb.iter().chain(&["--json"]));
        let parsed = serde_json::from_str::<serde_json::Value>(&ran.stdout);
        assert!(ran.code == 0 && parsed.is_ok(), "{verb:?}: {ran:?}");
    }
}
