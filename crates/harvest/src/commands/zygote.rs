//! `harvest zygote`: the parent of every sandbox. Runs on the bare main thread.

use std::{path::Path, process::ExitCode};

/// Serves sandboxes for the installation at `home` until nobody needs it, or only tries the host.
pub(crate) fn main(home: &Path, probe: bool) -> ExitCode {
    if probe {
        return harvest_engine::probe::main(home);
    }
    harvest_engine::zygote::main(home)
}
