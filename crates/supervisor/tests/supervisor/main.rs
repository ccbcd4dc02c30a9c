//! Drives the real program over the bridge: no namespaces, cgroup files replaced by plain ones, the
//! agent by a script.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod boots;
mod checkouts;
mod commands;
mod contract;
mod cradle;
mod groups;
mod harness;
mod terminals;
mod turns;

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, UdpSocket},
    os::unix::{fs::PermissionsExt, net::UnixListener},
};

use groups::Groups;
use harness::*;
use harvest_proto::{
    EventBody, TurnId,
    bridge::*,
    event::{BootPhase, PhaseStatus, TurnOutcome},
};

#[test]
fn a_garbled_connection_is_closed_and_no_other() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let mut garbled = sandbox.guest();
    garbled.stream.write_all(&[0xff; 64]).unwrap();
    while garbled.hear() {}
    let mut greedy = sandbox.guest();
    let exec = greedy.exec(Command { stdin: Some(0), ..sh("sleep 98765") }).unwrap();
    // The credit and the pipe's own 64 KiB, and more: the supervisor hangs up in the middle.
    let frame = Frame::<ToSupervisor>::Data {
        stream: u32::try_from(exec * 10).unwrap(),
        bytes: vec![0; 65536],
    };
    for _ in 0..16 {
        let _hung_up = greedy.stream.write_all(&frame.encode());
    }
    while greedy.hear() {}
    assert_eq!(guest.sh("echo fine").1, "fine\n");
}

#[test]
fn an_owner_hears_as_often_as_it_asked_that_the_supervisor_is_there() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.dial_beating(Role::Owner { lease: 1, epoch: 1, stored: 0 }, Some(20));
    owner.until(|owner| (owner.heartbeats >= 3).then_some(()));
}

#[test]
fn only_the_highest_lease_owns_and_guests_own_nothing() {
    let sandbox = Sandbox::start();
    let mut first = sandbox.owner(2, 0);
    assert!(sandbox.dial(Role::Owner { lease: 1, epoch: 1, stored: 0 }).welcome().is_none());
    let mut second = sandbox.owner(3, 0);
    while first.hear() {}
    assert_eq!(second.sh("echo mine").1, "mine\n");
    let mut guest = sandbox.guest();
    let boot = sandbox.boot(BootStart::Fresh, &[]);
    let refused = guest.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot.clone()) });
    assert_eq!(refused.unwrap_err().code, FaultCode::NotOwner);
    let early = second.ask(|id| ToSupervisor::Prompt { id, prompt: Box::new(order("x")) });
    assert_eq!(early.unwrap_err().code, FaultCode::NotReady);
    second
        .ask(|id| ToSupervisor::Boot { id, boot: Box::new(Boot { agent: None, ..boot }) })
        .unwrap();
    assert!(sandbox.dial(Role::Owner { lease: 9, epoch: 2, stored: 0 }).welcome().is_none());
    second.phase(BootPhase::Ready, PhaseStatus::Done);
}

#[test]
fn a_request_of_a_later_version_is_answered_and_the_connection_goes_on() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let fault =
        guest.ask(|id| ToSupervisor::File { id, request: FileRequest::Unknown }).unwrap_err();
    assert_eq!(fault.code, FaultCode::Invalid);
    let path = sandbox.at("home").display().to_string();
    assert!(
        guest
            .ask(|id| ToSupervisor::File { id, request: FileRequest::Stat { path, follow: false } })
            .is_ok()
    );
}

#[test]
fn a_file_that_opens_and_cannot_be_read_is_refused_and_the_connection_goes_on() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    // Nothing is at the first address of a process.
    let request = FileRequest::Read { path: "/proc/self/mem".into(), stream: 5 };
    let fault = guest.ask(|id| ToSupervisor::File { id, request }).unwrap_err();
    assert!(
        fault.code == FaultCode::System && fault.message.contains("/proc/self/mem"),
        "{fault:?}"
    );
    assert_eq!(guest.sh("echo fine").1, "fine\n");
}

#[test]
fn a_file_appears_whole_with_its_owner_and_mode() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let path = sandbox.at("home/note").display().to_string();
    let text: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let write = FileRequest::Write {
        path: path.clone(),
        mode: 0o640,
        user: Some("harvest".into()),
        stream: 5,
    };
    guest.next += 1;
    let id = guest.next;
    guest.say(ToSupervisor::File { id, request: write });
    let (feed, bytes) = (guest.stream.try_clone().unwrap(), text.clone());
    // The credit is heard below while this writes; a frame at a time never exceeds it.
    let mut feed = Client::new(feed);
    let mut sent = 0;
    for piece in bytes.chunks(MAX_DATA_BYTES) {
        while sent + piece.len() > INITIAL_CREDIT_BYTES as usize {
            sent -= credit(&mut guest);
        }
        feed.data(5, piece);
        sent += piece.len();
    }
    guest.say(ToSupervisor::End { stream: 5 });
    assert_eq!(guest.until(|guest| guest.replies.remove(&id)), Ok(Reply::Done));
    let stat = guest.ask(|id| ToSupervisor::File {
        id,
        request: FileRequest::Stat { path: path.clone(), follow: false },
    });
    let Ok(Reply::Stat(stat)) = stat else { panic!("{stat:?}") };
    assert_eq!(
        (stat.kind, stat.size, stat.mode, stat.uid),
        (FileKind::File, 4_000_000, 0o640, 10001)
    );
    let read = FileRequest::Read { path: path.clone(), stream: 6 };
    assert_eq!(guest.ask(|id| ToSupervisor::File { id, request: read }), Ok(Reply::Done));
    guest.until(|guest| guest.ended.contains(&6).then_some(()));
    assert!(guest.data[&6] == text);
    let list = FileRequest::List { path: sandbox.at("home").display().to_string(), after: None };
    let Ok(Reply::List { entries, .. }) = guest.ask(|id| ToSupervisor::File { id, request: list })
    else {
        panic!()
    };
    assert_eq!(entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["note"]);
    let gone = FileRequest::Read { path: "/no/such/file".into(), stream: 7 };
    assert_eq!(
        guest.ask(|id| ToSupervisor::File { id, request: gone }).unwrap_err().code,
        FaultCode::NotFound
    );
}

/// Waits for one `Credit`.
fn credit(client: &mut Client) -> usize {
    loop {
        let mut piece = [0u8; 4096];
        loop {
            match client.decoder.take::<FromSupervisor>().unwrap() {
                Some(Frame::Control(FromSupervisor::Credit { bytes, .. })) => {
                    return bytes as usize;
                }
                Some(other) => client.note(other),
                None => break,
            }
        }
        let count = client.stream.read(&mut piece).unwrap();
        client.decoder.push(&piece[..count]);
    }
}

#[test]
fn a_shutdown_is_answered_and_ends_the_agent_first() {
    let mut sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    assert_eq!(owner.ask(|id| ToSupervisor::Shutdown { id }), Ok(Reply::Done));
    assert!(sandbox.process.wait().unwrap().success());
}

#[test]
fn a_look_up_waits_for_the_gateway_and_obeys_it() {
    let sandbox = Sandbox::start();
    let asker = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    asker.set_read_timeout(Some(PATIENCE)).unwrap();
    asker.connect(sandbox.dns).unwrap();
    let question = |id: u8, name: &str, kind: u8| {
        let mut packet = vec![0, id, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            packet.push(u8::try_from(label.len()).unwrap());
            packet.extend(label.as_bytes());
        }
        packet.extend([0, 0, kind, 0, 1]);
        packet
    };
    let mut buffer = [0u8; 512];
    let mut heard = || {
        let count = asker.recv(&mut buffer).unwrap();
        (buffer[1], buffer[3] & 0x0f, buffer[7], buffer[count - 4..count].to_vec())
    };
    // Nobody is there yet: a new name waits, the gateway's own names do not, nor do other types.
    asker.send(&question(1, "Allowed.example", 1)).unwrap();
    asker.send(&question(2, "model.harvest.internal", 1)).unwrap();
    assert_eq!(heard(), (2, 0, 1, vec![198, 18, 0, 2]));
    asker.send(&question(3, "allowed.example", 28)).unwrap();
    assert_eq!(heard().0, 3);
    let gateway = UnixListener::bind(sandbox.at("door/door.sock")).unwrap();
    let answer = |answer: &str| {
        let (mut stream, _) = gateway.accept().unwrap();
        let mut line = [0u8; 512];
        let count = stream.read(&mut line).unwrap();
        stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
        String::from_utf8_lossy(&line[..count]).into_owned()
    };
    assert_eq!(
        answer(r#"{"answer":"open"}"#),
        "{\"ask\":\"lookup\",\"name\":\"allowed.example\"}\n"
    );
    assert_eq!(heard(), (1, 0, 1, vec![198, 18, 0, 4]));
    asker.send(&question(4, "evil.example", 1)).unwrap();
    answer(r#"{"answer":"refused","reason":"policy"}"#);
    let (id, code, answers, _) = heard();
    assert_eq!((id, code, answers), (4, 3, 0));
}
