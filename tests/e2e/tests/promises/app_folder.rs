//! The folder `/app` and the MCP servers of a repository: what every agent is told.

use std::sync::{Arc, Mutex};

use harvest_e2e::Host;
use harvest_proto::{
    EventBody, SessionId,
    api::{Session, SessionState},
    bridge::Exit,
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{completed, turn_ended};

/// An idle session of Claude Code with the scripted model.
pub(crate) async fn idle(host: &Host, files: &[(&str, &str)]) -> SessionId {
    host.repository("calc", files).await;
    let body = json!({ "repository": "calc", "model": "scripted", "network": "none" });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    host.wait_for(&session.id, SessionState::Idle).await;
    session.id
}

#[tokio::test]
async fn app_folder_is_read_only_for_root() {
    let host = Host::start().await;
    let session = idle(&host, &[("a.txt", "a\n")]).await;
    let (exit, files) = host.exec(&session, "root", "ls /app && grep -c . /app/AGENTS.md").await;
    assert_eq!(exit, Exit::Code(0), "{files}");
    for name in ["AGENTS.md", "mcp.json", "memory-seed.json", "opencode.json"] {
        assert!(files.contains(name), "{files}");
    }
    for attempt in [
        "echo x > /app/AGENTS.md",
        "touch /app/new",
        "rm /app/mcp.json",
        "chmod 777 /app",
        "mv /app /gone",
        "mount -o remount,rw /app",
        "mount -t tmpfs none /app",
        "umount /app",
        "echo x > /proc/1/root/app/AGENTS.md",
        "ls /proc/1/fd",
    ] {
        let (exit, output) = host.exec(&session, "root", attempt).await;
        assert_ne!(exit, Exit::Code(0), "{attempt}: {output}");
    }
    // A fresh checkout has no change, whatever agents have been told.
    let (exit, status) =
        host.exec(&session, "harvest", "cd /workspace/calc && git status --porcelain").await;
    assert_eq!((exit, status.as_str()), (Exit::Code(0), ""));
}

/// A server with one tool, `hello`.
pub(crate) const SERVER: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    answers = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "greeter", "version": "1"}},
        "tools/list": {"tools": [{"name": "hello", "description": "Greets.",
                                  "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": "greetings " + "from the repository"}]},
    }
    if "id" in request:
        result = answers.get(request["method"], {})
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"#;

#[tokio::test]
async fn server_of_repository_is_used_by_claude() {
    let host = Host::start().await;
    let config =
        json!({ "mcpServers": { "greeter": { "command": "python3", "args": ["server.py"] } } });
    let files = [(".mcp.json", &*config.to_string()), ("server.py", SERVER)];
    host.repository("calc", &files).await;
    let script =
        json!([{ "tool": { "name": "mcp__greeter__hello", "input": {} } }, { "text": "done" }]);
    let session = host.session("calc", "Greet.", &script).await.id;
    let mut follower = host.follow(session.clone());
    let tool = follower.until("the tool", |body| matches!(body, EventBody::ToolEnded { .. })).await;
    assert!(
        matches!(&tool.body, EventBody::ToolEnded { ok: true, output, .. } if output.contains("greetings from")),
        "{tool:?}"
    );
    follower.until("the turn", completed).await;
    let refused = |body: &EventBody| matches!(body, EventBody::EgressRefused { .. });
    assert!(!host.events(&session).await.iter().any(refused), "nothing is fetched at run time");
}

#[tokio::test]
async fn rules_are_in_the_model_request() {
    let (model, requests) = recording_model().await;
    let openai = format!("{model}/v1");
    let env = [
        ("ANTHROPIC_API_KEY", "sk-recorded"),
        ("OPENAI_API_KEY", "sk-recorded"),
        ("HARVEST_UPSTREAMS_ANTHROPIC_URL", &*model),
        ("HARVEST_UPSTREAMS_OPENAI_URL", &*openai),
    ];
    let host = Host::start_with(&env).await;
    host.repository("calc", &[("AGENTS.md", "Indent with seventeen blanks.\n")]).await;
    for agent in ["claude", "opencode", "codex"] {
        let body =
            json!({ "repository": "calc", "agent": agent, "network": "none", "prompt": "Do it." });
        let session: Session =
            serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
        host.follow(session.id).until("the turn to fail", turn_ended).await;
        let requests = std::mem::take(&mut *requests.lock().unwrap());
        for told in ["Act, do not ask", "Repair what breaks", "/workspace/calc", "seventeen blanks"]
        {
            assert!(requests.iter().any(|request| request.contains(told)), "{agent}: {told}");
        }
    }
}

/// A stand-in for the model service that keeps the requests and accepts no key.
pub(crate) async fn recording_model() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let requests = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let kept = Arc::clone(&kept);
            tokio::spawn(async move {
                let request = read_request(&mut stream).await;
                kept.lock().unwrap().push(request);
                let error =
                    json!({ "type": "authentication_error", "message": "invalid x-api-key" });
                let body = json!({ "type": "error", "error": error }).to_string();
                let head = "HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\nconnection: close";
                let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                let _ = stream.write_all(answer.as_bytes()).await;
                // Reads until the client closes: a reset could overtake the response.
                let mut rest = [0; 4096];
                while stream.read(&mut rest).await.is_ok_and(|read| read > 0) {}
            });
        }
    });
    (url, requests)
}

/// Reads one request to its end, by its length or its last chunk.
async fn read_request(stream: &mut TcpStream) -> String {
    let (mut request, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let text = String::from_utf8_lossy(&request);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let head = head.to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let whole = match length.and_then(|length| length.trim().parse::<usize>().ok()) {
                Some(length) => body.len() >= length,
                None => !head.contains("chunked") || body.ends_with("0\r\n\r\n"),
            };
            if whole {
                return text.into_owned();
            }
        }
        match stream.read(&mut chunk).await {
            Ok(read) if read > 0 => request.extend_from_slice(&chunk[..read]),
            _ => return String::from_utf8_lossy(&request).into_owned(),
        }
    }
}
