//! `harvest show`: what the agent said of itself.

use harvest_e2e::Host;
use harvest_proto::{api::Session, event::McpState};
use serde_json::json;

use crate::{completed, prompt_options::create};

#[tokio::test]
async fn show_lists_agent_version_and_servers() {
    let host = Host::start().await;
    let script = json!([{ "text": "done" }]);
    for (agent, state) in [
        ("claude", McpState::Connected),
        ("codex", McpState::Connected),
        // Its protocol does not report states.
        ("opencode", McpState::Offered),
    ] {
        let body = json!({ "agent": agent, "model": "scripted", "network": "none",
                           "prompt": format!("Say it.\nscript: {script}") });
        let session = create(&host, body).await;
        host.follow(session.clone()).until("the turn", completed).await;
        let id = session.to_string();
        let shown = host.harvest(["show", &id]).stdout;
        assert!(shown.contains(&format!("mcp server    harvest {state}")), "{shown}");
        let json = host.harvest(["show", &id, "--json"]).stdout;
        let info = serde_json::from_str::<Session>(&json).unwrap().agent_info.unwrap();
        assert!(info.model.is_some(), "{info:?}");
        let version = info.version.clone().unwrap();
        assert!(shown.contains(&format!("{agent} {version}")), "{shown}");
        assert!(info.mcp.iter().any(|one| one.name == "harvest" && one.state == state));
    }
}
