//! Stopping turns, and turns without an owner.

use std::time::Duration;

use super::*;

#[test]
fn stop_kills_the_turn_and_keeps_the_conversation() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("hang please");
    owner.text("hanging");
    let busy =
        owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(turn_request("second")) });
    assert_eq!(busy.unwrap_err().code, FaultCode::Busy);
    let left = fs::read_to_string(sandbox.at("home/left")).unwrap();
    assert!(is_alive(&left));
    let late = owner.request(|id| ToSupervisor::Stop { id, turn: TurnId::random() });
    assert_eq!(late.unwrap_err().code, FaultCode::NotFound);
    assert_eq!(owner.request(|id| ToSupervisor::Stop { id, turn }), Ok(Reply::Done));
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    assert!(!is_alive(&left), "a process of the agent is still alive");
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(fs::read_to_string(sandbox.at("home/starts")).unwrap(), "new\nresume\n");
}

#[test]
fn stop_empties_only_the_agents_cgroup() {
    let Some(groups) = Cgroups::create() else { return };
    let sandbox = Sandbox::start_in(Some(&groups));
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("hang please");
    owner.text("hanging");
    let left = fs::read_to_string(sandbox.at("home/left")).unwrap();
    assert!(groups.members("agent").contains(&left.trim().to_owned()));
    assert!(!groups.members("commands").is_empty(), "no launcher in the commands' cgroup");
    // Not a descendant: only killing the whole cgroup reaches it.
    let mut stranger = std::process::Command::new("sleep").arg("98765").spawn().unwrap();
    groups.add("agent", stranger.id());
    let waiting = std::thread::spawn(move || stranger.wait().unwrap());
    owner.request(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    assert!(!is_alive(&left) && !waiting.join().unwrap().success());
    let exec = owner.exec(sh("echo on")).unwrap();
    assert_eq!((owner.exit(exec), owner.stdout(exec).as_str()), (Exit::Code(0), "on\n"));
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    drop(sandbox);
}

#[test]
fn scripted_agent_runs_in_the_agents_cgroup() {
    let Some(groups) = Cgroups::create() else { return };
    let sandbox = Sandbox::start_in(Some(&groups));
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted_with(&mut owner, harvest_proto::AgentName::Scripted);
    let (_, turn) = owner.prompt(r#"script: [{"text":"hanging","chunks":1},{"hang":600}]"#);
    owner.text("hanging");
    let read = |pid: &str, file: &str| {
        fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
    };
    let members = groups.members("agent");
    let agent = members.iter().find(|pid| read(pid, "cmdline").contains("scripted-agent"));
    let agent = agent.expect("the agent is in its cgroup");
    assert!(read(agent, "status").contains("\nUid:\t10001\t10001\t10001\t10001\n"));
    owner.request(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    assert!(!is_alive(agent));
    drop(sandbox);
}

#[test]
fn unresponsive_agent_is_killed_on_stop() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("be unresponsive");
    owner.text("unresponsive");
    owner.request(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    // No turn was completed, so there is nothing to resume: a new conversation is created.
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(fs::read_to_string(sandbox.at("home/starts")).unwrap(), "new\nresume\nnew\n");
}

#[test]
fn turn_continues_without_owner_and_loses_no_events() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let half = owner.stored;
    owner.send(ToSupervisor::EventsStored { upto: half });
    let request = turn_request("many events");
    owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(request.clone()) }).unwrap();
    drop(owner);
    let mut ended = sandbox.owner(1, half);
    let numbers = |client: &mut Client| {
        client.until(|client| {
            let has_ended =
                client.events.iter().any(|event| matches!(event.body, EventBody::TurnEnded { .. }));
            has_ended.then(|| client.events.iter().map(|event| event.number).collect::<Vec<_>>())
        })
    };
    let first = numbers(&mut ended);
    assert!(first.len() > 200);
    // Nothing was acknowledged, so a newer owner gets the same events again.
    let mut newer = sandbox.owner(2, half);
    assert_eq!(numbers(&mut newer), first);
    let known = newer.welcome().unwrap();
    assert_eq!(known.prompts[0].0, request.prompt);
    newer.send(ToSupervisor::EventsStored { upto: newer.stored });
    let mut last = sandbox.owner(3, newer.stored);
    last.prompt("say hello");
    assert_eq!(last.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn late_answer_does_not_end_the_turn() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let mut boot = sandbox.boot(BootStart::Fresh, &[]);
    let silence = Duration::from_secs(1);
    boot.agent.as_mut().unwrap().silence_millis = 1000;
    let booted = owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) });
    assert_eq!(booted, Ok(Reply::Done));
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    owner.prompt("ask me");
    let opened = owner.event(|body| matches!(body, EventBody::RequestOpened { .. }));
    let EventBody::RequestOpened { request, .. } = opened else { unreachable!() };
    // The time that passes is what is tested.
    std::thread::sleep(silence + silence / 10);
    let answer = |id| ToSupervisor::Answer { id, request: request.clone(), answer: "red".into() };
    assert_eq!(owner.request(answer), Ok(Reply::Done));
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn silent_turn_fails() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let mut boot = sandbox.boot(BootStart::Fresh, &[]);
    boot.agent.as_mut().unwrap().silence_millis = 200;
    let booted = owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) });
    assert_eq!(booted, Ok(Reply::Done));
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    owner.prompt("hang please");
    let ended = owner.event(|body| matches!(body, EventBody::TurnEnded { .. }));
    let EventBody::TurnEnded { outcome, reason, error: Some(error), .. } = ended else {
        panic!("{ended:?}")
    };
    assert_eq!((outcome, reason), (TurnOutcome::Failed, Some(TurnReason::Silent)));
    assert!(error.starts_with("silent: ") && error.contains("200ms"), "{error}");
}
