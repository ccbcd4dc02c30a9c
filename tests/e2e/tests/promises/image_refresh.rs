//! The schedule keeps images fresh, and with them the builds and sessions on them. Each test has an
//! image cache of its own: other tests start from the images of the machine.

use std::{fs, path::PathBuf, process::Command};

use harvest_e2e::Host;
use harvest_proto::{EventBody, event::StartWay};
use serde_json::{Value, json};

use crate::{build_faults::json, clocks::Wall, completed, repository_config::add};

/// An image cache with the image `base` of this machine, whose files it shares. Removed on drop.
pub(crate) struct Cache(tempfile::TempDir);

impl Cache {
    pub(crate) fn with_base() -> Self {
        let of_machine = of_machine();
        // Beside the machine's: links cannot leave a file system.
        let folder = tempfile::Builder::new().prefix("hv-cache").tempdir_in(&of_machine).unwrap();
        let cache = Self(folder);
        let record = fs::read_to_string(of_machine.join("images/base.json"))
            .expect("an image `base`: `make build` and `harvest image build agents` make it");
        let layers: Value = serde_json::from_str(&record).unwrap();
        for folder in ["images", "layers"] {
            fs::create_dir(cache.0.path().join(folder)).unwrap();
        }
        fs::write(cache.record_path(), &record).unwrap();
        for layer in layers["layers"].as_array().unwrap() {
            cache.link(&format!("layers/{}", layer.as_str().unwrap()));
        }
        // Which layer a step has that was run again.
        cache.link("steps");
        cache
    }

    fn link(&self, path: &str) {
        let [from, to] = [of_machine().join(path), self.0.path().join(path)];
        let linked = Command::new("cp").args(["-a", "--link"]).arg(from).arg(to).status();
        assert!(linked.unwrap().success(), "{path}");
    }

    fn record_path(&self) -> PathBuf {
        self.0.path().join("images/base.json")
    }

    fn record(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.record_path()).unwrap()).unwrap()
    }

    fn set_record(&self, record: &Value) {
        fs::write(self.record_path(), record.to_string()).unwrap();
    }

    /// What makes a server use the cache.
    pub(crate) fn env(&self) -> [(&str, &str); 2] {
        [("HARVEST_CACHE", self.0.path().to_str().unwrap()), ("HARVEST_IMAGE", "base")]
    }
}

/// The image cache of this machine.
fn of_machine() -> PathBuf {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    folder("HARVEST_CACHE").or_else(|| Some(caches?.join("harvest"))).unwrap()
}

/// Starts a session; returns how it started, and whether its disk has `ping`.
async fn session_has_ping(host: &Host) -> (StartWay, bool) {
    let session = host.scripted("shop", "Look.", &json!([{ "text": "done" }])).await;
    let mut stream = host.follow(session.id.clone());
    let is_start = |body: &EventBody| matches!(body, EventBody::SandboxStarted { .. });
    let started = stream.until("the start", is_start).await.body;
    let EventBody::SandboxStarted { way, .. } = started else { unreachable!() };
    stream.until("the turn", completed).await;
    let (_, found) = host.exec(&session.id, "harvest", "command -v ping").await;
    (way, !found.is_empty())
}

#[tokio::test]
async fn schedule_brings_changed_recipe_to_sessions() {
    let cache = Cache::with_base();
    let host = Host::start_with(&cache.env()).await;
    let built = host.harvest(["image", "build", "base"]);
    assert_eq!(built.code, 0, "{built:?}");
    // The image as an earlier recipe left it: without its last two steps, of which the first one
    // makes `ping`. The layer of the last one is not cached, so that this step runs.
    let mut record = cache.record();
    assert!(record["source"].as_str().unwrap().starts_with("built-in"), "{record}");
    let layers = record["layers"].as_array_mut().unwrap();
    let last = layers.pop().unwrap();
    layers.pop().unwrap();
    let last = cache.0.path().join("layers").join(last.as_str().unwrap());
    fs::remove_dir_all(&last).unwrap();
    record["recipe_key"] = json!("of an earlier recipe");
    cache.set_record(&record);

    add(&host, &[("file", "1")]);
    assert_eq!(host.harvest(["repo", "build", "shop"]).code, 0);
    let before = json(&host, &["repo", "show", "shop"])["build"].clone();
    assert_eq!(before["image_id"], record["id"]);
    assert_eq!(session_has_ping(&host).await, (StartWay::Build, false));

    let run = json(&host, &["schedule", "run"]);
    assert_eq!(run["status"], "success", "{run}");
    assert_eq!((&run["images"], &run["rebuilt"]), (&json!(["base"]), &json!(["local/shop"])));
    assert!(last.is_dir(), "the last step ran");
    let after = json(&host, &["repo", "show", "shop"])["build"].clone();
    assert_eq!(after["image_id"], cache.record()["id"]);
    assert_ne!(after["image_id"], before["image_id"]);
    assert_eq!(session_has_ping(&host).await, (StartWay::Build, true));

    let again = host.harvest(["schedule", "run"]);
    assert!(again.code == 0 && again.stderr.contains("Nothing has moved"), "{again:?}");
}

#[tokio::test]
async fn daily_run_clears_only_stale_caches() {
    let cache = Cache::with_base();
    // An image of the user's own recipe is never looked at: no update of a package can interfere.
    let mut record = cache.record();
    record["source"] = json!("recipe, from Debian bookworm");
    cache.set_record(&record);
    let mut host = Host::start_with(&cache.env()).await;
    add(&host, &[("file", "1")]);
    let session = host.scripted("shop", "Fill.", &json!([{ "text": "done" }])).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    let fill = "cd /mnt/state && mkdir -p .cache/pip .cache/npm/old outside && cd .cache && \
        for file in pip/stale pip/read pip/written npm/old/stale ../outside/stale; do \
          echo content > $file && touch -d '20 days ago' $file; done && \
        cat pip/read > /dev/null && touch pip/written && ln -s ../outside pip/link && \
        touch -h -d '20 days ago' pip/link && echo filled";
    assert_eq!(host.exec(&session, "harvest", fill).await.1.trim_end(), "filled");

    let wall = Wall::of(&mut host);
    host.kill();
    host.up().await;
    let list = "cd /mnt/state && find . -mindepth 1 ! -path './git-repos*' | sort | tr '\n' ' '";
    let files = async |host: &Host| host.exec(&session, "root", list).await.1;
    let all = files(&host).await;
    assert_eq!(json(&host, &["schedule", "run"])["status"], "success");
    assert_eq!(files(&host).await, all, "a new home begins its first day");
    wall.set("+25h");
    assert_eq!(json(&host, &["schedule", "run"])["status"], "success");
    let left = files(&host).await;
    let gone: Vec<&str> = all.split(' ').filter(|file| !left.contains(file)).collect();
    // The folder has just changed: it goes when it has been empty for as long.
    assert_eq!(gone, ["./.cache/npm/old/stale", "./.cache/pip/link", "./.cache/pip/stale"]);
    for kept in ["./.cache/pip/read", "./.cache/pip/written", "./outside/stale"] {
        assert!(left.contains(kept), "{kept}: {left}");
    }
}
