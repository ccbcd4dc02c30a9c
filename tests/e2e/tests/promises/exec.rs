//! One-shot execution on the real binary: exit codes, messages, streams, and no leaked processes.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, Command, Stdio},
};

use harvest_e2e::{FRESH, OfflineHome, most_memory, processes_with, until};
use serde_json::Value;

/// A unique argument for `sleep`, to find a process by its command line.
fn unique() -> String {
    let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    let digits: String = random.bytes().take(12).map(|byte| char::from(b'0' + byte % 10)).collect();
    format!("1{digits}")
}

fn document(offline: &OfflineHome, arguments: &[&str]) -> (i32, Value) {
    let ran = offline.harvest(FRESH.iter().chain(&["--json"]).chain(arguments));
    (ran.code, serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("not JSON: {ran:?}")))
}

/// A command that has printed its first line.
fn begun(command: &mut Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let stdout = child.stdout.as_mut().unwrap();
    // Unbuffered: the caller reads what follows the line.
    while !line.ends_with('\n') {
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "it ended after {line:?}");
        line.push(byte[0].into());
    }
    child
}

fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

#[test]
fn exec_maps_every_ending_to_exit_code() {
    let offline = OfflineHome::new();
    let ends: &[(&[&str], i32, &str)] = &[
        (&["--", "true"], 0, "success"),
        (&["--", "sh", "-c", "exit 7"], 7, "error"),
        (&["--", "sh", "-c", "kill -TERM $$"], 143, "error"),
        (&["--", "/no/such/program"], 127, "error"),
        (&["--", "/etc"], 126, "error"),
        (&["--timeout", "200ms", "--", "sleep", "1000"], 124, "timeout"),
        (&["--memory", "24m", "--", "tail", "/dev/zero"], 137, "oom"),
        (
            &["--disk", "4m", "--", "sh", "-c", "head -c 9000000 /dev/zero > /f; sleep 1000"],
            137,
            "error",
        ),
        (&["--user", "nosuch", "--", "true"], 125, "crashed"),
    ];
    for (arguments, code, status) in ends {
        let (exit, document) = document(&offline, arguments);
        assert_eq!(
            (exit, document["status"].as_str()),
            (*code, Some(*status)),
            "{arguments:?}: {document}"
        );
        assert_eq!(document["returncode"], *code, "{document}");
        assert!(
            document["sandbox_id"].as_str().is_some_and(|id| id.starts_with("sbx_")),
            "{document}"
        );
        assert!(
            document["duration_secs"].is_number() && document["stderr"].is_string(),
            "{document}"
        );
    }
    let plain =
        offline.harvest(FRESH.iter().chain(&["--memory", "24m", "--", "tail", "/dev/zero"]));
    assert!(plain.code == 137 && plain.stderr.contains("oom"), "{plain:?}");
    let missing = offline.harvest(["exec", "--image", "nosuch", "--", "true"]);
    assert!(missing.code == 125 && missing.stderr.contains("no image `nosuch`"), "{missing:?}");
    assert_eq!(offline.json(&["sandbox", "ls"]), Value::Array(vec![]), "nothing is left");
}

#[test]
fn a_command_gets_what_it_was_given() {
    let offline = OfflineHome::new();
    let flags = ["-e", "A=b c", "-w", "/etc", "--user", "10001", "--", "sh", "-c"];
    let script = ["echo $A; pwd; id -u; echo err >&2"];
    let ran = offline.harvest(FRESH.iter().chain(&flags).chain(&script));
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("b c\n/etc\n10001\n", "err\n"));
    for (language, program) in [("python", "python3"), ("node", "node"), ("bash", "bash")] {
        let code = "print('it''s $HOME')";
        let flags = ["--code", code, "--lang", language, "--", "one"];
        assert_eq!(
            offline.harvest(FRESH.iter().chain(&flags)).stdout,
            format!("{program} one\n{code}")
        );
    }
    let lookup = offline.harvest(FRESH.iter().chain(&["--", "nslookup", "forge.example"]));
    assert!(
        lookup.code == 1 && lookup.stdout.contains("NXDOMAIN"),
        "nothing is reachable: {lookup:?}"
    );
}

#[test]
fn input_is_passed_on_as_it_comes() {
    let offline = OfflineHome::new();
    let mut command = offline.command();
    let command = command.args(FRESH).args(["-i", "--", "cat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    for word in ["one\n", "two\n"] {
        stdin.write_all(word.as_bytes()).unwrap();
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, word, "it comes back before the input ends");
    }
    drop(stdin);
    assert!(child.wait().unwrap().success());
    // Without -i the command has no stdin.
    let mut alone = offline.command();
    let alone = alone.args(FRESH).args(["--", "cat"]).stdin(Stdio::piped()).output().unwrap();
    assert!(alone.status.success() && alone.stdout.is_empty());
}

#[test]
fn slow_reader_gets_gigabyte_in_bounded_memory() {
    const BYTES: u64 = 1_000_000_000;
    let offline = OfflineHome::new();
    let mut child = begun(&mut offline.exec(&format!("echo; head -c {BYTES} /dev/zero")));
    // The output is not read: the command blocks and nothing else does.
    let listed = offline.json(&["sandbox", "ls"]);
    let supervisor = u32::try_from(listed[0]["pid"].as_u64().unwrap()).unwrap();
    assert_eq!(offline.exec("echo beside").output().unwrap().stdout, b"beside\n");
    let mut stdout = child.stdout.take().unwrap();
    let mut rest = vec![0u8; 1 << 20];
    let mut left = BYTES;
    while left > 50_000_000 {
        left -= stdout.read(&mut rest).unwrap() as u64;
    }
    let (cli, inside) = (most_memory(child.id()).unwrap(), most_memory(supervisor).unwrap());
    assert!(cli < 64 << 20 && inside < 32 << 20, "the CLI took {cli} bytes, pid 1 {inside}");
    while left > 0 {
        left -= stdout.read(&mut rest).unwrap() as u64;
    }
    assert_eq!(stdout.read(&mut rest).unwrap(), 0);
    assert!(child.wait().unwrap().success());
}

#[test]
fn json_result_keeps_output_ends_and_binary() {
    let offline = OfflineHome::new();
    let script =
        "echo first; head -c 5000000 /dev/zero | tr '\\0' x; printf 'last\\377'; echo err >&2";
    let script = script.replace("tr", "/bin/busybox tr");
    let (code, document) = document(&offline, &["--", "sh", "-c", &script]);
    let text = document["stdout"].as_str().unwrap();
    assert_eq!((code, document["truncated"].as_bool()), (0, Some(true)));
    assert!(
        text.starts_with("first\nxxx")
            && text.ends_with("xxxlast\u{fffd}")
            && text.len() < 1_100_000
    );
    assert!(document["stdout_base64"].as_str().unwrap().len() > text.len());
    assert_eq!(document["stderr"], "err\n");
    assert!(document.get("stderr_base64").is_none());
}

#[test]
fn double_forked_children_die_with_their_command() {
    let offline = OfflineHome::new();
    for (how, code) in
        [("timeout", Some(124)), ("-INT", Some(130)), ("-TERM", Some(143)), ("-KILL", None)]
    {
        let word = unique();
        let script = format!(
            "(setsid sh -c 'setsid sleep {word} &' &); sleep {word} & echo on; sleep {word}"
        );
        let mut command = offline.command();
        let limit = if how == "timeout" { "1s" } else { "30m" };
        command.args(FRESH).args(["--timeout", limit, "--", "sh", "-c", &script]);
        let mut child = begun(&mut command);
        if how != "timeout" {
            until("all three to run", || processes_with(&word).len() == 3);
            signal(&child, how);
        }
        assert_eq!(child.wait().unwrap().code(), code, "{how}");
        // The killed client could not wait; the zygote kills the command.
        until("all of it to die", || processes_with(&word).is_empty());
        until("its sandbox to be gone", || {
            offline.json(&["sandbox", "ls"]) == Value::Array(vec![])
        });
    }
}

#[test]
fn killed_command_leaves_its_sandbox_running() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    let (word, other) = (unique(), unique());
    offline.shell(&sandbox, &format!("setsid sleep {other} >/dev/null 2>&1 &"));
    for how in ["-INT", "-KILL"] {
        let script = format!("(setsid sleep {word} &); echo on; sleep {word}");
        let mut command = offline.command();
        let mut child = begun(command.args(["exec", &sandbox, "--", "sh", "-c", &script]));
        signal(&child, how);
        child.wait().unwrap();
        until("the command to die", || processes_with(&word).is_empty());
    }
    assert_eq!(offline.shell(&sandbox, "echo here"), "here");
    assert_eq!(processes_with(&other).len(), 1, "what an earlier command left running");
}

#[test]
fn exec_reports_sandbox_removed_during_command() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    let mut command = offline.command();
    command
        .args(["exec", &sandbox, "--", "sh", "-c", "echo on; sleep 98765"])
        .stderr(Stdio::piped());
    let child = begun(&mut command);
    assert_eq!(offline.harvest(["sandbox", "rm", &sandbox]).code, 0);
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{error}");
    assert!(error.contains("the sandbox exited before the command ended"), "{error}");
    let gone = offline.harvest(["exec", &sandbox, "--", "true"]);
    assert!(gone.code == 125 && gone.stderr.contains("no sandbox"), "{gone:?}");
}

#[test]
fn a_reader_that_leaves_ends_the_command() {
    let offline = OfflineHome::new();
    let word = unique();
    let mut child = begun(&mut offline.exec(&format!("sleep {word} & echo on; yes")));
    drop(child.stdout.take());
    assert_eq!(
        child.wait().unwrap().code(),
        Some(128 + 13),
        "as a pipe of its own would have ended it"
    );
    until("all of it to die", || processes_with(&word).is_empty());
    until("its sandbox to be gone", || offline.json(&["sandbox", "ls"]) == Value::Array(vec![]));
}

#[test]
fn two_homes_know_nothing_of_each_other() {
    let homes = [OfflineHome::new(), OfflineHome::new()];
    let sandboxes = homes.each_ref().map(OfflineHome::create);
    for (at, offline) in homes.iter().enumerate() {
        let listed = offline.json(&["sandbox", "ls"]);
        assert_eq!(listed.as_array().unwrap().len(), 1);
        assert_eq!(listed[0]["id"], sandboxes[at].as_str());
        assert_eq!(offline.harvest(["exec", &sandboxes[1 - at], "--", "true"]).code, 125);
    }
}

#[test]
fn read_only_home_is_reported() {
    let offline = OfflineHome::new();
    let home = offline.path("home");
    // In a private mount namespace: the host does not change.
    let script = "mount --bind \"$HARVEST_HOME\" \"$HARVEST_HOME\" && \
                  mount -o remount,ro,bind \"$HARVEST_HOME\" && exec \"$0\" exec --image tiny -- true";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script])
        .arg(offline.command().get_program())
        .env("HARVEST_HOME", &home)
        .env("HARVEST_CACHE", offline.path("cache"))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{error}");
    assert!(error.starts_with("error: the home ") && error.contains("read-only"), "{error}");
    assert!(error.contains("hint: ") && error.contains("HARVEST_HOME"), "{error}");
}
