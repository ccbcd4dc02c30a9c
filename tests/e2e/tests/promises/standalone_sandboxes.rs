//! Standalone sandboxes on the real binaries: slots, idempotent creation, terminals, files.

use std::{collections::BTreeSet, path::Path, process::Command, time::Duration};

use harvest_e2e::{Host, eventually, names, processes_with};
use harvest_proto::{SessionId, StateReason, api::SessionState};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{
    completed,
    terminals_and_files::{Socket, plays_a_shell},
};

const PLAIN: &str = r#"{"image": "claude", "state": false}"#;

fn plain() -> Value {
    serde_json::from_str(PLAIN).unwrap()
}

async fn shown(host: &Host, sandbox: &str) -> Value {
    host.get(&format!("/v1/sandboxes/{sandbox}")).send().await.unwrap().json().await.unwrap()
}

async fn waits(host: &Host, session: &SessionId) {
    eventually("the session to wait", || async {
        let now = host.show(session).await;
        (now.state == SessionState::Queued && now.reason == StateReason::LimitSandboxes)
            .then_some(())
    })
    .await;
}

#[tokio::test]
async fn standalone_sandbox_holds_slot_that_sessions_await() {
    let mut host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "1")]).await;
    let made = host.harvest(["sandbox", "create", "--image", "claude", "--no-state"]);
    assert_eq!(made.code, 0, "{made:?}");
    let first = made.stdout.trim().to_owned();
    assert!(shown(&host, &first).await["made_by"].is_string());
    // Two more never fit: they are refused with a hint.
    let fork = host.request(Method::POST, &format!("/v1/sandboxes/{first}/fork"));
    let refused = fork.json(&json!({ "count": 2 })).send().await.unwrap();
    assert_eq!(
        (refused.status(), refused.headers().contains_key("retry-after")),
        (StatusCode::TOO_MANY_REQUESTS, true)
    );
    let problem: Value = refused.json().await.unwrap();
    assert_eq!(problem["code"], "limit_sandboxes", "{problem}");
    let told = host.harvest(["sandbox", "fork", "-n", "2", &first]);
    assert!(told.code == 1 && told.stderr.contains("`limits.sandboxes`"), "{told:?}");
    // A session waits and starts when the sandbox is removed.
    let session = host.bare("Wait.", &json!([{ "text": "done" }])).await.id;
    waits(&host, &session).await;
    assert_eq!(host.harvest(["sandbox", "rm", &first]).code, 0);
    host.follow(session.clone()).until("its turn", completed).await;
    // The session is idle, so another sandbox waits for its slot.
    let second = host.post("/v1/sandboxes", plain()).await;
    let second = second["sandbox_id"].as_str().unwrap().to_owned();
    host.wait_for(&session, SessionState::Paused).await;
    // The next server knows the sandbox and notices its death.
    host.kill();
    host.up().await;
    let next = host.bare("Wait.", &json!([{ "text": "done" }])).await.id;
    waits(&host, &next).await;
    let pid = shown(&host, &second).await["pid"].to_string();
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    host.follow(next).until("its turn", completed).await;
}

async fn ask_under(
    host: &Host,
    path: &str,
    key: &str,
    body: &Value,
) -> reqwest::Result<reqwest::Response> {
    host.request(Method::POST, path).header("idempotency-key", key).json(body).send().await
}

/// Repeats a request until a server answers, as a client with a lost connection would.
async fn done_under(host: &Host, path: &str, key: &str, body: &Value) -> Value {
    let answer = eventually("it to be done", || async {
        let answer = ask_under(host, path, key, body).await.ok()?;
        answer.status().is_success().then_some(answer)
    })
    .await;
    answer.json().await.unwrap()
}

async fn listed(host: &Host) -> BTreeSet<String> {
    let list: Value = host.get("/v1/sandboxes").send().await.unwrap().json().await.unwrap();
    assert_eq!(list["damaged"], json!([]));
    let items = list["items"].as_array().unwrap();
    assert!(items.iter().all(|one| one["state"] == "running" && one["owner"] == "you"), "{list}");
    items.iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
}

fn signal(pid: u32, how: &str) {
    assert!(Command::new("kill").args([how, &pid.to_string()]).status().unwrap().success());
}

/// A stopped zygote, continued on drop.
struct Standstill(u32);

impl Standstill {
    fn of(home: &Path) -> Self {
        let ours = processes_with(home.to_str().unwrap());
        let zygote = processes_with("zygote").into_iter().find(|pid| ours.contains(pid)).unwrap();
        signal(zygote, "-STOP");
        Self(zygote)
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-CONT", &self.0.to_string()]).status();
    }
}

#[tokio::test]
async fn idempotent_create_survives_server_kill_anywhere() {
    let mut host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "99")]).await;
    let mut made = BTreeSet::new();
    let of = |answer: &Value| answer["sandbox_id"].as_str().unwrap().to_owned();
    made.insert(of(&host.post("/v1/sandboxes", plain()).await));
    // The planned id is stored, the zygote is asked, and the server dies before the answer.
    let folder = host.home().join("sandboxes");
    let still = Standstill::of(host.home());
    {
        let body = plain();
        let asked = ask_under(&host, "/v1/sandboxes", "still", &body);
        let begun =
            eventually("it to be begun", || async { (names(&folder).len() == 2).then_some(()) });
        tokio::select! {
            answer = asked => panic!("without a zygote: {answer:?}"),
            () = begun => {}
        }
    }
    host.kill();
    drop(still);
    host.up().await;
    let answer = done_under(&host, "/v1/sandboxes", "still", &plain()).await;
    assert!(made.insert(of(&answer)));
    assert_eq!(listed(&host).await, made, "the one that was begun, and no other");
    let again = ask_under(&host, "/v1/sandboxes", "still", &plain()).await.unwrap();
    assert_eq!(again.headers()["idempotency-replayed"], "true");
    assert_eq!(again.json::<Value>().await.unwrap(), answer);
    // Kills at other moments of the request.
    for millis in [0, 1, 2, 4, 8, 16, 32] {
        let (key, body) = (format!("after-{millis}"), plain());
        let asked = ask_under(&host, "/v1/sandboxes", &key, &body);
        drop(tokio::time::timeout(Duration::from_millis(millis), asked).await);
        host.kill();
        host.up().await;
        let answer = done_under(&host, "/v1/sandboxes", &key, &plain()).await;
        assert!(made.insert(of(&answer)));
        assert_eq!(listed(&host).await, made, "killed after {millis} ms");
    }
    assert_eq!(names(&folder).len(), made.len(), "nothing else is on the disk");
}

#[tokio::test]
async fn idempotent_fork_creates_each_sandbox_once() {
    let mut host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "99")]).await;
    let source =
        host.post("/v1/sandboxes", plain()).await["sandbox_id"].as_str().unwrap().to_owned();
    let (path, body) = (format!("/v1/sandboxes/{source}/fork"), json!({ "count": 3 }));
    let mut made = BTreeSet::from([source]);
    for millis in [4, 12, 20, 28] {
        let key = format!("after-{millis}");
        drop(
            tokio::time::timeout(
                Duration::from_millis(millis),
                ask_under(&host, &path, &key, &body),
            )
            .await,
        );
        host.kill();
        host.up().await;
        let answer = done_under(&host, &path, &key, &body).await;
        let forks =
            answer["forks"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned());
        made.extend(forks);
        assert_eq!(listed(&host).await, made, "killed after {millis} ms");
        let left: Value = host.get("/v1/snapshots").send().await.unwrap().json().await.unwrap();
        assert_eq!(left["items"], json!([]), "what they began as has no name any more");
    }
    assert_eq!(made.len(), 13);
}

#[tokio::test]
async fn standalone_sandbox_has_terminals_with_or_without_server() {
    let mut host = Host::start().await;
    let id = host.post("/v1/sandboxes", plain()).await["sandbox_id"].as_str().unwrap().to_owned();
    let path = format!("/v1/sandboxes/{id}/pty?rows=33&cols=99");
    let mut socket = Socket::open(&host, &path).await;
    socket.shows("$ ").await;
    socket.type_in("PS1='$ '; stty -echo; stty size; id -un; pwd\r").await;
    let inspected = shown(&host, &id).await;
    let said = socket.shows(&format!("{}\r\n", inspected["workdir"].as_str().unwrap())).await;
    assert!(said.contains("33 99") && said.contains(inspected["user"].as_str().unwrap()), "{said}");
    socket.shows("$ ").await;
    socket.say(json!({ "resize": { "rows": 44, "cols": 111 } })).await;
    socket.type_in("until [ \"$(stty size)\" = '44 111' ]; do :; done; exit 7\r").await;
    assert_eq!(socket.end().await["exited"]["exit"], json!({ "how": "code", "value": 7 }));
    // A plain request and an unknown sandbox get the usual errors.
    assert_eq!(host.get(&path).send().await.unwrap().status(), StatusCode::UPGRADE_REQUIRED);
    let none = host.harvest(["sandbox", "shell", &id]);
    assert!(none.code == 125 && none.stderr.contains("must be a terminal"), "{none:?}");

    let bash = ["--", "bash", "--norc", "-i"];
    let of =
        |words: &[&str]| words.iter().chain(&bash).map(|&word| word.to_owned()).collect::<Vec<_>>();
    let (verbs, newest) =
        ([of(&["shell", &id]), of(&["sandbox", "shell", &id])], of(&["sandbox", "shell", "-"]));
    for verb in &verbs {
        plays_a_shell(&host, &verb.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
    host.kill();
    plays_a_shell(&host, &newest.iter().map(String::as_str).collect::<Vec<_>>()).await;
    host.up().await;
    assert_eq!(shown(&host, &id).await["state"], "running");
}

#[tokio::test]
async fn standalone_sandbox_copies_files_with_or_without_server() {
    let mut host = Host::start().await;
    let id = host.post("/v1/sandboxes", plain()).await["sandbox_id"].as_str().unwrap().to_owned();
    let inside = |path: &str| format!("{id}:{path}");
    let here = tempfile::tempdir().unwrap();
    let text = |name: &str| here.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(text("tree")).unwrap();
    std::fs::write(text("tree/file"), vec![b'x'; 300_000]).unwrap();
    for (name, served) in ["one", "two"].into_iter().zip([true, false]) {
        let at = &format!("/workspace/{name}");
        if !served {
            host.kill();
        }
        let copied = host.harvest(["sandbox", "cp", &text("tree"), &inside(at)]);
        assert_eq!(copied.code, 0, "{served} {copied:?}");
        let back = host.harvest(["cp", "-r", &inside(at), &text(name)]);
        assert_eq!(back.code, 0, "{served} {back:?}");
        assert_eq!(std::fs::read(text(&format!("{name}/file"))).unwrap().len(), 300_000);
        let whose =
            ["exec", &id, "--user", "root", "--", "stat", "-c", "%U", &format!("{at}/file")];
        let whose = host.harvest(whose).stdout;
        assert_eq!(whose.trim(), "harvest", "the image's user");
        let missing = host.harvest(["cp", &inside("/nosuch"), "-"]);
        assert!(missing.code == 1 && missing.stderr.contains("/nosuch"), "{missing:?}");
        let stopped = "sbx_000000000000:/x";
        let none = host.harvest(["cp", &text("tree/file"), stopped]);
        assert!(none.code == 1 && none.stderr.contains("there is no sandbox"), "{none:?}");
    }
}
