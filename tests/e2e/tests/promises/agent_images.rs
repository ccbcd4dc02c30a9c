//! Images that hold agents: their size.

use harvest_e2e::Host;
use serde_json::Value;

#[tokio::test]
async fn base_image_stays_below_800_megabytes() {
    let host = Host::start().await;
    let image: Value = host.get("/v1/images/base").send().await.unwrap().json().await.unwrap();
    let bytes = image["bytes"].as_u64().unwrap();
    assert!(bytes < 800_000_000, "{bytes}");
}
