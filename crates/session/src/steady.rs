//! The time for measuring how long things take. It goes evenly whatever becomes of the wall's clock, so that
//! neither a corrected clock nor a night of a closed laptop ends a turn; and it goes on evenly when another server
//! takes over, because all servers of one boot of a host count from the same moment, which the store remembers.
//!
//! It is near the wall's time and is never shown as such.

use std::{fs, time::Duration};

use harvest_proto::Timestamp;
use harvest_store::{Store, StoreError};
use rustix::time::{ClockId, clock_gettime};

use crate::wiring::now;

const KEY: &str = "steady";

/// A clock that only goes forth, and at the pace of time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steady {
    /// What it showed when the host's even clock showed nothing.
    zero: Timestamp,
}

impl Steady {
    /// The clock of the servers before us on this boot, else a new one.
    pub(crate) async fn open(store: &Store) -> Result<Self, StoreError> {
        let boot = boot();
        if let Some(zero) = store.meta_get(KEY).await?.and_then(|kept| zero(&kept, &boot)) {
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

/// What was kept, if it is of this boot.
fn zero(kept: &str, boot: &str) -> Option<Timestamp> {
    let (of, millis) = kept.split_once(' ')?;
    (of == boot && !boot.is_empty()).then(|| millis.parse().ok().map(Timestamp::from_millis))?
}

/// How long the host has been up and awake.
fn since_boot() -> Duration {
    clock_gettime(ClockId::Monotonic).try_into().unwrap_or_default()
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_clock_of_this_boot_is_gone_on_with() {
        assert_eq!(zero("a 7", "a"), Some(Timestamp::from_millis(7)));
        assert_eq!(zero("a 7", "b"), None);
        assert_eq!(zero(" 7", ""), None, "who does not know its boot begins anew");
        assert_eq!(zero("a", "a"), None);
        assert_eq!(zero("a x", "a"), None);
    }
}
