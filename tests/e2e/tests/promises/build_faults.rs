//! Builds that are killed, hang, leave processes, exceed the disk or have a broken remote: the
//! earlier build stays in use, and nothing is left behind.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    process::Stdio,
    sync::{Arc, Mutex},
};

use harvest_e2e::{Host, unique};
use serde_json::Value;

use crate::repository_config::add;

/// The output of a command as JSON.
pub(crate) fn json(host: &Host, arguments: &[&str]) -> Value {
    let printed = host.harvest([arguments, &["--json"]].concat()).stdout;
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
}

#[tokio::test]
async fn killed_server_keeps_the_earlier_build() {
    let mut host = Host::start().await;
    add(&host, &[(".harvest/setup.sh", "sleep 1\n"), (".harvest/check.sh", "sleep 1\n")]);
    assert_eq!(host.harvest(["repo", "build", "shop"]).code, 0);
    let before = json(&host, &["repo", "show", "shop"])["build"].clone();
    for step in [
        "Starting a sandbox\n",
        "Fetching the code",
        "Running the repository's setup",
        "Running .harvest/check.sh",
        "Saving a snapshot",
        "Starting a sandbox from the snapshot",
    ] {
        let mut build = host.command();
        build.args(["repo", "build", "shop", "--force"]).stderr(Stdio::piped());
        let mut build = build.spawn().unwrap();
        let lines = BufReader::new(build.stderr.take().unwrap()).lines();
        let mut lines = lines.map(|line| line.unwrap_or_default() + "\n");
        assert!(lines.any(|line| line.contains(step)), "{step}");
        host.kill();
        build.wait().unwrap();
        host.up().await;
        let after = json(&host, &["repo", "show", "shop"])["build"].clone();
        // The last step may have been over before the kill.
        let published = step.contains("from the snapshot") && after != before;
        assert!(after == before || published, "{step}: {after}");
        let builds = json(&host, &["repo", "builds", "shop"]);
        assert!(builds.as_array().unwrap().iter().all(|build| build["status"] != "building"));
        if published {
            return;
        }
    }
    assert_eq!(host.harvest(["repo", "build", "shop"]).code, 0);
    let sandboxes = json(&host, &["sandbox", "ls"]);
    assert_eq!(sandboxes.as_array().map(Vec::len), Some(0), "{sandboxes}");
}

#[tokio::test]
async fn hostile_setup_harms_only_its_build() {
    let host = Host::start().await;
    add(&host, &[("file", "1")]);
    assert_eq!(host.harvest(["repo", "build", "shop"]).code, 0);
    let before = json(&host, &["repo", "show", "shop"])["build"].clone();
    // Beyond the limit of a sandbox's disk.
    add(&host, &[(".harvest/setup.sh", "fallocate -l 11G /workspace/large\n")]);
    let full = host.harvest(["repo", "build", "shop"]);
    assert!(full.code == 1 && full.stderr.contains(".harvest/setup.sh failed"), "{full:?}");
    assert_eq!(json(&host, &["repo", "show", "shop"])["build"], before);
    let fork = "(setsid sleep 98765 &) ; setsid sh -c 'sleep 98765 & sleep 98765' &\n";
    add(&host, &[(".harvest/setup.sh", fork)]);
    let forked = host.harvest(["repo", "build", "shop"]);
    assert_eq!(forked.code, 0, "{forked:?}");
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let command = fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        (command == b"sleep\098765\0").then_some(())
    });
    assert_eq!(processes.count(), 0, "the build's processes are dead");
}

#[tokio::test]
async fn hanging_setup_ends_with_the_time_limit() {
    let host = Host::start_with(&[("HARVEST_CLOCKS_BUILD", "8s")]).await;
    add(&host, &[(".harvest/setup.sh", "sleep 98764\n")]);
    let built = host.harvest(["repo", "build", "shop"]);
    assert!(built.code == 1 && built.stderr.contains("timed out after 8 s"), "{built:?}");
    let sandboxes = json(&host, &["sandbox", "ls"]);
    assert_eq!(sandboxes.as_array().map(Vec::len), Some(0), "{sandboxes}");
}

#[tokio::test]
async fn hanging_tests_end_and_the_build_is_used() {
    let host = Host::start_with(&[("HARVEST_CLOCKS_WARM", "2s")]).await;
    let seconds = unique();
    let hang = format!("sleep {seconds} & setsid sleep {seconds} & sleep {seconds}\n");
    for (tests, file) in [("make test", "Makefile"), (".harvest/check.sh", ".harvest/check.sh")] {
        let text = if file == "Makefile" { format!("all:\ntest:\n\t{hang}") } else { hang.clone() };
        add(&host, &[(file, &text)]);
        let built = host.harvest(["repo", "build", "shop"]);
        assert_eq!(built.code, 0, "{tests}: {built:?}");
        let warning = format!("{tests} did not end within 2 s");
        assert!(built.stderr.contains(&warning), "{built:?}");
        assert!(!json(&host, &["repo", "show", "shop"])["build"].is_null());
    }
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let command = fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        (command == format!("sleep\0{seconds}\0").as_bytes()).then_some(())
    });
    assert_eq!(processes.count(), 0, "their processes are dead");
}

#[tokio::test]
async fn unresolvable_lockfile_fails_the_build() {
    let host = Host::start().await;
    let package = r#"{"name": "shop", "dependencies": {"is-number": "7.0.0"}}"#;
    let lock = r#"{"name": "shop", "lockfileVersion": 3, "packages": {
        "": {"name": "shop", "dependencies": {"is-number": "7.0.0"}},
        "node_modules/is-number": {"version": "7.0.0",
          "integrity": "sha512-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=="}}}"#;
    add(&host, &[("package.json", package), ("package-lock.json", lock)]);
    let built = host.harvest(["repo", "build", "shop"]);
    assert!(built.code == 1 && built.stderr.contains("npm ci"), "{built:?}");
    assert!(json(&host, &["repo", "show", "shop"])["build"].is_null());
}

/// How a remote answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Remote {
    Works,
    Status(&'static str),
    /// Breaks off within the answer with a pack.
    Breaks,
    Hangs,
}

/// A remote in front of the local forge.
#[derive(Clone)]
struct FaultyRemote(Arc<Mutex<(Remote, Vec<TcpStream>)>>);

impl FaultyRemote {
    fn start(host: &Host) -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/forge/local/shop.git", listener.local_addr().unwrap());
        let forge = host.url().unwrap().trim_start_matches("http://").to_owned();
        let remote = Self(Arc::new(Mutex::new((Remote::Works, Vec::new()))));
        let serving = remote.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(&forge)) else { return };
                let mode = {
                    let mut state = serving.0.lock().unwrap();
                    state.1.push(client.try_clone().unwrap());
                    state.0
                };
                std::thread::spawn(move || serve(client, server, mode));
            }
        });
        (remote, url)
    }

    /// Changes how it answers, and ends the connections that are open.
    fn set(&self, mode: Remote) {
        let mut state = self.0.lock().unwrap();
        state.0 = mode;
        for client in state.1.drain(..) {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}

fn serve(mut client: TcpStream, mut server: TcpStream, mode: Remote) {
    let limit = match mode {
        Remote::Works => u64::MAX,
        Remote::Breaks => 700,
        Remote::Status(status) => {
            let mut request = [0; 4096];
            let _ = client.read(&mut request);
            let head = "content-length: 0\r\nconnection: close\r\n\r\n";
            let _ = write!(client, "HTTP/1.1 {status}\r\n{head}");
            return;
        }
        Remote::Hangs => {
            // Until the client gives up.
            let _ = std::io::copy(&mut client, &mut std::io::sink());
            return;
        }
    };
    let (mut up, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    std::thread::spawn(move || std::io::copy(&mut up, &mut to_server));
    let _ = std::io::copy(&mut (&mut server).take(limit), &mut client);
    let _ = client.shutdown(Shutdown::Both);
}

#[tokio::test]
async fn faulty_remote_keeps_the_earlier_build() {
    let env = [("HARVEST_PRIVATE_HOSTS", "127.0.0.1"), ("HARVEST_CLOCKS_BUILD", "20s")];
    let host = Host::start_with(&env).await;
    add(&host, &[("file", "1")]);
    let (remote, url) = FaultyRemote::start(&host);
    let added =
        host.harvest(["repo", "add", &url, "--name", "acme/shop", "--secret", "FORGE_SHOP"]);
    assert_eq!(added.code, 0, "{added:?}");
    assert_eq!(host.harvest(["repo", "build", "acme/shop"]).code, 0);
    let before = json(&host, &["repo", "show", "acme/shop"])["build"].clone();
    add(&host, &[("file", &"moved\n".repeat(2000))]);
    for broken in [
        Remote::Status("401 Unauthorized"),
        Remote::Status("403 Forbidden"),
        Remote::Status("404 Not Found"),
        Remote::Status("500 Internal Server Error"),
        Remote::Breaks,
        Remote::Hangs,
    ] {
        remote.set(broken);
        for force in [&["--force"][..], &[]] {
            if broken == Remote::Hangs && !force.is_empty() {
                continue;
            }
            let built = host.harvest([&["repo", "build", "acme/shop"], force].concat());
            assert_eq!(built.code, 1, "{broken:?}: {built:?}");
        }
        assert_eq!(json(&host, &["repo", "show", "acme/shop"])["build"], before, "{broken:?}");
    }
    remote.set(Remote::Works);
    let built = host.harvest(["repo", "build", "acme/shop"]);
    assert_eq!(built.code, 0, "{built:?}");
    let after = json(&host, &["repo", "show", "acme/shop"])["build"].clone();
    assert_ne!(after["commit"], before["commit"]);
    assert_eq!(after["layers"], 1, "after failures it begins with the image");
}
