//! Commands on a terminal of their own.

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

/// A shell that asks with `$` and reads no files of the host's.
fn shell() -> Command {
    let mut command = on_terminal(&["bash", "--norc", "--noprofile"]);
    command.env =
        [("PS1".to_owned(), "$ ".to_owned()), ("HISTFILE".to_owned(), String::new())].into();
    command
}

/// How long a sleeper of one test sleeps: a number nobody else has on a command line.
fn unique() -> String {
    let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    let digits: String = random.bytes().take(8).map(|byte| char::from(b'0' + byte % 10)).collect();
    format!("1{digits}")
}

fn sleeper(seconds: &str) -> Option<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.map(|entry| entry.file_name().to_string_lossy().into_owned()).find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line == format!("sleep\0{seconds}\0").into_bytes() && lives(pid)
    })
}

#[test]
fn a_command_on_a_terminal_has_its_size_its_kind_and_its_user() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let script =
        "tty; stty size; echo $TERM; id -u; stat -c %u $(tty); stty -a | grep -o ' iutf8'; exit 5";
    let exec = guest.exec(on_terminal(&["sh", "-c", script])).unwrap();
    assert_eq!(guest.exit(exec), Exit::Code(5));
    let shown = guest.stdout(exec);
    let lines: Vec<&str> = shown.lines().map(str::trim_end).collect();
    assert!(lines[0].starts_with("/dev/pts/"), "{shown}");
    assert_eq!(lines[1..], ["40 100", "vt220", "10001", "10001", " iutf8"], "{shown}");
}

#[test]
fn what_cannot_be_started_on_a_terminal_says_why() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let mut code = |argv: &[&str]| guest.exec(on_terminal(argv)).unwrap_err().code;
    assert_eq!(code(&["no-such-program"]), FaultCode::NotFound);
    assert_eq!(code(&["/etc"]), FaultCode::NotExecutable);
    assert_eq!(code(&["a\0b"]), FaultCode::Invalid);
    let nowhere = Command { cwd: Some("/no/such/folder".into()), ..on_terminal(&["true"]) };
    assert_eq!(guest.exec(nowhere).unwrap_err().code, FaultCode::NotFound);
    assert_eq!(guest.sh("echo fine").1, "fine\n");
}

#[test]
fn another_size_is_told_to_what_runs_in_the_foreground() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.1; done";
    let exec = guest.exec(on_terminal(&["bash", "-c", script])).unwrap();
    guest.shows(exec, "ready");
    assert_eq!(
        guest.ask(|id| ToSupervisor::Resize { id, exec, rows: 11, cols: 222 }),
        Ok(Reply::Done)
    );
    assert_eq!(guest.exit(exec), Exit::Code(0));
    assert!(guest.stdout(exec).contains("11 222"), "{}", guest.stdout(exec));
    let late = guest.ask(|id| ToSupervisor::Resize { id, exec, rows: 1, cols: 1 });
    assert_eq!(late.unwrap_err().code, FaultCode::NotFound);
    let plain = guest.exec(sh("sleep 98765")).unwrap();
    let none = guest.ask(|id| ToSupervisor::Resize { id, exec: plain, rows: 1, cols: 1 });
    assert_eq!(none.unwrap_err().code, FaultCode::NotFound);
}

#[test]
fn jobs_are_interrupted_stopped_and_continued_from_the_keyboard() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let (first, second) = (unique(), unique());
    let exec = guest.exec(shell()).unwrap();
    guest.type_in(exec, &format!("sleep {first}\r"));
    wait_until("the first sleeps", || sleeper(&first).is_some());
    guest.type_in(exec, "\u{3}");
    guest.type_in(exec, "echo code=$?.\r");
    guest.shows(exec, "code=130.");
    guest.type_in(exec, &format!("sleep {second}\r"));
    wait_until("the second sleeps", || sleeper(&second).is_some());
    guest.type_in(exec, "\u{1a}");
    guest.shows(exec, "Stopped");
    guest.type_in(exec, "kill %1; fg; echo code=$?.\r");
    guest.shows(exec, "code=143.");
    // A password is not shown; a letter of two bytes is erased whole.
    guest.type_in(exec, "read -sp 'secret: ' word; echo; echo ${#word} letters\r");
    guest.shows(exec, "secret: ");
    guest.type_in(exec, "hidden\u{e4}\u{7f}\r");
    guest.shows(exec, "6 letters");
    assert!(!guest.stdout(exec).contains("hidden"));
    guest.type_in(exec, "exit 9\r");
    assert_eq!(guest.exit(exec), Exit::Code(9));
    assert_eq!((sleeper(&first), sleeper(&second)), (None, None));
}

#[test]
fn a_terminal_nobody_looks_at_hangs_up_and_spares_only_what_was_left_on_purpose() {
    let sandbox = Sandbox::start();
    let (stubborn, job, service) = (unique(), unique(), unique());
    for by_kill in [true, false] {
        let mut guest = sandbox.guest();
        let exec = guest.exec(shell()).unwrap();
        guest.type_in(exec, &format!("nohup setsid sleep {service} >/dev/null 2>&1 &\r"));
        guest.type_in(exec, &format!("sleep {job}\r"));
        wait_until("both sleep", || sleeper(&job).is_some() && sleeper(&service).is_some());
        if by_kill {
            assert_eq!(guest.ask(|id| ToSupervisor::Kill { id, exec }), Ok(Reply::Done));
            assert_eq!(guest.exit(exec), Exit::Killed);
        }
        drop(guest);
        wait_until("the job lives on", || sleeper(&job).is_none());
        kill(&sleeper(&service).expect("what is to stay stays"));
        wait_until("it ends", || sleeper(&service).is_none());
    }
    // Who does not care about hanging up is killed, and everything it started.
    let mut guest = sandbox.guest();
    let script =
        format!("trap '' HUP TERM; (setsid sleep {stubborn} &); while :; do sleep 1; done");
    guest.exec(on_terminal(&["bash", "-c", &script])).unwrap();
    wait_until("it sleeps", || sleeper(&stubborn).is_some());
    drop(guest);
    wait_until("it lives on", || sleeper(&stubborn).is_none());
}

#[test]
fn a_terminal_that_is_not_read_stalls_alone_and_can_be_closed() {
    let sandbox = Sandbox::start();
    let mut guest = sandbox.guest();
    let stream = u32::try_from((guest.next + 1) * 10 + 1).unwrap();
    guest.withheld.insert(stream, 0);
    let exec = guest.exec(on_terminal(&["yes"])).unwrap();
    guest.until(|guest| (guest.withheld[&stream] == u64::from(INITIAL_CREDIT_BYTES)).then_some(()));
    assert_eq!(guest.sh("echo meanwhile").1, "meanwhile\n");
    assert_eq!(guest.ask(|id| ToSupervisor::Kill { id, exec }), Ok(Reply::Done));
    assert_eq!(guest.exit(exec), Exit::Killed);
    // As much as is shown at once arrives whole.
    let exec = guest.exec(on_terminal(&["sh", "-c", "stty -opost; seq 200000"])).unwrap();
    assert_eq!(guest.exit(exec), Exit::Code(0));
    assert!(
        guest
            .stdout(exec)
            .lines()
            .map(str::to_owned)
            .eq((1..=200_000).map(|number| number.to_string()))
    );
    let peak = sandbox.memory_kib("VmHWM");
    assert!(peak < 24 * 1024, "{peak} KiB");
}

#[test]
fn a_terminal_stays_when_a_turn_is_stopped() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    sandbox.booted(&mut owner);
    let exec = owner.exec(shell()).unwrap();
    owner.shows(exec, "$ ");
    let (_, turn) = owner.prompt("hang please");
    owner.text("hanging");
    owner.ask(|id| ToSupervisor::Stop { id, turn }).unwrap();
    assert_eq!(owner.turn_ended(), TurnOutcome::Stopped);
    owner.type_in(exec, "echo still $((40+2))\r");
    owner.shows(exec, "still 42");
}
