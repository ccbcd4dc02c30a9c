//! Commands: input, output, exit, and detached commands.

use super::*;

#[test]
fn command_has_stdin_output_and_exit_code() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let exec =
        client.exec(Command { stdin: Some(0), ..sh("cat; echo err >&2; id -u; exit 7") }).unwrap();
    let stdin = u32::try_from(exec * 10).unwrap();
    client.data(stdin, b"from the client\n");
    client.send(ToSupervisor::End { stream: stdin });
    assert_eq!(client.exit(exec), Exit::Code(7));
    assert_eq!(client.stdout(exec), "from the client\n10001\n");
    assert_eq!(client.data[&(stdin + 2)], b"err\n");
    let root = client
        .exec(Command { user: Some("root".into()), ..sh("id -u; id -G; echo $HOME $TERM") })
        .unwrap();
    assert_eq!(client.exit(root), Exit::Code(0));
    assert_eq!(client.stdout(root), "0\n0\n/root xterm-256color\n");
    assert_eq!(client.sh("kill -TERM $$").0, Exit::Signal(15));
    assert_eq!(client.sh("echo by name > /dev/stdout").1, "by name\n");
}

#[test]
fn start_failures_have_a_code() {
    let sandbox = Sandbox::start();
    fs::write(sandbox.at("plain"), "x").unwrap();
    let mut client = sandbox.client();
    let mut code = |argv: &[&str], cwd: Option<&str>, user: Option<&str>| {
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        let command = Command {
            argv,
            cwd: cwd.map(str::to_owned),
            user: user.map(str::to_owned),
            ..Command::default()
        };
        client.exec(command).unwrap_err().code
    };
    assert_eq!(code(&["no-such-program"], None, None), FaultCode::NotFound);
    // std rejects this without an error number.
    assert_eq!(code(&["a\0b"], None, None), FaultCode::Invalid);
    assert_eq!(
        code(&[sandbox.at("plain").to_str().unwrap()], None, None),
        FaultCode::NotExecutable
    );
    assert_eq!(code(&["true"], Some("/no/such/folder"), None), FaultCode::NotFound);
    assert_eq!(code(&["true"], None, Some("unknown-user")), FaultCode::Invalid);
    assert_eq!(code(&[], None, None), FaultCode::Invalid);
    assert_eq!(client.sh("echo still here").1, "still here\n");
}

#[test]
fn timeout_kills_descendants_in_other_sessions() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let script = "(setsid sh -c 'sleep 98765 & echo $!; wait' &) ; sleep 98765";
    let exec = client.exec(Command { timeout_millis: Some(2000), ..sh(script) }).unwrap();
    assert_eq!(client.exit(exec), Exit::Timeout);
    let pid = client.stdout(exec);
    assert!(!pid.is_empty() && !is_alive(&pid), "{pid} is still alive");
}

#[test]
fn killed_command_leaves_nothing_but_exited_may() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let exec = client.exec(sh("(setsid sleep 98765 & echo $!); sleep 98765")).unwrap();
    client.until(|client| client.stdout(exec).ends_with('\n').then_some(()));
    assert_eq!(client.request(|id| ToSupervisor::Kill { id, exec }), Ok(Reply::Done));
    assert_eq!(client.exit(exec), Exit::Killed);
    assert!(!is_alive(&client.stdout(exec)));
    // The service holds the pipe open, which must not delay the exit.
    let (exit, service) = client.sh("sleep 98765 & echo $!");
    assert_eq!(exit, Exit::Code(0));
    assert!(is_alive(&service));
    kill(&service);
}

#[test]
fn flooding_service_does_not_delay_the_exit() {
    let sandbox = Sandbox::start();
    fs::set_permissions(sandbox.at("home"), fs::Permissions::from_mode(0o777)).unwrap();
    let mut client = sandbox.client();
    let (exit, _) = client.sh("yes & echo $! >$HOME/service");
    assert_eq!(exit, Exit::Code(0));
    assert_eq!(client.sh("echo meanwhile").1, "meanwhile\n");
    kill(&fs::read_to_string(sandbox.at("home/service")).unwrap());
}

#[test]
fn flooding_hook_does_not_block_other_commands() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    // First a service that keeps running, then a hook that never ends.
    let hooks = [
        (".harvest/setup.sh", "yes & echo $! >$HOME/service"),
        (".harvest/start.sh", "yes; exit 1"),
    ];
    let boot = sandbox.boot(BootStart::Fresh, &hooks);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Setup, PhaseStatus::Done);
    owner.phase(BootPhase::Start, PhaseStatus::Started);
    assert_eq!(sandbox.client().sh("echo meanwhile").1, "meanwhile\n");
    kill(&fs::read_to_string(sandbox.at("home/service")).unwrap());
}

#[test]
fn agent_with_an_endless_line_can_be_stopped() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let (_, turn) = owner.prompt("endless");
    owner.text("endless");
    owner.request(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    let peak = sandbox.memory_kib("VmHWM");
    assert!(peak < 40 * 1024, "{peak} KiB");
}

#[test]
fn closed_connection_kills_its_commands() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let exec = client.exec(sh("(setsid sleep 98765 & echo $!); sleep 98765")).unwrap();
    client.until(|client| client.stdout(exec).ends_with('\n').then_some(()));
    let pid = client.stdout(exec);
    drop(client);
    wait_until("the command is dead", || !is_alive(&pid));
}

#[test]
fn detached_command_outlives_its_connection() {
    let sandbox = Sandbox::start();
    fs::set_permissions(sandbox.at("home"), fs::Permissions::from_mode(0o777)).unwrap();
    let mut owner = sandbox.owner(1, 0);
    // The output exceeds the credit and stdin is read: neither delays the exit.
    let script = "cd $HOME; head -c 3000000 /dev/zero; cat; echo $$ >pid; mkfifo go; read x <go; echo done >end";
    let command = Command { detached: true, stdin: Some(0), ..sh(script) };
    let stream = u32::try_from((owner.next + 1) * 10 + 1).unwrap();
    owner.withheld.insert(stream, 0);
    owner.exec(command).unwrap();
    owner.until(|owner| (owner.detached == Some(1)).then_some(()));
    drop(owner);
    wait_until("the command continues", || sandbox.at("home/go").exists());
    let mut next = sandbox.owner(2, 0);
    assert_eq!(next.welcome().unwrap().detached, 1);
    // Attached commands are not counted.
    assert_eq!(next.sh("echo hi").1, "hi\n");
    assert_eq!(
        next.request(|id| ToSupervisor::Status { id })
            .map(|status| format!("{status:?}").contains("detached: 1")),
        Ok(true)
    );
    fs::write(sandbox.at("home/go"), "go\n").unwrap();
    next.until(|next| (next.detached == Some(0)).then_some(()));
    assert_eq!(fs::read_to_string(sandbox.at("home/end")).unwrap(), "done\n");
}

#[test]
fn detached_command_has_a_timeout() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let command =
        Command { detached: true, timeout_millis: Some(2000), ..sh("echo $$; exec sleep 98765") };
    let exec = client.exec(command).unwrap();
    client.until(|client| client.stdout(exec).ends_with('\n').then_some(()));
    let pid = client.stdout(exec);
    drop(client);
    wait_until("it is dead", || !is_alive(&pid));
    // Pid 1 learns of the exit a moment later.
    let mut owner = sandbox.owner(1, 0);
    let welcome = owner.welcome().unwrap().detached;
    owner.until(|owner| (owner.detached.unwrap_or(welcome) == 0).then_some(()));
}

#[test]
fn slow_reader_stalls_only_its_own_stream() {
    const TOTAL: u64 = 100 * 1024 * 1024;
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    assert_eq!(client.sh("echo warm").1, "warm\n");
    let stream = u32::try_from((client.next + 1) * 10 + 1).unwrap();
    client.withheld.insert(stream, 0);
    let exec = client.exec(sh(&format!("head -c {TOTAL} /dev/zero"))).unwrap();
    client.until(|client| {
        (client.withheld[&stream] == u64::from(INITIAL_CREDIT_BYTES)).then_some(())
    });
    // While it stalls, another command runs on the same connection.
    assert_eq!(client.sh("echo meanwhile").1, "meanwhile\n");
    assert_eq!(client.withheld[&stream], u64::from(INITIAL_CREDIT_BYTES));
    while client.withheld[&stream] < TOTAL {
        let before = client.withheld[&stream];
        let granted = 200_000u32;
        client.send(ToSupervisor::Credit { stream, bytes: granted });
        let wanted = (before + u64::from(granted)).min(TOTAL);
        client.until(|client| (client.withheld[&stream] >= wanted).then_some(()));
        assert_eq!(client.withheld[&stream], wanted, "never more than granted");
    }
    assert_eq!(client.exit(exec), Exit::Code(0));
    let peak = sandbox.memory_kib("VmHWM");
    assert!(peak < 24 * 1024, "{peak} KiB");
}

#[test]
fn killed_launchers_are_replaced_and_leave_nothing() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let exec = client.exec(sh("echo $PPID; setsid sh -c 'echo $$; sleep 98765'")).unwrap();
    client.until(|client| (client.stdout(exec).lines().count() == 2).then_some(()));
    let said = client.stdout(exec);
    let (launcher, left) = said.split_once('\n').unwrap();
    let spawner = parent(launcher);
    // Killing the launcher kills the command, and the exit is reported.
    kill(launcher);
    assert_eq!(client.exit(exec), Exit::Signal(9));
    wait_until("the launcher's command is dead", || !is_alive(left));
    kill(&spawner);
    wait_until("the spawner is dead", || !is_alive(&spawner));
    assert_eq!(client.sh("echo again").1, "again\n");
    assert_eq!(client.sh("echo and again").1, "and again\n");
}
