//! Only Unix and Internet sockets, in the sandbox's own network.

use std::os::{linux::net::SocketAddrExt, unix::net::SocketAddr};

use super::*;

pub(super) const PROBES: &[Probe] = &[
    probe("raw_socket", libc::EPERM, ADMIN, || {
        socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP)
    }),
    probe("raw_socket_v6", libc::EPERM, ADMIN, || {
        socket(libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6)
    }),
    probe("packet_socket", libc::EAFNOSUPPORT, ADMIN, || {
        socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0)
    }),
    probe("vsock", libc::EAFNOSUPPORT, SECCOMP, || socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
    probe("crypto_socket", libc::EAFNOSUPPORT, SECCOMP, || {
        socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0)
    }),
    probe("firewall_socket", libc::EPROTONOSUPPORT, SECCOMP, || {
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER)
    }),
    probe("audit_socket", libc::EPROTONOSUPPORT, SECCOMP, || {
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT)
    }),
    probe("device_events", libc::EPROTONOSUPPORT, SECCOMP, || {
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_KOBJECT_UEVENT)
    }),
];

fn socket(family: i32, kind: i32, protocol: i32) -> io::Result<()> {
    // SAFETY: integers only; the socket ends with this process.
    check(unsafe { libc::socket(family, kind, protocol) }.into())
}

#[test]
fn only_unix_and_internet_sockets_exist() {
    assert_blocked(PROBES, 1);
}

#[test]
fn abstract_sockets_need_the_hosts_network() {
    for (network, wanted) in [(Network::Door, libc::ECONNREFUSED), (Network::Host, 0)] {
        let world = World::new();
        let spec = Spec { binds: probe_binds(), network, ..world.spec() };
        let running = world.engine.start(&spec).unwrap();
        let name = format!("harvest-test-{}", running.id.part());
        let _listener =
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let mut command = probe_command("abstract_socket", 1);
        command.env.insert("HARVEST_PROBE_SOCKET".to_owned(), name);
        let inside = exec(&running, command);
        assert_eq!(result_of(&inside.out), Some(wanted), "{network:?} {inside:?}");
    }
}

#[test]
fn only_synthetic_addresses_are_reachable() {
    let world = World::new();
    let running = world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
    // Tests must not reach other hosts: reaching the synthetic address proves that the probe works.
    let outside = exec(&running, probe_command("connect_outside", 1));
    assert_eq!(result_of(&outside.out), Some(libc::ENETUNREACH), "{outside:?}");
    let within = exec(&running, probe_command("connect_synthetic", 1));
    assert_ne!(result_of(&within.out), Some(libc::ENETUNREACH), "{within:?}");
}

/// Connects to an abstract socket of the host.
pub(super) fn dial_abstract() -> io::Result<()> {
    let name = std::env::var("HARVEST_PROBE_SOCKET").unwrap();
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?).map(drop)
}
