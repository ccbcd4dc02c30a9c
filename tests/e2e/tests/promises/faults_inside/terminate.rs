//! A turn counts as ended only when its processes are gone, however its sandbox is stopped.

use harvest_e2e::{Host, processes_with};
use harvest_proto::{EventBody, event::TurnOutcome};
use reqwest::Method;
use serde_json::json;

use super::{begin, lives, signal, zygotes};
use crate::turn_ended;

#[tokio::test]
async fn terminate_reports_end_after_processes_are_gone() {
    let host = Host::start().await;
    let session = begin(&host, &json!([{ "bash": "exec sleep 98713.25" }])).await;
    lives("98713.25").await;
    let zygote = zygotes(&host).remove(0);
    assert!(signal(zygote, "-STOP"));
    let terminate = async {
        let path = format!("/v1/sessions/{session}/terminate");
        host.request(Method::POST, &path).json(&json!({})).send().await.unwrap()
    };
    let end = async {
        let event = host.follow(session.clone()).until("the turn to end", turn_ended).await;
        (event.body, processes_with("98713.25"))
    };
    // The zygote, which kills the sandbox, is stopped while the server handles these.
    let stall = async {
        for _ in 0..50 {
            host.show(&session).await;
        }
        assert!(signal(zygote, "-CONT"));
    };
    let (answer, (end, left), ()) = tokio::join!(terminate, end, stall);
    assert!(answer.status().is_success(), "{answer:?}");
    assert!(matches!(end, EventBody::TurnEnded { outcome: TurnOutcome::Stopped, .. }), "{end:?}");
    assert!(left.is_empty(), "the turn's processes are gone: {left:?}");
}
