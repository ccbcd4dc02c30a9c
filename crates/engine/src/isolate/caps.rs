//! Drops capabilities.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::plan::Capability;

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
