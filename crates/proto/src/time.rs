//! Points in time, as milliseconds since 1970, printed as RFC 3339 in UTC.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::text::string_conversions;

/// A point in time with millisecond precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String, format = "date-time"))]
pub struct Timestamp(i64);

impl Timestamp {
    /// From milliseconds since 1970.
    #[must_use]
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since 1970.
    #[must_use]
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// Time since `earlier`; zero when the clock was set back meanwhile.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// This time plus `duration`.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)))
    }

    /// This time minus `duration`.
    #[must_use]
    pub fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)))
    }

    fn system(self) -> SystemTime {
        // Years after 9999 cannot be printed; they only come from a broken clock.
        let millis = u64::try_from(self.0).unwrap_or(0).min(253_402_300_799_999);
        UNIX_EPOCH + Duration::from_millis(millis)
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let millis = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        Self(i64::try_from(millis).unwrap_or(i64::MAX))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", humantime::format_rfc3339_millis(self.system()))
    }
}

impl FromStr for Timestamp {
    type Err = humantime::TimestampError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        humantime::parse_rfc3339(text).map(Self::from)
    }
}

string_conversions!(Timestamp, humantime::TimestampError);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamp_prints_as_rfc_3339_utc() {
        let time = Timestamp::from_millis(1_763_196_705_123);
        assert_eq!(time.to_string(), "2025-11-15T08:51:45.123Z");
        assert_eq!(time.to_string().parse(), Ok(time));
    }

    #[test]
    fn clock_set_back_gives_zero_duration() {
        assert_eq!(Timestamp::from_millis(5).since(Timestamp::from_millis(9)), Duration::ZERO);
    }
}
