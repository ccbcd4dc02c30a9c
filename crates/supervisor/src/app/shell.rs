//! What makes an agent work that a user types into a shell: variables, and files that answer the
//! questions of a first start and name the rules and MCP servers. No secret is among them.

use std::{collections::BTreeMap, fs, io, path::Path};

use harvest_proto::{AgentName, UpstreamName, bridge::AgentLaunch, door::model_url};
use serde_json::{Map, Value, json};

use super::{CODEX_CONFIG, OPENCODE_CONFIG, RULES_FILE, Servers};

/// The key that agents send; the gateway replaces it.
const PLACEHOLDER_KEY: &str = "held-by-the-gateway";

/// Claude Code's state, in the home of the agent's user.
pub(crate) const CLAUDE_STATE: &str = ".claude.json";

/// Claude Code's instructions of a user, in the home folder.
const CLAUDE_RULES: &str = ".claude/CLAUDE.md";

/// The configuration that Codex reads below the user's own.
const CODEX_SYSTEM_CONFIG: &str = "/etc/codex/config.toml";

/// A script for the home folder: writes the settings of Claude Code and leads its instructions to
/// the rules. What exists belongs to the user and stays.
pub(crate) const WRITE_MISSING: &str = r#"set -e
umask 077
mkdir -p .claude
[ -e .claude/settings.json ] || printf '%s' "$1" > .claude/settings.json
[ -e .claude/CLAUDE.md ] || ln -sfn "$2" .claude/CLAUDE.md"#;

/// The arguments of [`WRITE_MISSING`].
pub(crate) fn missing_files() -> [String; 2] {
    [claude_settings().to_string(), RULES_FILE.to_owned()]
}

/// Variables of commands in a session's sandbox; the image's and the session's own win.
pub(crate) fn env(launch: &AgentLaunch) -> BTreeMap<String, String> {
    let anthropic = model_url(&upstream(AgentName::Claude, launch));
    let openai = model_url(&upstream(AgentName::Codex, launch)) + "/v1";
    [
        ("ANTHROPIC_BASE_URL", &*anthropic),
        ("ANTHROPIC_API_KEY", PLACEHOLDER_KEY),
        ("OPENAI_BASE_URL", &*openai),
        ("OPENAI_API_KEY", PLACEHOLDER_KEY),
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
        ("CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL", "1"),
        ("DISABLE_AUTOUPDATER", "1"),
        ("DISABLE_TELEMETRY", "1"),
        ("DISABLE_ERROR_REPORTING", "1"),
        // Allows Claude Code to skip permissions as root.
        ("IS_SANDBOX", "1"),
        ("OPENCODE_CONFIG", OPENCODE_CONFIG),
        ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
        ("OPENCODE_DISABLE_MODELS_FETCH", "1"),
        ("OPENCODE_DISABLE_LSP_DOWNLOAD", "1"),
        ("OPENCODE_DISABLE_DEFAULT_PLUGINS", "1"),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect()
}

/// The model service of an agent that a user types: the session's own if it is the session's agent
/// or scripted, else the agent's usual one.
fn upstream(agent: AgentName, launch: &AgentLaunch) -> UpstreamName {
    if launch.name == agent || launch.upstream == UpstreamName::scripted() {
        return launch.upstream.clone();
    }
    agent.built_in_upstream().unwrap_or_else(UpstreamName::anthropic)
}

/// Leads Codex to its configuration in `/app`, unless the image has one of its own.
pub(crate) fn link_codex_config() -> io::Result<()> {
    let path = Path::new(CODEX_SYSTEM_CONFIG);
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    match std::os::unix::fs::symlink(CODEX_CONFIG, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    }
}

/// The user's instructions of Claude Code, if they are only the rules.
pub(crate) fn linked_rules(home: &str) -> Option<String> {
    let path = Path::new(home).join(CLAUDE_RULES);
    let is_ours = fs::read_link(&path).is_ok_and(|target| target == Path::new(RULES_FILE));
    is_ours.then(|| path.display().to_string())
}

/// Claude Code's state with these folders trusted and these servers; the rest of it stays. `None`
/// when it cannot be read, or lacks nothing.
pub(crate) fn claude_state(
    existing: Option<&str>,
    folders: &[String],
    servers: &Servers,
) -> Option<String> {
    let fresh = fresh_claude_state(folders, servers);
    let Some(text) = existing else { return Some(fresh.to_string()) };
    let mut state: Value =
        harvest_proto::json::from_slice(text.as_bytes()).ok().filter(Value::is_object)?;
    let before = state.clone();
    for table in ["mcpServers", "projects"] {
        if !state[table].is_object() {
            state[table] = json!({});
        }
        for (name, value) in fresh[table].as_object().into_iter().flatten() {
            match (&mut state[table][name], value) {
                // A project also has what Claude Code knows about it.
                (Value::Object(kept), Value::Object(new)) if table == "projects" => {
                    kept.extend(new.clone());
                }
                (place, new) => *place = new.clone(),
            }
        }
    }
    (state != before).then(|| state.to_string())
}

/// Onboarding done, these folders trusted, the placeholder key accepted.
fn fresh_claude_state(folders: &[String], servers: &Servers) -> Value {
    let trusted = json!({ "hasTrustDialogAccepted": true, "hasCompletedProjectOnboarding": true });
    let projects: Map<String, Value> =
        folders.iter().map(|folder| (folder.clone(), trusted.clone())).collect();
    // Claude Code remembers the last 20 characters of a key.
    let known = &PLACEHOLDER_KEY[PLACEHOLDER_KEY.len().saturating_sub(20)..];
    json!({
        "hasCompletedOnboarding": true,
        "theme": "dark",
        "bypassPermissionsModeAccepted": true,
        "hasSeenAutoDefaultNudge": true,
        "customApiKeyResponses": { "approved": [known], "rejected": [] },
        "projects": projects,
        "mcpServers": servers,
    })
}

fn claude_settings() -> Value {
    json!({
        "permissions": { "defaultMode": "bypassPermissions" },
        "skipDangerousModePermissionPrompt": true,
    })
}

/// The model through the door, everything allowed, no request besides; the rules and servers of
/// every agent.
pub(super) fn codex_config(
    launch: &AgentLaunch,
    rules: &str,
    folders: &[String],
    servers: &Servers,
) -> String {
    let own = launch.name == AgentName::Codex || launch.upstream == UpstreamName::scripted();
    let model = launch.model.as_ref().filter(|_| own);
    let model = model.map(|model| format!("model = {}\n", json!(model))).unwrap_or_default();
    let (url, rules) = (model_url(&upstream(AgentName::Codex, launch)), json!(rules));
    let mut text = format!(
        r#"{model}model_provider = "harvest"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"
developer_instructions = {rules}

[analytics]
enabled = false

[features]
plugins = false
# The image has the program, not the package that its daemon needs.
daemon_auto_start = false

[model_providers.harvest]
name = "Harvest"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = false
"#,
    );
    for folder in folders {
        text += &format!("\n[projects.{}]\ntrust_level = \"trusted\"\n", json!(folder));
    }
    text.extend(servers.iter().filter_map(codex_server));
    // JSON allows this character in a string, TOML does not.
    text.replace('\u{7f}', "\\u007F")
}

/// A server of `.mcp.json` as a table. A JSON string is one of TOML too.
fn codex_server((name, server): (&String, &Value)) -> Option<String> {
    let table = |key: &str| {
        let entries = server[key].as_object().into_iter().flatten();
        let entries = entries.filter(|(_, value)| value.is_string());
        let entries = entries.map(|(name, value)| format!("{} = {value}", json!(name)));
        format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
    };
    let how = match (&server["command"], &server["url"]) {
        (command @ Value::String(_), _) => {
            let arguments = server["args"].as_array().into_iter().flatten();
            let arguments: Value = arguments.filter(|one| one.is_string()).cloned().collect();
            format!("command = {command}\nargs = {arguments}\nenv = {}\n", table("env"))
        }
        (_, url @ Value::String(_)) => {
            format!("url = {url}\nhttp_headers = {}\n", table("headers"))
        }
        _ => return None,
    };
    Some(format!("\n[mcp_servers.{}]\n{how}", json!(name)))
}

#[cfg(test)]
mod tests {
    use harvest_proto::bridge::{ModelProtocol, RestartPolicy};

    use super::*;

    fn launch(name: AgentName, upstream: UpstreamName) -> AgentLaunch {
        AgentLaunch {
            name,
            program: None,
            conversation: "c".into(),
            resume: false,
            model: Some("m".into()),
            effort: None,
            upstream,
            protocol: ModelProtocol::Messages,
            questions: true,
            silence_millis: 1,
            restarts: RestartPolicy::default(),
        }
    }

    #[test]
    fn claude_trusts_folders_and_key() {
        let state = claude_state(None, &["/workspace/shop".to_owned()], &Map::new()).unwrap();
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(state["projects"]["/workspace/shop"]["hasTrustDialogAccepted"], true);
        let key = &env(&launch(AgentName::Claude, UpstreamName::anthropic()))["ANTHROPIC_API_KEY"];
        let approved = state["customApiKeyResponses"]["approved"][0].as_str().unwrap();
        assert!(key.ends_with(approved) && approved.len() <= 20);
    }

    #[test]
    fn claude_keeps_its_state_and_gets_new_servers() {
        let servers = json!({"a": {"url": "http://new"}});
        let servers = servers.as_object().unwrap();
        let before = json!({
            "theme": "light",
            "mcpServers": {"a": {"url": "http://old"}, "mine": {"command": "x"}},
            "projects": {"/w": {"history": [1]}},
        });
        let state = claude_state(Some(&before.to_string()), &["/w".to_owned()], servers).unwrap();
        let after: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(
            (&after["theme"], &after["projects"]["/w"]["history"]),
            (&json!("light"), &json!([1]))
        );
        let expected = json!({"a": {"url": "http://new"}, "mine": {"command": "x"}});
        assert_eq!(after["mcpServers"], expected);
        assert_eq!(claude_state(Some(&state), &["/w".to_owned()], servers), None, "lacks nothing");
        assert_eq!(claude_state(Some("not JSON"), &[], servers), None);
    }

    #[test]
    fn typed_agents_use_a_service_of_their_own() {
        let urls = |name, upstream: &str| {
            let env = env(&launch(name, upstream.parse().unwrap()));
            ["ANTHROPIC_BASE_URL", "OPENAI_BASE_URL"].map(|name| {
                env[name].trim_start_matches("http://model.harvest.internal/").to_owned()
            })
        };
        assert_eq!(urls(AgentName::Claude, "anthropic"), ["anthropic", "openai/v1"]);
        assert_eq!(urls(AgentName::Codex, "my-own"), ["anthropic", "my-own/v1"]);
        assert_eq!(urls(AgentName::Opencode, "my-own"), ["anthropic", "openai/v1"]);
        assert_eq!(urls(AgentName::Claude, "scripted"), ["scripted", "scripted/v1"]);
    }

    #[test]
    fn codex_gets_the_same_servers_and_rules() {
        let servers = json!({
            "local": {"command": "run", "args": ["-x\u{7f}"], "env": {"A": "b \"c\""}},
            "remote": {"url": "https://h/mcp", "headers": {"K": "v"}},
            "neither": {},
        });
        let claude = launch(AgentName::Claude, UpstreamName::anthropic());
        let text = codex_config(&claude, "Act.\n", &[], servers.as_object().unwrap());
        assert!(text.starts_with("model_provider = "), "another agent's model is not Codex's");
        assert!(text.contains("\ndaemon_auto_start = false\n"), "the interactive program starts");
        assert!(text.contains("developer_instructions = \"Act.\\n\"\n"), "{text}");
        assert!(text.contains(r#"base_url = "http://model.harvest.internal/openai/v1""#), "{text}");
        let tables = &text[text.find("\n[mcp_servers").unwrap()..];
        assert_eq!(
            tables,
            r#"
[mcp_servers."local"]
command = "run"
args = ["-x\u007F"]
env = { "A" = "b \"c\"" }

[mcp_servers."remote"]
url = "https://h/mcp"
http_headers = { "K" = "v" }
"#
        );
    }
}
