//! Machines without a session: what a host offers to who wants a sandbox, an image or a volume of their
//! own. The traits say what can be asked, a host's own code does it, and [`Commands`] runs commands on
//! top of whichever it is. All of it works without a server as well; with one, sandboxes take places.

mod commands;
mod counted;
mod disks;
mod error;
mod images;
mod sandboxes;

pub use commands::Commands;
pub use counted::{Asker, Outcome};
pub use disks::HostDisks;
pub use error::MachineError;
pub use images::{Archive, ImageLines, Images, ImportImage};
pub use sandboxes::{Forks, Fresh, NewSandbox, Sandboxes};

/// Everything a host offers.
pub trait Machines: Sandboxes + Images + HostDisks {}

impl<T: Sandboxes + Images + HostDisks> Machines for T {}
