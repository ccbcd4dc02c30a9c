//! The whole contract of agents on the real programs, with the scripted model: one session of each
//! agent goes through every fault, and after each one the agent remembers the conversation. The
//! results are the table in `docs/agents.md`.

mod faults;
mod matrix;
mod session;

use harvest_e2e::Host;
use serde_json::json;

use self::session::{Agent, UnderTest};

/// Every row of the table, in its order.
async fn fulfils_the_whole_contract(agent: Agent) {
    let name = agent.name;
    let host = Host::start_with(&[("HARVEST_IMAGE", "agents")]).await;
    let mut test = UnderTest::begin(host, agent).await;
    faults::stop_in_a_silent_model(&mut test).await;
    faults::stop_in_a_shell_loop(&mut test).await;
    faults::overloaded_model(&mut test).await;
    faults::rejected_key(&mut test).await;
    faults::dropped_stream(&mut test).await;
    faults::prompt_while_busy(&mut test).await;
    faults::long_output(&mut test).await;
    faults::invalid_line(&mut test).await;
    faults::killed_agent(&mut test).await;
    faults::killed_supervisor(&mut test).await;
    faults::killed_server(&mut test).await;
    faults::pause_and_resume(&mut test).await;
    faults::fork(&mut test).await;
    faults::restore(&mut test).await;
    matrix::check(name, &test.rows);
}

#[tokio::test]
async fn claude_fulfils_the_whole_contract() {
    let step = json!({ "content": "one", "status": "in_progress", "activeForm": "" });
    let plan = ("TodoWrite", json!({ "todos": [step] }));
    fulfils_the_whole_contract(Agent { name: "claude", argument: "stream-json", plan }).await;
}

#[tokio::test]
async fn opencode_fulfils_the_whole_contract() {
    let step = json!({ "content": "one", "status": "in_progress", "priority": "high" });
    let plan = ("todowrite", json!({ "todos": [step] }));
    fulfils_the_whole_contract(Agent { name: "opencode", argument: "acp", plan }).await;
}

#[tokio::test]
async fn codex_fulfils_the_whole_contract() {
    let plan = ("update_plan", json!({ "plan": [{ "step": "one", "status": "in_progress" }] }));
    fulfils_the_whole_contract(Agent { name: "codex", argument: "app-server", plan }).await;
}

#[tokio::test]
async fn scripted_agent_fulfils_the_whole_contract() {
    let plan = ("TodoWrite", json!({ "todos": [] }));
    fulfils_the_whole_contract(Agent { name: "scripted", argument: "scripted-agent", plan }).await;
}
