//! How much a model is to think.

use crate::text::word_enum;

word_enum!(
    /// How much the model thinks before it answers: a prompt's or a session's. The levels that
    /// every agent knows.
    Effort, "effort" {
        /// Fast and cheap.
        Low = "low",
        /// Between the two.
        Medium = "medium",
        /// Slow and thorough.
        High = "high",
    }
);
