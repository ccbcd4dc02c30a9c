//! The tools of the image `full`, used in a session as agents use them: each MCP server as
//! `/app/mcp.json` starts it, and the browsers on a page that is served inside.

use harvest_e2e::Host;
use harvest_proto::{SessionId, api::SessionState, bridge::Exit};
use serde_json::json;

const IMAGE: &[(&str, &str)] = &[("HARVEST_IMAGE", "full")];

/// Calls a tool of an MCP server over its standard input and prints the text that it returns. The
/// server is one of `/app/mcp.json`, or a command.
const CALL: &str = r#"
import json, os, subprocess, sys
name, tool, arguments = sys.argv[1:]
known = json.load(open("/app/mcp.json"))["mcpServers"].get(name, {"command": name})
argv = [known["command"], *known.get("args", [])]
env = {**os.environ, **known.get("env", {})}
server = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def send(message):
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    server.stdin.flush()
def ask(number, method, params):
    send({"id": number, "method": method, "params": params})
    while True:
        answer = json.loads(server.stdout.readline())
        if answer.get("id") == number and "method" not in answer:
            return answer["result"]
client = {"name": "test", "version": "1"}
ask(1, "initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
send({"method": "notifications/initialized"})
result = ask(2, "tools/call", {"name": tool, "arguments": json.loads(arguments)})
print("\n".join(part.get("text", "") for part in result["content"]))
server.kill()
"#;

struct FullSession {
    host: Host,
    id: SessionId,
}

impl FullSession {
    async fn start() -> Self {
        let host = Host::start_with(IMAGE).await;
        let id = host.bare("Begin.", &json!([{ "text": "done" }])).await.id;
        host.wait_for(&id, SessionState::Idle).await;
        Self { host, id }
    }

    async fn run(&self, command: &str) -> String {
        let (exit, output) = self.host.exec(&self.id, "harvest", command).await;
        assert_eq!(exit, Exit::Code(0), "{command}: {output}");
        output
    }

    async fn call(&self, server: &str, tool: &str, arguments: &str) -> String {
        self.run(&format!("python3 - {server} {tool} '{arguments}' <<'END'\n{CALL}\nEND")).await
    }
}

#[tokio::test]
async fn bun_and_gh_have_their_pinned_versions() {
    let session = FullSession::start().await;
    assert_eq!(session.run("bun --version").await, "1.4.4\n");
    assert_eq!(session.run("echo 'console.log(6 * 7)' > a.ts; bun a.ts").await, "42\n");
    assert!(session.run("gh --version").await.starts_with("gh version 2.103.3 "));
}

#[tokio::test]
async fn stock_servers_work_without_the_network() {
    let session = FullSession::start().await;
    let entity = r#"{"entities":[{"name":"Ada","entityType":"person","observations":["writes"]}]}"#;
    session.call("mcp-server-memory", "create_entities", entity).await;
    let graph = session.call("mcp-server-memory", "read_graph", "{}").await;
    assert!(graph.contains("Ada") && graph.contains("writes"), "{graph}");

    session.run("echo inside > /workspace/a").await;
    let read = "read_text_file";
    let text = session.call("filesystem", read, r#"{"path":"/workspace/a"}"#).await;
    assert!(text.contains("inside\n"), "{text}");
    let refused = session.call("filesystem", read, r#"{"path":"/etc/passwd"}"#).await;
    assert!(refused.contains("Access denied") && !refused.contains("root:"), "{refused}");

    let serve = "mkdir -p /tmp/page && cd /tmp/page && \
                 echo '<title>Open today</title>' > index.html && \
                 setsid python3 -m http.server --bind 127.0.0.1 8000 > /dev/null 2>&1 & \
                 until curl -sf http://127.0.0.1:8000/ > /dev/null; do :; done";
    session.run(serve).await;
    let page = r#"{"url":"http://127.0.0.1:8000/"}"#;
    for (server, tool) in [("playwright", "browser_navigate"), ("devtools", "new_page")] {
        let text = session.call(server, tool, page).await;
        assert!(text.contains("Open today"), "{server}: {text}");
    }
}
