//! Capabilities inside a sandbox, by number. They hold over the sandbox's own user namespace only.

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
