//! Claude Code over its `stream-json` protocol, one long-lived process per sandbox: its command
//! line and the lines sent to it. `map.rs` interprets its own lines. Tested with 2.1.325.

mod map;

use std::path::Path;

use harvest_proto::{
    PromptId,
    bridge::{AgentLaunch, TurnRequest},
    door::model_url,
};
use serde_json::{Value, json};

pub(super) use self::map::Claude;
use super::{Agent, AgentStart, Image, Invocation, Signal, owned};
use crate::{app, users};

/// The id of the request whose response means that the agent is ready.
const INITIALIZE: &str = "initialize";

/// The id of the hook that asks before each tool.
const TOOL_HOOK: &str = "tool";

/// After this time Claude Code would run the tool without an answer; a sync is over long before.
const HOOK_TIMEOUT_SECONDS: u64 = 24 * 60 * 60;

/// The id of the request that changes the effort.
const SET_EFFORT: &str = "set_effort";

/// Additional variables. The key is a placeholder: the gateway holds the real one.
const ENV: [(&str, &str); 9] = [
    ("ANTHROPIC_API_KEY", "held-by-the-gateway"),
    ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
    ("DISABLE_AUTOUPDATER", "1"),
    ("DISABLE_TELEMETRY", "1"),
    ("DISABLE_ERROR_REPORTING", "1"),
    // `session_state_changed` is the only reliable end of a turn.
    ("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", "1"),
    // Covers minutes in which the gateway rejects requests; while it restarts, requests wait.
    ("CLAUDE_CODE_MAX_RETRIES", "10"),
    // A turn must not end while background work is still running.
    ("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1"),
    // Required for the permission mode below as root.
    ("IS_SANDBOX", "1"),
];

impl Agent for Claude {
    fn invocation(&mut self, start: &AgentStart<'_>) -> Invocation {
        self.resumes = start.resume;
        self.asks_for_tools = start.syncing;
        self.model.clone_from(&start.launch.model);
        // Only sandboxes have the file.
        let mcp = Path::new(app::MCP_CONFIG).exists();
        let mut argv = argv(start.launch, start.cwd, start.resume, mcp);
        argv.extend(without_linked_rules());
        Invocation { argv, env: env(start.launch), warning: None }
    }

    fn init_line(&mut self) -> Option<String> {
        let mut request = json!({"subtype": "initialize"});
        if self.asks_for_tools {
            let hook = json!({"hookCallbackIds": [TOOL_HOOK], "timeout": HOOK_TIMEOUT_SECONDS});
            request["hooks"] = json!({"PreToolUse": [hook]});
        }
        Some(control_request(INITIALIZE, &request))
    }

    /// Its own request for another model first asks the service for that model, and keeps the old
    /// one if that fails; the command line takes any.
    fn set_model(&mut self, launch: &AgentLaunch) -> Option<Vec<Signal>> {
        if launch.model != self.model {
            return None;
        }
        let settings = json!({"effortLevel": launch.effort});
        let request = json!({"subtype": "apply_flag_settings", "settings": settings});
        Some(vec![Signal::Send(control_request(SET_EFFORT, &request))])
    }

    /// Claude Code runs a line with the same `uuid` once, also after a resume.
    fn prompt(&mut self, request: &TurnRequest, images: &[Image]) -> String {
        self.begin(&request.prompt);
        let mut content = vec![json!({"type": "text", "text": request.text})];
        content.extend(images.iter().map(|image| {
            let source =
                json!({"type": "base64", "media_type": image.media_type, "data": image.base64});
            json!({"type": "image", "source": source})
        }));
        json!({
            "type": "user",
            "uuid": uuid(&request.prompt),
            "message": {"role": "user", "content": content},
        })
        .to_string()
    }

    fn cancel(&mut self) -> Option<String> {
        Some(control_request("interrupt", &json!({"subtype": "interrupt"})))
    }

    fn answer(&mut self, request: &str, answer: &str) -> Vec<Signal> {
        self.on_answer(request, answer)
    }

    fn parse_line(&mut self, line: &[u8]) -> Vec<Signal> {
        self.interpret(line)
    }

    fn line_dropped(&mut self, head: &[u8]) -> Vec<Signal> {
        self.interpret_head(head)
    }

    fn asks_for_tools(&self) -> bool {
        self.asks_for_tools
    }

    fn answer_tool(&mut self, request: &str, refusal: Option<&str>) -> Vec<Signal> {
        vec![Signal::Send(answer_hook(request, refusal))]
    }

    fn close_questions(&mut self) -> Vec<Signal> {
        self.close_all()
    }
}

/// Leaves out the user's instructions where they lead to the rules: the system prompt has them.
fn without_linked_rules() -> Vec<String> {
    let link = users::find(users::AGENT_USER).and_then(|user| app::linked_rules(&user.home));
    let settings = link.map(|path| json!({ "claudeMdExcludes": [path] }).to_string());
    settings.map_or_else(Vec::new, |settings| vec!["--settings".to_owned(), settings])
}

fn env(launch: &AgentLaunch) -> Vec<(String, String)> {
    let mut env = owned(&ENV);
    env.push(("ANTHROPIC_BASE_URL".to_owned(), model_url(&launch.upstream)));
    env
}

fn argv(launch: &AgentLaunch, cwd: &str, resume: bool, mcp: bool) -> Vec<String> {
    let fixed = [
        "claude",
        "-p",
        "--input-format",
        "stream-json",
        "--output-format",
        "stream-json",
        "--verbose",
        "--include-partial-messages",
        // Everything is allowed, but questions are sent to us as requests.
        "--permission-mode",
        "bypassPermissions",
        "--permission-prompt-tool",
        "stdio",
        // Those of the repositories are in our file: Claude Code would ask before it uses them.
        "--strict-mcp-config",
        "--append-system-prompt",
    ];
    let mut argv: Vec<String> = fixed.map(str::to_owned).into();
    argv.push(app::instructions(cwd));
    if mcp {
        argv.extend(["--mcp-config", app::MCP_CONFIG].map(str::to_owned));
    }
    argv.push(if resume { "--resume" } else { "--session-id" }.to_owned());
    argv.push(launch.conversation.clone());
    if let Some(model) = &launch.model {
        argv.extend(["--model".to_owned(), model.clone()]);
    }
    if let Some(effort) = launch.effort {
        argv.extend(["--effort".to_owned(), effort.to_string()]);
    }
    if !launch.questions {
        argv.extend(["--disallowedTools", "AskUserQuestion"].map(str::to_owned));
    }
    argv
}

fn control_request(id: &str, request: &Value) -> String {
    json!({"type": "control_request", "request_id": id, "request": request}).to_string()
}

/// Allows a tool call.
fn allow(request: &str, input: &Value) -> String {
    let response = json!({"behavior": "allow", "updatedInput": input});
    respond(request, json!({"subtype": "success", "response": response}))
}

/// Denies a tool call.
fn deny(request: &str, message: &str) -> String {
    let response = json!({"behavior": "deny", "message": message});
    respond(request, json!({"subtype": "success", "response": response}))
}

/// Lets a tool run, or refuses it for a reason that the model is told.
fn answer_hook(request: &str, refusal: Option<&str>) -> String {
    let refuse = |why| {
        let decision = json!({
            "hookEventName": "PreToolUse",
            "permissionDecision": "deny",
            "permissionDecisionReason": why,
        });
        json!({"hookSpecificOutput": decision})
    };
    let response = refusal.map_or_else(|| json!({}), refuse);
    respond(request, json!({"subtype": "success", "response": response}))
}

/// The error response to an unknown control request.
fn not_supported(request: &str) -> String {
    respond(request, json!({"subtype": "error", "error": "not supported"}))
}

fn respond(request: &str, mut response: Value) -> String {
    response["request_id"] = request.into();
    json!({"type": "control_response", "response": response}).to_string()
}

/// The prompt's 60 bits as a version 4 UUID.
fn uuid(id: &PromptId) -> String {
    // The alphabet of ids, five bits per character.
    const ALPHABET: &str = "0123456789abcdefghjkmnpqrstvwxyz";
    let bits = id
        .part()
        .chars()
        .fold(0u64, |bits, letter| (bits << 5) | ALPHABET.find(letter).unwrap_or(0) as u64);
    format!(
        "{:08x}-{:04x}-4{:03x}-8000-000000000000",
        bits >> 28,
        (bits >> 12) & 0xffff,
        bits & 0xfff
    )
}

#[cfg(test)]
mod tests {
    use harvest_proto::{Effort, door::MODEL_NAME};

    use super::*;

    fn launch() -> AgentLaunch {
        AgentLaunch {
            name: harvest_proto::AgentName::Claude,
            program: None,
            conversation: "c0ffee".into(),
            resume: false,
            model: Some("opus".into()),
            effort: None,
            upstream: "my-own".parse().unwrap(),
            protocol: harvest_proto::bridge::ModelProtocol::Messages,
            questions: true,
            silence_millis: 1,
            restarts: harvest_proto::bridge::RestartPolicy::default(),
        }
    }

    #[test]
    fn model_requests_go_through_the_gateway() {
        let env = env(&launch());
        let base = env.iter().find(|(name, _)| name == "ANTHROPIC_BASE_URL").unwrap();
        assert_eq!(base.1, format!("http://{MODEL_NAME}/my-own"));
    }

    #[test]
    fn conversation_is_created_then_resumed() {
        let launch = launch();
        let first = argv(&launch, "/workspace/shop", false, true).join(" ");
        assert!(!first.contains("AskUserQuestion"));
        let asks_nothing = AgentLaunch { questions: false, ..launch.clone() };
        let argv_without = argv(&asks_nothing, "/workspace/shop", false, true).join(" ");
        assert!(argv_without.ends_with("--disallowedTools AskUserQuestion"));
        assert!(first.contains("--session-id c0ffee --model opus") && !first.contains("--resume"));
        assert!(
            argv(&launch, "/workspace/shop", true, false).join(" ").contains("--resume c0ffee")
        );
    }

    #[test]
    fn effort_changes_without_a_restart() {
        let high = AgentLaunch { effort: Some(Effort::High), ..launch() };
        let first = argv(&high, "/workspace/shop", false, false).join(" ");
        assert!(first.contains("--model opus --effort high"), "{first}");
        let (mut claude, own) = (Claude::default(), launch());
        let env = std::collections::BTreeMap::new();
        let start = AgentStart {
            launch: &own,
            cwd: "/",
            resume: false,
            syncing: false,
            conversation: None,
            env: &env,
        };
        claude.invocation(&start);
        let mut level = |launch: &AgentLaunch| {
            let [Signal::Send(line)] = &claude.set_model(launch)?[..] else { return None };
            let line: Value = serde_json::from_str(line).unwrap();
            Some(line["request"]["settings"]["effortLevel"].clone())
        };
        assert_eq!(level(&high), Some("high".into()));
        assert_eq!(level(&launch()), Some(Value::Null));
        assert_eq!(level(&AgentLaunch { model: None, ..launch() }), None);
    }

    #[test]
    fn hooks_are_only_used_during_a_sync() {
        let (env, own) = (std::collections::BTreeMap::new(), launch());
        for syncing in [false, true] {
            let mut claude = Claude::default();
            let start = AgentStart {
                launch: &own,
                cwd: "/",
                resume: false,
                syncing,
                conversation: None,
                env: &env,
            };
            claude.invocation(&start);
            let line: Value = serde_json::from_str(&claude.init_line().unwrap()).unwrap();
            let hook = &line["request"]["hooks"]["PreToolUse"][0];
            assert_eq!(hook["hookCallbackIds"][0] == TOOL_HOOK, syncing, "{line}");
            assert_eq!(claude.asks_for_tools(), syncing);
        }
    }

    #[test]
    fn refusal_of_a_tool_has_its_reason() {
        let answer =
            |refusal| -> Value { serde_json::from_str(&answer_hook("970a", refusal)).unwrap() };
        let refused = answer(Some("it changed"));
        let output = &refused["response"]["response"]["hookSpecificOutput"];
        assert_eq!(output["permissionDecision"], "deny");
        assert_eq!(output["permissionDecisionReason"], "it changed");
        assert_eq!(answer(None)["response"]["response"], json!({}));
    }

    #[test]
    fn uuid_is_stable_and_unique_per_prompt() {
        let one: PromptId = "prm_zzzzzzzzzzzz".parse().unwrap();
        let other: PromptId = "prm_zzzzzzzzzzzy".parse().unwrap();
        assert_eq!(uuid(&one), "ffffffff-ffff-4fff-8000-000000000000");
        assert_eq!(uuid(&other), "ffffffff-ffff-4ffe-8000-000000000000");
    }
}
