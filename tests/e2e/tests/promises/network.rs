//! Promise 8 for a session: only the gateway is reachable.

use harvest_e2e::Host;
use harvest_proto::{EventBody, bridge::Exit};
use serde_json::json;

use crate::{SAMPLE, completed};

#[tokio::test]
async fn network_none_reaches_only_model_and_repository() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = host.session("calc", "Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;

    let works = [
        "curl -s -o /dev/null http://model.harvest.internal/",
        "git -C /workspace/calc ls-remote origin",
    ];
    for command in works {
        let (exit, output) = host.exec(&session, "harvest", command).await;
        assert_eq!(exit, Exit::Code(0), "{command}: {output}");
    }
    // A server on the host through every address of it, and a name outside the policy.
    let port = std::fs::read_to_string(host.home().join("server.json")).unwrap();
    let port: serde_json::Value = serde_json::from_str(&port).unwrap();
    let port = port["url"].as_str().unwrap().rsplit(':').next().unwrap().to_owned();
    for target in [
        "127.0.0.1",
        "198.18.0.1",
        "198.18.9.9",
        "10.0.0.1",
        "169.254.169.254",
        "[::1]",
        "example.org",
    ] {
        let (exit, output) = host
            .exec(&session, "root", &format!("curl -s --max-time 5 http://{target}:{port}/healthz"))
            .await;
        assert_ne!(exit, Exit::Code(0), "{target} answered: {output}");
    }
    // The door of this or another sandbox: its folder is in no mount, and pid 1 cannot be read.
    let search = "find / -xdev -name '*.sock' 2>/dev/null; ls /proc/1/fd 2>&1; true";
    let (_, found) = host.exec(&session, "root", search).await;
    assert!(!found.contains("door") && found.contains("Permission denied"), "{found}");
    let events = host.events(&session).await;
    let refused = |body: &EventBody| matches!(body, EventBody::EgressRefused { name, .. } if name == "example.org");
    assert!(events.iter().any(refused), "the refusal is on record");
}

/// Opens as many connections as it can, and sends a byte on each from time to time.
const SLOW: &str = r#"
import itertools, socket, time
held = []
try:
    for number in range(900):
        stream = socket.create_connection(("model.harvest.internal", 80), timeout=20)
        stream.sendall(b"POST /v1/messages HTTP/1.1\r\nx-slow: ")
        held.append(stream)
        if number == 400:
            open("/tmp/slow", "w").close()
except OSError:
    pass
for stream in itertools.cycle(held):
    try:
        stream.sendall(b"a")
    except OSError:
        pass
    time.sleep(0.001)
"#;

#[tokio::test]
async fn slow_connections_harm_no_other_sandbox() {
    let host = Host::start().await;
    let hostile = host.bare("Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(hostile.clone()).until("the first turn", completed).await;
    let start = format!(
        "cat > /tmp/slow.py <<'END'\n{SLOW}\nEND\n\
         setsid python3 /tmp/slow.py > /dev/null 2>&1 & until test -e /tmp/slow; do sleep 0.1; done"
    );
    let (exit, output) = host.exec(&hostile, "harvest", &start).await;
    assert_eq!(exit, Exit::Code(0), "{output}");
    // Every request of these turns passes the same server.
    let script = json!([{ "bash": "curl -s -o /dev/null http://model.harvest.internal/" }, { "text": "done" }]);
    for _ in 0..3 {
        let other = host.bare("Work.", &script).await.id;
        host.follow(other.clone()).until("the turn", completed).await;
    }
    let (exit, _) = host.exec(&hostile, "harvest", "pgrep -f slow.py").await;
    assert_eq!(exit, Exit::Code(0), "the attack went on meanwhile");
    assert_eq!(host.harvest(["stop", &hostile.to_string()]).code, 0);
}
