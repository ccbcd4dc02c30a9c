//! Translates engine errors to [`HostError`], with a hint where one is known.

use std::{borrow::Cow, error::Error};

use harvest_engine::EngineError;
use harvest_images::{ImageError, PullError};
use harvest_proto::{Hint, SandboxId};
pub(super) use harvest_session::error_chain;
use harvest_session::standalone::HostError;

pub(super) fn host_error(doing: String, error: EngineError) -> HostError {
    let text = error.to_string();
    match &error {
        EngineError::ImageMissing { image } => image_missing(image),
        EngineError::SnapshotMissing { snapshot } => missing(
            "snapshot_missing",
            format!("there is no snapshot {snapshot}"),
            "`harvest snapshot ls` lists the snapshots",
        ),
        EngineError::NotRunning { sandbox } => not_running(sandbox),
        EngineError::Exists { .. } => {
            conflict("exists", text, "`harvest sandbox ls` lists the sandboxes")
        }
        EngineError::Invalid { .. } => HostError::invalid("invalid_sandbox", text),
        EngineError::VolumeMissing { volume } => missing(
            "volume_missing",
            text,
            format!("create it with `harvest volume create {volume}`"),
        ),
        EngineError::VolumeExists { .. } => {
            conflict("exists", text, "`harvest volume ls` lists the volumes")
        }
        EngineError::VolumeInUse { .. } => conflict(
            "volume_in_use",
            text,
            "`harvest sandbox ls` lists the sandboxes that may use it",
        ),
        EngineError::NoRoom { .. } | EngineError::DiskLow { .. } => {
            HostError::NoSpace { what: text, hint: hint_of(&error).unwrap_or_default() }
        }
        _ => failed(doing, error),
    }
}

/// The error of an image that could not be made.
pub(super) fn image_error(doing: String, error: ImageError) -> HostError {
    match error {
        ImageError::Engine(error) => host_error(doing, error),
        ImageError::Invalid { reason } => HostError::invalid("invalid_image", reason),
        ImageError::Recipe(_)
        | ImageError::Pull { source: PullError::Reference { .. }, .. }
        | ImageError::Unpack { .. } => invalid_source(&error),
        ImageError::Step { .. }
        | ImageError::Pull { .. }
        | ImageError::Bridge { .. }
        | ImageError::File { .. } => failed(doing, error),
    }
}

/// The error of a recipe, reference or archive that the user has to change.
fn invalid_source(error: &ImageError) -> HostError {
    let code = match error {
        ImageError::Recipe(_) => "invalid_recipe",
        ImageError::Pull { .. } => "invalid_reference",
        _ => "invalid_archive",
    };
    HostError::Invalid { code, what: error_chain(error), hint: hint_of(error) }
}

pub(super) fn image_missing(named: &str) -> HostError {
    let hint = "`harvest image ls` lists the images; `harvest image build FILE.toml` builds one";
    missing("image_missing", format!("there is no image `{named}`"), hint)
}

pub(super) fn no_such_sandbox(sandbox: &SandboxId) -> HostError {
    missing(
        "not_found",
        format!("there is no sandbox {sandbox}"),
        "`harvest sandbox ls` lists the sandboxes",
    )
}

pub(super) fn not_running(sandbox: &SandboxId) -> HostError {
    let hint = format!("`harvest sandbox start {sandbox}` starts it again with its disk");
    conflict("not_running", format!("{sandbox} is not running"), hint)
}

pub(super) fn missing(
    code: &'static str,
    what: impl Into<String>,
    hint: impl Into<String>,
) -> HostError {
    HostError::Missing { code, what: what.into(), hint: hint.into() }
}

pub(super) fn conflict(
    code: &'static str,
    what: impl Into<String>,
    hint: impl Into<String>,
) -> HostError {
    HostError::Conflict { code, what: what.into(), hint: hint.into() }
}

fn failed<E: Hint + Error + Send + Sync + 'static>(doing: String, error: E) -> HostError {
    HostError::Failed { doing, hint: hint_of(&error), source: Box::new(error) }
}

fn hint_of(error: &impl Hint) -> Option<String> {
    error.hint().map(Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixable_errors_have_a_hint() {
        let cases = [
            (EngineError::ImageMissing { image: "x".into() }, "image_missing", "image build"),
            (
                EngineError::VolumeMissing { volume: "data".parse().unwrap() },
                "volume_missing",
                "create data",
            ),
            (
                EngineError::NotRunning { sandbox: SandboxId::random() },
                "not_running",
                "sandbox start sbx_",
            ),
            (
                EngineError::NoRoom { what: "a volume".into(), needed_bytes: 2, free_bytes: 1 },
                "no_room",
                "harvest gc",
            ),
        ];
        for (error, code, hint) in cases {
            let error = host_error("cannot try".into(), error);
            assert_eq!(error.code(), code);
            assert!(error.hint().is_some_and(|text| text.contains(hint)), "{error:?}");
        }
    }
}
