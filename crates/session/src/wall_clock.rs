//! The wall clock, for times that users see. Timeouts use the monotonic clock.

use harvest_proto::Timestamp;

/// The wall-clock time.
pub(crate) fn now() -> Timestamp {
    std::time::SystemTime::now().into()
}
