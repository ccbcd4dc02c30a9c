//! Machines without a session: what a host offers to who wants a sandbox, an image or a volume of their
//! own. The traits say what can be asked, a host's own code does it, and [`Commands`] runs commands on
//! top of whichever it is. Nothing here knows the store: it works without a server as well.

mod commands;
mod disks;
mod error;
mod images;
mod sandboxes;

pub use commands::Commands;
pub use disks::HostDisks;
pub use error::MachineError;
pub use images::{Archive, ImageLines, Images, ImportImage};
pub use sandboxes::{Fresh, Sandboxes};

/// Everything a host offers.
pub trait Machines: Sandboxes + Images + HostDisks {}

impl<T: Sandboxes + Images + HostDisks> Machines for T {}
