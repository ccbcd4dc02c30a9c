//! A stand-in for the model service, so that the documents can use real Claude Code without a key:
//! for a prompt that it knows it calls the shell once, then it says that it is done.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// What the model says at the end of each turn.
pub(super) const LAST_WORDS: &str = "Done.";

/// Commands by a part of the prompt that they answer.
type Answers = Vec<(String, String)>;

pub(super) struct Model {
    pub(super) url: String,
}

impl Model {
    pub(super) async fn start(answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answers = Arc::new(answers);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&answers)));
            }
        });
        Self { url }
    }
}

async fn serve(mut stream: TcpStream, answers: Arc<Answers>) {
    let request = read_body(&mut stream).await;
    let (kind, body) = respond(&request, &answers);
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all((head + &body).as_bytes()).await;
    // Reads until the client closes: a reset could overtake the response.
    let mut rest = [0; 4096];
    while stream.read(&mut rest).await.is_ok_and(|read| read > 0) {}
}

async fn read_body(stream: &mut TcpStream) -> Value {
    let (mut request, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let text = String::from_utf8_lossy(&request);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let head = head.to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length = length.map_or(0, |length| length.trim().parse().unwrap());
            if body.len() >= length {
                return serde_json::from_str(body).unwrap_or_default();
            }
        }
        match stream.read(&mut chunk).await {
            Ok(read) if read > 0 => request.extend_from_slice(&chunk[..read]),
            _ => return Value::Null,
        }
    }
}

/// The command for the messages after the model's last one, if they are a known prompt.
fn command<'a>(request: &Value, answers: &'a Answers) -> Option<&'a str> {
    let tools = request["tools"].as_array()?;
    tools.iter().find(|tool| tool["name"] == "Bash")?;
    let messages = request["messages"].as_array()?;
    // Claude Code may add notes of its own after the prompt.
    let new = messages.iter().rev().take_while(|message| message["role"] != "assistant");
    let text: String = new.map(|message| message["content"].to_string()).collect();
    if text.contains("\"tool_result\"") {
        return None;
    }
    let known = answers.iter().find(|(prompt, _)| text.contains(prompt.as_str()));
    known.map(|(_, command)| command.as_str())
}

/// The type and body of a response of the Messages API.
fn respond(request: &Value, answers: &Answers) -> (&'static str, String) {
    // Claude Code takes messages of one id for parts of one.
    let number = request["messages"].as_array().map_or(0, Vec::len);
    let block = command(request, answers).map_or_else(
        || json!({ "type": "text", "text": LAST_WORDS }),
        |command| {
            let input = json!({ "command": command, "description": "Does the work" });
            json!({ "type": "tool_use", "id": format!("toolu_{number}"), "name": "Bash", "input": input })
        },
    );
    let stop = if block["type"] == "text" { "end_turn" } else { "tool_use" };
    let usage = json!({ "input_tokens": 100, "output_tokens": 20 });
    let mut message = json!({
        "id": format!("msg_{number}"), "type": "message", "role": "assistant", "model": request["model"],
        "content": [block], "stop_reason": stop, "stop_sequence": null, "usage": usage,
    });
    if request["stream"] != true {
        return ("application/json", message.to_string());
    }
    let (mut first, delta) = (
        block.clone(),
        match stop {
            "tool_use" => {
                json!({ "type": "input_json_delta", "partial_json": block["input"].to_string() })
            }
            _ => json!({ "type": "text_delta", "text": LAST_WORDS }),
        },
    );
    let empty = if stop == "tool_use" { ("input", json!({})) } else { ("text", json!("")) };
    first[empty.0] = empty.1;
    message["content"] = json!([]);
    message["stop_reason"] = Value::Null;
    let ended = json!({ "stop_reason": stop, "stop_sequence": null });
    let events = [
        json!({ "type": "message_start", "message": message }),
        json!({ "type": "content_block_start", "index": 0, "content_block": first }),
        json!({ "type": "content_block_delta", "index": 0, "delta": delta }),
        json!({ "type": "content_block_stop", "index": 0 }),
        json!({ "type": "message_delta", "delta": ended, "usage": usage }),
        json!({ "type": "message_stop" }),
    ];
    let frame = |event: &Value| {
        format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default())
    };
    ("text/event-stream", events.iter().map(frame).collect())
}
