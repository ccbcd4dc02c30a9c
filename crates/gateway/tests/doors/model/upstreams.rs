//! Upstreams by path, and the credential of each.

use super::*;

fn ledger(secrets: &[(&'static str, &'static str)]) -> RecordingLedger {
    RecordingLedger { secrets: secrets.iter().copied().collect(), ..RecordingLedger::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn path_selects_an_upstream_without_key() {
    let (url, seen) = fake_api().await;
    let kind = harvest_proto::UpstreamKind::Anthropic;
    let own = Upstream { kind, url, secret: None, oauth_secret: None };
    let upstreams = Upstreams::default().with("my-own".parse().unwrap(), own);
    let config = GatewayConfig { upstreams, ..GatewayConfig::default() };
    let agent = Agent::new(ledger(&[]), config, UpstreamName::anthropic()).await;
    let answered = agent.send("/my-own/v1/messages", &model("stream")).await.unwrap();
    assert_eq!(
        (answered.status(), &answered.headers()["x-harvest-upstream"]),
        (reqwest::StatusCode::OK, &"my-own".parse().unwrap())
    );
    let (uri, headers, _) = seen.lock().unwrap().remove(0);
    assert_eq!(uri, "/v1/messages");
    assert!(!headers.contains_key("x-api-key") && !headers.contains_key("authorization"));
    let scripted = agent.send("/scripted/v1/messages", &request(&[user("hi")], false)).await;
    assert_eq!(scripted.unwrap().headers()["x-harvest-upstream"], "scripted");
    let unknown = agent.send("/nope/v1/messages", &model("x")).await.unwrap();
    assert_eq!(unknown.status(), 404);
    assert!(unknown.text().await.unwrap().contains("upstream `nope` is not configured"));
}

#[tokio::test(flavor = "multi_thread")]
async fn scripted_session_reaches_no_paid_upstream() {
    let (url, seen) = fake_api().await;
    let ledger = ledger(&[("ANTHROPIC_API_KEY", KEY)]);
    let agent = Agent::new(ledger, at(&url), UpstreamName::scripted()).await;
    let refused = agent.send("/anthropic/v1/messages", &model("stream")).await.unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("`anthropic` is not for this sandbox"));
    assert_eq!(seen.lock().unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_token_is_sent_without_api_key() {
    const TOKEN: &str = "sk-ant-oat-never-inside";
    let (url, seen) = fake_api().await;
    let token = ("CLAUDE_CODE_OAUTH_TOKEN", TOKEN);
    for (secrets, by_token) in
        [(&[token][..], true), (&[token, ("ANTHROPIC_API_KEY", KEY)][..], false)]
    {
        let agent = Agent::new(ledger(secrets), at(&url), UpstreamName::anthropic()).await;
        assert_eq!(agent.json(&model("json")).await.0, 200);
        let (_, headers, _) = seen.lock().unwrap().remove(0);
        let betas: Vec<_> = headers.get_all("anthropic-beta").iter().collect();
        if by_token {
            assert_eq!(headers["authorization"], format!("Bearer {TOKEN}"));
            assert_eq!(betas, ["some-beta", "oauth-2025-04-20"]);
            assert!(!headers.contains_key("x-api-key"));
        } else {
            assert_eq!(headers["x-api-key"], KEY);
            assert_eq!(betas, ["some-beta"]);
            assert!(!headers.contains_key("authorization"));
        }
        let services = agent.door.gateway.model_services(&[]).await;
        let used = if by_token { token.0 } else { "ANTHROPIC_API_KEY" };
        assert_eq!(services[0].secret.as_deref(), Some(used));
    }
}
