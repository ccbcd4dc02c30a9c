//! Features that differ between hosts, found by trying and never by the kernel's version. The
//! results go into [`crate::HostFacts`], which the plan depends on.

use std::{fs, sync::OnceLock, thread};

use rustix::thread::{CpuSet, UnshareFlags, sched_getaffinity};

use crate::{
    child_probe::ChildProbe,
    isolate::network,
    plan::{HostSize, IdAllocation, Redirect},
    rootless,
};

/// A feature that a zygote must not use, so that its fallback is tested on hosts that have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisabledFeature {
    /// Nftables with IPv4 support.
    Nftables,
}

/// How sandboxes of this process get their ids.
pub(crate) fn id_allocation() -> IdAllocation {
    if rootless::is_active() { IdAllocation::Shared } else { IdAllocation::PerSandbox }
}

/// The size of this host, as this process sees it; read once.
pub(crate) fn host_size() -> &'static HostSize {
    static SIZE: OnceLock<HostSize> = OnceLock::new();
    SIZE.get_or_init(|| {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let meminfo = read("/proc/meminfo");
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        let set = sched_getaffinity(None).unwrap_or_default();
        let most = u32::try_from(CpuSet::MAX_CPU).unwrap_or(u32::MAX);
        HostSize {
            memory_bytes: kib.unwrap_or(0) * 1024,
            cpus: (0..most).filter(|cpu| set.is_set(*cpu as usize)).collect(),
            cpuinfo: read("/proc/cpuinfo"),
        }
    })
}

/// Detects how this host redirects packets, in a child process while the zygote prepares the rest.
pub(crate) enum RedirectProbe {
    Known(Redirect),
    Running(ChildProbe),
}

impl RedirectProbe {
    /// Starts the detection.
    ///
    /// # Safety
    /// The caller must have one thread only.
    pub(crate) unsafe fn start(disabled: &[DisabledFeature]) -> Self {
        if disabled.contains(&DisabledFeature::Nftables) {
            return Self::Known(Redirect::Iptables);
        }
        let net = u64::from(libc::CLONE_NEWNET.cast_unsigned());
        // SAFETY: the caller vouches for one thread.
        let probe = unsafe {
            ChildProbe::start(net, || Ok(redirect_name(network::detect_redirect()).to_owned()))
        };
        // A failure to probe shows again when a sandbox is started.
        probe.map_or(Self::Known(Redirect::default()), Self::Running)
    }

    /// Waits for the result.
    pub(crate) fn outcome(self) -> Redirect {
        let probe = match self {
            Self::Known(redirect) => return redirect,
            Self::Running(probe) => probe,
        };
        match probe.outcome() {
            Ok(way) if way == redirect_name(Redirect::Iptables) => Redirect::Iptables,
            _ => Redirect::default(),
        }
    }
}

/// Detects it from a multi-threaded process: a network namespace can be private to one thread.
pub(crate) fn detect_redirect_in_thread() -> Redirect {
    static FOUND: OnceLock<Redirect> = OnceLock::new();
    let act = || {
        // SAFETY: this thread was spawned for the probe and ends before other code could use its
        // sockets.
        let left = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) };
        left.map_or(Redirect::default(), |()| network::detect_redirect())
    };
    *FOUND.get_or_init(|| thread::spawn(act).join().unwrap_or_default())
}

pub(crate) fn redirect_name(redirect: Redirect) -> &'static str {
    match redirect {
        Redirect::Nftables => "nftables",
        Redirect::Iptables => "iptables",
    }
}
