//! What the user can do about an error.

use std::{borrow::Cow, io};

/// An error that may know what the user can do about it. The message itself does not say it: the
/// printer and the API show the hint apart.
pub trait Hint {
    /// The next step for the user, where known.
    fn hint(&self) -> Option<Cow<'_, str>>;
}

/// The hint for a full disk of the machine.
pub const DISK_FULL: &str = "`harvest df` shows disk usage, `harvest gc` removes unused data";

impl Hint for io::Error {
    fn hint(&self) -> Option<Cow<'_, str>> {
        (self.kind() == io::ErrorKind::StorageFull).then_some(DISK_FULL.into())
    }
}
