//! The inputs of a session: several repositories, local folders, variables, a snapshot, a key.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use harvest_e2e::{Host, Ran};
use harvest_proto::{
    EventBody,
    api::{CheckOutcome, Session},
};
use serde_json::{Value, json};

use crate::{SAMPLE, completed};

/// Every file below a folder, `.git` included, with mode, mtime and content.
fn picture(folder: &Path) -> BTreeMap<PathBuf, (u32, i64, i64, Vec<u8>)> {
    let (mut all, mut folders) = (BTreeMap::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let about = fs::symlink_metadata(&path).unwrap();
            let content = if about.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            if about.is_dir() {
                folders.push(path.clone());
            }
            all.insert(path, (about.mode(), about.mtime(), about.mtime_nsec(), content));
        }
    }
    all
}

/// A folder with the sample in it.
fn folder(host: &Host, name: &str) -> PathBuf {
    let folder = host.home().join("folders").join(name);
    for (path, content) in SAMPLE {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    folder
}

fn git(folder: &Path, script: &str) {
    let who = ["-c", "user.name=Test", "-c", "user.email=test@example.org"];
    let done = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(who)
        .args(script.split(' '))
        .output()
        .unwrap();
    assert!(done.status.success(), "git {script}: {done:?}");
}

fn well(ran: Ran) -> Ran {
    assert_eq!(ran.code, 0, "{ran:?}");
    ran
}

fn session(ran: &Ran) -> Session {
    serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"))
}

const SCRIPTED: [&str; 5] = ["-m", "scripted", "--net", "none", "-d"];

#[tokio::test]
async fn two_folders_are_used_without_being_modified() {
    let host = Host::start().await;
    // One git checkout on its own branch with uncommitted work, and one folder without git.
    let (calc, lib) = (folder(&host, "calc"), folder(&host, "other/lib"));
    git(&calc, "init -q -b trunk");
    git(&calc, "add -A");
    git(&calc, "commit -qm Begin");
    fs::write(calc.join("draft.txt"), "not yet").unwrap();
    let before = (picture(&calc), picture(&lib));

    let change = "sed -i s/a.-.b/a+b/ calc.py && git commit -qam fix && git push -q";
    let script = json!([
        { "bash": format!("pwd > /tmp/where; {change}; cd ../lib && {change}; echo $MODE > /tmp/mode") },
        { "text": "done" },
    ]);
    let prompt = format!("Fix both.\nscript: {script}");
    let names = [calc.to_str().unwrap(), lib.to_str().unwrap()];
    let run = [
        "run",
        &prompt,
        "-r",
        names[0],
        "-r",
        names[1],
        "-e",
        "MODE=fast",
        "--key",
        "both",
        "--json",
        "--all",
    ];
    let ran = well(host.harvest(run.iter().chain(&SCRIPTED)));
    assert!(ran.stderr.contains("draft.txt"), "what is not committed is named: {}", ran.stderr);
    let made = session(&ran);
    let mut follower = host.follow(made.id.clone());
    let checked = |body: &EventBody| matches!(body, EventBody::Evidence(evidence) if evidence.outcome == CheckOutcome::Passed);
    let first = follower.until("the first evidence", checked).await;
    follower.after(first.seq, "the second evidence", checked).await;
    assert!(follower.seen.iter().any(|event| completed(&event.body)));
    let logs = well(host.harvest(["logs", &made.id.to_string()])).stdout;
    for name in ["local/calc", "local/lib"] {
        let told = |line: &str| {
            logs.lines().any(|one| one.starts_with(line) && one.contains(&format!(" of {name} ")))
        };
        assert!(told("Opened pull request #1") && told("Check passed on "), "{logs}");
    }
    let shown = host.show(&made.id).await;
    let bases: Vec<_> =
        shown.repositories.iter().map(|one| (one.name.as_str(), one.base.as_deref())).collect();
    assert_eq!(bases, [("local/calc", Some("trunk")), ("local/lib", Some("main"))]);
    for repository in &shown.repositories {
        let pull = repository.pr.as_ref().unwrap();
        assert!(
            pull.evidence.as_ref().unwrap().outcome == CheckOutcome::Passed
                && pull.url.contains(repository.name.as_str()),
            "{pull:?}"
        );
    }
    let (_, seen) =
        host.exec(&made.id, "harvest", "cat /tmp/where /tmp/mode; pwd; ls /workspace").await;
    assert_eq!(seen, "/workspace/calc\nfast\n/workspace/calc\ncalc\nlib\n");
    let diff = well(host.harvest(["diff", "-"])).stdout;
    assert!(diff.contains("+++ b/calc/calc.py") && diff.contains("+++ b/lib/calc.py"), "{diff}");
    let turn = well(host.harvest(["diff", "-", "--turn", "1"])).stdout;
    assert!(turn.contains("+++ b/calc/calc.py") && turn.contains("+++ b/lib/calc.py"), "{turn}");
    assert_eq!((picture(&calc), picture(&lib)), before, "the folders are only read");

    // The key returns the same session; the folder is updated and not registered twice.
    let key: Value = host.get("/v1/sessions?key=both").send().await.unwrap().json().await.unwrap();
    assert_eq!(key["items"][0]["id"], json!(made.id));
    fs::write(lib.join("calc.py"), "def add(a, b):\n    return a + b\n").unwrap();
    let again =
        format!("Look.\nscript: {}", json!([{ "bash": "cat calc.py" }, { "text": "seen" }]));
    let again = session(&well(
        host.harvest(["run", &again, "-r", names[1], "--json"].iter().chain(&SCRIPTED)),
    ));
    host.follow(again.id.clone()).until("the turn", completed).await;
    let (_, code) = host.exec(&again.id, "harvest", "cat calc.py").await;
    assert!(code.contains("a + b"), "{code}");
    let listed: Value =
        serde_json::from_str(&well(host.harvest(["repo", "ls", "--json"])).stdout).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 2, "{listed}");
}

#[tokio::test]
async fn repositories_of_equal_name_work_side_by_side() {
    // Without a key `run` would fail earlier.
    let host = Host::start_with(&[("ANTHROPIC_API_KEY", "unused")]).await;
    let (app, other) = (folder(&host, "app"), folder(&host, "other"));
    fs::write(other.join("owner"), "acme\n").unwrap();
    for folder in [&app, &other] {
        well(host.harvest(["repo", "add", "--all", folder.to_str().unwrap()]));
    }
    let url = format!("{}/forge/local/other.git", host.url().unwrap());
    well(host.harvest(["repo", "add", &url, "--name", "acme/app", "--secret", "FORGE_OTHER"]));
    for arguments in [["run", "x", "-rapp"], ["repo", "build", "app"], ["repo", "rm", "app"]] {
        let refused = host.harvest(arguments);
        let listed = refused.stderr.contains("`app` is ambiguous: acme/app, local/app");
        assert!(refused.code == 1 && listed && refused.stderr.contains("hint:"), "{refused:?}");
    }
    let change = "sed -i s/a.-.b/a+b/ calc.py && git commit -qam fix && git push -q";
    let script = json!([{ "bash": format!("{change}; cd ../acme-app && {change}") }]);
    let prompt = format!("Fix both.\nscript: {script}");
    let run = ["run", &prompt, "-r", "local/app", "-r", "acme/app", "--json"];
    let made = session(&well(host.harvest(run.iter().chain(&SCRIPTED))));
    let mut follower = host.follow(made.id.clone());
    let checked = |body: &EventBody| matches!(body, EventBody::Evidence(evidence) if evidence.outcome == CheckOutcome::Passed);
    let first = follower.until("the first evidence", checked).await;
    follower.after(first.seq, "the second evidence", checked).await;
    let look = "ls /workspace; cat /workspace/*/owner; git -C ../acme-app remote get-url origin";
    let (_, seen) = host.exec(&made.id, "harvest", look).await;
    assert_eq!(seen, "acme-app\napp\nacme\nhttp://git.harvest.internal/acme/app.git\n");
    let shown = host.show(&made.id).await;
    let pulls: Vec<_> =
        shown.repositories.iter().map(|one| one.pr.as_ref().unwrap().url.as_str()).collect();
    assert!(pulls[0].contains("/local/app/") && pulls[1].contains("/local/other/"), "{pulls:?}");
}

#[tokio::test]
async fn session_starts_without_repository_or_from_snapshot() {
    let host = Host::start().await;
    let note = format!(
        "Write.\nscript: {}",
        json!([{ "bash": "pwd > note; ls -A >> note" }, { "text": "done" }])
    );
    let body = json!({ "prompt": note, "model": "scripted", "network": "none" });
    let first: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    let mut follower = host.follow(first.id.clone());
    follower.until("the snapshot", |body| matches!(body, EventBody::SnapshotTaken { .. })).await;
    let snapshot = host.show(&first.id).await.snapshot_id.unwrap().to_string();
    let lib = folder(&host, "lib");
    let look = format!(
        "Look.\nscript: {}",
        json!([{ "bash": "git branch --show-current" }, { "text": "seen" }])
    );
    let run = ["run", &look, "-r", lib.to_str().unwrap(), "--from", &snapshot, "--json", "--all"];
    let second = session(&well(host.harvest(run.iter().chain(&SCRIPTED))));
    well(host.harvest(["rm", "--yes", &first.id.to_string()]));
    host.follow(second.id.clone()).until("the turn", completed).await;
    let (_, seen) =
        host.exec(&second.id, "harvest", "cat /workspace/note; git branch --show-current").await;
    assert_eq!(
        seen,
        format!("/workspace\nnote\n{}\n", second.branch),
        "its disk, and what it lacked, cloned"
    );
    let unknown = ["run", "x", "-r", lib.to_str().unwrap(), "--from", "snp_000000000000"];
    let unknown = host.harvest(unknown.iter().chain(&SCRIPTED));
    assert!(unknown.code == 1 && unknown.stderr.contains("hint:"), "{unknown:?}");
}

#[tokio::test]
async fn concurrent_folder_registration_yields_one_working_token() {
    let host = Host::start().await;
    let lib = folder(&host, "lib");
    std::thread::scope(|scope| {
        let add = || well(host.harvest(["repo", "add", "--all", lib.to_str().unwrap()]));
        let both = [scope.spawn(add), scope.spawn(add)].map(|one| one.join().unwrap().stderr);
        assert_eq!(both.iter().filter(|said| said.contains("Updated ")).count(), 1, "{both:?}");
    });
    // The clone uses the token.
    well(host.harvest(["repo", "build", "lib"]));
}

#[tokio::test]
async fn copied_folder_survives_new_port_until_removed() {
    // Without a key `run` would fail earlier.
    let mut host = Host::start_with(&[("ANTHROPIC_API_KEY", "unused")]).await;
    let lib = folder(&host, "lib");
    let lib = lib.to_str().unwrap();
    let asked = host.harvest(["repo", "add", lib]);
    assert!(asked.code == 2 && asked.stderr.contains("is not a git repository: 3 files ("));
    assert!(asked.stderr.contains("--all") && !host.home().join("forge/lib").exists());
    well(host.harvest(["repo", "add", lib, "--all"]));
    let again = well(host.harvest(["repo", "add", lib]));
    assert!(again.stderr.contains("Updated "), "{again:?}");
    let before = host.url().unwrap();
    host.kill();
    // Occupies the old port, unless another test took it first.
    let port = before.rsplit(':').next().unwrap().parse::<u16>().unwrap();
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).ok();
    host.up().await;
    assert_ne!(host.url().unwrap(), before);
    let listed = well(host.harvest(["repo", "ls"])).stdout;
    assert!(listed.contains(&host.url().unwrap()), "{listed}");
    let look = format!("Look.\nscript: {}", json!([{ "text": "seen" }]));
    let made =
        session(&well(host.harvest(["run", &look, "-r", "lib", "--json"].iter().chain(&SCRIPTED))));
    host.follow(made.id.clone()).until("the turn", completed).await;
    let used = host.harvest(["repo", "rm", "--yes", "lib"]);
    assert!(used.code == 1 && used.stderr.contains("hint:"), "{used:?}");
    well(host.harvest(["rm", "--yes", "-"]));
    well(host.harvest(["repo", "rm", "--yes", "lib"]));
    assert!(!host.home().join("forge/lib").exists());
    assert!(!well(host.harvest(["secret", "ls"])).stdout.contains("FORGE_LIB"));
    let empty = host.home().join("empty");
    fs::create_dir(&empty).unwrap();
    for (arguments, words) in [
        (["repo", "add", empty.to_str().unwrap()], "there are no files in"),
        (["repo", "add", "/nope"], "there is no folder"),
        (["run", "x", "-rnope"], "no repository and no folder `nope`"),
    ] {
        let refused = host.harvest(arguments);
        assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");
        assert!(
            refused.stderr.contains("hint:") && !refused.stderr.contains("fatal:"),
            "{refused:?}"
        );
    }
    let image = host.harvest(["repo", "add", "https://git.example.org/x.git", "--image", "nope"]);
    assert!(image.code == 1 && image.stderr.contains("harvest image ls"), "{image:?}");
}
