//! Pull requests; and the local forge for those without an account.
#![forbid(unsafe_code)]

pub mod forge;
mod slug;

pub use forge::{Forge, ForgeError, NewPull, TakeError, Taken};
pub use slug::slug;
