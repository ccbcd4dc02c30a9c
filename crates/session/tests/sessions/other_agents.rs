//! Agents that do not remember the session, and agents that continue the work of another one.

use harvest_proto::{AgentName, Effort, ModelRef, bridge::ModelProtocol};

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
    let with = |agent| {
        let text = "second".parse().unwrap();
        CreatePrompt { agent: Some(agent), ..CreatePrompt::new(text) }
    };
    sessions.prompt(&id, with(AgentName::Scripted), ada()).await.unwrap();
    assert_eq!(sessions.get(&id).await.unwrap().agent, AgentName::Scripted);
    harness.fake.remove_agent("codex");
    let refused = sessions.prompt(&id, with(AgentName::Codex), ada()).await.unwrap_err();
    assert_eq!(refused.code(), "agent_missing");
}

#[tokio::test]
async fn prompt_model_stays_only_with_its_agent() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("first")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let with = |model: &str, agent| CreatePrompt {
        agent,
        model: Some(model.parse().unwrap()),
        effort: Some(Effort::High),
        ..CreatePrompt::new("next".parse().unwrap())
    };
    let refused = sessions.prompt(&id, with("nope/m", None), ada()).await.unwrap_err();
    assert_eq!(refused.code(), "no_model_service");
    let before = sessions.get(&id).await.unwrap();
    let prompt = sessions.prompt(&id, with("scripted/m", None), ada()).await.unwrap();
    let options = |of: &Prompt| (of.model.as_deref() == Some("scripted/m"), of.effort);
    assert_eq!(options(&prompt), (true, Some(Effort::High)));
    let stored = sessions.prompts(&id).await.unwrap();
    assert_eq!(options(stored.last().unwrap()), (true, Some(Effort::High)));
    let after = sessions.get(&id).await.unwrap();
    assert_eq!((&after.model, after.effort), (&before.model, before.effort));
    let agent = Some(AgentName::Scripted);
    sessions.prompt(&id, with("scripted/other", agent), ada()).await.unwrap();
    let after = sessions.get(&id).await.unwrap();
    assert_eq!(
        (after.model.as_deref(), after.effort),
        (Some("scripted/other"), Some(Effort::High))
    );
}

#[tokio::test]
async fn opencode_speaks_the_protocol_of_its_upstream() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    for (model, protocol) in [
        (None, ModelProtocol::Messages),
        (Some("scripted"), ModelProtocol::Messages),
        (Some("openai/gpt"), ModelProtocol::Responses),
    ] {
        let (agent, model) = (Some(AgentName::Opencode), model.map(|name| name.parse().unwrap()));
        let create = CreateSession { agent, model, ..CreateSession::default() };
        let id = sessions.create(create, ada()).await.unwrap().id;
        until_state(&sessions, &id, SessionState::Idle).await;
        let boot = harness.fake.boot(&sandbox(&sessions, &id).await).unwrap();
        assert_eq!(boot.agent.unwrap().protocol, protocol);
    }
}

#[tokio::test]
async fn codex_requests_the_scripted_model_by_name() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    for (agent, name) in [(AgentName::Codex, Some("scripted")), (AgentName::Claude, None)] {
        let (agent, model) = (Some(agent), Some(ModelRef::scripted()));
        let create = CreateSession { agent, model, ..CreateSession::default() };
        let id = sessions.create(create, ada()).await.unwrap().id;
        until_state(&sessions, &id, SessionState::Idle).await;
        let boot = harness.fake.boot(&sandbox(&sessions, &id).await).unwrap();
        assert_eq!(boot.agent.unwrap().model.as_deref(), name);
    }
}
