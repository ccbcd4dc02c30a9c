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
    // The fake agent repeats a prompt, and after "forgotten" the messages that it got.
    assert_eq!(text_of(&sessions, &id).await, "firstUser first\nAgent first\n");
}

/// What the agent wrote.
async fn text_of(sessions: &Sessions, id: &SessionId) -> String {
    let text = |event: Event| match event.body {
        EventBody::TextDelta { text } => Some(text),
        _ => None,
    };
    all(sessions, id).await.into_iter().filter_map(text).collect()
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
async fn queued_prompts_keep_their_agent() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hold")).await.id;
    until(&sessions, &id, started).await;
    let with = |agent, model: Option<&str>| CreatePrompt {
        agent,
        model: model.map(|model| model.parse().unwrap()),
        ..CreatePrompt::new("options".parse().unwrap())
    };
    let mut last = None;
    for (agent, model) in [
        (None, Some("scripted/one")),
        (None, None),
        (Some(AgentName::Codex), Some("scripted/two")),
        (None, None),
    ] {
        last = Some(sessions.prompt(&id, with(agent, model), ada()).await.unwrap().id);
    }
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    until_status(&sessions, &id, &last.unwrap(), PromptStatus::Completed).await;
    let expected = [
        "Some((Claude, Some(\"one\"), None))",
        "Some((Claude, None, None))",
        "Some((Codex, Some(\"two\"), None))",
        "Some((Codex, Some(\"two\"), None))",
    ];
    let texts = text_of(&sessions, &id).await;
    assert_eq!(texts.lines().collect::<Vec<_>>(), expected);
    let agents = sessions.prompts(&id).await.unwrap().into_iter().map(|prompt| prompt.agent);
    let (claude, codex) = (Some(AgentName::Claude), Some(AgentName::Codex));
    assert_eq!(agents.collect::<Vec<_>>()[1..], [claude.clone(), claude, codex, None]);
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
