//! Counts of the zygote's standby processes. The zygote alone decides when to prefork one.

use serde::{Deserialize, Serialize};

use crate::{
    Engine,
    error::EngineError,
    zygote::{
        client,
        protocol::{Answer, Request},
    },
};

/// Standby processes of a zygote since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyCounts {
    /// Ready for a start now.
    pub ready: u64,
    /// Preforked in advance.
    pub preforked: u64,
    /// Starts that used a standby.
    pub used: u64,
    /// Starts that ran every step on demand, because no suitable standby was ready.
    pub missed: u64,
}

impl Engine {
    /// The standby counts of this home's zygote; `None` when no zygote runs. Starts no zygote and
    /// keeps none alive.
    ///
    /// # Errors
    /// When the zygote cannot be reached.
    pub fn standby_counts(&self) -> Result<Option<StandbyCounts>, EngineError> {
        Ok(match client::ask_if_running(&self.disk.home, &Request::StandbyCounts)? {
            Some(Answer::StandbyCounts(counts)) => Some(counts),
            _ => None,
        })
    }
}
