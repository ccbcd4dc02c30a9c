//! Commands that cannot start, print too much, print binary data, or do not die.

use harvest_engine::supervisor_client::SupervisorClientError;
use harvest_proto::bridge::FaultCode;

use super::*;

fn refusal(running: &Running, command: Command) -> FaultCode {
    let refused =
        SupervisorClient::dial(&running.bridge).unwrap().exec(command, &[], &mut |_, _| {});
    match refused {
        Err(SupervisorClientError::Refused(fault)) => fault.code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn command_that_cannot_start_reports_why() {
    let world = World::new();
    let running = world.start();
    shell(&running, "echo text > /tmp/text; mkdir /tmp/folder; ln -s loop /tmp/loop");
    for (program, code) in [
        ("missing", FaultCode::NotFound),
        ("/tmp/missing/program", FaultCode::NotFound),
        ("/tmp/text", FaultCode::NotExecutable),
        ("/tmp/folder", FaultCode::NotExecutable),
        ("/tmp/loop", FaultCode::NotExecutable),
        ("", FaultCode::Invalid),
        ("zero\0byte", FaultCode::Invalid),
    ] {
        assert_eq!(refusal(&running, command(&[program])), code, "{program:?}");
    }
    let nowhere = Command { cwd: Some("/nowhere".to_owned()), ..command(&["true"]) };
    assert_eq!(refusal(&running, nowhere), FaultCode::NotFound);
    let unknown_user = Command { user: Some("no-such-user".to_owned()), ..command(&["true"]) };
    assert_eq!(refusal(&running, unknown_user), FaultCode::Invalid);
    let long = "x".repeat(200 << 10);
    assert_eq!(refusal(&running, command(&["true", &long])), FaultCode::Invalid);
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn binary_input_and_output_pass_unchanged() {
    let world = World::new();
    let running = world.start();
    let bytes: Vec<u8> = (0..=255u8).cycle().take(300_000).collect();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let copy = command(&["sh", "-c", "cat; printf '\\377\\376' >&2"]);
    let mut client = SupervisorClient::dial(&running.bridge).unwrap();
    let exit = client.exec(copy, &bytes, &mut |output, bytes| match output {
        Output::Stdout => out.extend_from_slice(bytes),
        Output::Stderr => err.extend_from_slice(bytes),
    });
    assert_eq!(exit.unwrap(), Exit::Code(0));
    assert!(out == bytes && err == [0xff, 0xfe], "{} {err:?}", out.len());
    // Unusual text in arguments and variables.
    let unusual = "ä 漢\u{202e}\n\"'$(x)\\";
    let mut echo = command(&["sh", "-c", "printf %s \"$1$ODD\"", "sh", unusual]);
    echo.env.insert("ODD".to_owned(), unusual.to_owned());
    assert_eq!(exec(&running, echo).out, format!("{unusual}{unusual}"));
}

/// Peak memory of a process, in KiB.
fn peak(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn gigabyte_of_output_does_not_grow_pid_1() {
    let world = World::new();
    let running = world.start();
    shell(&running, "true");
    let before = peak(running.pid);
    let mut count = 0u64;
    let mut client = SupervisorClient::dial(&running.bridge).unwrap();
    let all = command(&["head", "-c", "1073741824", "/dev/zero"]);
    let exit = client.exec(all, &[], &mut |_, bytes| count += bytes.len() as u64);
    assert_eq!((exit.unwrap(), count), (Exit::Code(0), 1 << 30));
    let grown = peak(running.pid) - before;
    assert!(grown < 8 * 1024, "pid 1 grew by {grown} KiB");
}

#[test]
fn stalled_reader_blocks_only_its_own_command() {
    let world = World::new();
    let running = world.start();
    let before = peak(running.pid);
    // Sends a request and never reads the answer.
    let silent: Vec<SupervisorClient> = (0..8)
        .map(|_| {
            let (bridge, (sender, receiver)) = (running.bridge.clone(), std::sync::mpsc::channel());
            thread::spawn(move || {
                let mut client = SupervisorClient::dial(&bridge).unwrap();
                let endless = command(&["cat", "/dev/zero"]);
                let _broken = client.exec(endless, &[], &mut |_, _| {
                    let _gone = sender.send(());
                    thread::park();
                });
            });
            receiver.recv().unwrap();
            SupervisorClient::dial(&running.bridge).unwrap()
        })
        .collect();
    assert_eq!(shell(&running, "echo on").out, "on");
    let grown = peak(running.pid) - before;
    assert!(grown < 16 * 1024, "pid 1 grew by {grown} KiB");
    drop(silent);
    world.engine.kill(&running.id).unwrap();
}

// The zygote does the same to a sandbox over its disk limit, on a busy machine for as long.
#[test]
fn command_waits_while_all_commands_are_killed() {
    let world = World::new();
    let running = world.start();
    let groups: Vec<PathBuf> = world
        .groups_of(&running.id)
        .into_iter()
        .flat_map(|group| ["work", "work/commands"].map(|name| group.join(name)))
        .collect();
    let end = Instant::now() + Duration::from_secs(1);
    thread::scope(|scope| {
        scope.spawn(|| {
            while Instant::now() < end {
                groups.iter().for_each(|group| kill_all_in(group));
            }
        });
        // Killed while it starts, or started after the kills: never refused.
        while Instant::now() < end {
            let output = shell(&running, "echo on");
            assert!(output.exit == Exit::Signal(9) || output.out == "on", "{output:?}");
        }
    });
    assert_eq!(shell(&running, "echo on").out, "on");
}

fn kill_all_in(group: &Path) {
    use rustix::process::{Pid, Signal, kill_process};
    let procs = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    for pid in procs.lines().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

// Starts two sleepers outside the command's session, group and parent.
const DETACHED_SLEEPERS: &str =
    "(setsid sh -c '(setsid sleep 1000 &) ; sleep 1000' >/dev/null 2>&1 &) ; ";

#[test]
fn timeout_kills_detached_processes_too() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let script = format!("{DETACHED_SLEEPERS} sleep 1000");
    let late = Command { timeout_millis: Some(700), ..command(&["sh", "-c", &script]) };
    let output = exec(&running, late);
    assert_eq!(output.exit, Exit::Timeout);
    assert_eq!(sleepers(range), [0u32; 0]);
    // Without a timeout, processes left by a command survive: the list above could have contained
    // some.
    shell(&running, DETACHED_SLEEPERS);
    eventually("the detached sleepers", || sleepers(range).len() >= 2);
}

fn sleepers(range: u32) -> Vec<u32> {
    let sleeps = |pid: &u32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"sleep"))
    };
    processes_of(range).into_iter().filter(sleeps).collect()
}

#[test]
fn disconnect_kills_detached_processes_too() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let caller = Caller::new(&world, "exec", &running.id, &SnapshotId::random());
    eventually("the command to run", || shell(&running, "cat /tmp/started").exit == Exit::Code(0));
    eventually("both sleepers", || sleepers(range).len() == 2);
    caller.kill();
    eventually("the end of all sleepers", || sleepers(range).is_empty());
    assert_eq!(shell(&running, "echo on").out, "on");
}
