//! What this host can do that another cannot, found out by trying and never by the kernel's version.
//! What is found goes into [`crate::HostFacts`], from where the plan takes it.

use std::{sync::OnceLock, thread};

use rustix::thread::UnshareFlags;

use crate::{isolate::network, plan::Redirect, probe::trial::Trial};

/// Something a zygote is told to do without, so that its ways around are tried on hosts that have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// Nftables that know IPv4.
    Nftables,
}

/// How this host redirects, being tried in a process of its own while the zygote prepares the rest.
pub(crate) enum RedirectTrial {
    Known(Redirect),
    Underway(Trial),
}

impl RedirectTrial {
    /// Starts trying.
    ///
    /// # Safety
    /// The caller must have one thread only.
    pub(crate) unsafe fn start(lacking: &[Lack]) -> Self {
        if lacking.contains(&Lack::Nftables) {
            return Self::Known(Redirect::Iptables);
        }
        let net = u64::from(libc::CLONE_NEWNET.cast_unsigned());
        // SAFETY: the caller vouches for one thread.
        let trial = unsafe { Trial::start(net, || Ok(word(network::redirect_here()).to_owned())) };
        // Who may not try says so when a sandbox is started.
        trial.map_or(Self::Known(Redirect::default()), Self::Underway)
    }

    /// What came of it.
    pub(crate) fn found(self) -> Redirect {
        let trial = match self {
            Self::Known(redirect) => return redirect,
            Self::Underway(trial) => trial,
        };
        match trial.outcome() {
            Ok(way) if way == word(Redirect::Iptables) => Redirect::Iptables,
            _ => Redirect::default(),
        }
    }
}

/// The same for a process with threads: network namespaces are a thread's own.
pub(crate) fn redirect_in_a_thread() -> Redirect {
    static FOUND: OnceLock<Redirect> = OnceLock::new();
    let act = || {
        // SAFETY: a thread of our own, which ends before anyone else could use a socket of it.
        let left = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) };
        left.map_or(Redirect::default(), |()| network::redirect_here())
    };
    *FOUND.get_or_init(|| thread::spawn(act).join().unwrap_or_default())
}

pub(crate) fn word(redirect: Redirect) -> &'static str {
    match redirect {
        Redirect::Nftables => "nftables",
        Redirect::Iptables => "iptables",
    }
}
