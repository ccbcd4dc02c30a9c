//! Requests that ask the model service to reach something by itself.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn model_service_reaches_nothing_for_network_none() {
    let (anthropic_url, seen) = fake_api().await;
    let ledger = RecordingLedger {
        secrets: HashMap::from([("ANTHROPIC_API_KEY", KEY)]),
        ..RecordingLedger::default()
    };
    let config = at(&anthropic_url);
    let network =
        harvest_gateway::ledger::ResolvedPolicy::of(harvest_proto::NetworkPolicy::None, &[])
            .fixed();
    let upstream = tokio::sync::watch::channel(UpstreamName::anthropic()).1;
    let policy = crate::DoorPolicy { upstream, network, ..policy(&[]) };
    let agent = Agent::with_policy(ledger, config, policy).await;
    let image =
        json!({"type": "image", "source": {"type": "url", "url": "https://evil.example/?x"}});
    let mut sources = model("json");
    sources["messages"] = json!([{"role": "user", "content": [image]}]);
    let mut servers = model("json");
    servers["mcp_servers"] = json!([{"type": "url", "url": "https://mcp.example/", "name": "m"}]);
    let mut tools = model("json");
    tools["tools"] = json!([{"type": "web_search_20250305", "name": "web_search"}]);
    for request in [&sources, &servers, &tools] {
        let (status, body) = agent.json(request).await;
        assert_eq!((status, &body["error"]["type"]), (400, &json!("invalid_request_error")));
        assert!(body["error"]["message"].as_str().unwrap().contains("`none`"), "{body}");
    }
    let events = agent.door.ledger.events();
    let names = events.iter().map(|event| match event {
        EventBody::EgressRefused { name, .. } => name.as_str(),
        other => panic!("{other:?}"),
    });
    assert_eq!(names.collect::<Vec<_>>(), ["evil.example", "mcp.example", "web_search_20250305"]);
    assert_eq!(seen.lock().unwrap().len(), 0, "nothing was sent to the service");
    assert_eq!(agent.json(&model("json")).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn request_is_sent_in_its_judged_form() {
    let (agent, seen) = anthropic().await;
    let request = agent.client.post(format!("{}{MESSAGES}", agent.base));
    let request = request.header("content-type", "application/x-protobuf");
    assert_eq!(request.body(model("json").to_string()).send().await.unwrap().status(), 200);
    let (_, headers, _) = seen.lock().unwrap().remove(0);
    assert_eq!(headers["content-type"], "application/json");
}
