//! Commands on terminals.

use harvest_proto::{bridge::*, event::TurnOutcome};

use crate::harness::*;

fn on_terminal(argv: &[&str]) -> Command {
    Command {
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        stdin: Some(0),
        terminal: Some(Terminal { rows: 40, cols: 100, term: Some("vt220".into()) }),
        ..Command::default()
    }
}

/// A shell with the prompt `$` that reads no configuration of the host.
fn shell() -> Command {
    let mut command = on_terminal(&["bash", "--norc", "--noprofile"]);
    command.env =
        [("PS1".to_owned(), "$ ".to_owned()), ("HISTFILE".to_owned(), String::new())].into();
    command
}

/// A unique number of seconds to sleep, to find the process by its command line.
fn unique() -> String {
    let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    let digits: String = random.bytes().take(8).map(|byte| char::from(b'0' + byte % 10)).collect();
    format!("1{digits}")
}

fn sleeper(seconds: &str) -> Option<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.map(|entry| entry.file_name().to_string_lossy().into_owned()).find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line == format!("sleep\0{seconds}\0").into_bytes() && is_alive(pid)
    })
}

#[test]
fn terminal_has_its_size_type_and_owner() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let script =
        "tty; stty size; echo $TERM; id -u; stat -c %u $(tty); stty -a | grep -o ' iutf8'; exit 5";
    let exec = client.exec(on_terminal(&["sh", "-c", script])).unwrap();
    assert_eq!(client.exit(exec), Exit::Code(5));
    let shown = client.stdout(exec);
    let lines: Vec<&str> = shown.lines().map(str::trim_end).collect();
    assert!(lines[0].starts_with("/dev/pts/"), "{shown}");
    assert_eq!(lines[1..], ["40 100", "vt220", "10001", "10001", " iutf8"], "{shown}");
}

#[test]
fn start_failures_on_terminals_have_a_code() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let mut code = |argv: &[&str]| client.exec(on_terminal(argv)).unwrap_err().code;
    assert_eq!(code(&["no-such-program"]), FaultCode::NotFound);
    assert_eq!(code(&["/etc"]), FaultCode::NotExecutable);
    assert_eq!(code(&["a\0b"]), FaultCode::Invalid);
    let nowhere = Command { cwd: Some("/no/such/folder".into()), ..on_terminal(&["true"]) };
    assert_eq!(client.exec(nowhere).unwrap_err().code, FaultCode::NotFound);
    assert_eq!(client.sh("echo fine").1, "fine\n");
}

#[test]
fn resize_signals_the_foreground_job() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.1; done";
    let exec = client.exec(on_terminal(&["bash", "-c", script])).unwrap();
    client.wait_for_output(exec, "ready");
    assert_eq!(
        client.request(|id| ToSupervisor::Resize { id, exec, rows: 11, cols: 222 }),
        Ok(Reply::Done)
    );
    assert_eq!(client.exit(exec), Exit::Code(0));
    assert!(client.stdout(exec).contains("11 222"), "{}", client.stdout(exec));
    let late = client.request(|id| ToSupervisor::Resize { id, exec, rows: 1, cols: 1 });
    assert_eq!(late.unwrap_err().code, FaultCode::NotFound);
    let plain = client.exec(sh("sleep 98765")).unwrap();
    let none = client.request(|id| ToSupervisor::Resize { id, exec: plain, rows: 1, cols: 1 });
    assert_eq!(none.unwrap_err().code, FaultCode::NotFound);
}

#[test]
fn job_control_works_from_the_keyboard() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let (first, second) = (unique(), unique());
    let exec = client.exec(shell()).unwrap();
    client.type_in(exec, &format!("sleep {first}\r"));
    wait_until("the first sleeps", || sleeper(&first).is_some());
    client.type_in(exec, "\u{3}");
    client.type_in(exec, "echo code=$?.\r");
    client.wait_for_output(exec, "code=130.");
    client.type_in(exec, &format!("sleep {second}\r"));
    wait_until("the second sleeps", || sleeper(&second).is_some());
    client.type_in(exec, "\u{1a}");
    client.wait_for_output(exec, "Stopped");
    client.type_in(exec, "kill %1; fg; echo code=$?.\r");
    client.wait_for_output(exec, "code=143.");
    // A password is not echoed; backspace erases a whole two-byte character. The echoed command
    // must not look like the prompt, which shows that the echo is off.
    client.type_in(exec, "read -sp \"secret $((1+1)): \" word; echo; echo ${#word} letters\r");
    client.wait_for_output(exec, "secret 2: ");
    client.type_in(exec, "hidden\u{e4}\u{7f}\r");
    client.wait_for_output(exec, "6 letters");
    assert!(!client.stdout(exec).contains("hidden"));
    client.type_in(exec, "exit 9\r");
    assert_eq!(client.exit(exec), Exit::Code(9));
    assert_eq!((sleeper(&first), sleeper(&second)), (None, None));
}

#[test]
fn disconnect_hangs_up_but_spares_nohup_services() {
    let sandbox = Sandbox::start();
    let (stubborn, job, service) = (unique(), unique(), unique());
    for by_kill in [true, false] {
        let mut client = sandbox.client();
        let exec = client.exec(shell()).unwrap();
        client.type_in(exec, &format!("nohup setsid sleep {service} >/dev/null 2>&1 &\r"));
        client.type_in(exec, &format!("sleep {job}\r"));
        wait_until("both sleep", || sleeper(&job).is_some() && sleeper(&service).is_some());
        if by_kill {
            assert_eq!(client.request(|id| ToSupervisor::Kill { id, exec }), Ok(Reply::Done));
            assert_eq!(client.exit(exec), Exit::Killed);
        }
        drop(client);
        wait_until("the job is dead", || sleeper(&job).is_none());
        kill(&sleeper(&service).expect("the service is still running"));
        wait_until("it ends", || sleeper(&service).is_none());
    }
    // A command that ignores SIGHUP is killed with its descendants.
    let mut client = sandbox.client();
    let script =
        format!("trap '' HUP TERM; (setsid sleep {stubborn} &); while :; do sleep 1; done");
    client.exec(on_terminal(&["bash", "-c", &script])).unwrap();
    wait_until("it sleeps", || sleeper(&stubborn).is_some());
    drop(client);
    wait_until("it is dead", || sleeper(&stubborn).is_none());
}

#[test]
fn unread_terminal_stalls_alone_and_can_be_closed() {
    let sandbox = Sandbox::start();
    let mut client = sandbox.client();
    let stream = u32::try_from((client.next + 1) * 10 + 1).unwrap();
    client.withheld.insert(stream, 0);
    let exec = client.exec(on_terminal(&["yes"])).unwrap();
    client.until(|client| {
        (client.withheld[&stream] == u64::from(INITIAL_CREDIT_BYTES)).then_some(())
    });
    assert_eq!(client.sh("echo meanwhile").1, "meanwhile\n");
    assert_eq!(client.request(|id| ToSupervisor::Kill { id, exec }), Ok(Reply::Done));
    assert_eq!(client.exit(exec), Exit::Killed);
    // A large output arrives completely.
    let exec = client.exec(on_terminal(&["sh", "-c", "stty -opost; seq 200000"])).unwrap();
    assert_eq!(client.exit(exec), Exit::Code(0));
    assert!(
        client
            .stdout(exec)
            .lines()
            .map(str::to_owned)
            .eq((1..=200_000).map(|number| number.to_string()))
    );
    let peak = sandbox.memory_kib("VmHWM");
    assert!(peak < 24 * 1024, "{peak} KiB");
}

#[test]
fn terminal_survives_the_stop_of_a_turn() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let exec = owner.exec(shell()).unwrap();
    owner.wait_for_output(exec, "$ ");
    let (_, turn) = owner.prompt("hang please");
    owner.text("hanging");
    owner.request(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    owner.type_in(exec, "echo still $((40+2))\r");
    owner.wait_for_output(exec, "still 42");
}
