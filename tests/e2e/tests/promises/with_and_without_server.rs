//! Standalone sandboxes on the real binaries: over HTTP, and by the CLI with and without a server.

use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
};

use harvest_e2e::{Host, binary, eventually, processes_with, sweep_after, unique};
use reqwest::Method;
use serde_json::{Value, json};

/// `exec` in an ephemeral sandbox without the 2 GB state volume.
const FRESH: [&str; 4] = ["exec", "--image", "claude", "--no-state"];

fn command(host: &Host) -> Command {
    let mut command = Command::new(binary("harvest"));
    command.env("HARVEST_HOME", host.home()).env("NO_COLOR", "1").env_remove("HARVEST_URL");
    command
}

/// A command in an ephemeral sandbox that has printed its first line.
fn begun(host: &Host, script: &str) -> Child {
    let mut command = command(host);
    command
        .args(FRESH)
        .args(["--", "sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    assert_eq!(child.stdout.as_mut().unwrap().read(&mut [0; 8]).unwrap(), 3, "it says `on`");
    child
}

async fn owners(host: &Host) -> Vec<String> {
    let list: Value = host.get("/v1/sandboxes").send().await.unwrap().json().await.unwrap();
    let items = list["items"].as_array().unwrap();
    items.iter().map(|sandbox| sandbox["owner"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn leftovers_of_killed_test_are_removed() {
    let host = Host::start().await;
    host.post("/v1/sandboxes", json!({"image": "claude", "state": false})).await;
    let home = host.home().to_owned();
    let living = |role: &str| {
        let ours = processes_with(home.to_str().unwrap());
        processes_with(role).into_iter().filter(|pid| ours.contains(pid)).count()
    };
    // A standby being forked has the zygote's command line for a moment.
    assert_ne!(living("zygote"), 0);
    let mut test = Command::new("sleep").arg(unique()).spawn().unwrap();
    sweep_after(test.id(), &home, &std::collections::BTreeMap::new());
    test.kill().unwrap();
    test.wait().unwrap();
    eventually("everything of it to be gone", || async {
        (!home.exists() && living("zygote") == 0).then_some(())
    })
    .await;
    assert!(host.get("/healthz").send().await.is_err(), "the server is gone, too");
}

/// The same commands have the same results with and without a server.
fn commands_end_as_they_should(host: &Host) {
    let ends: &[(&[&str], i32, &str)] = &[
        (&["--", "sh", "-c", "echo out; echo err >&2; exit 7"], 7, "out\n"),
        (&["--", "/no/such/program"], 127, ""),
        (&["--timeout", "200ms", "--", "sleep", "1000"], 124, ""),
        (&["--memory", "24m", "--", "tail", "/dev/zero"], 137, ""),
        (
            &["--code", "import sys; print(6 * 7, sys.argv[1:])", "--lang", "python", "--", "x"],
            0,
            "42 ['x']\n",
        ),
    ];
    for (arguments, code, stdout) in ends {
        let ran = host.harvest(FRESH.iter().chain(*arguments));
        assert_eq!((ran.code, ran.stdout.as_str()), (*code, *stdout), "{arguments:?}: {ran:?}");
    }
    let mut counting = command(host);
    counting
        .args(FRESH)
        .args(["-i", "--", "wc", "-c"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut counting = counting.spawn().unwrap();
    counting.stdin.take().unwrap().write_all(&vec![b'x'; 5_000_000]).unwrap();
    let counted = counting.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&counted.stdout), "5000000\n");
    let missing = host.harvest(["exec", "--image", "nosuch", "--", "true"]);
    assert!(missing.code == 125 && missing.stderr.contains("no image `nosuch`"), "{missing:?}");
    let none = host.harvest(["sandbox", "ls", "--json"]);
    assert_eq!(none.stdout.trim(), "[]", "nothing is left");
}

#[tokio::test]
async fn exec_ends_alike_with_and_without_server() {
    let mut host = Host::start().await;
    commands_end_as_they_should(&host);
    host.kill();
    commands_end_as_they_should(&host);
}

#[tokio::test]
async fn command_dies_with_its_client_connection() {
    let host = Host::start().await;
    for (how, code) in [("-INT", Some(130)), ("-KILL", None)] {
        let word = unique();
        let mut child = begun(&host, &format!("(setsid sleep {word} &); echo on; sleep {word}"));
        let owners_now = owners(&host).await;
        assert!(owners_now.len() == 1 && owners_now[0].starts_with("process "), "{owners_now:?}");
        assert_ne!(owners_now[0], format!("process {}", child.id()), "the server made it");
        let killed = Command::new("kill").args([how, &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        assert_eq!(child.wait().unwrap().code(), code, "{how}");
        eventually("all of it to die", || async { processes_with(&word).is_empty().then_some(()) })
            .await;
        eventually("its sandbox to be gone", || async {
            owners(&host).await.is_empty().then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn standalone_sandbox_outlives_server_but_ephemeral_does_not() {
    let mut host = Host::start().await;
    let made = host.post("/v1/sandboxes", json!({"image": "claude", "state": false})).await;
    assert_eq!(made["status"], "running");
    let path = format!("/v1/sandboxes/{}", made["sandbox_id"].as_str().unwrap());
    let word = unique();
    let mut child = begun(&host, &format!("echo on; sleep {word}"));
    eventually("it to run", || async { (processes_with(&word).len() == 1).then_some(()) }).await;
    host.kill();
    assert_eq!(child.wait().unwrap().code(), Some(125), "a failure of ours is not the command's");
    host.up().await;
    eventually("the fresh one to be gone", || async {
        (owners(&host).await == ["you"]).then_some(())
    })
    .await;
    assert!(processes_with(&word).is_empty());
    let shown: Value = host.get(&path).send().await.unwrap().json().await.unwrap();
    assert_eq!(shown["state"], "running");
}

#[tokio::test]
async fn http_api_creates_snapshots_forks_and_deletes_sandbox() {
    let host = Host::start().await;
    let made = host.post("/v1/sandboxes", json!({"image": "claude", "state": false})).await;
    let path = format!("/v1/sandboxes/{}", made["sandbox_id"].as_str().unwrap());
    let run = async |path: &str, script: &str| {
        let body = json!({"argv": ["sh", "-c", script], "user": "root"});
        let answer =
            host.request(Method::POST, &format!("{path}/exec")).json(&body).send().await.unwrap();
        let text = answer.text().await.unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(last["type"], "exited", "{text}");
        (text.lines().count() - 1, last["exit"]["value"].as_i64())
    };
    assert_eq!(run(&path, "echo first > /f").await, (0, Some(0)));
    let file = |path: &str, file: &str| format!("{path}/files?path={file}");
    let put = host.request(Method::PUT, &(file(&path, "/srv/g") + "&mode=600")).body("in");
    let put: Value = put.send().await.unwrap().json().await.unwrap();
    assert_eq!(
        (&put["size"], &put["uid"], &put["mode"]),
        (&json!(2), &json!(0), &json!(0o600)),
        "{put}"
    );
    let listed: Value = host.get(&file(&path, "/srv")).send().await.unwrap().json().await.unwrap();
    assert_eq!(listed["items"][0]["name"], "g", "{listed}");
    assert_eq!(host.get(&file(&path, "/srv/g")).send().await.unwrap().text().await.unwrap(), "in");
    let about = host.request(Method::HEAD, &file(&path, "/srv/g")).send().await.unwrap();
    assert_eq!(about.headers()["x-harvest-mode"], "0600");
    assert_eq!(
        host.request(Method::DELETE, &file(&path, "/srv/g")).send().await.unwrap().status(),
        204
    );
    assert_eq!(host.get(&file(&path, "/srv/g")).send().await.unwrap().status(), 404);
    let kept = host.post(&format!("{path}/snapshot"), json!({})).await;
    run(&path, "echo second > /f").await;
    let forked = host.post(&format!("{path}/fork"), json!({"count": 2})).await;
    for fork in forked["forks"].as_array().unwrap() {
        let fork = format!("/v1/sandboxes/{}", fork.as_str().unwrap());
        assert_eq!(run(&fork, "grep -qx second /f").await, (0, Some(0)));
        assert_eq!(host.request(Method::DELETE, &fork).send().await.unwrap().status(), 204);
    }
    let restored = host.post(&format!("{path}/restore"), json!({"snapshot_id": kept["id"]})).await;
    assert_eq!(run(&path, "grep -qx first /f").await, (0, Some(0)));
    host.post(&format!("{path}/stop"), json!({})).await;
    let refused =
        host.request(Method::POST, &format!("{path}/exec")).json(&json!({"argv": ["true"]}));
    assert_eq!(refused.send().await.unwrap().status(), 409);
    host.post(&format!("{path}/start"), json!({})).await;
    assert_eq!(run(&path, "grep -qx first /f").await, (0, Some(0)));
    let snapshots: Value = host.get("/v1/snapshots").send().await.unwrap().json().await.unwrap();
    let ids: Vec<&Value> =
        snapshots["items"].as_array().unwrap().iter().map(|one| &one["id"]).collect();
    assert!(ids.contains(&&kept["id"]) && ids.contains(&&restored["kept"]), "{snapshots}");
    assert_eq!(host.request(Method::DELETE, &path).send().await.unwrap().status(), 204);
    assert_eq!(host.get(&path).send().await.unwrap().status(), 404);
}
