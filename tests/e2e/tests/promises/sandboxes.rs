//! Sandboxes of one's own on the real binary: made, copied into and out of, kept, put back, multiplied.

use std::fs;

use harvest_e2e::{Host, Machine};
use serde_json::Value;

#[test]
fn a_tree_goes_in_and_comes_back() {
    let machine = Machine::new();
    let sandbox = machine.create();
    let source = machine.path("source");
    fs::create_dir_all(source.join("a")).unwrap();
    fs::write(source.join("a/file"), "content").unwrap();
    std::os::unix::fs::symlink("../nowhere", source.join("a/link")).unwrap();
    let inside = |path: &str| format!("{sandbox}:{path}");
    machine.line(&["sandbox", "cp", source.to_str().unwrap(), &inside("/new")]);
    assert_eq!(
        machine.shell(&sandbox, "cat /new/a/file; readlink /new/a/link"),
        "content../nowhere"
    );
    // Into a folder that is there, under its own name.
    machine.line(&["sandbox", "cp", source.join("a").to_str().unwrap(), "-:/new"]);
    assert_eq!(machine.shell(&sandbox, "ls /new /new/a"), "/new:\na\n\n/new/a:\nfile\nlink");
    let target = machine.path("target");
    machine.line(&["sandbox", "cp", &inside("/new/a"), target.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "content");
    assert_eq!(fs::read_link(target.join("link")).unwrap().to_str(), Some("../nowhere"));
    for (arguments, words) in [
        ([inside("/nosuch"), target.display().to_string()], "there is nothing at /nosuch"),
        (["/etc/hostname".to_owned(), "sbx_000000000000:/x".to_owned()], "there is no sandbox"),
        (["/nosuch".to_owned(), inside("/x")], "No such file"),
        (["/a".to_owned(), "/b".to_owned()], "neither side is in a sandbox"),
        ([inside("/a"), inside("/b")], "one side of a copy is on this machine"),
    ] {
        let ran = machine.harvest(["sandbox", "cp", &arguments[0], &arguments[1]]);
        assert!(ran.code == 1 && ran.stderr.contains(words), "{arguments:?}: {ran:?}");
    }
}

#[test]
fn forks_go_their_own_ways_and_a_restore_goes_back() {
    let machine = Machine::new();
    let sandbox = machine.create();
    machine.shell(&sandbox, "echo first > /f");
    let snapshot = machine.line(&["sandbox", "snapshot", &sandbox]);
    machine.shell(&sandbox, "echo second > /f");
    let forks = machine.line(&["sandbox", "fork", "-n", "3", &sandbox]);
    let forks: Vec<&str> = forks.lines().collect();
    assert_eq!(forks.len(), 3);
    for fork in &forks {
        assert_eq!(machine.shell(fork, "cat /f"), "second");
        machine.shell(fork, &format!("echo {fork} > /f"));
    }
    for fork in &forks {
        assert_eq!(machine.shell(fork, "cat /f"), **fork);
    }
    assert_eq!(
        machine.json(&["snapshot", "ls"]).as_array().unwrap().len(),
        1,
        "a fork leaves none"
    );
    let anew = machine.line(&["sandbox", "restore", &snapshot]);
    assert_eq!(machine.shell(&anew, "cat /f"), "first");
    // In place: the id stays, and what was on the disk is another snapshot.
    let put_back = machine.json(&["sandbox", "restore", &sandbox, &snapshot]);
    assert_eq!(put_back["id"], sandbox.as_str());
    assert_eq!(machine.shell(&sandbox, "cat /f"), "first");
    let kept = put_back["kept"].as_str().unwrap();
    machine.line(&["sandbox", "restore", &sandbox, kept]);
    assert_eq!(machine.shell(&sandbox, "cat /f"), "second");
    let from = machine.line(&["sandbox", "create", "--from", &snapshot[..8]]);
    assert_eq!(machine.shell(&from, "cat /f"), "first");
    machine.line(&["snapshot", "rm", &snapshot]);
    assert_eq!(machine.shell(&from, "cat /f"), "first", "what uses it keeps what it uses");
}

#[test]
fn a_stopped_sandbox_starts_again_with_its_disk() {
    let machine = Machine::new();
    let sandbox = machine.create();
    machine.shell(&sandbox, "echo kept > /f");
    machine.line(&["sandbox", "stop", &sandbox]);
    assert_eq!(machine.json(&["sandbox", "inspect", &sandbox])["state"], "dead");
    let dead = machine.harvest(["exec", &sandbox, "--", "true"]);
    assert!(dead.code == 125 && dead.stderr.contains("harvest sandbox start"), "{dead:?}");
    let used = machine.json(&["df"]);
    assert_eq!(used["sandboxes"][0]["id"], sandbox.as_str(), "{used}");
    assert!(used["images_bytes"].as_u64().unwrap() > 1_000_000, "{used}");
    // Collecting garbage leaves what somebody may go on with.
    machine.line(&["gc"]);
    machine.line(&["sandbox", "start", &sandbox]);
    assert_eq!(machine.shell(&sandbox, "cat /f"), "kept");
    machine.line(&["sandbox", "start", &sandbox]);
}

#[test]
fn a_sandbox_is_named_by_its_beginning_and_removed_for_good() {
    let machine = Machine::new();
    let sandbox = machine.create();
    assert_eq!(machine.json(&["sandbox", "inspect", &sandbox[..10]])["id"], sandbox.as_str());
    assert_eq!(machine.json(&["sandbox", "inspect", &sandbox[4..10]])["image"], "tiny");
    assert_eq!(machine.line(&["exec", &sandbox[..10], "--", "echo", "hi"]), "hi");
    let wrong = machine.harvest(["sandbox", "rm", &sandbox, "sbx_nosuch"]);
    assert_eq!(wrong.code, 1, "a slip in the last must not cost the first: {wrong:?}");
    assert_eq!(machine.json(&["sandbox", "inspect", "-"])["state"], "running");
    machine.line(&["sandbox", "rm", "--all"]);
    assert_eq!(machine.json(&["sandbox", "ls"]), Value::Array(vec![]));
}

#[test]
fn what_one_run_leaves_in_its_state_or_in_a_volume_the_next_one_finds() {
    let machine = Machine::new();
    let run = |flags: &[&str], script: &str| {
        machine.harvest(
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
        machine.line(&["volume", "create", "data", "--size", "16m", "--files", "100"]),
        "data"
    );
    assert_eq!(run(&["--no-state", "--volume", "data:/d"], "echo volume > /d/f").code, 0);
    let read_only = run(&["--no-state", "--volume", "data:/d:ro"], "cat /d/f; echo x > /d/g");
    assert!(read_only.code != 0 && read_only.stdout == "volume\n", "{read_only:?}");
    let sandbox = machine.line(&[
        "sandbox",
        "create",
        "--image",
        "tiny",
        "--no-state",
        "--volume",
        "data:/d",
    ]);
    let busy = machine.harvest(["volume", "rm", "data"]);
    assert!(busy.code == 1 && busy.stderr.contains("in use"), "{busy:?}");
    machine.line(&["sandbox", "rm", &sandbox]);
    let names =
        |listed: Value| listed.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    let listed: Vec<Value> = names(machine.json(&["volume", "ls"]));
    assert_eq!(listed, ["data", "exec-state"]);
    machine.line(&["volume", "rm", "data", "exec-state"]);
    let missing = run(&["--volume", "data:/d"], "true");
    assert!(
        missing.code == 125 && missing.stderr.contains("harvest volume create data"),
        "{missing:?}"
    );
}

#[tokio::test]
async fn a_sandbox_of_ones_own_is_in_no_servers_way() {
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
