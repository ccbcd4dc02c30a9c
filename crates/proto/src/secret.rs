//! A wrapper for values that must not be printed.

use std::{convert::Infallible, fmt, str::FromStr};

use serde::{Deserialize, Deserializer};

/// A secret value. `Debug` prints `***`, and there is neither `Display` nor `Serialize`, so that it
/// cannot get into a log, an event or a response by accident.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    /// Wraps a secret value.
    pub const fn new(value: T) -> Self {
        Self(value)
    }

    /// The value itself. Review every caller.
    pub const fn expose(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("***")
    }
}

impl FromStr for Secret<String> {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self::new(text.to_owned()))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Secret<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        T::deserialize(from).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_hides_the_secret() {
        assert_eq!(format!("{:?}", Some(Secret::new("sk-ant-123"))), "Some(***)");
    }
}
