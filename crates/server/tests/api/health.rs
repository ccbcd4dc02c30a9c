//! How a server says that it is well.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use crate::{host::Host, problem};

#[tokio::test]
async fn ready_means_that_the_store_is_writable_and_the_machine_answers() {
    let host = Host::start().await;
    assert_eq!(host.ask_as(None, "GET", "/readyz", &[], "").await.json(), json!({"ready": true}));
    let host = Host::start_broken().await;
    assert_eq!(host.ask_as(None, "GET", "/healthz", &[], "").await.status, 200);
    let answer = host.ask_as(None, "GET", "/readyz", &[], "").await;
    problem(&answer, 503, "not_ready");
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("the machine does not answer"), "{detail}");
    assert!(answer.header("retry-after").is_some());
}

#[tokio::test]
async fn the_metrics_can_be_parsed_and_hold_nothing_that_somebody_sent() {
    let host = Host::start().await;
    host.repository().await;
    let prompt = json!({"repository": "calc", "prompt": "planted-text"});
    assert_eq!(host.post("/v1/sessions", &[], prompt).await.status, 201);
    host.ask("GET", "/planted-path?planted=query", &[], "").await;
    host.ask("BREW", "/v1/sessions", &[], "").await;
    host.ask("GET", "/v1/sessions/ses_000000000000", &[], "").await;
    let answer = host.ask_as(None, "GET", "/metrics", &[], "").await;
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = answer.text();
    for planted in ["planted", "BREW", "ses_", "hvt_", "example.org", "127.0.0.1"] {
        assert!(!text.contains(planted), "{planted} in {text}");
    }
    let samples = parse(text);
    let sample =
        |name: &str| samples.get(name).copied().unwrap_or_else(|| panic!("{name} in {text}"));
    let missed =
        r#"harvest_requests_total{method="GET",route="/v1/sessions/{session}",status="404"}"#;
    assert_eq!(sample(missed), 1.0);
    assert_eq!(
        sample(r#"harvest_requests_total{method="POST",route="/v1/sessions",status="201"}"#),
        1.0
    );
    assert_eq!(sample(r#"harvest_requests_total{method="GET",route="none",status="404"}"#), 1.0);
    assert!(sample("harvest_events_total") >= 2.0 && sample("harvest_resident_bytes") > 0.0);
    assert_eq!(sample("harvest_sandboxes"), 0.0);
}

#[tokio::test]
async fn the_metrics_are_for_this_machine_and_for_admins() {
    let host = Host::start().await;
    let user = json!({"name": "Bob", "email": "bob@example.org"});
    let bob = host.post("/v1/tokens", &[], json!({"name": "bob", "user": user})).await.json();
    let far = [("x-forwarded-for", "203.0.113.9")];
    problem(&host.ask_as(None, "GET", "/metrics", &far, "").await, 403, "forbidden");
    problem(
        &host.ask_as(bob["value"].as_str(), "GET", "/metrics", &far, "").await,
        403,
        "forbidden",
    );
    assert_eq!(host.ask("GET", "/metrics", &far, "").await.status, 200);
}

/// The text format, strictly: every sample belongs to the family announced last, no sample comes twice,
/// a histogram's buckets rise and end with +Inf at its count.
fn parse(text: &str) -> BTreeMap<&str, f64> {
    let (mut samples, mut families, mut family) = (BTreeMap::new(), BTreeSet::new(), ("", ""));
    let mut last_bucket = 0.0;
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(!words.is_empty() && families.insert(name), "{line}");
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
        assert!(samples.insert(series, value).is_none(), "{line} comes twice");
    }
    samples
}
