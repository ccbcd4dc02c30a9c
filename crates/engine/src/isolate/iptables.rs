//! The redirect for kernels whose nftables lack IPv4: the same rule for the older iptables
//! interface, in the kernel's binary format. Acts on the caller's network namespace, which must be
//! fresh: the whole `nat` table is replaced.

use std::{io, net::Ipv4Addr};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::syscall;

// From the kernel's `ip_tables.h`, `x_tables.h`, `xt_tcpudp.h` and `nf_nat.h`, with 64-bit sizes.
const TABLE_OPTION: i32 = 64;
const NAME_BYTES: usize = 32;
const INFO_BYTES: usize = 84;
const HEADER_BYTES: usize = 32;
const HOOKS: usize = 5;
const OUTPUT: usize = 3;
const ACCEPT: i32 = -2;
const TCP: u16 = 6;
const NOT_THESE_PORTS: u8 = 2;
const PORT_GIVEN: u32 = 2;

/// `-t nat -A OUTPUT -p tcp -d RANGE ! --dport 53 -j REDIRECT --to-ports PORT`
pub(crate) fn install(address: Ipv4Addr, prefix: u8, port: u16) -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut info = [0u8; INFO_BYTES];
    info[..3].copy_from_slice(b"nat");
    // Reading the table makes the kernel create it.
    syscall::ip_option(&socket, TABLE_OPTION, &mut info)?;
    let number =
        |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    let (hooks, old_entries) = (number(NAME_BYTES), number(INFO_BYTES - 8));
    let table = Table::new(hooks, &rule(address, prefix, port));
    // The kernel returns the counters of the entries it drops.
    let mut counters = vec![[0u64; 2]; old_entries as usize];
    syscall::replace_table(&socket, TABLE_OPTION, table.bytes(hooks), &mut counters)
}

/// The entries of a table: a policy for each hook, one rule before the policy of OUTPUT, and an end
/// marker.
struct Table {
    entries: Vec<u8>,
    count: u32,
    first: [u32; HOOKS],
    policy: [u32; HOOKS],
}

impl Table {
    fn new(hooks: u32, rule: &[u8]) -> Self {
        let mut table =
            Self { entries: Vec::new(), count: 0, first: [0; HOOKS], policy: [0; HOOKS] };
        for hook in (0..HOOKS).filter(|hook| hooks & (1 << hook) != 0) {
            table.first[hook] = table.end();
            if hook == OUTPUT {
                table.push(rule);
            }
            table.policy[hook] = table.end();
            table.push(&entry(&[0; 8], 0, &[], &part("", &ACCEPT.to_ne_bytes())));
        }
        // The end marker's name is also its value.
        let mut name = [0u8; 30];
        name[..5].copy_from_slice(b"ERROR");
        table.push(&entry(&[0; 8], 0, &[], &part("ERROR", &name)));
        table
    }

    fn end(&self) -> u32 {
        u32::try_from(self.entries.len()).expect("six entries are a kilobyte")
    }

    fn push(&mut self, entry: &[u8]) {
        self.entries.extend_from_slice(entry);
        self.count += 1;
    }

    /// The header of a replacement up to the counters, and the entries that follow them.
    fn bytes(&self, hooks: u32) -> (Vec<u8>, &[u8]) {
        let mut head = vec![0u8; NAME_BYTES];
        head[..3].copy_from_slice(b"nat");
        let numbers = [hooks, self.count, self.end()];
        for number in numbers.iter().chain(&self.first).chain(&self.policy) {
            head.extend_from_slice(&number.to_ne_bytes());
        }
        (head, &self.entries)
    }
}

/// A rule: the packets it matches and their target.
fn entry(destination: &[u8; 8], protocol: u16, matches: &[u8], target: &[u8]) -> Vec<u8> {
    const FIXED: usize = 112;
    let mut bytes = vec![0u8; 4];
    // Source, destination and the masks of both, in this order.
    bytes.extend_from_slice(&destination[..4]);
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&destination[4..]);
    // Interface names and masks: any.
    bytes.resize(80, 0);
    bytes.extend_from_slice(&protocol.to_ne_bytes());
    bytes.resize(88, 0);
    let short =
        |size: usize| u16::try_from(size).expect("an entry is a few hundred bytes").to_ne_bytes();
    bytes.extend_from_slice(&short(FIXED + matches.len()));
    bytes.extend_from_slice(&short(FIXED + matches.len() + target.len()));
    bytes.resize(FIXED, 0);
    [&bytes, matches, target].concat()
}

/// A match or a target: size, name, revision 0, data.
fn part(name: &str, value: &[u8]) -> Vec<u8> {
    let size = (HEADER_BYTES + value.len()).next_multiple_of(8);
    let mut bytes = u16::try_from(size).expect("parts are short").to_ne_bytes().to_vec();
    bytes.extend_from_slice(name.as_bytes());
    bytes.resize(HEADER_BYTES, 0);
    bytes.extend_from_slice(value);
    bytes.resize(size, 0);
    bytes
}

fn rule(address: Ipv4Addr, prefix: u8, port: u16) -> Vec<u8> {
    let mask = u32::MAX << (32 - u32::from(prefix));
    let network = u32::from(address) & mask;
    let mut destination = [0u8; 8];
    destination[..4].copy_from_slice(&network.to_be_bytes());
    destination[4..].copy_from_slice(&mask.to_be_bytes());
    let ports: [[u8; 2]; 4] = [0, u16::MAX, 53, 53].map(u16::to_ne_bytes);
    let not_the_resolver = [&ports.concat()[..], &[0, 0, 0, NOT_THESE_PORTS]].concat();
    // One range: its flags, any address, this port.
    let to = [
        &1u32.to_ne_bytes()[..],
        &PORT_GIVEN.to_ne_bytes(),
        &[0; 8],
        &port.to_be_bytes(),
        &port.to_be_bytes(),
    ]
    .concat();
    entry(&destination, TCP, &part("tcp", &not_the_resolver), &part("REDIRECT", &to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_entries_are_contiguous() {
        let rule = rule(Ipv4Addr::new(198, 18, 0, 1), 15, 4000);
        let table = Table::new(0b11011, &rule);
        let (mut at, mut count, mut starts) = (0, 0, Vec::new());
        while at < table.entries.len() {
            starts.push(u32::try_from(at).unwrap());
            at += usize::from(u16::from_ne_bytes([table.entries[at + 90], table.entries[at + 91]]));
            count += 1;
        }
        assert_eq!((at, count), (table.entries.len(), table.count));
        for hook in [0, 1, 3, 4] {
            assert!(starts.contains(&table.first[hook]) && starts.contains(&table.policy[hook]));
        }
        assert_eq!(table.first[OUTPUT] + u32::try_from(rule.len()).unwrap(), table.policy[OUTPUT]);
        assert_eq!(rule[4..8], [198, 18, 0, 0]);
        assert_eq!(table.bytes(0b11011).0.len(), 84);
    }
}
