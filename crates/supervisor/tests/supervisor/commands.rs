//! Commands: their input and output, their end, and what outlives a connection.

use super::*;

#[test]
fn a_command_gets_its_stdin_and_gives_its_output_and_exit_code() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let exec =
        guest.exec(Command { stdin: Some(0), ..sh("cat; echo err >&2; id -u; exit 7") }).unwrap();
    let stdin = u32::try_from(exec * 10).unwrap();
    guest.data(stdin, b"from the dialer\n");
    guest.say(ToSupervisor::End { stream: stdin });
    assert_eq!(guest.exit(exec), Exit::Code(7));
    assert_eq!(guest.stdout(exec), "from the dialer\n10001\n");
    assert_eq!(guest.data[&(stdin + 2)], b"err\n");
    let root = guest
        .exec(Command { user: Some("root".into()), ..sh("id -u; id -G; echo $HOME $TERM") })
        .unwrap();
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
    assert_eq!(
        code(&[sandbox.at("plain").to_str().unwrap()], None, None),
        FaultCode::NotExecutable
    );
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
    let hooks = [
        (".harvest/setup.sh", "yes & echo $! >$HOME/service"),
        (".harvest/start.sh", "yes; exit 1"),
    ];
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
fn a_detached_command_outlives_its_connection_and_every_owner_hears_that_it_runs_and_that_it_has_ended()
 {
    let sandbox = Sandbox::start();
    fs::set_permissions(sandbox.at("home"), fs::Permissions::from_mode(0o777)).unwrap();
    let mut owner = sandbox.owner(1, 0);
    // More than anybody grants is said, and something is read: neither keeps it from its end.
    let script = "cd $HOME; head -c 3000000 /dev/zero; cat; echo $$ >pid; mkfifo go; read x <go; echo done >end";
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
    let command =
        Command { detached: true, timeout_millis: Some(2000), ..sh("echo $$; exec sleep 98765") };
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
