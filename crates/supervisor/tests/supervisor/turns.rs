//! Turns that are stopped, and turns without an owner.

use super::*;

#[test]
fn a_stop_leaves_nothing_of_the_turn_and_the_conversation_goes_on() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("hang please");
    owner.text("hanging");
    let busy = owner.ask(|id| ToSupervisor::Prompt { id, prompt: Box::new(order("second")) });
    assert_eq!(busy.unwrap_err().code, FaultCode::Busy);
    let left = fs::read_to_string(sandbox.at("home/left")).unwrap();
    assert!(lives(&left));
    let late = owner.ask(|id| ToSupervisor::Stop { id, turn: TurnId::random() });
    assert_eq!(late.unwrap_err().code, FaultCode::NotFound);
    assert_eq!(owner.ask(|id| ToSupervisor::Stop { id, turn }), Ok(Reply::Done));
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    assert!(!lives(&left), "what the agent left behind lives on");
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(fs::read_to_string(sandbox.at("home/starts")).unwrap(), "new\nresume\n");
}

#[test]
fn a_stop_empties_the_agents_cgroup_of_version_2_and_no_other() {
    let Some(groups) = Groups::make() else { return };
    let sandbox = Sandbox::start_in(Some(&groups));
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("hang please");
    owner.text("hanging");
    let left = fs::read_to_string(sandbox.at("home/left")).unwrap();
    assert!(groups.members("agent").contains(&left.trim().to_owned()));
    assert!(!groups.members("commands").is_empty(), "no launcher is where commands are");
    // Nobody's descendant: only who kills the cgroup as a whole reaches it.
    let mut stranger = std::process::Command::new("sleep").arg("98765").spawn().unwrap();
    groups.add("agent", stranger.id());
    let waiting = std::thread::spawn(move || stranger.wait().unwrap());
    owner.ask(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    assert!(!lives(&left) && !waiting.join().unwrap().success());
    let exec = owner.exec(sh("echo on")).unwrap();
    assert_eq!((owner.exit(exec), owner.stdout(exec).as_str()), (Exit::Code(0), "on\n"));
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    drop(sandbox);
}

#[test]
fn an_agent_that_does_not_listen_is_stopped_all_the_same() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("be deaf");
    owner.text("deaf");
    owner.ask(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    // No turn was ever finished, so there is nothing to resume: the conversation begins anew.
    owner.prompt("say hello");
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(fs::read_to_string(sandbox.at("home/starts")).unwrap(), "new\nresume\nnew\n");
}

#[test]
fn a_turn_goes_on_without_an_owner_and_the_next_one_hears_everything_once() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let half = owner.stored;
    owner.say(ToSupervisor::EventsStored { upto: half });
    let order = order("many events");
    owner.ask(|id| ToSupervisor::Prompt { id, prompt: Box::new(order.clone()) }).unwrap();
    drop(owner);
    let mut ended = sandbox.owner(1, half);
    let numbers = |client: &mut Client| {
        client.until(|client| {
            let over =
                client.events.iter().any(|event| matches!(event.body, EventBody::TurnEnded { .. }));
            over.then(|| client.events.iter().map(|event| event.number).collect::<Vec<_>>())
        })
    };
    let first = numbers(&mut ended);
    assert!(first.len() > 200);
    // Nothing was acknowledged, so a newer owner hears the very same again.
    let mut newer = sandbox.owner(2, half);
    assert_eq!(numbers(&mut newer), first);
    let known = newer.welcome().unwrap();
    assert_eq!(known.prompts[0].0, order.prompt);
    newer.say(ToSupervisor::EventsStored { upto: newer.stored });
    let mut last = sandbox.owner(3, newer.stored);
    last.prompt("say hello");
    assert_eq!(last.turn_ended(), TurnOutcome::Completed);
}
