//! The real Codex, from the image `agents`, with the scripted model and without network.

use harvest_e2e::Host;

use crate::agents::{Questions, keeps_the_contract};

#[tokio::test]
async fn codex_keeps_the_contract_of_agents() {
    let host = Host::start_with(&[("HARVEST_IMAGE", "agents")]).await;
    keeps_the_contract(&host, "codex", Questions::Asked).await;
}
