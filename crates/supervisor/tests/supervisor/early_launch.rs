//! A standby supervisor, started before it is known which sandbox it will serve.

use std::{
    io::{IoSlice, Read},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    process::{Child, Command, Stdio},
};

use harvest_proto::launch::{Descriptor, EarlyLaunch};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
        SocketType, socketpair,
    },
    pipe::{PipeFlags, pipe_with},
};

use crate::harness::wait_until;

/// A standby supervisor, whose spawner joins cgroups by writing to `join`.
fn start_standby(join: OwnedFd) -> (Child, OwnedFd) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let program = env!("CARGO_BIN_EXE_harvest-supervisor");
    let process = Command::new(program).stdin(Stdio::from(theirs)).spawn().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let rights = [join.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&rights)));
    let text =
        serde_json::to_vec(&EarlyLaunch { early_descriptors: vec![Descriptor::JoinCommands] })
            .unwrap();
    rustix::net::sendmsg(&ours, &[IoSlice::new(&text)], &mut ancillary, SendFlags::empty())
        .unwrap();
    (process, ours)
}

fn has_settled(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN | PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

/// The roles of all descendants of a process.
fn descendant_roles(pid: u32) -> Vec<String> {
    let children =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let roles = children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()).flat_map(
        |child| {
            let line = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            let role =
                String::from_utf8_lossy(&line).split('\0').nth(1).unwrap_or_default().to_owned();
            [vec![role], descendant_roles(child)].concat()
        },
    );
    roles.collect()
}

#[test]
fn standby_settles_after_its_processes_have_started() {
    // The spawner blocks while it joins: the pipe is full.
    let (mut drain, join) = {
        let (drain, join) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        while rustix::io::write(&join, &[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&join, false).unwrap();
        (std::fs::File::from(drain), join)
    };
    let (mut process, socket) = start_standby(join);
    wait_until("the spawner starts", || {
        descendant_roles(process.id()).contains(&"spawner".to_owned())
    });
    assert!(!has_settled(&socket), "the launcher has not started yet");
    let mut bytes = [0; 8192];
    wait_until("the launcher starts", || {
        while drain.read(&mut bytes).is_ok_and(|count| count > 0) {}
        descendant_roles(process.id()) == ["spawner", "launcher"]
    });
    wait_until("the supervisor settles", || has_settled(&socket));
    drop(socket);
    assert!(!process.wait().unwrap().success(), "it exits without a launch");
}
