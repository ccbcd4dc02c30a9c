//! What makes an agent work that a user types into a shell: variables, and files in the home of the
//! agent's user that answer the questions of a first start. No secret is among them.

use serde_json::{Map, Value, json};

use super::OPENCODE_CONFIG;

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
pub(crate) fn user_files(folders: &[String]) -> [(&'static str, String); 3] {
    [
        (".claude.json", claude_state(folders).to_string()),
        (".claude/settings.json", claude_settings().to_string()),
        (".codex/config.toml", codex_config(folders)),
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
fn codex_config(folders: &[String]) -> String {
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
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claude_trusts_folders_and_key() {
        let [(_, state), ..] = user_files(&["/workspace/shop".to_owned()]);
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(state["projects"]["/workspace/shop"]["hasTrustDialogAccepted"], true);
        let key = env().find(|(name, _)| name == "ANTHROPIC_API_KEY").unwrap().1;
        let approved = state["customApiKeyResponses"]["approved"][0].as_str().unwrap();
        assert!(key.ends_with(approved) && approved.len() <= 20);
    }
}
