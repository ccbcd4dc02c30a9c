//! Garbage, partial frames and floods on the zygote's socket and on the bridge.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType};

use super::*;

fn dial_zygote(world: &World) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let path = world.home.join("run/zygote.sock");
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

#[test]
fn zygote_survives_floods_of_silent_and_broken_clients() {
    let world = World::new();
    let running = world.start();
    let zygotes = world.zygotes();
    let mut random = Random(17);
    let silent: Vec<OwnedFd> = (0..500).map(|_| dial_zygote(&world)).collect();
    for _ in 0..300 {
        let bytes: Vec<u8> = (0..random.below(2000)).map(|_| random.below(256) as u8).collect();
        let _refused = rustix::net::send(dial_zygote(&world), &bytes, SendFlags::NOSIGNAL);
    }
    // Unrequested descriptors must not stay open.
    let files = || fs::read_dir(format!("/proc/{}/fd", zygotes[0])).unwrap().count();
    // When this is answered, every earlier connection has been accepted.
    world.engine.thaw(&running.id).unwrap();
    let before = files();
    for _ in 0..50 {
        let (client, extra) = (dial_zygote(&world), fs::File::open("/dev/null").unwrap());
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let rights = [std::os::fd::AsFd::as_fd(&extra)];
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&rights)));
        let words = [std::io::IoSlice::new(b"{\"ask\":\"ping\"}")];
        rustix::net::sendmsg(&client, &words, &mut control, SendFlags::NOSIGNAL).unwrap();
    }
    let other = world.start();
    assert_eq!(shell(&other, "echo on").out, "on");
    eventually("passed descriptors to be closed", || files() <= before + 16);
    drop(silent);
    assert_eq!(shell(&running, "echo on").out, "on");
    assert_eq!(world.zygotes(), zygotes);
}

#[test]
fn bridge_survives_garbage_and_floods() {
    let world = World::new();
    let running = world.start();
    let mut random = Random(19);
    let mut open = Vec::new();
    for round in 0..200u64 {
        let mut stream = UnixStream::connect(&running.bridge).unwrap();
        let mut bytes: Vec<u8> = (0..random.below(300)).map(|_| random.below(256) as u8).collect();
        // Some begin like a frame of the maximum size.
        if round % 3 == 0 {
            bytes.splice(..0, [0xff; 5]);
        }
        let _refused = stream.write_all(&bytes);
        // Half of them stay open, within a frame or before the first.
        if round % 2 == 0 {
            open.push(stream);
        }
    }
    assert_eq!(shell(&running, "echo on").out, "on");
    let status = fs::read_to_string(format!("/proc/{}/status", running.pid)).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 32 * 1024, "pid 1 took {peak} KiB");
    drop(open);
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn start_without_free_pids_fails_cleanly() {
    let world = World::new();
    let running = world.start();
    let limits: Vec<PathBuf> = world
        .groups()
        .iter()
        .map(|group| group.join("zygote/pids.max"))
        .filter(|file| file.exists())
        .collect();
    assert!(!limits.is_empty());
    for limit in &limits {
        fs::write(limit, "1").unwrap();
    }
    // Standbys may still be used; afterwards no process can be started.
    let mut started = Vec::new();
    let error = loop {
        match world.engine.start(&world.spec()) {
            Ok(running) => started.push(running),
            Err(error) => break error,
        }
        assert!(started.len() < 8, "starts do not end");
    };
    assert!(error.to_string().contains("Resource temporarily unavailable"), "{error}");
    assert_eq!(world.engine.list().unwrap().len(), 1 + started.len());
    for limit in &limits {
        fs::write(limit, "max").unwrap();
    }
    assert_eq!(shell(&world.start(), "echo on").out, "on");
    assert_eq!(shell(&running, "echo on").out, "on");
}
