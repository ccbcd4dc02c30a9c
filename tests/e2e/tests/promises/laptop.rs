//! `harvest mcp`: an agent on a laptop starts, reads, steers and stops sessions with tools.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Stdio},
};

use harvest_e2e::Host;
use serde_json::{Value, json};

use crate::SAMPLE;

/// A client that speaks to `harvest mcp` by its standard input and output.
struct Laptop {
    program: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    id: u64,
}

impl Laptop {
    fn start(host: &Host) -> Self {
        let mut command = host.command();
        let command = command.arg("mcp").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = command.spawn().unwrap();
        let stdout = BufReader::new(program.stdout.take().unwrap());
        Self { stdin: program.stdin.take(), program, stdout, id: 0 }
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.stdin.as_mut().unwrap(), "{message}").unwrap();
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("not a message: {line:?}"))
    }

    fn request(&mut self, method: &str, params: Value) -> Value {
        self.id += 1;
        let id = self.id;
        self.send(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }));
        let answer = self.receive();
        assert_eq!(answer["id"], json!(id), "{answer}");
        answer
    }

    /// Calls a tool; returns its text and its result for programs.
    fn call(&mut self, tool: &str, arguments: Value) -> (String, Value) {
        let answer = self.request("tools/call", json!({ "name": tool, "arguments": arguments }));
        let result = &answer["result"];
        assert_eq!(result["isError"], json!(false), "{tool}: {answer}");
        let text = result["content"][0]["text"].as_str().unwrap();
        (text.to_owned(), result["structuredContent"].clone())
    }
}

#[tokio::test]
async fn agent_on_a_laptop_steers_a_session() {
    let mut host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let mut laptop = Laptop::start(&host);
    let hello = laptop.request("initialize", json!({ "protocolVersion": "2025-06-18" }));
    assert_eq!(hello["result"]["serverInfo"]["name"], "harvest", "{hello}");
    laptop.send(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }));
    let tools = laptop.request("tools/list", json!({}));
    assert_eq!(tools["result"]["tools"].as_array().unwrap().len(), 9, "{tools}");

    let change = "echo from-the-laptop > note && git add note && git commit -qm Note";
    let script = json!([{ "bash": change }, { "text": "The note is written." }]);
    let start = json!({
        "prompt": format!("Write a note.\nscript: {script}"), "repository": "calc",
        "agent": "scripted", "network": "none", "key": "laptop",
    });
    laptop.call("start_session", start);
    let session = json!({ "session": "laptop" });
    let (_, waited) = laptop.call("wait_for_session", session.clone());
    assert_eq!(waited["state"], "idle", "{waited}");
    let (text, document) = laptop.call("read_session", session.clone());
    assert_eq!(document, Value::Null, "Claude Code would show it instead of the text");
    let (_, next) = text.rsplit_once("[read on with after=").unwrap();
    let next: u64 = next.trim_end_matches(']').parse().unwrap();
    assert!(text.contains("The note is written.") && text.contains("[turn completed]"), "{text}");
    let (diff, _) = laptop.call("session_diff", session.clone());
    assert!(diff.contains("+from-the-laptop"), "{diff}");

    // The server is another one, at another port.
    host.kill();
    host.up().await;
    let prompt = "Wait.\nscript: [{\"hang\": 600}]";
    laptop.call("send_prompt", json!({ "session": "laptop", "prompt": prompt }));
    let (_, working) =
        laptop.call("wait_for_session", json!({ "session": "laptop", "seconds": 0 }));
    assert_ne!(working["state"], "idle", "{working}");
    laptop.call("stop_session", session.clone());
    let (_, stopped) = laptop.call("wait_for_session", session);
    assert_eq!(stopped["state"], "idle", "{stopped}");
    let after = json!({ "session": "laptop", "after": next });
    let (rest, _) = laptop.call("read_session", after);
    assert!(rest.contains("[turn stopped") && !rest.contains("The note"), "{rest}");

    // Without a server a request is answered with the reason.
    host.kill();
    let failed = laptop.request("tools/list", json!({}));
    assert!(failed["error"]["message"].is_string(), "{failed}");
    drop(laptop.stdin.take());
    assert!(laptop.program.wait().unwrap().success());
}
