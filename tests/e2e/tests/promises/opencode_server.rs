//! OpenCode's own server inside a sandbox: `opencode attach` and its port.

use std::fs;

use harvest_e2e::{Host, eventually, processes_with};
use harvest_proto::{EventBody, SessionId, api::Session, bridge::Exit};
use serde_json::json;

use crate::{
    SAMPLE, completed,
    faults_inside::{signal, supervisor},
    terminals_and_files::Socket,
};

/// What is typed does not contain the word of its answer.
const PROMPT: &str = r#"script: [{"text": "\u0068arvested"}]"#;

async fn session() -> (Host, SessionId) {
    let host = Host::start_with(&[("HARVEST_IMAGE", "agents")]).await;
    host.repository("calc", SAMPLE).await;
    let body = json!({ "repository": "calc", "agent": "opencode", "model": "scripted",
                       "network": "none", "prompt": PROMPT });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    host.follow(session.id.clone()).until("the turn", completed).await;
    (host, session.id)
}

async fn kill(host: &Host, session: &SessionId) {
    let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let sandbox = namespace(supervisor(host, session).await);
    let pid = processes_with("acp").into_iter().find(|pid| namespace(*pid) == sandbox);
    assert!(signal(pid.expect("OpenCode runs"), "-9"));
    let exited = |body: &EventBody| matches!(body, EventBody::AgentExited { .. });
    host.follow(session.clone()).until("its exit", exited).await;
}

async fn healthy(host: &Host, session: &SessionId) {
    eventually("a healthy server", || async {
        let health = "curl -sf -m 5 localhost:4096/global/health";
        let (exit, text) = host.exec(session, "harvest", health).await;
        (exit == Exit::Code(0) && text.contains(r#""healthy":true"#)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn attach_shows_the_session_after_a_restart() {
    let (host, session) = session().await;
    healthy(&host, &session).await;
    kill(&host, &session).await;
    healthy(&host, &session).await;
    let path = format!("/v1/sessions/{session}/pty?rows=40&cols=120");
    let mut socket = Socket::open(&host, &path).await;
    socket.shows("$ ").await;
    socket.type_in("opencode attach http://localhost:4096 --continue\r").await;
    socket.shows("harvested").await;
}

#[tokio::test]
async fn opencode_starts_while_its_port_is_in_use() {
    let (host, session) = session().await;
    let take = "setsid sh -c 'until python3 -m http.server -b 127.0.0.1 4096; do sleep 0.1; done' \
                >/dev/null 2>&1 &";
    host.exec(&session, "harvest", take).await;
    kill(&host, &session).await;
    let used = |body: &EventBody| matches!(body, EventBody::Warning { message } if message.contains("port 4096 is in use"));
    let mut follower = host.follow(session.clone());
    let warned = follower.until("the warning", used).await.seq;
    host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    follower.after(warned, "the next turn", completed).await;
}
