//! An agent alone on the host: its own program and its own protocol, with the settings that it has
//! in a session.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{model::MODEL, text};

const PATIENCE: Duration = Duration::from_secs(60);

/// A running agent with a conversation. Dropping it ends it.
pub(super) struct Alone {
    name: &'static str,
    program: Child,
    stdin: ChildStdin,
    lines: Receiver<Value>,
    /// The number of requests.
    requests: u64,
    conversation: String,
}

impl Alone {
    /// Starts the program `agent` of the folder and opens a conversation.
    pub(super) fn start(name: &'static str, folder: &Path, model: &str) -> Result<Self> {
        let work = folder.join("work");
        let mut program = Command::new(folder.join("agent"))
            .args(arguments(name, model))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", folder.join("home"))
            .envs(environment(name, model))
            .current_dir(&work)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let stdin = program.stdin.take().context("the program has no input")?;
        let stdout = BufReader::new(program.stdout.take().context("the program has no output")?);
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let values = stdout.lines().map_while(Result::ok);
            let values = values.filter_map(|line| serde_json::from_str(&line).ok());
            values.into_iter().try_for_each(|value| sender.send(value))
        });
        let conversation = String::new();
        let mut alone = Self { name, program, stdin, lines, requests: 0, conversation };
        alone.open(&work.display().to_string()).with_context(|| format!("{name} did not start"))?;
        Ok(alone)
    }

    fn open(&mut self, work: &str) -> Result<()> {
        match self.name {
            "claude" => {
                let request = json!({"subtype": "initialize"});
                self.send(
                    &json!({"type": "control_request", "request_id": "r", "request": request}),
                )?;
                self.wait(|line| text(line, "type") == "control_response")?;
            }
            "opencode" => {
                let files = json!({"readTextFile": false, "writeTextFile": false});
                let capabilities = json!({"fs": files, "terminal": false});
                let hello = json!({"protocolVersion": 1, "clientCapabilities": capabilities});
                self.call("initialize", &hello)?;
                let opened = self.call("session/new", &json!({"cwd": work, "mcpServers": []}))?;
                self.conversation = text(&opened, "sessionId").to_owned();
            }
            _ => {
                let client = json!({"name": "bench", "title": "Bench", "version": "1"});
                self.call("initialize", &json!({"clientInfo": client}))?;
                self.send(&json!({"method": "initialized", "params": {}}))?;
                let thread = json!({"cwd": work, "approvalPolicy": "never", "sandbox": "danger-full-access"});
                let opened = self.call("thread/start", &thread)?;
                self.conversation = text(&opened["thread"], "id").to_owned();
            }
        }
        Ok(())
    }

    /// Runs a turn to its end. Returns the time until the agent reported its first tool, in the
    /// line that also a session reports.
    pub(super) fn first_tool(&mut self, prompt: &str) -> Result<Duration> {
        let content = json!([{"type": "text", "text": prompt}]);
        let session = self.conversation.clone();
        let began = Instant::now();
        match self.name {
            "claude" => {
                self.send(
                    &json!({"type": "user", "message": {"role": "user", "content": content}}),
                )?;
                self.wait(|line| {
                    let mut blocks = line["message"]["content"].as_array().into_iter().flatten();
                    text(line, "type") == "assistant"
                        && blocks.any(|block| text(block, "type") == "tool_use")
                })?;
                let took = began.elapsed();
                self.wait(|line| text(line, "state") == "idle")?;
                Ok(took)
            }
            "opencode" => {
                let id = self
                    .request("session/prompt", &json!({"sessionId": session, "prompt": content}))?;
                self.wait(|line| {
                    let update = &line["params"]["update"];
                    text(update, "sessionUpdate").starts_with("tool_call")
                        && update["rawInput"]["command"].is_string()
                })?;
                let took = began.elapsed();
                self.reply(id)?;
                Ok(took)
            }
            _ => {
                self.request("turn/start", &json!({"threadId": session, "input": content}))?;
                self.wait(|line| {
                    text(line, "method") == "item/started"
                        && text(&line["params"]["item"], "type") == "commandExecution"
                })?;
                let took = began.elapsed();
                self.wait(|line| text(line, "method") == "turn/completed")?;
                Ok(took)
            }
        }
    }

    fn send(&mut self, line: &Value) -> Result<()> {
        writeln!(self.stdin, "{line}").with_context(|| format!("{} reads no more", self.name))
    }

    fn request(&mut self, method: &str, params: &Value) -> Result<u64> {
        self.requests += 1;
        let id = self.requests;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}))?;
        Ok(id)
    }

    fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        let id = self.request(method, params)?;
        self.reply(id)
    }

    fn reply(&self, id: u64) -> Result<Value> {
        let mut reply = self.wait(|line| line["id"] == id && line["method"].is_null())?;
        match reply["result"].take() {
            Value::Null => bail!("{} answered {reply}", self.name),
            result => Ok(result),
        }
    }

    fn wait(&self, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        loop {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.with_context(|| format!("{} says nothing more", self.name))?;
            if wanted(&line) {
                return Ok(line);
            }
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

fn arguments(name: &str, model: &str) -> Vec<String> {
    let provider = format!(
        "model_providers.bench={{ name = \"Bench\", base_url = \"{model}/v1\", \
         env_key = \"OPENAI_API_KEY\", wire_api = \"responses\", supports_websockets = false }}"
    );
    let codex_model = format!("model=\"{MODEL}\"");
    let arguments: &[&str] = match name {
        "claude" => &[
            "-p",
            "--input-format",
            "stream-json",
            "--output-format",
            "stream-json",
            "--verbose",
            "--include-partial-messages",
            "--permission-mode",
            "bypassPermissions",
            "--model",
            MODEL,
        ],
        "opencode" => &["acp", "--port", "0", "--hostname", "127.0.0.1"],
        _ => &[
            "app-server",
            "-c",
            "model_provider=\"bench\"",
            "-c",
            "check_for_update_on_startup=false",
            "-c",
            "analytics.enabled=false",
            "-c",
            "features.plugins=false",
            "-c",
            "history.persistence=\"none\"",
            "-c",
            &provider,
            "-c",
            &codex_model,
        ],
    };
    arguments.iter().map(|&argument| argument.to_owned()).collect()
}

fn environment(name: &str, model: &str) -> Vec<(&'static str, String)> {
    let opencode = json!({
        "autoupdate": false, "share": "disabled", "snapshot": false, "lsp": false,
        "formatter": false, "permission": {"*": "allow"}, "enabled_providers": ["bench"],
        "model": format!("bench/{MODEL}"), "small_model": format!("bench/{MODEL}"),
        "provider": {"bench": {
            "npm": "@ai-sdk/anthropic",
            "options": {"baseURL": format!("{model}/v1"), "apiKey": "none"},
            "models": {MODEL: {"limit": {"context": 200_000, "output": 32_000}}},
        }},
    });
    let on = "1".to_owned();
    match name {
        "claude" => vec![
            ("ANTHROPIC_BASE_URL", model.to_owned()),
            ("ANTHROPIC_API_KEY", "none".to_owned()),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", on.clone()),
            ("DISABLE_AUTOUPDATER", on.clone()),
            ("DISABLE_TELEMETRY", on.clone()),
            ("DISABLE_ERROR_REPORTING", on.clone()),
            ("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", on.clone()),
            ("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", on.clone()),
            ("IS_SANDBOX", on),
        ],
        "opencode" => vec![
            ("OPENCODE_CONFIG_CONTENT", opencode.to_string()),
            ("OPENCODE_DISABLE_AUTOUPDATE", on.clone()),
            ("OPENCODE_DISABLE_MODELS_FETCH", on.clone()),
            ("OPENCODE_DISABLE_LSP_DOWNLOAD", on.clone()),
            ("OPENCODE_DISABLE_DEFAULT_PLUGINS", on),
        ],
        _ => vec![("OPENAI_API_KEY", "none".to_owned())],
    }
}
