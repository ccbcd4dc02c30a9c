//! Commands that cannot start, say too much, say nonsense, or will not die.

use harvest_engine::guest::GuestError;
use harvest_proto::bridge::FaultCode;

use super::*;

fn refusal(running: &Running, command: Command) -> FaultCode {
    let refused = Guest::dial(&running.bridge).unwrap().exec(command, &[], &mut |_, _| {});
    match refused {
        Err(GuestError::Refused(fault)) => fault.code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_command_that_cannot_start_says_why() {
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
    let nobody = Command { user: Some("nobody-here".to_owned()), ..command(&["true"]) };
    assert_eq!(refusal(&running, nobody), FaultCode::Invalid);
    let long = "x".repeat(200 << 10);
    assert_eq!(refusal(&running, command(&["true", &long])), FaultCode::Invalid);
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn bytes_that_are_no_text_come_out_as_they_went_in() {
    let world = World::new();
    let running = world.start();
    let bytes: Vec<u8> = (0..=255u8).cycle().take(300_000).collect();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let copy = command(&["sh", "-c", "cat; printf '\\377\\376' >&2"]);
    let mut guest = Guest::dial(&running.bridge).unwrap();
    let exit = guest.exec(copy, &bytes, &mut |output, bytes| match output {
        Output::Stdout => out.extend_from_slice(bytes),
        Output::Stderr => err.extend_from_slice(bytes),
    });
    assert_eq!(exit.unwrap(), Exit::Code(0));
    assert!(out == bytes && err == [0xff, 0xfe], "{} {err:?}", out.len());
    // Text that is not plain, in arguments and variables.
    let odd = "ä 漢\u{202e}\n\"'$(x)\\";
    let mut echo = command(&["sh", "-c", "printf %s \"$1$ODD\"", "sh", odd]);
    echo.env.insert("ODD".to_owned(), odd.to_owned());
    assert_eq!(exec(&running, echo).out, format!("{odd}{odd}"));
}

/// The most memory a process ever had, in KiB.
fn peak(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_gigabyte_of_output_passes_through_pid_1_without_staying_there() {
    let world = World::new();
    let running = world.start();
    shell(&running, "true");
    let before = peak(running.pid);
    let mut count = 0u64;
    let mut guest = Guest::dial(&running.bridge).unwrap();
    let all = command(&["head", "-c", "1073741824", "/dev/zero"]);
    let exit = guest.exec(all, &[], &mut |_, bytes| count += bytes.len() as u64);
    assert_eq!((exit.unwrap(), count), (Exit::Code(0), 1 << 30));
    let grown = peak(running.pid) - before;
    assert!(grown < 8 * 1024, "pid 1 grew by {grown} KiB");
}

#[test]
fn a_reader_that_stops_reading_stops_only_its_own_command() {
    let world = World::new();
    let running = world.start();
    let before = peak(running.pid);
    // Says what it wants and never reads an answer.
    let silent: Vec<Guest> = (0..8)
        .map(|_| {
            let (bridge, (said, heard)) = (running.bridge.clone(), std::sync::mpsc::channel());
            thread::spawn(move || {
                let mut guest = Guest::dial(&bridge).unwrap();
                let endless = command(&["cat", "/dev/zero"]);
                let _broken = guest.exec(endless, &[], &mut |_, _| {
                    let _gone = said.send(());
                    thread::park();
                });
            });
            heard.recv().unwrap();
            Guest::dial(&running.bridge).unwrap()
        })
        .collect();
    assert_eq!(shell(&running, "echo on").out, "on");
    let grown = peak(running.pid) - before;
    assert!(grown < 16 * 1024, "pid 1 grew by {grown} KiB");
    drop(silent);
    world.engine.kill(&running.id).unwrap();
}

// Two sleepers that no longer belong to the command's session, group or parent.
const HIDERS: &str = "(setsid sh -c '(setsid sleep 1000 &) ; sleep 1000' >/dev/null 2>&1 &) ; ";

#[test]
fn a_tree_that_hides_dies_with_its_commands_time_limit() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let script = format!("{HIDERS} sleep 1000");
    let late = Command { timeout_millis: Some(700), ..command(&["sh", "-c", &script]) };
    let said = exec(&running, late);
    assert_eq!(said.exit, Exit::Timeout);
    assert_eq!(sleepers(range), [0u32; 0]);
    // Without a limit what a command leaves stays: then the list above could have had something in it.
    shell(&running, HIDERS);
    eventually("the hiders hide", || sleepers(range).len() >= 2);
}

fn sleepers(range: u32) -> Vec<u32> {
    let sleeps = |pid: &u32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"sleep"))
    };
    processes_of(range).into_iter().filter(sleeps).collect()
}

#[test]
fn a_tree_that_hides_dies_when_its_caller_is_killed() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let caller = Caller::new(&world, "exec", &running.id, &SnapshotId::random());
    eventually("the command runs", || shell(&running, "cat /tmp/started").exit == Exit::Code(0));
    eventually("both sleep", || sleepers(range).len() == 2);
    caller.kill();
    eventually("nothing is left of it", || sleepers(range).is_empty());
    assert_eq!(shell(&running, "echo on").out, "on");
}
