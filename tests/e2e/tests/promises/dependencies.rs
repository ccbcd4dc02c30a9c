//! Dependencies: found by the files of a repository, installed in its build with the real package
//! managers and registries, and there when a session starts.

use std::{fs, path::Path, process::Command};

use harvest_e2e::Host;
use harvest_proto::{EventBody, api::SessionState, event::TurnOutcome};
use serde_json::json;

const PACKAGE: &str = r#"{
  "name": "shop", "version": "1.0.0", "private": true, "engines": {"node": "20.x"},
  "scripts": {"build": "node -p \"'built'\" > built", "test": "exit 3"},
  "dependencies": {"is-number": "7.0.0"}
}"#;

const PACKAGE_LOCK: &str = r#"{
  "name": "shop", "version": "1.0.0", "lockfileVersion": 3, "requires": true,
  "packages": {
    "": {"name": "shop", "version": "1.0.0", "dependencies": {"is-number": "7.0.0"},
         "engines": {"node": "20.x"}},
    "node_modules/is-number": {"version": "7.0.0",
      "integrity": "sha512-41Cifkg6e8TylSpdtTpeLVMqvSBEVzTttHvERD741+pnZ8ANv0004MRL43QKPDlK9cGvNp6NZWZUBlbGXYxxng=="}
  }
}"#;

const UV_LOCK: &str = "version = 1\nrequires-python = \">=3.9\"\n\n[[package]]\nname = \"jobs\"\n\
                       version = \"1\"\nsource = { virtual = \".\" }\n";

fn commit(folder: &Path, files: &[(&str, &str)]) {
    for (path, content) in files {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    for arguments in ["init -q -b main", "add -A", "commit -q -m Change"] {
        let mut git = Command::new("git");
        git.args(["-c", "user.name=T", "-c", "user.email=t@example.org"]).current_dir(folder);
        assert!(git.args(arguments.split(' ')).status().unwrap().success());
    }
}

/// Registers a folder with these files, without a build.
fn add(host: &Host, name: &str, files: &[(&str, &str)]) {
    let folder = host.home().join("sources").join(name);
    commit(&folder, files);
    let added = host.harvest(["repo", "add", folder.to_str().unwrap()]);
    assert_eq!(added.code, 0, "{added:?}");
}

#[tokio::test]
async fn build_installs_dependencies_of_every_kind() {
    let host = Host::start().await;
    let ignored = (".gitignore", "node_modules\nbuilt\n.venv\n");
    let npm = [("package.json", PACKAGE), ("package-lock.json", PACKAGE_LOCK), ignored];
    let pip = [("requirements.txt", "six==1.16.0\n"), (".python-version", "3.99\n")];
    let mixed = [
        (
            "web/package.json",
            r#"{"dependencies": {"is-number": "7.0.0"}, "packageManager": "yarn@1.22.22"}"#,
        ),
        ("jobs/pyproject.toml", "[project]\nname = \"jobs\"\nversion = \"1\"\n"),
        ("jobs/uv.lock", UV_LOCK),
        ("lib/pyproject.toml", "[project]\nname = \"lib\"\nversion = \"1\"\n"),
        ("lib/lib.py", "x = 1\n"),
        ignored,
    ];
    let none = [("README.md", "nothing to install\n")];
    let kinds: [(_, &[_], &[&str], _); 4] = [
        (
            "npm",
            &npm,
            &["✓ node 20.x in npm", "✓ npm ci", "✓ npm run build", "npm test --silent failed"],
            Some("npm"),
        ),
        (
            "pip",
            &pip,
            &["asks for Python ==3.99.*, and the image has", "✓ python3 -m pip install -r"],
            Some("pip"),
        ),
        (
            "mixed",
            &mixed,
            &["✓ uv sync --frozen in mixed/jobs", "install -e . in mixed/lib", "✓ yarn install"],
            Some("uv"),
        ),
        ("none", &none, &[], None),
    ];
    for (name, files, printed, manager) in kinds {
        add(&host, name, files);
        let built = host.harvest(["repo", "build", name]);
        assert_eq!(built.code, 0, "{built:?}");
        for line in printed {
            assert!(built.stderr.contains(line), "{line}: {}", built.stderr);
        }
        let shown = host.harvest(["repo", "show", name, "--json"]).stdout;
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown["build"]["package_manager"], json!(manager), "{shown}");
    }
    let uses = "node --version && node -p \"require('is-number')(1)\" && cat built \
                && git status --short";
    let script = json!([{ "bash": uses }, { "text": "done" }]);
    let session = host.scripted("npm", "Use it.", &script).await;
    host.wait_for(&session.id, SessionState::Idle).await;
    let events = host.events(&session.id).await;
    let output = events.iter().find_map(|event| match event {
        EventBody::ToolEnded { output, .. } => Some(output.clone()),
        _ => None,
    });
    let output = output.unwrap();
    assert!(output.starts_with("v20.") && output.contains("true\nbuilt"), "{output}");
    assert!(!output.contains("??"), "the checkout is clean: {output}");
    let installs = events.iter().any(|event| matches!(event, EventBody::InstallStep { .. }));
    assert!(!installs, "a session that starts from a build installs nothing");
}

/// Builds a repository. Returns what was printed, and the build.
fn rebuild(host: &Host, arguments: &[&str]) -> (String, serde_json::Value) {
    let built = host.harvest([&["repo", "build", "shop"], arguments].concat());
    assert_eq!(built.code, 0, "{built:?}");
    let shown = host.harvest(["repo", "show", "shop", "--json"]).stdout;
    (built.stderr, serde_json::from_str::<serde_json::Value>(&shown).unwrap()["build"].clone())
}

#[tokio::test]
async fn rebuild_installs_only_what_a_lockfile_moved() {
    let host = Host::start().await;
    let ignored = (".gitignore", "node_modules\nbuilt\n");
    let package = PACKAGE.replace(r#""engines": {"node": "20.x"},"#, "");
    let files = [("package.json", &*package), ("package-lock.json", PACKAGE_LOCK), ignored];
    add(&host, "shop", &files);
    let (printed, first) = rebuild(&host, &[]);
    assert!(printed.contains("✓ npm ci"), "{printed}");
    assert_eq!(first["layers"], json!(1));

    let folder = host.home().join("sources/shop");
    commit(&folder, &[("README.md", "new\n")]);
    assert_eq!(host.harvest(["repo", "add", folder.to_str().unwrap()]).code, 0);
    let (printed, second) = rebuild(&host, &[]);
    assert!(!printed.contains("npm ci") && printed.contains("✓ npm run build"), "{printed}");
    assert_eq!((&second["layers"], &second["package_manager"]), (&json!(2), &json!("npm")));

    commit(&folder, &[("package-lock.json", &PACKAGE_LOCK.replace("1.0.0", "1.0.1"))]);
    assert_eq!(host.harvest(["repo", "add", folder.to_str().unwrap()]).code, 0);
    let (printed, third) = rebuild(&host, &[]);
    assert!(printed.contains("✓ npm ci"), "{printed}");
    assert_eq!(third["layers"], json!(3));

    commit(&folder, &[(".nvmrc", "20\n")]);
    assert_eq!(host.harvest(["repo", "add", folder.to_str().unwrap()]).code, 0);
    let (printed, fourth) = rebuild(&host, &[]);
    assert!(printed.contains("a pinned version of Node or Python moved"), "{printed}");
    assert_eq!(fourth["layers"], json!(1));
    assert_eq!(rebuild(&host, &["--force"]).1["layers"], json!(1));
}

#[tokio::test]
async fn build_of_a_branch_prints_its_result() {
    let host = Host::start().await;
    add(&host, "shop", &[("file", "base\n")]);
    let folder = host.home().join("sources/shop");
    let git = |arguments: &[&str]| {
        assert!(
            Command::new("git").args(arguments).current_dir(&folder).status().unwrap().success()
        );
    };
    git(&["checkout", "-q", "-b", "next"]);
    commit(&folder, &[("file", "next\n")]);
    assert_eq!(host.harvest(["repo", "add", folder.to_str().unwrap()]).code, 0);
    git(&["checkout", "-q", "main"]);
    assert_eq!(host.harvest(["repo", "set", "shop", "--base", "main"]).code, 0);
    assert_eq!(host.harvest(["repo", "build", "shop"]).code, 0);
    let built = host.harvest(["repo", "build", "shop", "--branch", "next", "--json"]);
    let last = built.stdout.lines().last().unwrap();
    let result: serde_json::Value = serde_json::from_str(last).unwrap();
    for (key, expected) in [
        ("success", json!(true)),
        ("status", json!("success")),
        ("repo", json!("local/shop")),
        ("branch", json!("next")),
        ("package_manager", json!(null)),
    ] {
        assert_eq!(result[key], expected, "{key}: {result}");
    }
    assert!(result["snapshot_id"].is_string() && result["duration_secs"].is_number(), "{result}");
    let unknown = host.harvest(["repo", "build", "shop", "--branch", "nope"]);
    assert!(unknown.stderr.contains("branch nope does not exist"), "{unknown:?}");
    let shown = host.harvest(["repo", "show", "shop", "--json"]).stdout;
    assert!(!shown.contains(result["commit"].as_str().unwrap()), "the base keeps its build");
}

#[tokio::test]
async fn failed_install_fails_builds_but_not_sessions() {
    let host = Host::start().await;
    add(&host, "shop", &[("requirements.txt", "./missing-package\n")]);
    let built = host.harvest(["repo", "build", "shop"]);
    assert_eq!(built.code, 1, "{built:?}");
    assert!(built.stderr.contains("`harvest repo logs local/shop`"), "{built:?}");
    let listed = host.harvest(["repo", "builds", "shop"]);
    assert!(listed.stdout.contains("failed"), "{listed:?}");
    let log = host.harvest(["repo", "logs", "shop"]).stdout;
    assert!(log.contains("missing-package") && log.contains("exited with code 1"), "{log}");

    let session = host.scripted("shop", "Go on.", &json!([{ "text": "on" }])).await;
    host.wait_for(&session.id, SessionState::Idle).await;
    let events = host.events(&session.id).await;
    let failed = events.iter().find_map(|event| match event {
        EventBody::InstallStep { failure: Some(failure), tail, .. } => Some((failure, tail)),
        _ => None,
    });
    let (failure, tail) = failed.unwrap();
    assert_eq!(failure, "exited with code 1");
    assert!(tail.contains("missing-package"), "{tail}");
    let ended = |event: &EventBody| {
        matches!(event, EventBody::TurnEnded { outcome: TurnOutcome::Completed, .. })
    };
    assert!(events.iter().any(ended));
}

#[tokio::test]
async fn build_of_a_folder_takes_its_newest_commit() {
    let host = Host::start().await;
    let setup = |exit: u8| format!("echo setup; exit {exit}\n");
    add(&host, "shop", &[(".harvest/setup.sh", &setup(1))]);
    assert_eq!(host.harvest(["repo", "build", "shop"]).code, 1);
    let folder = host.home().join("sources/shop");
    commit(&folder, &[(".harvest/setup.sh", &setup(0))]);
    let built = host.harvest(["repo", "build", folder.to_str().unwrap()]);
    assert_eq!(built.code, 0, "{built:?}");
    let head = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(&folder).output();
    let head = String::from_utf8(head.unwrap().stdout).unwrap();
    let shown = host.harvest(["repo", "show", "shop", "--json"]).stdout;
    assert!(shown.contains(head.trim()), "{shown}");
}

#[tokio::test]
async fn repository_settings_can_be_changed() {
    let host = Host::start().await;
    add(&host, "shop", &[("file", "x")]);
    let before = host.harvest(["repo", "show", "shop"]).stdout;
    assert!(before.contains("image         default"), "{before}");
    let changed = host.harvest(["repo", "set", "shop", "--image", "base"]);
    assert_eq!(changed.code, 0, "{changed:?}");
    assert!(host.harvest(["repo", "show", "shop"]).stdout.contains("image         base"));
    for (arguments, why) in [
        (&["--image", "nosuch"][..], "there is no image `nosuch`"),
        (&["--base", "nope"], "branch nope does not exist"),
        (&["--secret", "NOPE"], "secret NOPE"),
        (&[], "nothing to change"),
    ] {
        let refused = host.harvest([&["repo", "set", "shop"], arguments].concat());
        assert!(refused.code != 0 && refused.stderr.contains(why), "{refused:?}");
    }
    let shown = host.harvest(["repo", "show", "shop"]).stdout;
    assert!(
        shown.contains("image         base") && shown.contains("base          main"),
        "{shown}"
    );
    assert_eq!(host.harvest(["repo", "set", "shop", "--unset", "image"]).code, 0);
    assert!(host.harvest(["repo", "show", "shop"]).stdout.contains("image         default"));
}

#[tokio::test]
async fn schedule_rebuilds_only_what_has_moved() {
    let host = Host::start().await;
    add(&host, "shop", &[("file", "1")]);
    add(&host, "other", &[("file", "1")]);
    let run = |expected: &[&str]| {
        let ran = host.harvest(["schedule", "run"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        let built: Vec<_> =
            ran.stderr.lines().filter_map(|line| line.strip_prefix("Built ")).collect();
        assert_eq!(built, expected, "{ran:?}");
    };
    run(&["local/other", "local/shop"]);
    run(&[]);
    let folder = host.home().join("sources/shop");
    commit(&folder, &[("file", "2")]);
    assert_eq!(host.harvest(["repo", "add", folder.to_str().unwrap()]).code, 0);
    run(&["local/shop"]);
    let shown = host.harvest(["repo", "builds", "shop", "--json"]).stdout;
    let builds: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(builds.as_array().unwrap().len(), 2, "{builds}");
    let runs = host.harvest(["schedule", "runs", "--json"]).stdout;
    let runs: serde_json::Value = serde_json::from_str(&runs).unwrap();
    assert_eq!(runs.as_array().unwrap().len(), 3, "{runs}");
    assert_eq!((&runs[0]["status"], &runs[0]["image_rebuilt"]), (&json!("success"), &json!(true)));
    assert_eq!(runs[1]["image_rebuilt"], json!(false));
    let paused = host.harvest(["schedule", "pause", "--json"]).stdout;
    assert!(paused.contains("\"paused\": true"), "{paused}");
    assert_eq!(host.harvest(["schedule", "resume"]).code, 0);
}
