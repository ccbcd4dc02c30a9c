//! Starts sandboxes of one's own: with `/mnt/state` where it can be had, and with words for what is missing.

use anyhow::Result;
use harvest_engine::{EXEC_STATE, Engine, EngineError, Network, Running, Spec, VolumeMount};

use crate::{commands::volume_explained, printer::Printer};

/// Starts one; blocks. Without `/mnt/state`, and saying so, where the host has no room or tool for it.
pub(crate) fn begin(engine: &Engine, mut spec: Spec, with_state: bool, print: Printer) -> Result<Running> {
    if spec.network == Network::Host {
        print.note("warning: --net host reaches everything this machine does, its loopback included");
    }
    let asked_for = spec.volumes.clone();
    if with_state {
        match state(engine) {
            Ok(state) => spec.volumes.push(state),
            Err(error) => without(print, &error),
        }
    }
    let started = match engine.start(&spec) {
        Err(error) if is_of_volumes(&error) && spec.volumes.len() > asked_for.len() => {
            spec.volumes = asked_for;
            let started = engine.start(&spec);
            // Only now is it known whose fault it was.
            if started.is_ok() {
                without(print, &error);
            }
            started
        }
        other => other,
    };
    started.map_err(|error| volume_explained(error).context("cannot start a sandbox"))
}

fn state(engine: &Engine) -> Result<VolumeMount, EngineError> {
    engine.state(&EXEC_STATE.parse()?)
}

fn is_of_volumes(error: &EngineError) -> bool {
    use EngineError as Error;
    matches!(error, Error::VolumeTool { .. } | Error::VolumeMissing { .. } | Error::File { .. })
}

fn without(print: Printer, error: &EngineError) {
    let cause = std::error::Error::source(error).map_or_else(String::new, |source| format!(": {source}"));
    print.note(format!("warning: without /mnt/state: {error}{cause}"));
}
