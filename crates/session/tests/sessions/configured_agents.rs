//! Agents that the server's configuration adds.

use harvest_proto::{AgentName, Hint, UpstreamName, bridge::AgentProgram, door::model_url};
use harvest_session::ConfiguredAgent;

use super::*;

fn own() -> AgentName {
    "own".parse().unwrap()
}

async fn configured() -> Harness {
    let mut harness = Harness::new().await;
    let env = [("URL".to_owned(), "{model_url}".to_owned())].into();
    let program = AgentProgram { command: vec!["own".into(), "--model={model}".into()], env };
    let agent = ConfiguredAgent { program, upstream: UpstreamName::openai() };
    harness.config.agents = [(own(), agent)].into();
    harness
}

fn with_own(model: Option<&str>) -> CreateSession {
    let model = model.map(|name| name.parse().unwrap());
    CreateSession { agent: Some(own()), model, ..CreateSession::default() }
}

#[tokio::test]
async fn configured_agent_is_launched_by_its_command() {
    let harness = configured().await;
    let sessions = harness.serve().await;
    for (model, upstream, argument) in [
        (None, UpstreamName::openai(), None),
        (Some("gpt"), UpstreamName::openai(), Some("--model=gpt")),
        (Some("scripted"), UpstreamName::scripted(), Some("--model=scripted")),
    ] {
        let id = sessions.create(with_own(model), ada()).await.unwrap().id;
        until_state(&sessions, &id, SessionState::Idle).await;
        let launch = harness.fake.boot(&sandbox(&sessions, &id).await).unwrap().agent.unwrap();
        let program = launch.program.unwrap();
        assert_eq!(program.command.get(1).map(String::as_str), argument);
        assert_eq!(program.env["URL"], model_url(&upstream));
        assert_eq!((launch.name, launch.upstream), (own(), upstream.clone()));
        assert_eq!(*harness.doors.0.lock().unwrap().last().unwrap().upstream.borrow(), upstream);
    }
}

#[tokio::test]
async fn unknown_agents_are_refused_with_known_ones() {
    let harness = configured().await;
    let sessions = harness.serve().await;
    let unknown: AgentName = "nope".parse().unwrap();
    let create = CreateSession { agent: Some(unknown.clone()), ..CreateSession::default() };
    let refused = sessions.create(create, ada()).await.unwrap_err();
    assert_eq!(refused.code(), "no_agent");
    let hint = refused.hint().unwrap();
    assert!(hint.contains("`codex`, `own`") && hint.contains("`[agents.nope]`"), "{hint}");
    let id = harness.session(&sessions, Some("first")).await.id;
    let text = || "second".parse().unwrap();
    let prompt = |agent| CreatePrompt { agent, ..CreatePrompt::new(text()) };
    let refused = sessions.prompt(&id, prompt(Some(unknown)), ada()).await.unwrap_err();
    assert_eq!(refused.code(), "no_agent");
    sessions.prompt(&id, prompt(Some(own())), ada()).await.unwrap();
    assert_eq!(sessions.get(&id).await.unwrap().agent, own());
}

#[tokio::test]
async fn session_of_removed_agent_fails_with_its_key() {
    let mut harness = configured().await;
    let sessions = harness.serve().await;
    let id = sessions.create(with_own(None), ada()).await.unwrap().id;
    until_state(&sessions, &id, SessionState::Idle).await;
    sessions.close().await;
    harness.config.agents.clear();
    let sessions = harness.serve().await;
    let names_key = |text: &str| text.contains("`[agents.own]`");
    // The sandbox still runs; the next prompt would start another one.
    send(&sessions, &id, "second").await;
    let failed = |event: &Event| matches!(&event.body, EventBody::TurnEnded { error: Some(error), .. } if names_key(error));
    until(&sessions, &id, failed).await;
    until_state(&sessions, &id, SessionState::Paused).await;
    send(&sessions, &id, "third").await;
    let failed = |event: &Event| matches!(&event.body, EventBody::StateChanged { state: SessionState::Failed, detail: Some(detail), .. } if names_key(detail));
    until(&sessions, &id, failed).await;
    // Another agent continues it.
    let text = "fourth".parse().unwrap();
    let agent = Some(AgentName::Scripted);
    sessions.prompt(&id, CreatePrompt { agent, ..CreatePrompt::new(text) }, ada()).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
}
