//! The network policy of a session.

use crate::text::word_enum;

word_enum!(
    /// Network policy of a session.
    #[derive(Default)]
    NetworkPolicy, "network policy" {
        /// The gateway's own names only: model and git.
        None = "none",
        /// In addition, the names that the operator trusts, such as package registries.
        #[default]
        Trusted = "trusted",
    }
);
