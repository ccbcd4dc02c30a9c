//! One script in all protocols: a turn of an agent with the tools of Codex, and one with those of
//! OpenCode.

use super::*;

const SCRIPT: &str = r#"script: [
    [{"thinking": "hm"}, {"text": "Working.", "chunks": 2}, {"bash": "ls"}],
    {"write": {"path": "/w/a.txt", "content": "x\n"}},
    {"tool": {"name": "mcp__memory__read_graph"}},
    [{"text": "finished"}, {"usage": {"input": 7, "output": 8, "cache_read": 9}}]
]"#;

/// The events of a stream.
fn data(stream: &str) -> Vec<Value> {
    let lines = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

async fn stream(agent: &Agent, path: &str, body: &Value) -> String {
    let answered = agent.send(path, body).await.unwrap();
    assert_eq!(answered.status(), 200);
    answered.text().await.unwrap()
}

fn codex_request(input: &[Value]) -> Value {
    json!({"model": "m", "stream": true, "instructions": "rules", "input": input, "tools": [
        {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "mcp__memory", "tools": [{"type": "function", "name": "read_graph"}]},
    ]})
}

#[tokio::test(flavor = "multi_thread")]
async fn script_plays_with_tools_of_codex() {
    let agent = Agent::scripted().await;
    let text = json!([{"type": "input_text", "text": SCRIPT}]);
    let mut input = vec![json!({"type": "message", "role": "user", "content": text})];
    let mut called = Vec::new();
    loop {
        let whole = stream(&agent, "/v1/responses", &codex_request(&input)).await;
        let events = data(&whole);
        let numbers = events.iter().map(|event| event["sequence_number"].as_u64().unwrap());
        assert!(numbers.eq(0..events.len() as u64));
        let last = events.last().unwrap();
        assert_eq!(
            (&events[0]["type"], &last["type"]),
            (&json!("response.created"), &json!("response.completed"))
        );
        let output = last["response"]["output"].as_array().unwrap().clone();
        let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
        assert!(done.map(|event| &event["item"]).eq(&output));
        let calls: Vec<_> =
            output.iter().filter(|item| item["call_id"].is_string()).cloned().collect();
        input.extend(output);
        if calls.is_empty() {
            let usage = &last["response"]["usage"];
            assert_eq!((&usage["input_tokens"], &usage["total_tokens"]), (&json!(16), &json!(24)));
            break;
        }
        for call in calls {
            let given = call.get("arguments").or(call.get("input")).unwrap();
            called.push(json!([call["namespace"], call["name"], given]));
            let kind = format!("{}_output", call["type"].as_str().unwrap());
            input.push(json!({"type": kind, "call_id": call["call_id"], "output": "ok"}));
        }
    }
    let patch = "*** Begin Patch\n*** Add File: /w/a.txt\n+x\n*** End Patch";
    assert_eq!(
        called,
        [
            json!([null, "exec_command", "{\"cmd\":\"ls\"}"]),
            json!([null, "apply_patch", patch]),
            json!(["mcp__memory", "read_graph", "{}"]),
        ]
    );
    let settled = agent.door.ledger.wait_for_events(4).await.len();
    assert_eq!(settled, 4);
    let last = *agent.door.ledger.settled.lock().unwrap().last().unwrap();
    let expected =
        Usage { input_tokens: 7, output_tokens: 8, cache_read_tokens: 9, cache_write_tokens: 0 };
    assert_eq!(last, expected);
}

fn opencode_request(messages: &[Value], include_usage: bool) -> Value {
    let tool = |name: &str, properties: Value| {
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    json!({"model": "m", "stream": true, "stream_options": {"include_usage": include_usage}, "messages": messages, "tools": [
        tool("bash", json!({"command": {"type": "string"}, "description": {"type": "string"}})),
        tool("write", json!({"filePath": {"type": "string"}, "content": {"type": "string"}})),
        tool("memory_read_graph", json!({})),
    ]})
}

#[tokio::test(flavor = "multi_thread")]
async fn script_plays_with_tools_of_opencode() {
    let agent = Agent::scripted().await;
    let mut messages = vec![json!({"role": "user", "content": SCRIPT})];
    let mut called = Vec::new();
    loop {
        let whole =
            stream(&agent, "/v1/chat/completions", &opencode_request(&messages, true)).await;
        assert!(whole.ends_with("data: [DONE]\n\n"), "{whole}");
        let chunks = data(&whole);
        let (last, rest) = chunks.split_last().unwrap();
        assert!(last["choices"] == json!([]) && last["usage"]["prompt_tokens"].is_u64(), "{last}");
        assert!(rest.iter().all(|chunk| chunk["usage"].is_null() && chunk["id"] == last["id"]));
        let message = assemble_chat(rest);
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        messages.push(message);
        if calls.is_empty() {
            break;
        }
        for call in calls {
            called.push(json!([call["function"]["name"], call["function"]["arguments"]]));
            messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "ok"}));
        }
    }
    assert_eq!(
        called,
        [
            json!(["bash", "{\"command\":\"ls\",\"description\":\"Run a scripted command\"}"]),
            json!(["write", "{\"content\":\"x\\n\",\"filePath\":\"/w/a.txt\"}"]),
            json!(["memory_read_graph", "{}"]),
        ]
    );
    // Without the wish there is no chunk of usage, but the tokens count.
    let whole =
        stream(&agent, "/v1/chat/completions", &opencode_request(&messages[..1], false)).await;
    assert!(!whole.contains("usage"), "{whole}");
    agent.door.ledger.wait_for_events(5).await;
    assert_eq!(agent.door.ledger.settled.lock().unwrap()[4].input_tokens, 100);
}

/// Assembles a message from its chunks, like a client.
fn assemble_chat(chunks: &[Value]) -> Value {
    let (mut text, mut calls) = (String::new(), Vec::<Value>::new());
    for chunk in chunks {
        let delta = &chunk["choices"][0]["delta"];
        text.push_str(delta["content"].as_str().unwrap_or_default());
        for piece in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = piece["index"].as_u64().unwrap() as usize;
            match calls.get_mut(index) {
                None => calls.push(piece.clone()),
                Some(call) => {
                    let more = piece["function"]["arguments"].as_str().unwrap();
                    let known = call["function"]["arguments"].as_str().unwrap();
                    call["function"]["arguments"] = json!(format!("{known}{more}"));
                }
            }
        }
    }
    let reason = if calls.is_empty() { "stop" } else { "tool_calls" };
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], reason);
    json!({"role": "assistant", "content": text, "tool_calls": calls})
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_tools_and_model_lists_are_answered() {
    let agent = Agent::scripted().await;
    let schema = json!({"enum": ["yes"]});
    let title =
        json!({"model": "m", "messages": [{"role": "user", "content": SCRIPT}], "input": SCRIPT});
    for (path, pointer) in [
        ("/v1/chat/completions", "/choices/0/message/content"),
        ("/v1/responses", "/output/0/content/0/text"),
    ] {
        let answered = agent.send(path, &title).await.unwrap().text().await.unwrap();
        let answered: Value = serde_json::from_str(&answered).unwrap();
        assert_eq!(answered.pointer(pointer), Some(&json!("Scripted title")));
        let mut structured = title.clone();
        structured["text"] = json!({"format": {"type": "json_schema", "schema": schema}});
        structured["response_format"] =
            json!({"type": "json_schema", "json_schema": {"schema": schema}});
        let answered = agent.send(path, &structured).await.unwrap().text().await.unwrap();
        assert!(answered.contains("\\\"yes\\\""), "{answered}");
    }
    for (path, status) in [("/v1/models", 200), ("/v1/models/scripted", 200), ("/v1/models/x", 404)]
    {
        let url = format!("{}{path}", agent.base);
        let answered = agent.client.get(url).send().await.unwrap();
        assert_eq!(answered.status(), status);
        let body: Value = serde_json::from_str(&answered.text().await.unwrap()).unwrap();
        let id = body.pointer("/data/0/id").or(body.get("id")).unwrap_or(&body["error"]["type"]);
        assert!(id == "scripted" || id == "not_found_error", "{body}");
    }
}
