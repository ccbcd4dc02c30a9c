//! `harvest zygote`: the parent process of every sandbox. Runs on the main thread, without a
//! runtime.

use std::{path::Path, process::ExitCode};

/// Runs the zygote of the installation at `home` until it is unused, or only probes the host.
pub(crate) fn main(home: &Path, probe: bool) -> ExitCode {
    if probe {
        return harvest_engine::probe::main(home);
    }
    harvest_engine::zygote::main(home)
}
