//! `harvest mcp`: relays messages of the Model Context Protocol, one per line, between standard
//! input and output and the server's endpoint `/mcp`. What the tools do is up to the server.

use std::io::BufRead as _;

use anyhow::{Context, Result};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinSet};

use crate::{Invocation, client::Client};

/// The code of JSON-RPC for a failure of the server.
const INTERNAL_ERROR: i64 = -32603;

pub(crate) async fn run(ctx: &Invocation) -> Result<u8> {
    // A missing server or a wrong token is reported before the first message.
    Client::find(&ctx.config)?.get::<Value>("/v1/me").await?;
    let mut lines = lines();
    // A tool may wait: other messages are answered meanwhile.
    let mut calls = JoinSet::new();
    let mut ended = false;
    while !ended || !calls.is_empty() {
        tokio::select! {
            line = lines.recv(), if !ended => match line {
                Some(line) => {
                    // Found anew each time: a server that was started again may have another port.
                    let client = Client::find(&ctx.config);
                    calls.spawn(async move { relay(client, line?).await });
                }
                None => ended = true,
            },
            Some(answer) = calls.join_next(), if !calls.is_empty() => {
                if let Some(answer) = answer.context("a call was cancelled")?? {
                    ctx.print.verbatim(&format!("{answer}\n"))?;
                }
            }
        }
    }
    Ok(0)
}

/// The lines of standard input, read by a thread that ends with it.
fn lines() -> mpsc::Receiver<Result<String>> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let line = line.context("cannot read standard input");
            if sender.blocking_send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// The answer to a message, in one line; none to a notification.
async fn relay(client: Result<Client>, message: String) -> Result<Option<String>> {
    if message.trim().is_empty() {
        return Ok(None);
    }
    let id = id(&message);
    let read = async {
        let message = Some(message.into_bytes());
        let response = client?.raw(Method::POST, "/mcp", Vec::new(), message).await?;
        let status = response.status();
        anyhow::Ok((status, response.text().await.context("the response broke off")?))
    };
    Ok(match read.await {
        Ok((StatusCode::ACCEPTED, _)) => None,
        Ok((StatusCode::OK, text)) => Some(text),
        Ok((status, problem)) => failure(id, &refusal(status, &problem)),
        Err(error) => failure(id, &format!("{error:#}")),
    })
}

/// The id of a request. What is no request at all has the id `null`, a notification none.
fn id(message: &str) -> Option<Value> {
    match serde_json::from_str::<Value>(message) {
        Ok(message) if message.get("method").is_some() => message.get("id").cloned(),
        _ => Some(Value::Null),
    }
}

fn refusal(status: StatusCode, problem: &str) -> String {
    let problem: Value = serde_json::from_str(problem).unwrap_or_default();
    let detail = problem["detail"].as_str().map_or_else(|| status.to_string(), str::to_owned);
    match problem["hint"].as_str() {
        Some(hint) => format!("{detail}; hint: {hint}"),
        None => detail,
    }
}

/// An error response; none to a notification.
fn failure(id: Option<Value>, why: &str) -> Option<String> {
    let error = json!({ "code": INTERNAL_ERROR, "message": why });
    id.map(|id| json!({ "jsonrpc": "2.0", "id": id, "error": error }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_get_no_error() {
        assert_eq!(id(r#"{"method":"ping","id":7}"#), Some(json!(7)));
        assert_eq!(id(r#"{"method":"notifications/initialized"}"#), None);
        assert_eq!(id("no JSON"), Some(Value::Null));
        assert_eq!(failure(None, "x"), None);
        assert!(failure(Some(json!(7)), "x").unwrap().contains("\"id\":7"));
        let problem = r#"{"detail":"it is paused","hint":"resume it"}"#;
        assert_eq!(refusal(StatusCode::CONFLICT, problem), "it is paused; hint: resume it");
    }
}
