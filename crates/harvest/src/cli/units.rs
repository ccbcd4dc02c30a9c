//! Parses sizes, core counts and turn ranges from the command line.

use std::str::FromStr;

use harvest_proto::{InvalidMoney, Money};

/// A number of bytes: `512m`, `10g`, `4096`. Units are powers of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size; write it as `512m` or `10g`");
        let lower = text.to_ascii_lowercase();
        let digits = lower.find(|char: char| !char.is_ascii_digit()).unwrap_or(lower.len());
        let (number, unit) = lower.split_at(digits);
        let shift = match unit.trim_end_matches("ib").trim_end_matches('b') {
            "" => 0,
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            _ => return Err(wrong()),
        };
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes > 0);
        bytes.map(Self).ok_or_else(wrong)
    }
}

impl TryFrom<String> for Size {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// CPU cores: `2`, `0.5`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cores(f64);

impl Cores {
    /// Thousandths of a core.
    pub(crate) fn millis(self) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "parsing checked the bounds"
        )]
        let millis = (self.0 * 1000.0).round() as u32;
        millis
    }
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cores = text.parse::<f64>().ok().filter(|cores| (0.01..=4096.0).contains(cores));
        cores
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a number of cores; write it as `2` or `0.5`"))
    }
}

/// An amount in dollars: `2.50`; `none` removes a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Amount(pub(crate) Option<Money>);

impl FromStr for Amount {
    type Err = InvalidMoney;

    fn from_str(text: &str) -> Result<Self, InvalidMoney> {
        match text {
            "none" => Ok(Self(None)),
            amount => amount.parse().map(|amount| Self(Some(amount))),
        }
    }
}

/// A range of turns: `3`, `1..3`, `1..`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnRange {
    /// The changes of one turn.
    One(u32),
    /// From the end of one turn to the end of another, or to the current state.
    Between(u32, Option<u32>),
}

impl TurnRange {
    /// The query string of a diff request.
    pub(crate) fn query(self) -> String {
        match self {
            Self::One(turn) => format!("?turn={turn}"),
            Self::Between(from, None) => format!("?from={from}"),
            Self::Between(from, Some(to)) => format!("?from={from}&to={to}"),
        }
    }
}

impl FromStr for TurnRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a turn or range; write it as `3` or `1..3`");
        let number = |text: &str| text.parse::<u32>().map_err(|_| wrong());
        match text.split_once("..") {
            None => number(text).map(Self::One),
            Some((from, "")) => Ok(Self::Between(number(from)?, None)),
            Some((from, to)) => Ok(Self::Between(number(from)?, Some(number(to)?))),
        }
    }
}

/// `1.2 GB`, `340 MB`, `12 kB`: powers of 1000.
pub(crate) fn bytes(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{} kB", bytes / 1_000),
        1_000_000..1_000_000_000 => format!("{} MB", bytes / 1_000_000),
        _ => format!("{}.{} GB", bytes / 1_000_000_000, bytes % 1_000_000_000 / 100_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turn_ranges_become_diff_queries() {
        let query = |text: &str| text.parse::<TurnRange>().map(TurnRange::query);
        assert_eq!(query("3").as_deref(), Ok("?turn=3"));
        assert_eq!(query("0..3").as_deref(), Ok("?from=0&to=3"));
        assert_eq!(query("2..").as_deref(), Ok("?from=2"));
        for wrong in ["", "..", "..2", "a", "1...2", "-1"] {
            assert!(query(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_parse_units_and_reject_zero() {
        let size = |text: &str| text.parse::<Size>().map(|size| size.0);
        assert_eq!(
            [size("512m"), size("10G"), size("4096")],
            [Ok(512 << 20), Ok(10 << 30), Ok(4096)]
        );
        assert_eq!([size("2GiB"), size("1kb")], [Ok(2 << 30), Ok(1024)]);
        for text in ["", "m", "-1", "1.5g", "0", "5x", "99999999999t", "1 g"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cores_may_be_fractions() {
        let cores = |text: &str| text.parse::<Cores>().map(Cores::millis);
        assert_eq!([cores("2"), cores("0.5"), cores("1.25")], [Ok(2000), Ok(500), Ok(1250)]);
        for text in ["", "0", "-1", "nan", "inf", "two"] {
            assert!(cores(text).is_err(), "{text}");
        }
    }

    #[test]
    fn byte_counts_print_in_decimal_units() {
        assert_eq!(
            [7, 12_345, 340_000_000, 1_260_000_000].map(bytes),
            ["7 B", "12 kB", "340 MB", "1.2 GB"]
        );
    }
}
