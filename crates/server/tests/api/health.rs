//! Health, readiness and metrics.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use crate::{problem, test_server::TestServer};

#[tokio::test]
async fn readiness_reports_a_failing_provider() {
    let server = TestServer::start().await;
    assert_eq!(
        server.request_as(None, "GET", "/readyz", &[], "").await.json(),
        json!({"ready": true})
    );
    let server = TestServer::start_broken().await;
    assert_eq!(server.request_as(None, "GET", "/healthz", &[], "").await.status, 200);
    let response = server.request_as(None, "GET", "/readyz", &[], "").await;
    problem(&response, 503, "not_ready");
    let detail = response.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("the sandbox provider fails: "), "{detail}");
    assert!(response.header("retry-after").is_some());
}

#[tokio::test]
async fn metrics_parse_and_contain_no_client_input() {
    let server = TestServer::start().await;
    server.repository().await;
    let prompt = json!({"repository": "calc", "prompt": "planted-text"});
    assert_eq!(server.post("/v1/sessions", &[], prompt).await.status, 201);
    server.request("GET", "/planted-path?planted=query", &[], "").await;
    server.request("BREW", "/v1/sessions", &[], "").await;
    server.request("GET", "/v1/sessions/ses_000000000000", &[], "").await;
    let response = server.request_as(None, "GET", "/metrics", &[], "").await;
    assert_eq!(response.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = response.text();
    for planted in ["planted", "BREW", "ses_", "hvt_", "example.org", "127.0.0.1"] {
        assert!(!text.contains(planted), "{planted} in {text}");
    }
    let samples = parse(text);
    let sample =
        |name: &str| samples.get(name).copied().unwrap_or_else(|| panic!("{name} in {text}"));
    let not_found =
        r#"harvest_requests_total{method="GET",route="/v1/sessions/{session}",status="404"}"#;
    assert_eq!(sample(not_found), 1.0);
    assert_eq!(
        sample(r#"harvest_requests_total{method="POST",route="/v1/sessions",status="201"}"#),
        1.0
    );
    assert_eq!(sample(r#"harvest_requests_total{method="GET",route="none",status="404"}"#), 1.0);
    assert!(sample("harvest_events_total") >= 2.0 && sample("harvest_resident_bytes") > 0.0);
    assert_eq!(sample("harvest_sandboxes"), 0.0);
}

#[tokio::test]
async fn metrics_are_local_or_for_admins() {
    let server = TestServer::start().await;
    let user = json!({"name": "Bob", "email": "bob@example.org"});
    let bob = server.post("/v1/tokens", &[], json!({"name": "bob", "user": user})).await.json();
    let remote = [("x-forwarded-for", "203.0.113.9")];
    problem(&server.request_as(None, "GET", "/metrics", &remote, "").await, 403, "forbidden");
    problem(
        &server.request_as(bob["value"].as_str(), "GET", "/metrics", &remote, "").await,
        403,
        "forbidden",
    );
    assert_eq!(server.request("GET", "/metrics", &remote, "").await.status, 200);
}

/// A strict parser of the text format: every sample belongs to the preceding family, no sample is
/// repeated, and a histogram's buckets are cumulative and end with +Inf at its count.
fn parse(text: &str) -> BTreeMap<&str, f64> {
    let (mut samples, mut families, mut family) = (BTreeMap::new(), BTreeSet::new(), ("", ""));
    let mut last_bucket = 0.0;
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').unwrap();
            assert!(!text.is_empty() && families.insert(name), "{line}");
            family = (name, "");
            continue;
        }
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert!(
                name == family.0 && ["counter", "gauge", "histogram"].contains(&kind),
                "{line}"
            );
            family.1 = kind;
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        let value: f64 = value.parse().unwrap();
        assert!(value.is_finite() && value >= 0.0, "{line}");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{line}");
        match family.1 {
            "histogram" => {
                let part = name.strip_prefix(family.0).unwrap();
                assert!(["_bucket", "_sum", "_count"].contains(&part), "{line}");
                if part == "_bucket" {
                    assert!(value >= last_bucket, "{line}");
                    last_bucket = value;
                }
                if part == "_count" {
                    assert_eq!(value, last_bucket, "{line}");
                    last_bucket = 0.0;
                }
            }
            "counter" => assert!(name == family.0 && name.ends_with("_total"), "{line}"),
            _ => assert_eq!(name, family.0, "{line}"),
        }
        assert!(samples.insert(series, value).is_none(), "{line} is repeated");
    }
    samples
}
