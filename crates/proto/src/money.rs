//! Money: whole millionths of a US dollar, and what it is counted for.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::text::{quoted, word_enum};

const MICROS_PER_DOLLAR: u64 = 1_000_000;
const DECIMALS: usize = 6;

/// The beginning of every message that refuses a model call because a budget is used up. The agent
/// repeats it in the error of its turn.
pub const BUDGET_REACHED: &str = "budget reached: ";

/// The command in such a message that raises the budget; the limit in tokens has none.
#[must_use]
pub fn budget_command(message: &str) -> Option<&str> {
    let (_, said) = message.split_once(BUDGET_REACHED)?;
    let start = said.find("`harvest budget ")? + 1;
    said.get(start..)?.split('`').next()
}

/// An amount in millionths of a US dollar, at most [`Money::MAX`].
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "u64", into = "u64")]
#[cfg_attr(
    feature = "openapi",
    derive(utoipa::ToSchema),
    schema(value_type = u64, minimum = 0, maximum = 1_000_000_000_000_u64)
)]
pub struct Money(u64);

impl Money {
    /// No money at all.
    pub const ZERO: Self = Self(0);

    /// A million dollars: sums of any number of amounts in a database stay below its limits.
    pub const MAX: Self = Self(1_000_000 * MICROS_PER_DOLLAR);

    /// At most [`Money::MAX`].
    #[must_use]
    pub fn from_micros(micros: u64) -> Self {
        Self(micros).min(Self::MAX)
    }

    /// Millionths of a dollar.
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// The sum, at most [`Money::MAX`].
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self::from_micros(self.0.saturating_add(other.0))
    }
}

/// Cents, and more digits for an amount below a cent.
impl fmt::Display for Money {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, micros) = (self.0 / MICROS_PER_DOLLAR, self.0 % MICROS_PER_DOLLAR);
        if whole == 0 && (1..10_000).contains(&micros) {
            let digits = format!("{micros:06}");
            return out.pad(&format!("$0.{}", digits.trim_end_matches('0')));
        }
        let cents = (self.0 + 5_000) / 10_000;
        out.pad(&format!("${}.{:02}", cents / 100, cents % 100))
    }
}

/// Why a text is not an amount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an amount in dollars; write it as `5` or `2.50`, at most 1000000")]
pub struct InvalidMoney(String);

impl FromStr for Money {
    type Err = InvalidMoney;

    fn from_str(text: &str) -> Result<Self, InvalidMoney> {
        let wrong = || InvalidMoney(quoted(text));
        let number = text.strip_prefix('$').unwrap_or(text);
        let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(decimals) || decimals.len() > DECIMALS {
            return Err(wrong());
        }
        let whole: u64 = whole.parse().map_err(|_| wrong())?;
        let micros: u64 = format!("{decimals:0<6}").parse().map_err(|_| wrong())?;
        let all = whole.checked_mul(MICROS_PER_DOLLAR).and_then(|all| all.checked_add(micros));
        all.filter(|all| *all <= Self::MAX.0).map(Self).ok_or_else(wrong)
    }
}

impl TryFrom<u64> for Money {
    type Error = InvalidMoney;

    fn try_from(micros: u64) -> Result<Self, InvalidMoney> {
        match Self(micros) {
            money if money <= Self::MAX => Ok(money),
            _ => Err(InvalidMoney(format!("{micros} millionths"))),
        }
    }
}

impl From<Money> for u64 {
    fn from(money: Money) -> Self {
        money.0
    }
}

word_enum!(
    /// What money is counted for.
    SpendingScope, "scope" {
        /// A session, with those that its agent created.
        Session = "session",
        /// The first repository of the sessions.
        Repository = "repository",
        /// The author of the sessions.
        User = "user",
        /// A day (UTC) of the whole server.
        Day = "day",
    }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_found_in_what_an_agent_repeats() {
        let said = "API Error: 400 {\"message\":\"budget reached: $1.00 for user a@b.c: $0.99 \
            spent; to go on, raise it: `harvest budget --user a@b.c AMOUNT`\"}";
        assert_eq!(budget_command(said), Some("harvest budget --user a@b.c AMOUNT"));
        for other in ["", "`harvest budget x AMOUNT`", "token budget reached: 7 of 7 tokens used"] {
            assert_eq!(budget_command(other), None, "{other}");
        }
    }

    #[test]
    fn amounts_parse_to_the_millionth() {
        let micros = |text: &str| text.parse::<Money>().map(Money::micros).ok();
        for (text, expected) in [("2.50", 2_500_000), ("$5", 5_000_000), ("0", 0), ("0.000001", 1)]
        {
            assert_eq!(micros(text), Some(expected), "{text}");
        }
        assert_eq!("1000000".parse(), Ok(Money::MAX));
        for text in ["", "$", "-1", "1.", ".5", "1e3", "1.0000001", "1000000.01", "five", "1,5"] {
            assert_eq!(micros(text), None, "{text}");
        }
    }

    #[test]
    fn amounts_print_as_cents_or_their_digits() {
        let shown =
            [2_500_000, 0, 1_994_999, 1_995_000, 120, 9_999, 10_000].map(Money::from_micros);
        let texts = ["$2.50", "$0.00", "$1.99", "$2.00", "$0.00012", "$0.009999", "$0.01"];
        assert_eq!(shown.map(|money| money.to_string()), texts);
    }

    #[test]
    fn amounts_stay_in_range() {
        assert_eq!(Money::MAX.plus(Money::MAX), Money::MAX);
        assert_eq!(Money::from_micros(u64::MAX), Money::MAX);
        assert!(serde_json::from_str::<Money>("1000000000001").is_err());
        assert!(serde_json::from_str::<Money>("-1").is_err());
        assert_eq!(serde_json::to_string(&Money::from_micros(7)).unwrap(), "7");
    }
}
