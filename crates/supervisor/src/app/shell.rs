//! What makes an agent work that a user types into a shell: variables, and files in the home of the
//! agent's user that answer the questions of a first start. No secret is among them.

use serde_json::{Map, Value, json};

use super::{OPENCODE_CONFIG, Servers};

/// The key that agents send; the gateway replaces it.
const PLACEHOLDER_KEY: &str = "held-by-the-gateway";

/// Variables of commands in a session's sandbox; the image's and the session's own win.
pub(crate) fn env() -> impl Iterator<Item = (String, String)> {
    [
        ("ANTHROPIC_BASE_URL", "http://model.harvest.internal"),
        ("ANTHROPIC_API_KEY", PLACEHOLDER_KEY),
        ("OPENAI_BASE_URL", "http://model.harvest.internal/v1"),
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
}

/// Files below the home folder with their content. An existing one is left alone: it belongs to the
/// user or to the agent's own state.
pub(crate) fn user_files(folders: &[String], servers: &Servers) -> [(&'static str, String); 3] {
    [
        (".claude.json", claude_state(folders).to_string()),
        (".claude/settings.json", claude_settings().to_string()),
        (".codex/config.toml", codex_config(folders, servers)),
    ]
}

/// Onboarding done, these folders trusted, the placeholder key accepted.
fn claude_state(folders: &[String]) -> Value {
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
    })
}

fn claude_settings() -> Value {
    json!({
        "permissions": { "defaultMode": "bypassPermissions" },
        "skipDangerousModePermissionPrompt": true,
    })
}

/// The model through the door, everything allowed, no request besides.
fn codex_config(folders: &[String], servers: &Servers) -> String {
    let mut text = String::from(
        r#"model_provider = "harvest"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false

[features]
plugins = false

[model_providers.harvest]
name = "Harvest"
base_url = "http://model.harvest.internal/v1"
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
    use super::*;

    #[test]
    fn claude_trusts_folders_and_key() {
        let [(_, state), ..] = user_files(&["/workspace/shop".to_owned()], &Map::new());
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(state["projects"]["/workspace/shop"]["hasTrustDialogAccepted"], true);
        let key = env().find(|(name, _)| name == "ANTHROPIC_API_KEY").unwrap().1;
        let approved = state["customApiKeyResponses"]["approved"][0].as_str().unwrap();
        assert!(key.ends_with(approved) && approved.len() <= 20);
    }

    #[test]
    fn codex_gets_the_same_servers() {
        let servers = json!({
            "local": {"command": "run", "args": ["-x\u{7f}"], "env": {"A": "b \"c\""}},
            "remote": {"url": "https://h/mcp", "headers": {"K": "v"}},
            "neither": {},
        });
        let text = codex_config(&[], servers.as_object().unwrap());
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
