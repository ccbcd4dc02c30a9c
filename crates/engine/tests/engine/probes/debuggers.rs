//! Debuggers work inside: a process traces and reads another of its user, but not the supervisor's.

use super::*;

/// The name of the attempt that must succeed.
pub(super) const TRACE_CHILD: &str = "trace_child";

pub(super) fn seize(process: i32) -> io::Result<()> {
    // SAFETY: integers only; this process exits right afterwards, which detaches it.
    check(unsafe { libc::ptrace(libc::PTRACE_SEIZE, process, 0, 0) })
}

/// The byte at this address of another process.
pub(super) fn read_memory(process: i32, address: *const u8) -> io::Result<u8> {
    let mut byte = 0u8;
    let here = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let there = libc::iovec { iov_base: address.cast_mut().cast(), iov_len: 1 };
    // SAFETY: the byte outlives the call; the address is not used in this process.
    let read =
        unsafe { libc::process_vm_readv(process, &raw const here, 1, &raw const there, 1, 0) };
    check(read.try_into().unwrap())?;
    Ok(byte)
}

/// As a debugger does: starts a process, traces it and reads its memory.
pub(super) fn trace_child() -> io::Result<()> {
    static VALUE: u8 = 42;
    // SAFETY: the child only waits to be killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: takes no arguments.
            unsafe { libc::pause() };
        }
    }
    check(child.into())?;
    let traced = seize(child).and_then(|()| read_memory(child, &raw const VALUE));
    // SAFETY: integers only, and the status is not wanted.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert_eq!(traced?, VALUE);
    Ok(())
}

#[test]
fn debuggers_reach_only_processes_of_their_user() {
    let world = World::new();
    let running = world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
    for user in ["root", "10001"] {
        let result = |probe: &str| {
            let command = Command { user: Some(user.to_owned()), ..probe_command(probe, 1) };
            let output = exec(&running, command);
            result_of(&output.out).unwrap_or_else(|| panic!("{probe}: {output:?}"))
        };
        assert_eq!(result(TRACE_CHILD), 0, "{user}");
        for probe in ["trace", "trace_launcher", "read_memory"] {
            assert_eq!(result(probe), libc::EPERM, "{probe} as {user}");
        }
    }
}
