//! The command line and the configuration of OpenCode.

use std::net::{Ipv4Addr, TcpListener};

use harvest_proto::{
    bridge::{AgentLaunch, ModelProtocol},
    door::model_url,
};
use serde_json::{Value, json};

use crate::{
    agents::{AgentStart, Invocation, owned},
    app,
};

/// Its HTTP interface, for `opencode attach` inside the sandbox.
const PORT: u16 = 4096;

/// A placeholder: the gateway holds the real key.
const KEY: &str = "held-by-the-gateway";

/// The model if the session names none.
const DEFAULT_MODEL: &str = "claude-sonnet-4-5";

/// Nothing is fetched at run time. The file has the MCP servers.
const ENV: [(&str, &str); 5] = [
    ("OPENCODE_CONFIG", app::OPENCODE_CONFIG),
    ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
    ("OPENCODE_DISABLE_MODELS_FETCH", "1"),
    ("OPENCODE_DISABLE_LSP_DOWNLOAD", "1"),
    ("OPENCODE_DISABLE_DEFAULT_PLUGINS", "1"),
];

pub(super) fn invocation(start: &AgentStart<'_>) -> Invocation {
    let is_free = TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).is_ok();
    let (port, warning) = port(is_free);
    let argv = ["opencode", "acp", "--port", &port.to_string(), "--hostname", "127.0.0.1"];
    let mut env = owned(&ENV);
    let mut config = config(start.launch);
    if start.syncing {
        ask_for_tools(&mut config);
    }
    env.push(("OPENCODE_CONFIG_CONTENT".to_owned(), config.to_string()));
    Invocation { argv: argv.map(str::to_owned).into(), env, warning }
}

/// Makes OpenCode ask before each tool but those that read and search, and go on when one is
/// refused.
fn ask_for_tools(config: &mut Value) {
    config["permission"]["*"] = "ask".into();
    for tool in ["read", "grep", "glob", "list"] {
        config["permission"][tool] = "allow".into();
    }
    config["experimental"] = json!({"continue_loop_on_deny": true});
}

// OpenCode does not start on a port that is in use; 0 is any free one.
fn port(is_free: bool) -> (u16, Option<String>) {
    if is_free {
        return (PORT, None);
    }
    let warning = format!(
        "port {PORT} is in use inside the sandbox: `opencode attach` cannot reach the agent until \
         it is restarted"
    );
    (0, Some(warning))
}

/// The id of the model in the configuration.
pub(super) fn model(launch: &AgentLaunch) -> String {
    format!("harvest/{}", launch.model.as_deref().unwrap_or(DEFAULT_MODEL))
}

pub(crate) fn config(launch: &AgentLaunch) -> Value {
    let name = launch.model.as_deref().unwrap_or(DEFAULT_MODEL);
    let model = model(launch);
    let package = match launch.protocol {
        ModelProtocol::Messages => "@ai-sdk/anthropic",
        ModelProtocol::Responses => "@ai-sdk/openai",
        ModelProtocol::Chat => "@ai-sdk/openai-compatible",
    };
    // The names of the packages' own options.
    let options = match (launch.effort, launch.protocol) {
        (None, _) => json!({}),
        (Some(effort), ModelProtocol::Messages) => json!({"effort": effort}),
        (Some(effort), _) => json!({"reasoningEffort": effort}),
    };
    let question = if launch.questions { "allow" } else { "deny" };
    json!({
        "autoupdate": false,
        "share": "disabled",
        // Harvest takes snapshots.
        "snapshot": false,
        "lsp": false,
        "formatter": false,
        "model": model,
        "small_model": model,
        "enabled_providers": ["harvest"],
        "instructions": [app::RULES_FILE],
        "permission": {
            "*": "allow",
            "external_directory": "allow",
            "doom_loop": "allow",
            "question": question,
        },
        "provider": {"harvest": {
            "name": "Harvest",
            "npm": package,
            "options": {"baseURL": format!("{}/v1", model_url(&launch.upstream)), "apiKey": KEY},
            "models": {name: {
                "limit": {"context": 200_000, "output": 32_000},
                "options": options,
                // Otherwise it replaces images by an error.
                "modalities": {"input": ["text", "image"], "output": ["text"]},
            }},
        }},
    })
}

#[cfg(test)]
mod tests {
    use harvest_proto::{AgentName, Effort, bridge::RestartPolicy, door::MODEL_NAME};

    use super::*;

    fn launch(protocol: ModelProtocol, questions: bool) -> AgentLaunch {
        AgentLaunch {
            name: AgentName::Opencode,
            program: None,
            conversation: "c".into(),
            resume: false,
            model: Some("m/1".into()),
            effort: None,
            upstream: "my-own".parse().unwrap(),
            protocol,
            questions,
            silence_millis: 1,
            restarts: RestartPolicy::default(),
        }
    }

    #[test]
    fn model_requests_go_through_the_gateway() {
        let config = config(&launch(ModelProtocol::Messages, true));
        let provider = &config["provider"]["harvest"];
        assert_eq!(provider["options"]["baseURL"], format!("http://{MODEL_NAME}/my-own/v1"));
        assert_eq!(provider["npm"], "@ai-sdk/anthropic");
        assert_eq!(config["model"], "harvest/m/1");
        assert!(provider["models"]["m/1"].is_object());
    }

    #[test]
    fn only_reads_need_no_permission_during_sync() {
        let mut config = config(&launch(ModelProtocol::Messages, true));
        assert_eq!(config["permission"]["*"], "allow");
        ask_for_tools(&mut config);
        let permission = &config["permission"];
        assert_eq!((&permission["*"], &permission["read"]), (&json!("ask"), &json!("allow")));
        assert!(permission["bash"].is_null() && permission["edit"].is_null());
        assert_eq!(config["experimental"]["continue_loop_on_deny"], true);
    }

    #[test]
    fn used_port_is_replaced_with_a_warning() {
        assert_eq!(port(true), (4096, None));
        assert!(matches!(port(false), (0, Some(warning)) if warning.contains("4096")));
    }

    #[test]
    fn effort_is_an_option_of_the_model() {
        let options = |protocol| {
            let launch = AgentLaunch { effort: Some(Effort::Low), ..launch(protocol, true) };
            config(&launch)["provider"]["harvest"]["models"]["m/1"]["options"].clone()
        };
        assert_eq!(options(ModelProtocol::Messages), json!({"effort": "low"}));
        assert_eq!(options(ModelProtocol::Responses), json!({"reasoningEffort": "low"}));
        assert_eq!(options(ModelProtocol::Chat), json!({"reasoningEffort": "low"}));
    }

    #[test]
    fn questions_can_be_taken_away() {
        let question = |questions| {
            let config = config(&launch(ModelProtocol::Chat, questions));
            config["permission"]["question"].as_str().map(str::to_owned)
        };
        assert_eq!(
            (question(true).as_deref(), question(false).as_deref()),
            (Some("allow"), Some("deny"))
        );
    }
}
