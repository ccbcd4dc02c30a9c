//! `harvest zygote`: the parent of every sandbox. Runs on the bare main thread.

use std::{path::Path, process::ExitCode};

/// Serves sandboxes for the installation at `home` until nobody needs it.
pub(crate) fn main(home: &Path) -> ExitCode {
    harvest_engine::zygote::main(home)
}
