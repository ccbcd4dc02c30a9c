//! Compiles the list of system calls into a seccomp filter. Written by hand, because it has three
//! answers (allow, EPERM, ENOSYS) and is a page of code.

use std::{collections::BTreeMap, sync::OnceLock};

use libc::c_long;

use super::syscalls::{ABSENT, ALLOWED, ALLOWED_UNNAMED, CONDITIONAL, NEWEST};
use crate::syscall::Instruction;

// Offsets in `struct seccomp_data`, little endian.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

const X86_64: u32 = 0xc000_003e;
// Set in the numbers of the x32 ABI, which nothing here uses.
const X32: u32 = 0x4000_0000;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;

const fn refuse(errno: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno.unsigned_abs()
}

const DENY: u32 = refuse(libc::EPERM);
const UNKNOWN: u32 = refuse(libc::ENOSYS);

// CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}. In clone's flags the bit of CLONE_NEWTIME is part of
// the exit signal.
const NEW_NAMESPACES: u32 = 0x7e02_0000;
const NEW_TIME: u32 = 0x80;

fn load(offset: u32) -> Instruction {
    Instruction { code: 0x20, if_true: 0, if_false: 0, value: offset }
}

fn argument(number: u32) -> Instruction {
    load(ARGUMENTS + 8 * number)
}

fn mask(bits: u32) -> Instruction {
    Instruction { code: 0x54, if_true: 0, if_false: 0, value: bits }
}

fn ret(action: u32) -> Instruction {
    Instruction { code: 0x06, if_true: 0, if_false: 0, value: action }
}

/// Skips `if_false` instructions unless equal.
fn unless_equal_skip(value: u32, skip: u8) -> Instruction {
    Instruction { code: 0x15, if_true: 0, if_false: skip, value }
}

/// Returns `action` if equal.
fn when_equal(value: u32, action: u32) -> [Instruction; 2] {
    [unless_equal_skip(value, 1), ret(action)]
}

/// Returns `action` if any of the bits is set.
fn when_any(bits: u32, action: u32) -> [Instruction; 2] {
    [Instruction { code: 0x45, if_true: 0, if_false: 1, value: bits }, ret(action)]
}

/// Returns `action` if the loaded value is below.
fn when_below(value: u32, action: u32) -> [Instruction; 2] {
    [Instruction { code: 0x35, if_true: 1, if_false: 0, value }, ret(action)]
}

/// The filter of every process in a sandbox. Built once: the zygote builds it before its first
/// sandbox, and children inherit the copy.
pub(crate) fn program() -> &'static [Instruction] {
    static PROGRAM: OnceLock<Vec<Instruction>> = OnceLock::new();
    PROGRAM.get_or_init(build)
}

fn build() -> Vec<Instruction> {
    let mut program =
        vec![load(ARCHITECTURE), Instruction { if_true: 1, ..unless_equal_skip(X86_64, 0) }];
    program.push(ret(UNKNOWN));
    program.push(load(NUMBER));
    // At or above the x32 bit.
    program.extend([Instruction { code: 0x35, if_true: 0, if_false: 1, value: X32 }, ret(UNKNOWN)]);
    for number in CONDITIONAL {
        let body = condition(*number);
        let length = u8::try_from(body.len()).expect("a condition is a few instructions");
        program.push(unless_equal_skip(index(*number), length));
        program.extend(body);
    }
    for (end, action) in ranges() {
        program.extend(when_below(end, action));
    }
    program.push(ret(UNKNOWN));
    program
}

fn index(number: c_long) -> u32 {
    u32::try_from(number).expect("system calls are numbered from 0")
}

/// Consecutive numbers with the same answer, each range ending before its first number.
fn ranges() -> Vec<(u32, u32)> {
    let mut answers: BTreeMap<u32, u32> =
        (0..=index(NEWEST)).map(|number| (number, DENY)).collect();
    answers.extend(ABSENT.iter().map(|number| (index(*number), UNKNOWN)));
    answers.extend(ALLOWED.iter().chain(ALLOWED_UNNAMED).map(|number| (index(*number), ALLOW)));
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for (number, answer) in answers {
        match ranges.last_mut() {
            Some(last) if last.1 == answer => last.0 = number + 1,
            _ => ranges.push((number + 1, answer)),
        }
    }
    ranges
}

/// The check of a call's arguments; every path returns an answer.
fn condition(number: c_long) -> Vec<Instruction> {
    match number {
        libc::SYS_clone => checks(&[argument(0)], &[when_any(NEW_NAMESPACES, DENY)], ALLOW),
        libc::SYS_unshare => {
            checks(&[argument(0)], &[when_any(NEW_NAMESPACES | NEW_TIME, DENY)], ALLOW)
        }
        libc::SYS_personality => {
            // PER_LINUX, ADDR_NO_RANDOMIZE, and the query value.
            let allowed = [0, 0x0004_0000, 0xffff_ffff].map(|value| when_equal(value, ALLOW));
            checks(&[argument(0)], &allowed, DENY)
        }
        libc::SYS_ioctl => {
            // TIOCSTI and TIOCLINUX inject input into another process's terminal.
            let denied = [0x5412, 0x541c].map(|request| when_equal(request, DENY));
            checks(&[argument(1)], &denied, ALLOW)
        }
        libc::SYS_mknod | libc::SYS_mknodat => {
            let mode = argument(if number == libc::SYS_mknod { 1 } else { 2 });
            let denied = [libc::S_IFCHR, libc::S_IFBLK].map(|kind| when_equal(kind, DENY));
            checks(&[mode, mask(libc::S_IFMT)], &denied, ALLOW)
        }
        libc::SYS_socket => socket(),
        libc::SYS_socketpair => {
            let unix = when_equal(libc::AF_UNIX.unsigned_abs(), ALLOW);
            checks(&[argument(0)], &[unix], refuse(libc::EAFNOSUPPORT))
        }
        _ => vec![ret(DENY)],
    }
}

/// Loads a value and returns the answer of the first check that applies to it, else `otherwise`.
fn checks(load: &[Instruction], checks: &[[Instruction; 2]], otherwise: u32) -> Vec<Instruction> {
    [load, checks.as_flattened(), &[ret(otherwise)]].concat()
}

/// Allows Unix sockets, Internet sockets except raw ones, and two kinds of netlink, which read the
/// sandbox's own network: routes and addresses (`ip`, `getaddrinfo`) and sockets (`ss`). Changes
/// need NET_ADMIN.
fn socket() -> Vec<Instruction> {
    let family = |family: i32| family.unsigned_abs();
    // The error of a kernel without the protocol; programs that write to the audit log then
    // continue.
    let missing = refuse(libc::EPROTONOSUPPORT);
    let readable = [libc::NETLINK_ROUTE, libc::NETLINK_SOCK_DIAG]
        .map(|protocol| when_equal(protocol.unsigned_abs(), ALLOW));
    let netlink = checks(&[argument(2)], &readable, missing);
    let kinds = [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET]
        .map(|kind| when_equal(kind.unsigned_abs(), ALLOW));
    let internet = checks(&[argument(1), mask(0xf)], &kinds, DENY);
    let mut body = vec![argument(0)];
    body.extend(when_equal(family(libc::AF_UNIX), ALLOW));
    for (number, then) in
        [(libc::AF_NETLINK, &netlink), (libc::AF_INET, &internet), (libc::AF_INET6, &internet)]
    {
        let length = u8::try_from(then.len()).expect("a few instructions");
        body.push(unless_equal_skip(family(number), length));
        body.extend(then);
    }
    body.push(ret(refuse(libc::EAFNOSUPPORT)));
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets the filter as the kernel does.
    fn answer(number: c_long, arguments: [u64; 6]) -> u32 {
        answer_on(X86_64, number, arguments)
    }

    fn answer_on(architecture: u32, number: c_long, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend_from_slice(&index(number).to_le_bytes());
        data.extend_from_slice(&architecture.to_le_bytes());
        data.extend_from_slice(&[0; 8]);
        data.extend(arguments.iter().flat_map(|argument| argument.to_le_bytes()));
        let (program, mut at, mut value) = (program(), 0, 0u32);
        loop {
            let Instruction { code, if_true, if_false, value: operand } = program[at];
            let jump = |taken: bool| 1 + usize::from(if taken { if_true } else { if_false });
            at += match code {
                0x20 => {
                    let from = operand as usize;
                    value = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
                    1
                }
                0x54 => {
                    value &= operand;
                    1
                }
                0x15 => jump(value == operand),
                0x35 => jump(value >= operand),
                0x45 => jump(value & operand != 0),
                0x06 => return operand,
                other => panic!("unknown instruction {other:#x}"),
            };
        }
    }

    #[test]
    fn common_calls_are_allowed() {
        for number in [
            libc::SYS_read,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_futex,
            libc::SYS_statx,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
        ] {
            assert_eq!(answer(number, [0; 6]), ALLOW, "{number}");
        }
    }

    #[test]
    fn calls_that_reach_the_host_are_refused() {
        for number in [
            libc::SYS_mount,
            libc::SYS_fsopen,
            libc::SYS_move_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_setns,
            libc::SYS_pidfd_getfd,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_kexec_load,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_open_by_handle_at,
            libc::SYS_reboot,
        ] {
            assert_eq!(answer(number, [0; 6]), DENY, "{number}");
        }
    }

    #[test]
    fn clone3_io_uring_and_newer_calls_return_enosys() {
        for number in
            [libc::SYS_clone3, libc::SYS_io_uring_setup, NEWEST + 1, 0x4000_0000, 0x7fff_ffff]
        {
            assert_eq!(answer(number, [0; 6]), UNKNOWN, "{number}");
        }
        assert_eq!(answer_on(0x4000_0003, libc::SYS_read, [0; 6]), UNKNOWN);
    }

    #[test]
    fn new_namespaces_are_refused() {
        for flag in [
            0x80u64,
            0x2_0000,
            0x200_0000,
            0x400_0000,
            0x800_0000,
            0x1000_0000,
            0x2000_0000,
            0x4000_0000,
        ] {
            assert_eq!(answer(libc::SYS_unshare, [flag, 0, 0, 0, 0, 0]), DENY, "{flag:#x}");
            if flag != 0x80 {
                assert_eq!(answer(libc::SYS_clone, [flag | 17, 0, 0, 0, 0, 0]), DENY, "{flag:#x}");
            }
        }
        // The flags of pthread_create and of fork.
        assert_eq!(answer(libc::SYS_clone, [0x3d_0f00, 0, 0, 0, 0, 0]), ALLOW);
        assert_eq!(answer(libc::SYS_clone, [17, 0, 0, 0, 0, 0]), ALLOW);
    }

    #[test]
    fn only_unix_internet_and_reading_netlink_is_allowed() {
        let socket = |family: i32, kind: i32, protocol: i32| {
            answer(libc::SYS_socket, [family as u64, kind as u64, protocol as u64, 0, 0, 0])
        };
        assert_eq!(socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0), ALLOW);
        assert_eq!(socket(libc::AF_INET6, libc::SOCK_DGRAM, 0), ALLOW);
        assert_eq!(socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0), ALLOW);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE), ALLOW);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_SOCK_DIAG), ALLOW);
        assert_eq!(socket(libc::AF_INET, libc::SOCK_RAW, 1), DENY);
        assert_eq!(socket(libc::AF_INET6, libc::SOCK_RAW | libc::SOCK_NONBLOCK, 58), DENY);
        let missing = refuse(libc::EPROTONOSUPPORT);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER), missing);
        for family in [libc::AF_PACKET, libc::AF_VSOCK, libc::AF_ALG, libc::AF_BLUETOOTH] {
            assert_eq!(
                socket(family, libc::SOCK_STREAM, 0),
                refuse(libc::EAFNOSUPPORT),
                "{family}"
            );
        }
    }

    #[test]
    fn socket_pairs_are_unix_only() {
        let pair = |family: i32| answer(libc::SYS_socketpair, [family as u64, 1, 0, 0, 0, 0]);
        assert_eq!(pair(libc::AF_UNIX), ALLOW);
        for family in [libc::AF_TIPC, libc::AF_INET, libc::AF_VSOCK, libc::AF_NETLINK] {
            assert_eq!(pair(family), refuse(libc::EAFNOSUPPORT), "{family}");
        }
    }

    #[test]
    fn mknod_creates_pipes_but_no_devices() {
        let mknod = |mode: u32| answer(libc::SYS_mknodat, [0, 0, u64::from(mode), 0, 0, 0]);
        assert_eq!(mknod(libc::S_IFIFO | 0o644), ALLOW);
        assert_eq!(mknod(libc::S_IFCHR | 0o644), DENY);
        assert_eq!(mknod(libc::S_IFBLK | 0o644), DENY);
    }
}
