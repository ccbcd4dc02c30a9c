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

/// The name of an attempt that must succeed.
pub(super) const LIST_SOCKETS: &str = "list_sockets";

/// As `ss` does: asks the kernel for all TCP sockets of this network.
pub(super) fn list_sockets() -> io::Result<()> {
    // `struct nlmsghdr`: length, SOCK_DIAG_BY_FAMILY, request and dump; then `inet_diag_req_v2`:
    // family, protocol, and every state.
    let mut request = [0u8; 72];
    request[..8].copy_from_slice(&[72, 0, 0, 0, 20, 0, 0x01, 0x03]);
    request[16..24].copy_from_slice(&[2, 6, 0, 0, 0xff, 0x0f, 0, 0]);
    let mut reply = [0u8; 8192];
    // SAFETY: both buffers outlive the calls; the socket ends with this process.
    let length = unsafe {
        let socket = libc::socket(libc::AF_NETLINK, libc::SOCK_DGRAM, libc::NETLINK_SOCK_DIAG);
        check(socket.into())?;
        check(libc::send(socket, request.as_ptr().cast(), request.len(), 0).try_into().unwrap())?;
        libc::recv(socket, reply.as_mut_ptr().cast(), reply.len(), 0)
    };
    check(length.try_into().unwrap())?;
    // NLMSG_ERROR carries a negated error code after its header.
    match u16::from_ne_bytes([reply[4], reply[5]]) {
        2 => {
            let code = i32::from_ne_bytes([reply[16], reply[17], reply[18], reply[19]]);
            Err(io::Error::from_raw_os_error(-code))
        }
        _ => Ok(()),
    }
}

#[test]
fn sockets_and_interfaces_inside_can_be_listed() {
    let world = World::new();
    let running = world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
    let command = Command { user: Some("10001".to_owned()), ..probe_command(LIST_SOCKETS, 1) };
    let listed = exec(&running, command);
    let result = result_of(&listed.out);
    // A kernel without the diagnostic modules answers so on the host too.
    assert!(result == Some(0) || result == Some(result_on_host(LIST_SOCKETS, 1)), "{listed:?}");
    assert_ne!(result, Some(libc::EPROTONOSUPPORT), "the filter allows the socket");
    let interfaces = shell(&running, "ip addr");
    assert!(interfaces.out.contains("lo:"), "{interfaces:?}");
    let change = shell(&running, "ip link set lo down");
    assert_ne!(change.exit, Exit::Code(0), "the network cannot be changed: {change:?}");
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
