//! Two sandboxes side by side: neither finds, signals, fills or starves anything of the other, nor of
//! the host. That a probe works is shown within one sandbox, where nothing is in its way.

use std::os::{fd::OwnedFd, linux::net::SocketAddrExt, unix::net::SocketAddr};

use super::*;

/// What probes do that have no guard to leave out.
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
            // SAFETY: the sandbox's limit of processes ends it.
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
    // SAFETY: the kernel has just opened it, for nobody else.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(i32::try_from(result).unwrap()) })
}

fn shared_memory(flags: i32) -> io::Result<i32> {
    // SAFETY: numbers only.
    let id = unsafe { libc::shmget(0x6861_7276, 4096, flags) };
    check(id.into()).map(|()| id)
}

fn queue(flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: the name outlives the call; without attributes the defaults hold.
    descriptor(unsafe { libc::syscall(libc::SYS_mq_open, c"left".as_ptr(), flags, 0o666, 0) })
}

/// Leaves a piece of shared memory, a queue and a socket, says so, and stays until its input ends.
fn leave_things() -> io::Result<()> {
    shared_memory(libc::IPC_CREAT | 0o666)?;
    let _queue = queue(libc::O_CREAT | libc::O_RDWR)?;
    let _socket = UnixListener::bind_addr(&SocketAddr::from_abstract_name("left")?)?;
    println!("\nleft: {}", std::process::id());
    stay()
}

/// Writes into connections nobody reads until they take no more, says so, and stays.
fn fill_sockets() -> io::Result<()> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let (mut ends, mut held) = (Vec::new(), 0);
    for _ in 0..16 {
        let mut near = std::net::TcpStream::connect(listener.local_addr()?)?;
        ends.push(listener.accept()?.0);
        // A write that waits this long waits for ever.
        near.set_write_timeout(Some(Duration::from_millis(100)))?;
        while let Ok(count) = near.write(&[0; 65536]) {
            held += count;
        }
        ends.push(near);
    }
    println!("\nleft: {held} bytes");
    stay()
}

fn stay() -> io::Result<()> {
    io::stdin().read_to_end(&mut Vec::new()).map(drop)
}

/// One more of something the kernel counts by user.
fn one_more(what: &str) -> io::Result<Vec<OwnedFd>> {
    match what {
        // SAFETY: numbers only.
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
            // Counted as long as it is open, and gone with this process, on the host too.
            // SAFETY: as above.
            check(unsafe { libc::syscall(libc::SYS_mq_unlink, name.as_ptr()) })?;
            Ok(vec![queue])
        }
        "signals" => {
            let signal = libc::SIGRTMIN();
            // SAFETY: both structures are plain numbers that outlive the calls; an empty set is a valid mask,
            // and the signal is blocked in the one thread it goes to, so that it only is counted.
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

/// Takes all there is of something, says so, and stays until its input ends.
fn take_all(what: &str) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: the limit outlives the call; lowering or keeping it harms nobody.
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
    stay()
}

/// Runs a probe that stays; answers when it has said what it left. It ends with its sandbox.
fn stay_inside(running: &Running, probe: &str) {
    let (said, heard) = std::sync::mpsc::channel();
    let bridge = running.bridge.clone();
    let probe = Command { user: Some("10001".to_owned()), ..probe_command(probe, 1) };
    // Its input is a pipe nobody writes to.
    let script = "mkfifo /dev/shm/never; exec \"$@\" <>/dev/shm/never";
    let mut argv: Vec<String> = ["sh", "-c", script, "sh"].map(str::to_owned).into();
    argv.extend(probe.argv.clone());
    thread::spawn(move || {
        let mut text = String::new();
        let mut guest = Guest::dial(&bridge).unwrap();
        let ended = guest.exec(Command { argv, ..probe }, &[], &mut |_, bytes| {
            text.push_str(&String::from_utf8_lossy(bytes));
            if text.contains("left: ") {
                let _heard_already = said.send(text.clone());
            }
        });
        let _heard_already = said.send(format!("{text} {ended:?}"));
    });
    let text = heard.recv().unwrap();
    assert!(text.contains("left: "), "{text}");
}

fn result(running: &Running, probe: &str) -> i32 {
    let said = exec(running, Command { user: Some("10001".to_owned()), ..probe_command(probe, 1) });
    result_of(&said.out).unwrap_or_else(|| panic!("{probe} said nothing: {said:?}"))
}

fn two(world: &World) -> [Running; 2] {
    [0, 1].map(|_| world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap())
}

#[test]
fn a_sandbox_finds_nothing_its_neighbour_left() {
    let world = World::new();
    let [one, other] = two(&world);
    stay_inside(&one, "leave_things");
    let things = [
        ("find_shared_memory", libc::ENOENT),
        ("find_queue", libc::ENOENT),
        ("find_socket", libc::ECONNREFUSED),
    ];
    for (probe, missing) in things {
        assert_eq!(result(&one, probe), 0, "{probe} where it was left");
        assert_eq!(result(&other, probe), missing, "{probe} next door");
        assert_eq!(outside(probe, 1), missing, "{probe} on the host");
    }
    // Processes and files by their names on the host.
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
fn what_the_kernel_counts_by_user_is_counted_by_sandbox() {
    for what in ["inotify", "queues", "signals"] {
        let world = World::new();
        let [one, other] = two(&world);
        let (take, need) = (format!("take {what}"), format!("need {what}"));
        stay_inside(&one, &take);
        assert_ne!(result(&one, &need), 0, "{what}: it has taken all there is");
        assert_eq!(result(&other, &need), 0, "{what} next door");
        assert_eq!(outside(&need, 1), 0, "{what} on the host");
    }
}

#[test]
fn what_sockets_hold_counts_as_the_sandboxes_and_is_limited() {
    let world = World::new();
    let mut held = Vec::new();
    for limited in [false, true] {
        let running = world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
        let file = |name: &str| {
            let places =
                world.groups().into_iter().map(|group| group.join(running.id.part()).join("work"));
            places.map(|place| place.join(name)).find(|file| file.exists())
        };
        // On cgroup v2 the memory limit counts them with everything else.
        let Some(limit) = file("memory.kmem.tcp.limit_in_bytes") else {
            stay_inside(&running, "fill_sockets");
            let memory = fs::read_to_string(file("memory.stat").unwrap()).unwrap();
            assert!(!memory.contains("\nsock 0\n"), "{memory}");
            return;
        };
        let set: u64 = fs::read_to_string(&limit).unwrap().trim().parse().unwrap();
        assert_eq!(set, 256 << 20);
        if limited {
            fs::write(&limit, (2 << 20).to_string()).unwrap();
        }
        stay_inside(&running, "fill_sockets");
        let usage = fs::read_to_string(file("memory.kmem.tcp.usage_in_bytes").unwrap()).unwrap();
        held.push(usage.trim().parse::<u64>().unwrap());
    }
    // A lower one bites, so the usual one would.
    assert!(held[0] > 8 << 20 && held[1] < 4 << 20, "{held:?}");
}

#[test]
fn one_sandbox_has_its_share_of_terminals_and_no_more() {
    let world = World::new();
    let running = world.start();
    // Far fewer than the host has for all sandboxes together, far more than one may have.
    let script =
        "i=10; while [ $i -lt 310 ]; do eval \"exec $i<>/dev/ptmx\" || exit 1; i=$((i+1)); done";
    let inside = shell(&running, script);
    assert_ne!(inside.exit, Exit::Code(0));
    assert!(inside.err.contains("No space left on device"), "{inside:?}");
    let outside = HostCommand::new("bash").args(["-c", script]).status().unwrap();
    assert!(outside.success(), "the host has more than that");
}
