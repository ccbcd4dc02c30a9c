//! The network inside: loopback with the synthetic address range, one redirect rule, and the
//! sockets the supervisor serves. Uses netlink directly, because the `nft` and `ip` programs cost
//! milliseconds and may be missing.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, TcpListener, UdpSocket},
    os::fd::OwnedFd,
};

use harvest_proto::launch::Descriptor;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use super::iptables;
use crate::{
    error::{Doing, StepError},
    plan::Redirect,
};

const REQUEST_ACK: u16 = 0x5;
const CREATE: u16 = 0x400;
const LOOPBACK_INDEX: u32 = 1;

/// Configures this process's network namespace; returns the descriptors for the supervisor.
pub(crate) fn set_up(
    address: Ipv4Addr,
    prefix: u8,
    ipv6: Ipv6Addr,
    redirect: Redirect,
) -> Result<Vec<(Descriptor, OwnedFd)>, StepError> {
    // Unprivileged users inside may bind every port.
    let ports = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
    std::fs::write(ports, "0").doing(|| format!("write {ports}"))?;
    // Without a protocol the socket is NETLINK_ROUTE.
    let route = open(None).doing(|| "open a netlink socket")?;
    exchange(&route, &[link_up(), address_add(libc::AF_INET, &address.octets(), prefix)])
        .doing(|| format!("give loopback the address {address}/{prefix}"))?;
    // Best effort: a kernel without IPv6 needs no IPv6 address.
    let _ = exchange(&route, &[address_add(libc::AF_INET6, &ipv6.octets(), 128)]);
    let udp = UdpSocket::bind(SocketAddrV4::new(address, 53))
        .doing(|| format!("bind UDP {address}:53"))?;
    let tcp = TcpListener::bind(SocketAddrV4::new(address, 53))
        .doing(|| format!("bind TCP {address}:53"))?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).doing(|| "bind the redirect")?;
    let port = listener.local_addr().doing(|| "read the redirect's port")?.port();
    let installed = match redirect {
        Redirect::Nftables => install_nftables(address, prefix, port),
        Redirect::Iptables => iptables::install(address, prefix, port),
    };
    installed.doing(|| format!("install the redirect by {redirect:?}").to_lowercase())?;
    Ok(vec![
        (Descriptor::DnsUdp, udp.into()),
        (Descriptor::DnsTcp, tcp.into()),
        (Descriptor::Redirect, listener.into()),
    ])
}

/// Detects which redirect works by installing one in this network namespace, which must be fresh.
/// When neither works, returns nftables, so that a start reports the missing feature.
pub(crate) fn detect_redirect() -> Redirect {
    let (address, prefix, port) = (Ipv4Addr::new(198, 18, 0, 1), 15, 53);
    if install_nftables(address, prefix, port).is_ok()
        || iptables::install(address, prefix, port).is_err()
    {
        Redirect::Nftables
    } else {
        Redirect::Iptables
    }
}

fn open(protocol: Option<rustix::net::Protocol>) -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)
}

/// Sends messages and waits for every requested acknowledgement.
fn exchange(socket: &OwnedFd, messages: &[Message]) -> io::Result<()> {
    let bytes: Vec<u8> = messages.iter().flat_map(|message| message.0.clone()).collect();
    send(socket, &bytes, SendFlags::empty())?;
    let mut wanted = messages.iter().filter(|message| message.wants_answer()).count();
    let mut buffer = vec![0u8; 16 * 1024];
    while wanted > 0 {
        let (length, _) = recv(socket, &mut *buffer, RecvFlags::empty())?;
        let mut rest = &buffer[..length];
        while let Some(head) = rest.first_chunk::<20>() {
            let size = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
            let error = i32::from_ne_bytes([head[16], head[17], head[18], head[19]]);
            // Only NLMSG_ERROR (2) is expected: the messages request nothing but acknowledgements.
            if u16::from_ne_bytes([head[4], head[5]]) == 2 {
                if error != 0 {
                    return Err(io::Error::from_raw_os_error(-error));
                }
                wanted = wanted.saturating_sub(1);
            }
            rest = rest.get(size.next_multiple_of(4).max(20)..).unwrap_or_default();
        }
    }
    Ok(())
}

/// A netlink message under construction.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = vec![0; 16];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | 1).to_ne_bytes());
        bytes.extend_from_slice(fixed);
        Self(bytes).sized()
    }

    fn with(mut self, attribute: &[u8]) -> Self {
        self.0.extend_from_slice(attribute);
        self.sized()
    }

    fn sized(mut self) -> Self {
        let length = u32::try_from(self.0.len()).expect("our messages are a few hundred bytes");
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self
    }

    fn wants_answer(&self) -> bool {
        u16::from_ne_bytes([self.0[6], self.0[7]]) & 4 != 0
    }
}

/// An attribute: length, kind, value, padded to four bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).expect("our attributes are short");
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn nested(kind: u16, parts: &[Vec<u8>]) -> Vec<u8> {
    const NESTED: u16 = 0x8000;
    attribute(kind | NESTED, &parts.concat())
}

fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), &[0]].concat())
}

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

fn link_up() -> Message {
    const UP: u32 = 1;
    // family, padding, type, index, flags, change mask
    let fixed =
        [[0u8; 4], LOOPBACK_INDEX.to_ne_bytes(), UP.to_ne_bytes(), UP.to_ne_bytes()].concat();
    Message::new(libc::RTM_NEWLINK, REQUEST_ACK, &fixed)
}

fn address_add(family: i32, address: &[u8], prefix: u8) -> Message {
    const SCOPE_HOST: u8 = 254;
    let mut fixed = vec![family.to_ne_bytes()[0], prefix, 0, SCOPE_HOST];
    fixed.extend_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    Message::new(libc::RTM_NEWADDR, REQUEST_ACK | CREATE, &fixed)
        .with(&attribute(libc::IFA_LOCAL, address))
        .with(&attribute(libc::IFA_ADDRESS, address))
}

const TABLE: &str = "harvest";
const CHAIN: &str = "out";
const REGISTER: u32 = 1;

fn nft(kind: u16, flags: u16) -> Message {
    const SUBSYSTEM: u16 = 10;
    let family = u8::try_from(libc::AF_INET).expect("AF_INET is 2");
    Message::new(SUBSYSTEM << 8 | kind, flags, &[family, 0, 0, 0])
}

fn batch(kind: u16) -> Message {
    // The batch's resource id is the subsystem in network byte order.
    Message::new(kind, 0, &[0, 0, 0, 10])
}

/// `table ip harvest { chain out { type nat hook output priority -100;
/// ip daddr RANGE tcp dport != 53 redirect to :PORT } }`
fn install_nftables(address: Ipv4Addr, prefix: u8, port: u16) -> io::Result<()> {
    const NEW_TABLE: u16 = 0;
    const NEW_CHAIN: u16 = 3;
    const NEW_RULE: u16 = 6;
    const HOOK_OUTPUT: u32 = 3;
    // The priority of destination NAT.
    let hook = nested(4, &[number(1, HOOK_OUTPUT), number(2, (-100i32).cast_unsigned())]);
    let messages = [
        batch(0x10),
        nft(NEW_TABLE, REQUEST_ACK | CREATE).with(&text(1, TABLE)),
        nft(NEW_CHAIN, REQUEST_ACK | CREATE)
            .with(&text(1, TABLE))
            .with(&text(3, CHAIN))
            .with(&hook)
            .with(&text(7, "nat")),
        nft(NEW_RULE, REQUEST_ACK | CREATE)
            .with(&text(1, TABLE))
            .with(&text(2, CHAIN))
            .with(&nested(4, &rule(address, prefix, port))),
        batch(0x11),
    ];
    exchange(&open(Some(netlink::NETFILTER))?, &messages)
}

fn rule(address: Ipv4Addr, prefix: u8, port: u16) -> Vec<Vec<u8>> {
    const NETWORK_HEADER: u32 = 1;
    const TRANSPORT_HEADER: u32 = 2;
    const EQUAL: u32 = 0;
    const NOT_EQUAL: u32 = 1;
    const L4_PROTOCOL: u32 = 16;
    const TCP: u8 = 6;
    const PORT_GIVEN: u32 = 2;
    let mask = (u32::MAX << (32 - u32::from(prefix))).to_be_bytes();
    let network = Ipv4Addr::from(u32::from(address) & u32::from_be_bytes(mask)).octets();
    let expression = |name: &str, parts: &[Vec<u8>]| nested(1, &[text(1, name), nested(2, parts)]);
    let value = |kind: u16, bytes: &[u8]| nested(kind, &[attribute(1, bytes)]);
    let payload = |base: u32, offset: u32, length: u32| {
        let parts = [number(1, REGISTER), number(2, base), number(3, offset), number(4, length)];
        expression("payload", &parts)
    };
    let compare = |how: u32, bytes: &[u8]| {
        expression("cmp", &[number(1, REGISTER), number(2, how), value(3, bytes)])
    };
    let bitwise = [
        number(1, REGISTER),
        number(2, REGISTER),
        number(3, 4),
        value(4, &mask),
        value(5, &[0; 4]),
    ];
    vec![
        payload(NETWORK_HEADER, 16, 4),
        expression("bitwise", &bitwise),
        compare(EQUAL, &network),
        expression("meta", &[number(1, REGISTER), number(2, L4_PROTOCOL)]),
        compare(EQUAL, &[TCP]),
        payload(TRANSPORT_HEADER, 2, 2),
        compare(NOT_EQUAL, &53u16.to_be_bytes()),
        expression("immediate", &[number(1, REGISTER), value(2, &port.to_be_bytes())]),
        expression("redir", &[number(1, REGISTER), number(3, PORT_GIVEN)]),
    ]
}
