//! Agents that do not remember the session, and agents that continue the work of another one.

use harvest_proto::AgentName;

use super::*;

#[tokio::test]
async fn agent_without_memory_gets_last_messages() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("first")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let second = send(&sessions, &id, "forgotten").await;
    let ended = |event: &Event| matches!(&event.body, EventBody::TurnEnded { prompt, .. } if *prompt == second);
    until(&sessions, &id, ended).await;
    let texts: String = all(&sessions, &id)
        .await
        .into_iter()
        .filter_map(|event| match event.body {
            EventBody::TextDelta { text } => Some(text),
            _ => None,
        })
        .collect();
    // The fake agent repeats a prompt, and after "forgotten" the messages that it got.
    assert_eq!(texts, "firstUser first\nAgent first\n");
}

#[tokio::test]
async fn prompt_can_change_the_sessions_agent() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("first")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let (text, agent) = ("second".parse().unwrap(), Some(AgentName::Scripted));
    let create = CreatePrompt { text, now: false, author: None, agent };
    sessions.prompt(&id, create, ada()).await.unwrap();
    assert_eq!(sessions.get(&id).await.unwrap().agent, AgentName::Scripted);
}
