//! A monotonic clock for timeouts: neither a corrected wall clock nor a suspended laptop ends a
//! turn. All servers of one boot of the host count from the same start, which is stored, so
//! timeouts survive a restart. Its values are near the wall-clock time but are never shown.

use std::{fs, time::Duration};

use harvest_proto::Timestamp;
use harvest_store::{Store, StoreError};
use rustix::time::{ClockId, clock_gettime};

use crate::wall_clock::now;

const KEY: &str = "monotonic_clock";

#[derive(Debug, Clone, Copy)]
pub(crate) struct MonotonicClock {
    /// The value at which the host's monotonic clock was zero.
    zero: Timestamp,
}

impl MonotonicClock {
    /// Continues the clock of earlier servers of this boot, or starts a new one.
    pub(crate) async fn open(store: &Store) -> Result<Self, StoreError> {
        let boot = boot_id();
        if let Some(zero) = store.meta_get(KEY).await?.and_then(|stored| parse_zero(&stored, &boot))
        {
            return Ok(Self { zero });
        }
        let millis = i64::try_from(since_boot().as_millis()).unwrap_or(0);
        let zero = Timestamp::from_millis(now().as_millis().saturating_sub(millis));
        store.meta_set(KEY, &format!("{boot} {}", zero.as_millis())).await?;
        Ok(Self { zero })
    }

    pub(crate) fn now(self) -> Timestamp {
        self.zero.after(since_boot())
    }
}

/// The stored start, if it is of this boot.
fn parse_zero(stored: &str, boot: &str) -> Option<Timestamp> {
    let (stored_boot, millis) = stored.split_once(' ')?;
    (stored_boot == boot && !boot.is_empty())
        .then(|| millis.parse().ok().map(Timestamp::from_millis))?
}

/// Since the boot of the host, without the time it was suspended.
fn since_boot() -> Duration {
    clock_gettime(ClockId::Monotonic).try_into().unwrap_or_default()
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_clock_of_this_boot_continues() {
        assert_eq!(parse_zero("a 7", "a"), Some(Timestamp::from_millis(7)));
        assert_eq!(parse_zero("a 7", "b"), None);
        assert_eq!(parse_zero(" 7", ""), None, "without a boot id the clock starts anew");
        assert_eq!(parse_zero("a", "a"), None);
        assert_eq!(parse_zero("a x", "a"), None);
    }
}
