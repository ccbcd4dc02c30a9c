//! How many seeds there are and were, as the zygote counts them. Whether to grow one is its own decision.

use serde::{Deserialize, Serialize};

use crate::{
    Engine,
    error::EngineError,
    zygote::{
        client,
        protocol::{Answer, Request},
    },
};

/// Seeds of a zygote, since it was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeedCounts {
    /// Waiting at their gate now.
    pub ready: u64,
    /// Grown ahead of time.
    pub grown: u64,
    /// Starts that took one.
    pub used: u64,
    /// Starts that took every step while somebody waited: none was ready, or none would have done.
    pub missed: u64,
}

impl Engine {
    /// The seeds of this home's zygote; `None` when there is none, or one of a version that does not count.
    /// Starts no zygote and keeps none alive.
    ///
    /// # Errors
    /// When the zygote cannot be asked.
    pub fn seeds(&self) -> Result<Option<SeedCounts>, EngineError> {
        Ok(match client::ask_if_there(&self.home, &Request::Seeds)? {
            Some(Answer::Seeds(counts)) => Some(counts),
            _ => None,
        })
    }
}
