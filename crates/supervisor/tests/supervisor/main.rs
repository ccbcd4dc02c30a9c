//! Drives the real program over the bridge: no namespaces, cgroup files replaced by plain ones, the
//! agent by a script.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod checkouts;
mod contract;
mod cradle;
mod groups;
mod harness;
mod terminals;

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
fn a_command_gets_its_stdin_and_gives_its_output_and_exit_code() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let exec = guest.exec(Command { stdin: Some(0), ..sh("cat; echo err >&2; id -u; exit 7") }).unwrap();
    let stdin = u32::try_from(exec * 10).unwrap();
    guest.data(stdin, b"from the dialer\n");
    guest.say(ToSupervisor::End { stream: stdin });
    assert_eq!(guest.exit(exec), Exit::Code(7));
    assert_eq!(guest.stdout(exec), "from the dialer\n10001\n");
    assert_eq!(guest.data[&(stdin + 2)], b"err\n");
    let root =
        guest.exec(Command { user: Some("root".into()), ..sh("id -u; id -G; echo $HOME $TERM") }).unwrap();
    assert_eq!(guest.exit(root), Exit::Code(0));
    assert_eq!(guest.stdout(root), "0\n0\n/root xterm-256color\n");
    assert_eq!(guest.sh("kill -TERM $$").0, Exit::Signal(15));
    assert_eq!(guest.sh("echo by name > /dev/stdout").1, "by name\n");
}

#[test]
fn what_cannot_be_started_says_why() {
    let sandbox = Sandbox::start();
    fs::write(sandbox.at("plain"), "x").unwrap();
    let mut guest = sandbox.guest();
    let mut code = |argv: &[&str], cwd: Option<&str>, user: Option<&str>| {
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        let command = Command {
            argv,
            cwd: cwd.map(str::to_owned),
            user: user.map(str::to_owned),
            ..Command::default()
        };
        guest.exec(command).unwrap_err().code
    };
    assert_eq!(code(&["no-such-program"], None, None), FaultCode::NotFound);
    // std refuses this one without an error number; pid 1 must outlive that.
    assert_eq!(code(&["a\0b"], None, None), FaultCode::Invalid);
    assert_eq!(code(&[sandbox.at("plain").to_str().unwrap()], None, None), FaultCode::NotExecutable);
    assert_eq!(code(&["true"], Some("/no/such/folder"), None), FaultCode::NotFound);
    assert_eq!(code(&["true"], None, Some("nobody-we-know")), FaultCode::Invalid);
    assert_eq!(code(&[], None, None), FaultCode::Invalid);
    assert_eq!(guest.sh("echo still here").1, "still here\n");
}

#[test]
fn a_time_limit_kills_children_that_left_their_group_and_session() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let script = "(setsid sh -c 'sleep 98765 & echo $!; wait' &) ; sleep 98765";
    let exec = guest.exec(Command { timeout_millis: Some(2000), ..sh(script) }).unwrap();
    assert_eq!(guest.exit(exec), Exit::Timeout);
    let pid = guest.stdout(exec);
    assert!(!pid.is_empty() && !lives(&pid), "{pid} lives");
}

#[test]
fn a_killed_command_leaves_nothing_and_an_ended_one_may_leave_a_service() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let exec = guest.exec(sh("(setsid sleep 98765 & echo $!); sleep 98765")).unwrap();
    guest.until(|guest| guest.stdout(exec).ends_with('\n').then_some(()));
    assert_eq!(guest.ask(|id| ToSupervisor::Kill { id, exec }), Ok(Reply::Done));
    assert_eq!(guest.exit(exec), Exit::Killed);
    assert!(!lives(&guest.stdout(exec)));
    // The service holds the pipe open, which must not keep the command from ending.
    let (exit, service) = guest.sh("sleep 98765 & echo $!");
    assert_eq!(exit, Exit::Code(0));
    assert!(lives(&service));
    kill(&service);
}

#[test]
fn a_service_that_floods_its_output_keeps_no_command_from_ending() {
    let sandbox = Sandbox::start();
    fs::set_permissions(sandbox.at("home"), fs::Permissions::from_mode(0o777)).unwrap();
    let mut guest = sandbox.guest();
    let (exit, _) = guest.sh("yes & echo $! >$HOME/service");
    assert_eq!(exit, Exit::Code(0));
    assert_eq!(guest.sh("echo meanwhile").1, "meanwhile\n");
    kill(&fs::read_to_string(sandbox.at("home/service")).unwrap());
}

#[test]
fn a_hook_or_its_service_that_floods_keeps_nobody_waiting() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    // First a service that goes on, then a hook that never ends.
    let hooks = [(".harvest/setup.sh", "yes & echo $! >$HOME/service"), (".harvest/start.sh", "yes; exit 1")];
    let boot = sandbox.boot(BootStart::Fresh, &hooks);
    owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Setup, PhaseStatus::Done);
    owner.phase(BootPhase::Start, PhaseStatus::Started);
    assert_eq!(sandbox.guest().sh("echo meanwhile").1, "meanwhile\n");
    kill(&fs::read_to_string(sandbox.at("home/service")).unwrap());
}

#[test]
fn an_agent_that_never_ends_a_line_can_be_stopped() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("endless");
    owner.text("endless");
    owner.ask(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    let peak = sandbox.memory_kib("VmHWM");
    assert!(peak < 40 * 1024, "{peak} KiB");
}

#[test]
fn a_lost_connection_takes_its_commands_along() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let exec = guest.exec(sh("(setsid sleep 98765 & echo $!); sleep 98765")).unwrap();
    guest.until(|guest| guest.stdout(exec).ends_with('\n').then_some(()));
    let pid = guest.stdout(exec);
    drop(guest);
    wait_until("the command lives on", || !lives(&pid));
}

#[test]
fn a_detached_command_outlives_its_connection_and_every_owner_hears_that_it_runs_and_that_it_has_ended() {
    let sandbox = Sandbox::start();
    fs::set_permissions(sandbox.at("home"), fs::Permissions::from_mode(0o777)).unwrap();
    let mut owner = sandbox.owner(1, 0);
    // More than anybody grants is said, and something is read: neither keeps it from its end.
    let script =
        "cd $HOME; head -c 3000000 /dev/zero; cat; echo $$ >pid; mkfifo go; read x <go; echo done >end";
    let command = Command { detached: true, stdin: Some(0), ..sh(script) };
    let stream = u32::try_from((owner.next + 1) * 10 + 1).unwrap();
    owner.withheld.insert(stream, 0);
    owner.exec(command).unwrap();
    owner.until(|owner| (owner.detached == Some(1)).then_some(()));
    drop(owner);
    wait_until("nobody waits for it", || sandbox.at("home/go").exists());
    let mut next = sandbox.owner(2, 0);
    assert_eq!(next.welcome().unwrap().detached, 1);
    // A command of its own is none of them.
    assert_eq!(next.sh("echo hi").1, "hi\n");
    assert_eq!(
        next.ask(|id| ToSupervisor::Status { id })
            .map(|status| format!("{status:?}").contains("detached: 1")),
        Ok(true)
    );
    fs::write(sandbox.at("home/go"), "go\n").unwrap();
    next.until(|next| (next.detached == Some(0)).then_some(()));
    assert_eq!(fs::read_to_string(sandbox.at("home/end")).unwrap(), "done\n");
}

#[test]
fn a_detached_command_is_killed_when_its_time_is_up_though_nobody_is_there() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let command = Command { detached: true, timeout_millis: Some(2000), ..sh("echo $$; exec sleep 98765") };
    let exec = guest.exec(command).unwrap();
    guest.until(|guest| guest.stdout(exec).ends_with('\n').then_some(()));
    let pid = guest.stdout(exec);
    drop(guest);
    wait_until("it lives on", || !lives(&pid));
    // It is dead a moment before pid 1 has heard so.
    let mut owner = sandbox.owner(1, 0);
    let welcome = owner.welcome().unwrap().detached;
    owner.until(|owner| (owner.detached.unwrap_or(welcome) == 0).then_some(()));
}

#[test]
fn a_slow_reader_stalls_its_own_stream_in_bounded_memory() {
    const TOTAL: u64 = 100 * 1024 * 1024;
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    assert_eq!(guest.sh("echo warm").1, "warm\n");
    let stream = u32::try_from((guest.next + 1) * 10 + 1).unwrap();
    guest.withheld.insert(stream, 0);
    let exec = guest.exec(sh(&format!("head -c {TOTAL} /dev/zero"))).unwrap();
    guest.until(|guest| (guest.withheld[&stream] == u64::from(INITIAL_CREDIT_BYTES)).then_some(()));
    // While it stalls, another command runs on the same connection.
    assert_eq!(guest.sh("echo meanwhile").1, "meanwhile\n");
    assert_eq!(guest.withheld[&stream], u64::from(INITIAL_CREDIT_BYTES));
    while guest.withheld[&stream] < TOTAL {
        let before = guest.withheld[&stream];
        let granted = 200_000u32;
        guest.say(ToSupervisor::Credit { stream, bytes: granted });
        let wanted = (before + u64::from(granted)).min(TOTAL);
        guest.until(|guest| (guest.withheld[&stream] >= wanted).then_some(()));
        assert_eq!(guest.withheld[&stream], wanted, "never more than granted");
    }
    assert_eq!(guest.exit(exec), Exit::Code(0));
    let peak = sandbox.memory_kib("VmHWM");
    assert!(peak < 24 * 1024, "{peak} KiB");
}

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
    let frame =
        Frame::<ToSupervisor>::Data { stream: u32::try_from(exec * 10).unwrap(), bytes: vec![0; 65536] };
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
    second.ask(|id| ToSupervisor::Boot { id, boot: Box::new(Boot { agent: None, ..boot }) }).unwrap();
    assert!(sandbox.dial(Role::Owner { lease: 9, epoch: 2, stored: 0 }).welcome().is_none());
    second.phase(BootPhase::Ready, PhaseStatus::Done);
}

#[test]
fn a_request_of_a_later_version_is_answered_and_the_connection_goes_on() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let fault = guest.ask(|id| ToSupervisor::File { id, request: FileRequest::Unknown }).unwrap_err();
    assert_eq!(fault.code, FaultCode::Invalid);
    let path = sandbox.at("home").display().to_string();
    assert!(
        guest.ask(|id| ToSupervisor::File { id, request: FileRequest::Stat { path, follow: false } }).is_ok()
    );
}

#[test]
fn a_file_that_opens_and_cannot_be_read_is_refused_and_the_connection_goes_on() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    // Nothing is at the first address of a process.
    let request = FileRequest::Read { path: "/proc/self/mem".into(), stream: 5 };
    let fault = guest.ask(|id| ToSupervisor::File { id, request }).unwrap_err();
    assert!(fault.code == FaultCode::System && fault.message.contains("/proc/self/mem"), "{fault:?}");
    assert_eq!(guest.sh("echo fine").1, "fine\n");
}

#[test]
fn a_file_appears_whole_with_its_owner_and_mode() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let path = sandbox.at("home/note").display().to_string();
    let text: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let write =
        FileRequest::Write { path: path.clone(), mode: 0o640, user: Some("harvest".into()), stream: 5 };
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
    assert_eq!((stat.kind, stat.size, stat.mode, stat.uid), (FileKind::File, 4_000_000, 0o640, 10001));
    let read = FileRequest::Read { path: path.clone(), stream: 6 };
    assert_eq!(guest.ask(|id| ToSupervisor::File { id, request: read }), Ok(Reply::Done));
    guest.until(|guest| guest.ended.contains(&6).then_some(()));
    assert!(guest.data[&6] == text);
    let list = FileRequest::List { path: sandbox.at("home").display().to_string(), after: None };
    let Ok(Reply::List { entries, .. }) = guest.ask(|id| ToSupervisor::File { id, request: list }) else {
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
                Some(Frame::Control(FromSupervisor::Credit { bytes, .. })) => return bytes as usize,
                Some(other) => client.note(other),
                None => break,
            }
        }
        let count = client.stream.read(&mut piece).unwrap();
        client.decoder.push(&piece[..count]);
    }
}

#[test]
fn a_fresh_boot_clones_runs_the_hooks_and_carries_prompts_out_once() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let setup = "echo $GREETING > $HOME/setup; id -u >> $HOME/setup; pwd >> $HOME/setup";
    let hooks =
        [(".harvest/setup.sh", setup), (".harvest/start.sh", "sleep 98765 & echo $! > $HOME/service")];
    let boot = sandbox.boot(BootStart::Fresh, &hooks);
    for _ in 0..2 {
        let boot = Box::new(boot.clone());
        assert_eq!(owner.ask(|id| ToSupervisor::Boot { id, boot }), Ok(Reply::Done));
    }
    for phase in [BootPhase::Starting, BootPhase::Sync, BootPhase::Setup, BootPhase::Start, BootPhase::Agent]
    {
        owner.phase(phase, PhaseStatus::Started);
        owner.phase(phase, PhaseStatus::Done);
    }
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let checkout = sandbox.at("workspace/shop");
    let setup = fs::read_to_string(sandbox.at("home/setup")).unwrap();
    assert_eq!(setup, format!("hi\n10001\n{}\n", checkout.display()));
    let head = fs::read_to_string(checkout.join(".git/HEAD")).unwrap();
    assert_eq!(head, "ref: refs/heads/harvest/work\n");

    let order = order("say hello");
    for _ in 0..2 {
        let prompt = Box::new(order.clone());
        assert_eq!(owner.ask(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
    }
    owner.event(|body| matches!(body, EventBody::TurnStarted { prompt, .. } if *prompt == order.prompt));
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(fs::read_to_string(sandbox.at("home/author")).unwrap(), "Ada (Harvest)\n");
    assert_eq!(fs::read_to_string(sandbox.at("home/where")).unwrap(), format!("{}\n", checkout.display()));
    let Ok(Reply::Status(status)) = owner.ask(|id| ToSupervisor::Status { id }) else { panic!() };
    assert_eq!(status.prompts, [(order.prompt, PromptProgress::Ended)]);
    assert_eq!((status.phase, status.failed), (Some(BootPhase::Ready), false));
    let service = fs::read_to_string(sandbox.at("home/service")).unwrap();
    assert!(lives(&service), "what start.sh started stays");
    kill(&service);
}

#[test]
fn a_failing_hook_ends_the_boot_with_its_last_lines() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let boot = sandbox
        .boot(BootStart::Fresh, &[(".harvest/setup.sh", "echo no such luck; echo MY_TOKEN=geheim; exit 9")]);
    owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    let failed = owner.event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
    let EventBody::BootPhase { phase, tail: Some(tail), .. } = failed else { panic!("{failed:?}") };
    assert_eq!(phase, BootPhase::Setup);
    assert!(tail.contains("no such luck") && tail.contains("code 9"), "{tail}");
    assert!(tail.contains("MY_TOKEN=***") && !tail.contains("geheim"), "{tail}");
    let refused = owner.ask(|id| ToSupervisor::Prompt { id, prompt: Box::new(order("x")) });
    assert_eq!(refused.unwrap_err().code, FaultCode::NotReady);
}

#[test]
fn a_hook_that_never_ends_is_killed_with_what_it_started() {
    let hook = "(setsid sleep 98765 & echo $! >$HOME/left); echo waiting; sleep 98765";
    // A busy machine may need longer than the limit to get as far as that; then it gets longer.
    for hook_millis in [1000, 8000, 60_000] {
        let sandbox = Sandbox::start();
        let mut owner = sandbox.owner(1, 0);
        let boot = sandbox.boot(BootStart::Fresh, &[(".harvest/start.sh", hook)]);
        let boot = Boot { hook_millis: Some(hook_millis), ..boot };
        owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
        let failed =
            owner.event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
        let EventBody::BootPhase { phase, tail: Some(tail), .. } = failed else { panic!("{failed:?}") };
        assert_eq!(phase, BootPhase::Start);
        assert!(tail.contains("time limit"), "{tail}");
        let left = fs::read_to_string(sandbox.at("home/left")).unwrap_or_default();
        if !left.is_empty() && tail.contains("waiting") {
            assert!(!lives(&left), "what it started lives on");
            return;
        }
    }
    panic!("the hook never got as far as waiting");
}

#[test]
fn an_image_boot_starts_from_the_newest_base_and_a_restore_changes_nothing() {
    let sandbox = Sandbox::start();
    let build = Boot { agent: None, ..sandbox.boot(BootStart::Build, &[]) };
    let mut owner = sandbox.owner(1, 0);
    owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(build) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let checkout = sandbox.at("workspace/shop");
    assert_eq!(fs::read_to_string(checkout.join(".git/HEAD")).unwrap(), "ref: refs/heads/main\n");
    let work = sandbox.at("origin-work");
    fs::write(work.join("README"), "newer\n").unwrap();
    git(&work, &["commit", "-q", "-a", "-m", "second"]);
    git(&work, &["push", "-q", "origin", "HEAD:main"]);

    // The same disk under the next sandboxes.
    let next = |start| {
        let next = Sandbox::start();
        fs::remove_dir(next.at("workspace")).unwrap();
        fs::rename(sandbox.at("workspace"), next.at("workspace")).unwrap();
        let boot = Boot { agent: None, ..sandbox.boot(start, &[]) };
        let mut owner = next.owner(1, 0);
        owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
        owner.phase(BootPhase::Ready, PhaseStatus::Done);
        let checkout = next.at("workspace/shop");
        let found = (
            fs::read_to_string(checkout.join(".git/HEAD")).unwrap(),
            fs::read_to_string(checkout.join("README")).unwrap(),
        );
        fs::write(checkout.join("README"), "work in progress\n").unwrap();
        fs::rename(next.at("workspace"), sandbox.at("workspace")).unwrap();
        found
    };
    let branch = "ref: refs/heads/harvest/work\n".to_owned();
    assert_eq!(next(BootStart::Image), (branch.clone(), "newer\n".to_owned()));
    assert_eq!(next(BootStart::Restore), (branch, "work in progress\n".to_owned()));
}

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
            let over = client.events.iter().any(|event| matches!(event.body, EventBody::TurnEnded { .. }));
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
    assert_eq!(answer(r#"{"answer":"open"}"#), "{\"ask\":\"lookup\",\"name\":\"allowed.example\"}\n");
    assert_eq!(heard(), (1, 0, 1, vec![198, 18, 0, 4]));
    asker.send(&question(4, "evil.example", 1)).unwrap();
    answer(r#"{"answer":"refused","reason":"policy"}"#);
    let (id, code, answers, _) = heard();
    assert_eq!((id, code, answers), (4, 3, 0));
}

#[test]
fn killed_go_betweens_are_replaced_and_leave_no_command_behind() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let exec = guest.exec(sh("echo $PPID; setsid sh -c 'echo $$; sleep 98765'")).unwrap();
    guest.until(|guest| (guest.stdout(exec).lines().count() == 2).then_some(()));
    let said = guest.stdout(exec);
    let (launcher, left) = said.split_once('\n').unwrap();
    let nursery = parent(launcher);
    // The command is dead, whoever was killed; the supervisor says so.
    kill(launcher);
    assert_eq!(guest.exit(exec), Exit::Signal(9));
    wait_until("the launcher's command lives on", || !lives(left));
    kill(&nursery);
    wait_until("the nursery lives on", || !lives(&nursery));
    assert_eq!(guest.sh("echo again").1, "again\n");
    assert_eq!(guest.sh("echo and again").1, "and again\n");
}
