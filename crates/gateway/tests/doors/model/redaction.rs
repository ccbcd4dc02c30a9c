//! A model service that repeats the key it was sent.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn key_in_successful_response_is_masked() {
    let answer = || async {
        let (first, second) = KEY.split_at(5);
        let chunks = [format!("{{\"id\":\"{first}"), format!("{second}\"}}")];
        Response::new(Body::from_stream(stream::iter(chunks.map(Ok::<_, Infallible>))))
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let anthropic_url = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().route("/v1/messages", post(answer));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let ledger = RecordingLedger {
        secrets: HashMap::from([("ANTHROPIC_API_KEY", KEY)]),
        ..RecordingLedger::default()
    };
    let config = at(&anthropic_url);
    let agent = Agent::new(ledger, config, UpstreamName::anthropic()).await;
    let masked = json!({"id": "*".repeat(KEY.len())});
    assert_eq!(agent.json(&model("leak")).await, (200, masked));
}
