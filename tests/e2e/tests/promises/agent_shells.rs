//! Agents that a user types into a shell of a session: no login, no onboarding, no trust question.

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, bridge::Exit};

use crate::{app_folder::idle, terminals_and_files::Socket};

/// A prompt for the scripted model. What is typed does not contain the word of its answer.
const PROMPT: &str = r#"script: [{"text": "\u0068arvested"}]"#;

/// Types into a shell of the session's user.
async fn shell(host: &Host, session: &SessionId) -> Socket {
    let path = format!("/v1/sessions/{session}/pty?rows=40&cols=120");
    let mut socket = Socket::open(host, &path).await;
    socket.shows("$ ").await;
    socket
}

#[tokio::test]
async fn claude_typed_in_a_shell_answers() {
    let host = Host::start().await;
    let session = idle(&host, &[("a.txt", "a\n")]).await;
    let mut socket = shell(&host, &session).await;
    socket.type_in("claude\r").await;
    // The prompt box comes first: no login, no trust question, no offer.
    let before = socket.shows("❯").await;
    for question in ["login", "trust", "API key", "Unable"] {
        assert!(!before.contains(question), "{before}");
    }
    socket.shows("bypass").await;
    socket.type_in(PROMPT).await;
    socket.shows("arvested").await;
    socket.type_in("\r").await;
    socket.shows("harvested").await;
}

#[tokio::test]
async fn opencode_typed_in_a_shell_answers() {
    let host = Host::start().await;
    let session = idle(&host, &[("a.txt", "a\n")]).await;
    let (exit, agents) = host.exec(&session, "harvest", "cat /etc/harvest/agents.json").await;
    assert!(exit == Exit::Code(0) && agents.contains("opencode"), "the image `agents` is built");
    let mut socket = shell(&host, &session).await;
    socket.type_in("opencode\r").await;
    socket.shows("Ask anything").await;
    socket.type_in(PROMPT).await;
    socket.shows("arvested").await;
    socket.type_in("\r").await;
    socket.shows("harvested").await;
    let refused = |body: &EventBody| matches!(body, EventBody::EgressRefused { .. });
    assert!(!host.events(&session).await.iter().any(refused), "nothing is fetched at run time");
}

#[tokio::test]
async fn codex_typed_in_a_shell_answers() {
    let host = Host::start().await;
    let session = idle(&host, &[("a.txt", "a\n")]).await;
    let mut socket = shell(&host, &session).await;
    socket.type_in(&format!("codex exec '{PROMPT}'\r")).await;
    socket.shows("harvested").await;
    let refused = |body: &EventBody| matches!(body, EventBody::EgressRefused { .. });
    assert!(!host.events(&session).await.iter().any(refused), "nothing is fetched at run time");
}
