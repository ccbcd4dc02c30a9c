//! Standalone sandboxes on the real binary: create, copy, snapshot, restore, fork.

use std::{fs, process::Command};

use harvest_e2e::{FRESH, Host, OfflineHome, binary};
use serde_json::Value;

#[test]
fn a_tree_goes_in_and_comes_back() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    let source = offline.path("source");
    fs::create_dir_all(source.join("a")).unwrap();
    fs::write(source.join("a/file"), "content").unwrap();
    std::os::unix::fs::symlink("../nowhere", source.join("a/link")).unwrap();
    let inside = |path: &str| format!("{sandbox}:{path}");
    offline.line(&["sandbox", "cp", source.to_str().unwrap(), &inside("/new")]);
    assert_eq!(
        offline.shell(&sandbox, "cat /new/a/file; readlink /new/a/link"),
        "content../nowhere"
    );
    // Into an existing folder, under the source's name.
    offline.line(&["sandbox", "cp", source.join("a").to_str().unwrap(), "-:/new"]);
    assert_eq!(offline.shell(&sandbox, "ls /new /new/a"), "/new:\na\n\n/new/a:\nfile\nlink");
    let target = offline.path("target");
    offline.line(&["sandbox", "cp", &inside("/new/a"), target.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "content");
    assert_eq!(fs::read_link(target.join("link")).unwrap().to_str(), Some("../nowhere"));
    for (arguments, words) in [
        (
            [inside("/nosuch"), target.display().to_string()],
            "/nosuch does not exist in the sandbox",
        ),
        (["/etc/hostname".to_owned(), "sbx_000000000000:/x".to_owned()], "there is no sandbox"),
        (["/nosuch".to_owned(), inside("/x")], "No such file"),
        (["/a".to_owned(), "/b".to_owned()], "neither side is in a sandbox"),
        ([inside("/a"), inside("/b")], "both sides are in a sandbox"),
    ] {
        let ran = offline.harvest(["sandbox", "cp", &arguments[0], &arguments[1]]);
        assert!(ran.code == 1 && ran.stderr.contains(words), "{arguments:?}: {ran:?}");
    }
}

#[test]
fn sandbox_forks_diverge_and_restore_reverts() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    offline.shell(&sandbox, "echo first > /f");
    let snapshot = offline.line(&["sandbox", "snapshot", &sandbox]);
    offline.shell(&sandbox, "echo second > /f");
    let forks = offline.line(&["sandbox", "fork", "-n", "3", &sandbox]);
    let forks: Vec<&str> = forks.lines().collect();
    assert_eq!(forks.len(), 3);
    for fork in &forks {
        assert_eq!(offline.shell(fork, "cat /f"), "second");
        offline.shell(fork, &format!("echo {fork} > /f"));
    }
    for fork in &forks {
        assert_eq!(offline.shell(fork, "cat /f"), **fork);
    }
    assert_eq!(
        offline.json(&["snapshot", "ls"]).as_array().unwrap().len(),
        1,
        "a fork leaves none"
    );
    let anew = offline.line(&["sandbox", "restore", &snapshot]);
    assert_eq!(offline.shell(&anew, "cat /f"), "first");
    // In place: the id stays, and the previous disk becomes a snapshot.
    let put_back = offline.json(&["sandbox", "restore", &sandbox, &snapshot]);
    assert_eq!(put_back["id"], sandbox.as_str());
    assert_eq!(offline.shell(&sandbox, "cat /f"), "first");
    let kept = put_back["kept"].as_str().unwrap();
    offline.line(&["sandbox", "restore", &sandbox, kept]);
    assert_eq!(offline.shell(&sandbox, "cat /f"), "second");
    let from = offline.line(&["sandbox", "create", "--from", &snapshot[..8]]);
    assert_eq!(offline.shell(&from, "cat /f"), "first");
    offline.line(&["snapshot", "rm", "--yes", &snapshot]);
    assert_eq!(offline.shell(&from, "cat /f"), "first", "what uses it keeps what it uses");
}

#[test]
fn a_stopped_sandbox_starts_again_with_its_disk() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    offline.shell(&sandbox, "echo kept > /f");
    offline.line(&["sandbox", "stop", &sandbox]);
    assert_eq!(offline.json(&["sandbox", "inspect", &sandbox])["state"], "dead");
    let dead = offline.harvest(["exec", &sandbox, "--", "true"]);
    assert!(dead.code == 125 && dead.stderr.contains("harvest sandbox start"), "{dead:?}");
    let used = offline.json(&["df"]);
    assert_eq!(used["sandboxes"][0]["id"], sandbox.as_str(), "{used}");
    assert!(used["images_bytes"].as_u64().unwrap() > 1_000_000, "{used}");
    // Garbage collection keeps snapshots that can still be used.
    offline.line(&["gc"]);
    offline.line(&["sandbox", "start", &sandbox]);
    assert_eq!(offline.shell(&sandbox, "cat /f"), "kept");
    offline.line(&["sandbox", "start", &sandbox]);
}

#[test]
fn sandbox_id_prefix_is_accepted_and_rm_deletes() {
    let offline = OfflineHome::new();
    let sandbox = offline.create();
    assert_eq!(offline.json(&["sandbox", "inspect", &sandbox[..10]])["id"], sandbox.as_str());
    assert_eq!(offline.json(&["sandbox", "inspect", &sandbox[4..10]])["image"], "tiny");
    assert_eq!(offline.line(&["exec", &sandbox[..10], "--", "echo", "hi"]), "hi");
    let wrong = offline.harvest(["sandbox", "rm", &sandbox, "sbx_nosuch"]);
    assert_eq!(wrong.code, 1, "a slip in the last must not cost the first: {wrong:?}");
    assert_eq!(offline.json(&["sandbox", "inspect", "-"])["state"], "running");
    offline.line(&["sandbox", "rm", "--all", "--yes"]);
    assert_eq!(offline.json(&["sandbox", "ls"]), Value::Array(vec![]));
}

#[test]
fn state_and_volumes_persist_between_runs() {
    let offline = OfflineHome::new();
    let run = |flags: &[&str], script: &str| {
        offline.harvest(
            ["exec", "--image", "tiny"].iter().chain(flags).chain(&["--", "sh", "-c", script]),
        )
    };
    let begun = run(&["--user", "10001"], "cd /mnt/state; ls -A; echo state > workspace/f");
    assert_eq!(
        (begun.code, begun.stdout.as_str()),
        (0, ".cache\ncheckpoints\ngit-repos\nworkspace\n")
    );
    assert_eq!(run(&[], "cat /mnt/state/workspace/f").stdout, "state\n");
    assert_ne!(run(&["--no-state"], "ls /mnt/state").code, 0);
    assert_eq!(
        offline.line(&["volume", "create", "data", "--size", "16m", "--files", "100"]),
        "data"
    );
    assert_eq!(run(&["--no-state", "--volume", "data:/d"], "echo volume > /d/f").code, 0);
    let read_only = run(&["--no-state", "--volume", "data:/d:ro"], "cat /d/f; echo x > /d/g");
    assert!(read_only.code != 0 && read_only.stdout == "volume\n", "{read_only:?}");
    let sandbox = offline.line(&[
        "sandbox",
        "create",
        "--image",
        "tiny",
        "--no-state",
        "--volume",
        "data:/d",
    ]);
    let busy = offline.harvest(["volume", "rm", "--yes", "data"]);
    assert!(busy.code == 1 && busy.stderr.contains("in use"), "{busy:?}");
    offline.line(&["sandbox", "rm", &sandbox]);
    let names =
        |listed: Value| listed.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    let listed: Vec<Value> = names(offline.json(&["volume", "ls"]));
    assert_eq!(listed, ["data", "exec-state"]);
    offline.line(&["volume", "rm", "--yes", "data", "exec-state"]);
    let missing = run(&["--volume", "data:/d"], "true");
    assert!(
        missing.code == 125 && missing.stderr.contains("harvest volume create data"),
        "{missing:?}"
    );
}

#[tokio::test]
async fn standalone_sandbox_does_not_block_server() {
    let mut host = Host::start().await;
    let made = host.harvest(["sandbox", "create", "--image", "claude", "--no-state"]);
    assert_eq!(made.code, 0, "{made:?}");
    let sandbox = made.stdout.trim();
    let answers = |host: &Host| host.harvest(["exec", sandbox, "--", "echo", "here"]).stdout;
    assert_eq!(answers(&host), "here\n");
    host.kill();
    assert_eq!(answers(&host), "here\n");
    host.up().await;
    assert_eq!(answers(&host), "here\n", "the server ends only what is of its own sessions");
    let code = "import sys; print(6 * 7, sys.argv[1:])";
    let ran = host.harvest(["exec", sandbox, "--code", code, "--lang", "python", "--", "x"]);
    assert_eq!(ran.stdout, "42 ['x']\n", "{ran:?}");
    let left =
        host.harvest(["exec", sandbox, "--", "sh", "-c", "ls /tmp | grep -c harvest- || true"]);
    assert_eq!(left.stdout, "0\n", "the code is taken away again");
}

#[test]
fn umask_of_the_user_does_not_reach_sandboxes() {
    let offline = OfflineHome::new();
    let given = offline.command();
    let mut shell = Command::new("sh");
    for (name, value) in given.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.args(["-c", "umask 077; exec \"$@\"", "sh"]).arg(binary("harvest")).args(FRESH);
    let ran = shell.args(["-u", "10001", "--", "id", "-u"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "10001\n", "{ran:?}");
}
