//! Two sandboxes side by side: neither can find, signal, fill up or starve anything of the other or
//! of the host. Each probe is shown to work within one sandbox, where nothing blocks it.

use std::os::{fd::OwnedFd, linux::net::SocketAddrExt, unix::net::SocketAddr};

use super::*;

/// Probes without a guard that could be left out.
pub(super) fn attempt(name: &str) -> io::Result<()> {
    match name {
        "abstract_socket" => sockets::dial_abstract(),
        "connect_outside" => std::net::TcpStream::connect("192.0.2.1:80").map(drop),
        "connect_synthetic" => std::net::TcpStream::connect("198.18.77.7:80").map(drop),
        "map_victim" => disk::map_victim(),
        "leave_things" => leave_things(),
        "fill_sockets" => fill_sockets(),
        "find_shared_memory" => shared_memory(0).map(drop),
        "find_queue" => queue(libc::O_RDWR).map(drop),
        "find_socket" => {
            UnixStream::connect_addr(&SocketAddr::from_abstract_name("left")?).map(drop)
        }
        "bomb" => loop {
            // SAFETY: the sandbox's process limit ends the loop.
            unsafe { libc::fork() };
        },
        other => match other.split_once(' ') {
            Some(("take", what)) => take_all(what),
            Some(("need", what)) => one_more(what).map(drop),
            _ => panic!("unknown probe {other}"),
        },
    }
}

fn descriptor(result: libc::c_long) -> io::Result<OwnedFd> {
    check(result)?;
    // SAFETY: the kernel has just opened it and no other code knows it.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(i32::try_from(result).unwrap()) })
}

fn shared_memory(flags: i32) -> io::Result<i32> {
    // SAFETY: integers only.
    let id = unsafe { libc::shmget(0x6861_7276, 4096, flags) };
    check(id.into()).map(|()| id)
}

fn queue(flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: the name outlives the call; without attributes the defaults hold.
    descriptor(unsafe { libc::syscall(libc::SYS_mq_open, c"left".as_ptr(), flags, 0o666, 0) })
}

/// Creates shared memory, a queue and a socket, prints a line, and waits until its input ends.
fn leave_things() -> io::Result<()> {
    shared_memory(libc::IPC_CREAT | 0o666)?;
    let _queue = queue(libc::O_CREAT | libc::O_RDWR)?;
    let _socket = UnixListener::bind_addr(&SocketAddr::from_abstract_name("left")?)?;
    println!("\nleft: {}", std::process::id());
    wait_for_input_end()
}

/// Fills connections that are never read until writes block, prints a line, and waits.
fn fill_sockets() -> io::Result<()> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let (mut ends, mut held) = (Vec::new(), 0);
    for _ in 0..16 {
        let mut near = std::net::TcpStream::connect(listener.local_addr()?)?;
        ends.push(listener.accept()?.0);
        // A write that blocks this long blocks forever.
        near.set_write_timeout(Some(Duration::from_millis(100)))?;
        while let Ok(count) = near.write(&[0; 65536]) {
            held += count;
        }
        ends.push(near);
    }
    println!("\nleft: {held} bytes");
    wait_for_input_end()
}

fn wait_for_input_end() -> io::Result<()> {
    io::stdin().read_to_end(&mut Vec::new()).map(drop)
}

/// Takes one more of a resource that the kernel counts per user.
fn one_more(what: &str) -> io::Result<Vec<OwnedFd>> {
    match what {
        // SAFETY: integers only.
        "inotify" => Ok(vec![descriptor(unsafe { libc::inotify_init1(0) }.into())?]),
        "queues" => {
            let name = std::ffi::CString::new(format!("q{}-{}", std::process::id(), next()))?;
            let attributes = [0i64, 10, 8192, 0, 0, 0, 0, 0];
            let (flags, attributes) = (libc::O_CREAT | libc::O_RDWR, attributes.as_ptr());
            // SAFETY: name and attributes outlive the calls.
            let queue = unsafe {
                libc::syscall(libc::SYS_mq_open, name.as_ptr(), flags, 0o600, attributes)
            };
            let queue = descriptor(queue)?;
            // Counted while open and freed with this process, on the host too.
            // SAFETY: as above.
            check(unsafe { libc::syscall(libc::SYS_mq_unlink, name.as_ptr()) })?;
            Ok(vec![queue])
        }
        "signals" => {
            let signal = libc::SIGRTMIN();
            // SAFETY: both structures consist of integers that outlive the calls; an empty set is a
            // valid mask, and the signal is blocked in the only thread it is sent to, so that it is
            // only counted.
            unsafe {
                let mut blocked: libc::sigset_t = std::mem::zeroed();
                libc::sigaddset(&raw mut blocked, signal);
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut());
                let mut about: libc::siginfo_t = std::mem::zeroed();
                about.si_code = libc::SI_QUEUE;
                let (process, thread) = (libc::getpid(), libc::gettid());
                let queue = libc::SYS_rt_tgsigqueueinfo;
                check(libc::syscall(queue, process, thread, signal, &raw mut about))?;
            }
            Ok(Vec::new())
        }
        other => panic!("nothing is called {other}"),
    }
}

fn next() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Takes all of a resource, prints a line, and waits until its input ends.
fn take_all(what: &str) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: the limit outlives the call; lowering or keeping it is harmless.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    let mut taken = Vec::new();
    let error = loop {
        match one_more(what) {
            Ok(more) => taken.push(more),
            Err(error) => break error,
        }
        assert!(taken.len() < 500_000, "there is no end to {what}");
    };
    println!("\nleft: {} {error}", taken.len());
    wait_for_input_end()
}

/// Runs a probe that waits; returns when it has printed its line. The probe ends with its sandbox.
fn run_in_background(running: &Running, probe: &str) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let bridge = running.bridge.clone();
    let probe = Command { user: Some("10001".to_owned()), ..probe_command(probe, 1) };
    // The input is a pipe that is never written.
    let script = "mkfifo /dev/shm/never; exec \"$@\" <>/dev/shm/never";
    let mut argv: Vec<String> = ["sh", "-c", script, "sh"].map(str::to_owned).into();
    argv.extend(probe.argv.clone());
    thread::spawn(move || {
        let mut text = String::new();
        let mut client = SupervisorClient::dial(&bridge).unwrap();
        let ended = client.exec(Command { argv, ..probe }, &[], &mut |_, bytes| {
            text.push_str(&String::from_utf8_lossy(bytes));
            if text.contains("left: ") {
                let _receiver_may_be_gone = sender.send(text.clone());
            }
        });
        let _receiver_may_be_gone = sender.send(format!("{text} {ended:?}"));
    });
    let text = receiver.recv().unwrap();
    assert!(text.contains("left: "), "{text}");
}

fn result(running: &Running, probe: &str) -> i32 {
    let output =
        exec(running, Command { user: Some("10001".to_owned()), ..probe_command(probe, 1) });
    result_of(&output.out).unwrap_or_else(|| panic!("{probe} printed no result: {output:?}"))
}

fn start_two(world: &World) -> [Running; 2] {
    [0, 1].map(|_| world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap())
}

#[test]
fn neighbours_share_no_ipc_objects_or_files() {
    let world = World::new();
    let [one, other] = start_two(&world);
    run_in_background(&one, "leave_things");
    let things = [
        ("find_shared_memory", libc::ENOENT),
        ("find_queue", libc::ENOENT),
        ("find_socket", libc::ECONNREFUSED),
    ];
    for (probe, missing) in things {
        assert_eq!(result(&one, probe), 0, "{probe} in the same sandbox");
        assert_eq!(result(&other, probe), missing, "{probe} in the other sandbox");
        assert_eq!(result_on_host(probe, 1), missing, "{probe} on the host");
    }
    // Processes and files by their host pids and paths.
    let range = range(&one);
    for pid in processes_of(range) {
        assert_ne!(shell(&other, &format!("kill -0 {pid}")).exit, Exit::Code(0), "{pid}");
    }
    assert_eq!(shell(&one, "sleep 100 & kill -0 $!").exit, Exit::Code(0));
    for path in [world.home.join("sandboxes"), one.bridge.clone(), world.home.join("run")] {
        assert!(path.exists(), "the host has it");
        assert_ne!(
            shell(&other, &format!("ls {}", path.display())).exit,
            Exit::Code(0),
            "{path:?}"
        );
    }
}

#[test]
fn per_user_kernel_limits_apply_per_sandbox() {
    for what in ["inotify", "queues", "signals"] {
        let world = World::new();
        let [one, other] = start_two(&world);
        let (take, need) = (format!("take {what}"), format!("need {what}"));
        run_in_background(&one, &take);
        assert_ne!(result(&one, &need), 0, "{what}: the limit is used up");
        assert_eq!(result(&other, &need), 0, "{what} in the other sandbox");
        assert_eq!(result_on_host(&need, 1), 0, "{what} on the host");
    }
}

#[test]
fn socket_memory_is_limited_per_sandbox() {
    let world = World::new();
    let mut held = Vec::new();
    for limited in [false, true] {
        let running = world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
        let file = |name: &str| {
            let groups = world.groups_of(&running.id).into_iter();
            groups.map(|group| group.join("work").join(name)).find(|file| file.exists())
        };
        // On cgroup v2 the memory limit includes them.
        let Some(limit) = file("memory.kmem.tcp.limit_in_bytes") else {
            run_in_background(&running, "fill_sockets");
            let memory = fs::read_to_string(file("memory.stat").unwrap()).unwrap();
            assert!(!memory.contains("\nsock 0\n"), "{memory}");
            return;
        };
        let set: u64 = fs::read_to_string(&limit).unwrap().trim().parse().unwrap();
        assert_eq!(set, 256 << 20);
        if limited {
            fs::write(&limit, (2 << 20).to_string()).unwrap();
        }
        run_in_background(&running, "fill_sockets");
        let usage = fs::read_to_string(file("memory.kmem.tcp.usage_in_bytes").unwrap()).unwrap();
        held.push(usage.trim().parse::<u64>().unwrap());
    }
    // The lower limit takes effect, so the usual one would too.
    assert!(held[0] > 8 << 20 && held[1] < 4 << 20, "{held:?}");
}

#[test]
fn terminals_are_limited_per_sandbox() {
    let world = World::new();
    let running = world.start();
    // Far fewer than the host has for all sandboxes, far more than one may have.
    let script =
        "i=10; while [ $i -lt 310 ]; do eval \"exec $i<>/dev/ptmx\" || exit 1; i=$((i+1)); done";
    let inside = shell(&running, script);
    assert_ne!(inside.exit, Exit::Code(0));
    assert!(inside.err.contains("No space left on device"), "{inside:?}");
    let outside = HostCommand::new("bash").args(["-c", script]).status().unwrap();
    assert!(outside.success(), "the host has more than that");
}
