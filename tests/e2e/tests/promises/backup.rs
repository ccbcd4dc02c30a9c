//! Backups of homes in use, loaded into new homes: what is there afterwards, and what a kill, a
//! full disk, a damaged file and another version leave.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use harvest_e2e::{Host, Ran, until};
use harvest_proto::{EventBody, SessionId, api::Session};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{completed, faults_host::SmallDisk, turn_ended};

/// A folder for backups beside a host's home.
fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("hvb").tempdir().unwrap()
}

fn path(file: &Path) -> &str {
    file.to_str().unwrap()
}

/// A backup without the layers of images, which every test of this machine shares.
fn backup(host: &Host, file: &Path) -> Value {
    let made = host.harvest(["backup", "create", path(file), "--without-images", "--json"]);
    assert_eq!(made.code, 0, "{made:?}");
    serde_json::from_str(&made.stdout).unwrap()
}

/// Stops a host's server and empties its home.
fn empty(host: &mut Host) {
    assert_eq!(host.harvest(["down"]).code, 0);
    host.kill();
    for entry in fs::read_dir(host.home()).unwrap() {
        let path = entry.unwrap().path();
        let removed =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.unwrap();
    }
}

/// A server on a home that was loaded from a backup.
async fn loaded(file: &Path) -> Host {
    let mut host = Host::start().await;
    empty(&mut host);
    let load = host.harvest(["backup", "load", path(file)]);
    assert_eq!(load.code, 0, "{load:?}");
    host.up().await;
    host
}

async fn session_of_two_turns(host: &Host) -> Session {
    let write = |text: &str| json!([{ "bash": format!("echo {text} > ~/file") }, { "text": "ok" }]);
    let session = host.bare("Write.", &write("one")).await;
    let mut follower = host.follow(session.id.clone());
    let first = follower.until("the first turn", completed).await;
    host.prompt(&session.id, "Again.", &write("two")).await;
    let second = follower.after(first.seq, "the second turn", completed).await;
    let kept = |body: &EventBody| matches!(body, EventBody::SnapshotTaken { .. });
    follower.after(second.seq, "its snapshot", kept).await;
    session
}

/// What `cat` prints in the session's next turn.
async fn read_in_a_turn(host: &Host, session: &SessionId) -> String {
    let before = host.show(session).await.seq;
    let script = json!([{ "bash": "cat ~/file" }, { "text": "read" }]);
    host.prompt(session, "Read.", &script).await;
    let mut follower = host.follow(session.clone());
    follower.after(before, "the turn to read", completed).await;
    host.exec(session, "harvest", "cat ~/file").await.1
}

#[tokio::test]
async fn busy_home_is_saved_and_loaded() {
    let (host, folder) = (Host::start().await, folder());
    host.repository("app", &[("readme", "of the repository\n")]).await;
    let secret =
        host.request(Method::PUT, "/v1/secrets/KEY").json(&json!({ "value": "planted-9" }));
    assert!(secret.send().await.unwrap().status().is_success());
    let rested = session_of_two_turns(&host).await.id;
    let busy = host.bare("Wait.", &json!([{ "bash": "sleep 1000" }, { "text": "ok" }])).await.id;
    let works = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    host.follow(busy.clone()).until("the turn to run", works).await;

    let file = folder.path().join("backup.tar.gz");
    let made = backup(&host, &file);
    assert_eq!(made["running"], 2, "{made}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // The server went on meanwhile.
    assert_eq!(host.exec(&rested, "harvest", "cat ~/file").await.1, "two\n");

    let other = loaded(&file).await;
    let listed = other.harvest(["ls", "--all", "--json"]);
    for session in [&rested, &busy] {
        assert!(listed.stdout.contains(&session.to_string()), "{listed:?}");
    }
    assert_eq!(read_in_a_turn(&other, &rested).await, "two\n");
    let restored = other.harvest(["restore", &format!("{rested}@1")]);
    assert_eq!(restored.code, 0, "{restored:?}");
    assert_eq!(read_in_a_turn(&other, &rested).await, "one\n");
    // The turn that ran is reported as interrupted, once.
    let ended = other.events(&busy).await.into_iter().filter(turn_ended).count();
    assert_eq!(ended, 1);
    let again = json!([{ "bash": "echo on > ~/file" }, { "text": "ok" }]);
    other.prompt(&busy, "Go on.", &again).await;
    other.follow(busy.clone()).until("the next turn", completed).await;
    // The key of the backup opens the sealed credential of the repository.
    assert_eq!(other.token(), host.token());
    let value = json!([{ "bash": "cat readme" }, { "text": "ok" }]);
    let body = json!({
        "repository": "app", "agent": "scripted", "model": "scripted", "network": "none",
        "prompt": format!("Read.\nscript: {value}"),
    });
    let of_repository = other.post("/v1/sessions", body).await;
    let id: SessionId = serde_json::from_value(of_repository["id"].clone()).unwrap();
    other.follow(id.clone()).until("a turn on the repository", completed).await;
    assert_eq!(other.exec(&id, "harvest", "cat readme").await.1, "of the repository\n");
    assert_eq!(other.harvest(["secret", "ls", "--json"]).stdout.matches("\"KEY\"").count(), 1);
}

#[tokio::test]
async fn backup_without_snapshots_tells_what_is_gone() {
    let (host, folder) = (Host::start().await, folder());
    let session = session_of_two_turns(&host).await.id;
    let file = folder.path().join("backup.tar.gz");
    let made = host.harvest(["backup", "create", path(&file), "--without-snapshots", "--json"]);
    let made: Value = serde_json::from_str(&made.stdout).unwrap();
    assert_eq!((made["snapshots"].clone(), made["layers"].clone()), (json!(0), json!(0)));
    let other = loaded(&file).await;
    let told = |body: &EventBody| matches!(body, EventBody::Warning { message } if message.contains("snp_"));
    other.follow(session.clone()).until("the missing snapshots to be reported", told).await;
    let history = other.harvest(["logs", &session.to_string()]);
    assert!(history.stdout.contains("turn 2"), "{history:?}");
}

/// Imports an image with a file and saves a sandbox's disk on it; returns the snapshot's id.
fn snapshot_on_own_image(host: &Host, folder: &Path) -> String {
    let root = folder.join("root");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", root.join("bin/sh")).unwrap();
    std::os::unix::fs::symlink("busybox", root.join("bin/cat")).unwrap();
    fs::write(root.join("of-image"), "image\n").unwrap();
    let ok = |ran: Ran| {
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.stdout.trim().to_owned()
    };
    ok(host.harvest(["image", "import", "own", path(&root)]));
    let sandbox = ok(host.harvest(["sandbox", "create", "--image", "own", "--net", "none"]));
    ok(host.harvest([
        "exec",
        "-u",
        "root",
        &sandbox,
        "--",
        "/bin/sh",
        "-c",
        "echo disk > /of-disk",
    ]));
    let snapshot = ok(host.harvest(["sandbox", "snapshot", &sandbox]));
    ok(host.harvest(["sandbox", "rm", &sandbox]));
    snapshot
}

#[tokio::test]
async fn backup_brings_image_layers_to_another_machine() {
    let folder = folder();
    let cache = |name: &str| folder.path().join(name).display().to_string();
    let host = Host::start_with(&[("HARVEST_CACHE", &cache("one"))]).await;
    let snapshot = snapshot_on_own_image(&host, folder.path());
    let file = folder.path().join("backup.tar.gz");
    let made = host.harvest(["backup", "create", path(&file), "--json"]);
    let made: Value = serde_json::from_str(&made.stdout).unwrap();
    assert_eq!((made["snapshots"].clone(), made["layers"].clone()), (json!(1), json!(2)));
    let lean = folder.path().join("lean.tar.gz");
    backup(&host, &lean);

    // The other machine is another cache.
    let mut other = Host::start_with(&[("HARVEST_CACHE", &cache("two"))]).await;
    empty(&mut other);
    let load = other.harvest(["backup", "load", path(&lean)]);
    assert!(load.stderr.contains("1 layer of its snapshots are not on this machine"), "{load:?}");
    fs::remove_dir_all(other.home()).unwrap();
    let load = other.harvest(["backup", "load", path(&file), "--json"]);
    let document: Value = serde_json::from_str(&load.stdout).unwrap();
    assert_eq!(document["missing_layers"], 0, "{load:?}");
    other.up().await;
    // The collection knows the home that needs the layers.
    assert_eq!(other.harvest(["gc"]).code, 0);
    let sandbox = other.harvest(["sandbox", "create", "--from", &snapshot, "--net", "none"]);
    assert_eq!(sandbox.code, 0, "{sandbox:?}");
    let command = ["exec", sandbox.stdout.trim(), "--", "/bin/cat", "/of-image", "/of-disk"];
    assert_eq!(other.harvest(command).stdout, "image\ndisk\n");
}

#[tokio::test]
async fn refused_load_leaves_the_home_unchanged() {
    let (mut host, folder) = (Host::start().await, folder());
    let file = folder.path().join("backup.tar.gz");
    backup(&host, &file);
    let refused = |host: &Host, file: &Path, reason: &str| {
        let load = host.harvest(["backup", "load", path(file)]);
        assert_eq!(load.code, 1, "{load:?}");
        assert!(load.stderr.contains(reason) && load.stderr.contains("hint: "), "{load:?}");
    };
    refused(&host, &file, "is in use");
    assert_eq!(host.harvest(["down"]).code, 0);
    refused(&host, &file, "is not empty");
    assert!(host.home().join("harvest.db").exists());
    empty(&mut host);
    let bytes = fs::read(&file).unwrap();
    let damaged = folder.path().join("damaged.tar.gz");
    for (content, reason) in [
        (&bytes[..bytes.len() - 9], "is damaged or no backup"),
        (&b"no archive"[..], "is damaged or no backup"),
        (&b"\0".repeat(1024)[..], "is no backup"),
    ] {
        fs::write(&damaged, content).unwrap();
        refused(&host, &damaged, reason);
    }
    assert_eq!(fs::read_dir(host.home()).unwrap().count(), 0);
    let other = host.harvest_with(
        &[("HARVEST_DATABASE", "postgres://ada:s3cret@127.0.0.1:1/x")],
        ["backup", "load", path(&file)],
    );
    assert!(other.stderr.contains("`database`") && !other.stderr.contains("s3cret"), "{other:?}");
    hostile_archives_are_refused(&host, &file, folder.path());
    assert_eq!(fs::read_dir(host.home()).unwrap().count(), 0);
    assert!(!host.home().with_extension("loading").exists());
}

/// Loads copies of a backup with one more member each: a link or file that a later step would
/// follow, mount or run, or one outside of the home.
fn hostile_archives_are_refused(host: &Host, file: &Path, folder: &Path) {
    // A folder whose content must stay: its name could be a layer's.
    let outside = folder.join("outside");
    fs::create_dir_all(outside.join("plain")).unwrap();
    let packed = folder.join("evil.tar.gz");
    let script = "import io, sys, tarfile\n\
        source = tarfile.open(sys.argv[1])\n\
        member = tarfile.TarInfo(sys.argv[3])\n\
        if sys.argv[4]:\n\
        \x20   member.type, member.linkname = tarfile.SYMTYPE, sys.argv[4]\n\
        with tarfile.open(sys.argv[2], 'w:gz') as out:\n\
        \x20   for known in source:\n\
        \x20       out.addfile(known, source.extractfile(known) if known.isfile() else None)\n\
        \x20   out.addfile(member, io.BytesIO())\n";
    for (member, link, reason) in [
        ("../../planted", "", "points outside"),
        ("image-layers", path(&outside), "is no backup: \"image-layers\" does not belong in one"),
        ("layers/evil", "/", "is no backup: \"layers/evil\" does not belong in one"),
        ("snapshots/evil.json", "/etc/passwd", "is no backup: \"snapshots/evil.json\""),
        ("store.json", "", "is no backup: \"store.json\" does not belong in one"),
        ("supervisor/0/harvest-supervisor", "", "is no backup: \"supervisor\""),
    ] {
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(file).arg(&packed).args([member, link]);
        assert!(python.status().unwrap().success());
        refused_with(host, &packed, reason);
    }
    assert!(outside.join("plain").exists());
    assert!(!host.home().parent().unwrap().join("planted").exists());
}

fn refused_with(host: &Host, file: &Path, reason: &str) {
    let load = host.harvest(["backup", "load", path(file)]);
    assert!(load.code == 1 && load.stderr.contains(reason), "{load:?}");
}

#[tokio::test]
async fn backup_follows_symlink_to_the_settings() {
    let folder = folder();
    let (settings, link) = (folder.path().join("dotfiles.toml"), folder.path().join("link.toml"));
    fs::write(&settings, "# of the user\n").unwrap();
    std::os::unix::fs::symlink("dotfiles.toml", &link).unwrap();
    let host = Host::start_with(&[("HARVEST_CONFIG", path(&link))]).await;
    let file = folder.path().join("backup.tar.gz");
    backup(&host, &file);
    let mut tar = Command::new("tar");
    let listed = tar.arg("-xzOf").arg(&file).arg("harvest.toml").output().unwrap();
    assert_eq!(String::from_utf8(listed.stdout).unwrap(), "# of the user\n");
}

#[tokio::test]
async fn full_disk_leaves_no_half_backup() {
    let (host, disk) = (Host::start().await, SmallDisk::new());
    let ballast = disk.fill();
    // Space for the copy of the database, but not for the archive beside it.
    let length = fs::metadata(&ballast).unwrap().len();
    fs::File::options().write(true).open(&ballast).unwrap().set_len(length - (600 << 10)).unwrap();
    let script = json!([{ "bash": "head -c 3000000 /dev/urandom > ~/random" }, { "text": "ok" }]);
    let session = host.bare("Write.", &script).await.id;
    let kept = |body: &EventBody| matches!(body, EventBody::SnapshotTaken { .. });
    host.follow(session).until("its snapshot", kept).await;
    let file = disk.place.join("backup.tar.gz");
    let made = host.harvest(["backup", "create", path(&file), "--without-images"]);
    assert_eq!(made.code, 1, "{made:?}");
    assert!(made.stderr.contains("the disk is full") && made.stderr.contains("hint: "), "{made:?}");
    let names: Vec<_> =
        fs::read_dir(&disk.place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().contains("backup")), "{names:?}");
    fs::remove_file(ballast).unwrap();
    backup(&host, &file);
}

#[tokio::test]
async fn killed_load_leaves_no_home() {
    let (host, folder) = (Host::start().await, folder());
    let files = "mkdir ~/many; cd ~/many; seq 1 3000 | split -l 2 -a 4 -";
    let script = json!([{ "bash": files }, { "text": "ok" }]);
    let session = host.bare("Write.", &script).await.id;
    let kept = |body: &EventBody| matches!(body, EventBody::SnapshotTaken { .. });
    host.follow(session).until("its snapshot", kept).await;
    let file = folder.path().join("backup.tar.gz");
    backup(&host, &file);
    let mut other = Host::start().await;
    empty(&mut other);
    let staging = PathBuf::from(format!("{}.loading", other.home().display()));
    for part in ["", "home", "home/layers"] {
        let mut load = other.command();
        load.args(["backup", "load", path(&file)]).stdin(Stdio::null()).stderr(Stdio::null());
        let mut load = load.stdout(Stdio::null()).spawn().unwrap();
        until("the backup to be unpacked", || staging.join(part).exists());
        load.kill().unwrap();
        load.wait().unwrap();
        assert_eq!(fs::read_dir(other.home()).unwrap().count(), 0, "killed at {part}");
    }
    let load = other.harvest(["backup", "load", path(&file)]);
    assert_eq!(load.code, 0, "{load:?}");
    assert!(!staging.exists());
    other.up().await;
}

/// Changes the version of the tables, as another version of the program would.
fn set_schema(home: &Path, change: &str) {
    let script = "import sqlite3, sys\n\
        database = sqlite3.connect(sys.argv[1])\n\
        database.execute(f'UPDATE schema_version SET version = version {sys.argv[2]}')\n\
        database.commit()\n";
    let file = home.join("harvest.db");
    let changed = Command::new("python3").args(["-c", script]).arg(file).arg(change).status();
    assert!(changed.unwrap().success());
}

#[tokio::test]
async fn former_version_refuses_newer_home_and_loads_backup() {
    let (mut host, folder) = (Host::start().await, folder());
    let session = session_of_two_turns(&host).await.id;
    let before = folder.path().join("before.tar.gz");
    backup(&host, &before);
    // The upgrade: a version with other tables made this home its own.
    assert_eq!(host.harvest(["down"]).code, 0);
    host.kill();
    set_schema(host.home(), "+ 1");
    let refused = host.harvest(["up"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("`harvest backup load FILE`"), "{refused:?}");
    // A backup of the newer version is refused as well, and tells by which it was made.
    let after = folder.path().join("after.tar.gz");
    backup(&host, &after);
    let moved = folder.path().join("newer");
    fs::create_dir(&moved).unwrap();
    for entry in fs::read_dir(host.home()).unwrap() {
        let entry = entry.unwrap();
        let target = moved.join(entry.file_name());
        assert!(Command::new("mv").arg(entry.path()).arg(target).status().unwrap().success());
    }
    refused_with(&host, &after, "load it with the program that made it");
    let load = host.harvest(["backup", "load", path(&before)]);
    assert_eq!(load.code, 0, "{load:?}");
    host.up().await;
    assert_eq!(read_in_a_turn(&host, &session).await, "two\n");
}
