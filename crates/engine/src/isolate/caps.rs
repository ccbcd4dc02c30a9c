//! Capabilities inside a sandbox, by number. They hold over the sandbox's own user namespace only.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

/// A capability that pid 1 keeps. Root commands inherit them; other users lose them with the change
/// of uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the kernel's own names")]
#[repr(u32)]
pub enum Capability {
    Chown = 0,
    DacOverride = 1,
    Fowner = 3,
    Fsetid = 4,
    Kill = 5,
    Setgid = 6,
    Setuid = 7,
    NetBindService = 10,
    Setfcap = 31,
}

impl Capability {
    /// The capabilities of a sandbox: enough to run commands as other users and to install
    /// packages. Never SYS_ADMIN, NET_ADMIN, NET_RAW, SYS_PTRACE or MKNOD.
    pub const SANDBOX: [Self; 9] = [
        Self::Chown,
        Self::DacOverride,
        Self::Fowner,
        Self::Fsetid,
        Self::Kill,
        Self::Setgid,
        Self::Setuid,
        Self::NetBindService,
        Self::Setfcap,
    ];
}

// The kernel refuses numbers beyond its last capability; 63 is what a set of 64 bits can hold.
const HIGHEST: u32 = 63;

/// Drops every capability but `kept`, irrevocably and in all sets.
pub(crate) fn keep_only(kept: &[Capability]) -> io::Result<()> {
    let bits = kept.iter().fold(0u64, |bits, capability| bits | 1 << (*capability as u32));
    for number in (0..=HIGHEST).filter(|number| bits & (1 << number) == 0) {
        let set = CapabilitySet::from_bits_retain(1 << number);
        match rustix::thread::remove_capability_from_bounding_set(set) {
            Ok(()) => {}
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let kept = CapabilitySet::from_bits_retain(bits);
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}
