//! Tests the real program over the bridge, without namespaces, with plain files instead of cgroups
//! and a script instead of the agent.
#![expect(clippy::unwrap_used, reason = "tests panic on failure")]

mod beside;
mod boots;
mod cgroups;
mod checkouts;
mod commands;
mod configured_agents;
mod contract;
mod early_launch;
mod file_access;
mod git_requests;
mod git_rules;
mod harness;
mod rebuilds;
mod repository_config;
mod restarts;
mod rpc_agents;
mod saved_work;
mod standby;
mod submodules;
mod syncs;
mod terminals;
mod tree_requests;
mod turns;

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, UdpSocket},
    os::unix::{fs::PermissionsExt, net::UnixListener},
};

use cgroups::Cgroups;
use harness::*;
use harvest_proto::{
    EventBody, TurnId, TurnReason,
    bridge::*,
    event::{BootPhase, PhaseStatus, TurnOutcome},
};

#[test]
fn malformed_frame_closes_only_its_connection() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let mut garbled = sandbox.client();
    garbled.stream.write_all(&[0xff; 64]).unwrap();
    while garbled.read() {}
    let mut greedy = sandbox.client();
    let exec = greedy.exec(Command { stdin: Some(0), ..sh("sleep 98765") }).unwrap();
    // More than the credit and the pipe's 64 KiB: the supervisor closes the connection midway.
    let frame = Frame::<ToSupervisor>::Data {
        stream: u32::try_from(exec * 10).unwrap(),
        bytes: vec![0; 65536],
    };
    for _ in 0..16 {
        let _hung_up = greedy.stream.write_all(&frame.encode());
    }
    while greedy.read() {}
    assert_eq!(client.sh("echo fine").1, "fine\n");
}

#[test]
fn heartbeat_interval_is_set_by_the_owner() {
    let sandbox = Sandbox::start();
    let mut owner =
        sandbox.dial_with_heartbeat(BridgeRole::Owner { lease: 1, epoch: 1, stored: 0 }, Some(20));
    owner.until(|owner| (owner.heartbeats >= 3).then_some(()));
}

#[test]
fn ping_is_answered_for_every_client() {
    let sandbox = Sandbox::start();
    for mut client in [sandbox.owner(1, 0), sandbox.client()] {
        client.send(ToSupervisor::Ping);
        client.until(|client| (client.pongs == 1).then_some(()));
    }
}

#[test]
fn only_the_highest_lease_is_owner() {
    let sandbox = Sandbox::start();
    let mut first = sandbox.owner(2, 0);
    assert!(sandbox.dial(BridgeRole::Owner { lease: 1, epoch: 1, stored: 0 }).welcome().is_none());
    let mut second = sandbox.owner(3, 0);
    while first.read() {}
    assert_eq!(second.sh("echo mine").1, "mine\n");
    let mut client = sandbox.client();
    let boot = sandbox.boot(BootStart::Fresh, &[]);
    let refused = client.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot.clone()) });
    assert_eq!(refused.unwrap_err().code, FaultCode::NotOwner);
    let early =
        second.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(turn_request("x")) });
    assert_eq!(early.unwrap_err().code, FaultCode::NotReady);
    second
        .request(|id| ToSupervisor::Boot { id, boot: Box::new(Boot { agent: None, ..boot }) })
        .unwrap();
    assert!(sandbox.dial(BridgeRole::Owner { lease: 9, epoch: 2, stored: 0 }).welcome().is_none());
    second.phase(BootPhase::Ready, PhaseStatus::Done);
}

#[test]
fn unreadable_file_is_an_error_reply() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    // Address 0 of a process is not mapped.
    let request = FileRequest::Read { path: "/proc/self/mem".into(), stream: 5 };
    let root = Some("root".to_owned());
    let fault = client.request(|id| ToSupervisor::File { id, user: root, request }).unwrap_err();
    assert!(
        fault.code == FaultCode::System && fault.message.contains("/proc/self/mem"),
        "{fault:?}"
    );
    assert_eq!(client.sh("echo fine").1, "fine\n");
}

#[test]
fn written_file_has_its_owner_and_mode() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    std::os::unix::fs::chown(sandbox.at("home"), Some(10001), Some(10001)).unwrap();
    let path = sandbox.at("home/note").display().to_string();
    let text: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let write = FileRequest::Write { path: path.clone(), mode: 0o640, stream: 5 };
    client.next += 1;
    let id = client.next;
    client.send(ToSupervisor::File { id, user: None, request: write });
    let (upload, bytes) = (client.stream.try_clone().unwrap(), text.clone());
    // Writes one frame at a time within the credit.
    let mut upload = Client::new(upload);
    let mut sent = 0;
    for piece in bytes.chunks(MAX_DATA_BYTES) {
        while sent + piece.len() > INITIAL_CREDIT_BYTES as usize {
            sent -= wait_for_credit(&mut client);
        }
        upload.data(5, piece);
        sent += piece.len();
    }
    client.send(ToSupervisor::End { stream: 5 });
    assert_eq!(client.until(|client| client.replies.remove(&id)), Ok(Reply::Done));
    let stat = client.request(|id| ToSupervisor::File {
        id,
        user: None,
        request: FileRequest::Stat { path: path.clone(), follow: false },
    });
    let Ok(Reply::Stat(stat)) = stat else { panic!("{stat:?}") };
    assert_eq!(
        (stat.kind, stat.size, stat.mode, stat.uid),
        (FileKind::File, 4_000_000, 0o640, 10001)
    );
    let read = FileRequest::Read { path: path.clone(), stream: 6 };
    assert_eq!(
        client.request(|id| ToSupervisor::File { id, user: None, request: read }),
        Ok(Reply::Done)
    );
    client.until(|client| client.ended.contains(&6).then_some(()));
    assert!(client.data[&6] == text);
    let list = FileRequest::List { path: sandbox.at("home").display().to_string(), after: None };
    let Ok(Reply::List { entries, .. }) =
        client.request(|id| ToSupervisor::File { id, user: None, request: list })
    else {
        panic!()
    };
    assert_eq!(entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["note"]);
    let gone = FileRequest::Read { path: "/no/such/file".into(), stream: 7 };
    assert_eq!(
        client.request(|id| ToSupervisor::File { id, user: None, request: gone }).unwrap_err().code,
        FaultCode::NotFound
    );
}

fn wait_for_credit(client: &mut Client) -> usize {
    loop {
        let mut piece = [0u8; 4096];
        loop {
            match client.decoder.take::<FromSupervisor>().unwrap() {
                Some(Frame::Control(FromSupervisor::Credit { bytes, .. })) => {
                    return bytes as usize;
                }
                Some(other) => client.record(other),
                None => break,
            }
        }
        let count = client.stream.read(&mut piece).unwrap();
        client.decoder.push(&piece[..count]);
    }
}

#[test]
fn shutdown_is_acknowledged_and_exits() {
    let mut sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    assert_eq!(owner.request(|id| ToSupervisor::Shutdown { id }), Ok(Reply::Done));
    assert!(sandbox.process.wait().unwrap().success());
}

#[test]
fn lookup_waits_for_the_gateway() {
    let sandbox = Sandbox::start();
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.connect(sandbox.dns).unwrap();
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
    let mut response = || {
        let count = socket.recv(&mut buffer).unwrap();
        (buffer[1], buffer[3] & 0x0f, buffer[7], buffer[count - 4..count].to_vec())
    };
    // Without a gateway a new name waits; the gateway's own names and other record types do not.
    socket.send(&question(1, "Allowed.example", 1)).unwrap();
    socket.send(&question(2, "model.harvest.internal", 1)).unwrap();
    assert_eq!(response(), (2, 0, 1, vec![198, 18, 0, 2]));
    socket.send(&question(3, "allowed.example", 28)).unwrap();
    assert_eq!(response().0, 3);
    let gateway = UnixListener::bind(sandbox.at("door/door.sock")).unwrap();
    let answer = |answer: &str| {
        let (mut stream, _) = gateway.accept().unwrap();
        let mut line = [0u8; 512];
        let count = stream.read(&mut line).unwrap();
        stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
        String::from_utf8_lossy(&line[..count]).into_owned()
    };
    assert_eq!(
        answer(r#"{"reply":"open"}"#),
        "{\"request\":\"lookup\",\"name\":\"allowed.example\"}\n"
    );
    assert_eq!(response(), (1, 0, 1, vec![198, 18, 0, 5]));
    socket.send(&question(4, "evil.example", 1)).unwrap();
    answer(r#"{"reply":"refused","reason":"policy"}"#);
    let (id, code, answers, _) = response();
    assert_eq!((id, code, answers), (4, 3, 0));
}
