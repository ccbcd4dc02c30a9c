//! Translates errors of the engine and of image builds to [`SandboxError`], with a hint where one
//! is known.

use std::{borrow::Cow, error::Error};

use harvest_engine::EngineError;
use harvest_images::{ImageError, PullError};
use harvest_proto::Hint;
use harvest_session::{
    error_chain,
    sandboxes::{MissingObject, SandboxError},
};

pub(super) fn sandbox_error(doing: impl Into<String>, error: EngineError) -> SandboxError {
    let text = error.to_string();
    match error {
        EngineError::ImageMissing { image } => SandboxError::Missing(MissingObject::Image(image)),
        EngineError::SnapshotMissing { snapshot } => SandboxError::no_snapshot(&snapshot),
        EngineError::VolumeMissing { volume } => {
            SandboxError::Missing(MissingObject::Volume(volume.into()))
        }
        EngineError::NotRunning { sandbox } => SandboxError::NotRunning { sandbox },
        EngineError::Exists { .. } => {
            SandboxError::conflict("exists", text, "`harvest sandbox ls` lists the sandboxes")
        }
        EngineError::Invalid { .. } => SandboxError::invalid("invalid_sandbox", text),
        EngineError::VolumeExists { .. } => {
            SandboxError::conflict("exists", text, "`harvest volume ls` lists the volumes")
        }
        EngineError::VolumeInUse { .. } => SandboxError::conflict(
            "volume_in_use",
            text,
            "`harvest sandbox ls` lists the sandboxes that may use it",
        ),
        EngineError::NoRoom { .. } | EngineError::DiskLow { .. } => {
            SandboxError::NoSpace { what: text, hint: hint_of(&error).unwrap_or_default() }
        }
        error => failed(doing.into(), error),
    }
}

/// The error of an image that could not be made.
pub(super) fn image_error(doing: String, error: ImageError) -> SandboxError {
    match error {
        ImageError::Engine(error) => sandbox_error(doing, error),
        ImageError::Invalid { reason } => SandboxError::invalid("invalid_image", reason),
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
fn invalid_source(error: &ImageError) -> SandboxError {
    let code = match error {
        ImageError::Recipe(_) => "invalid_recipe",
        ImageError::Pull { .. } => "invalid_reference",
        _ => "invalid_archive",
    };
    SandboxError::Invalid { code, what: error_chain(error), hint: hint_of(error) }
}

fn failed<E: Hint + Error + Send + Sync + 'static>(doing: String, error: E) -> SandboxError {
    SandboxError::Failed { doing, hint: hint_of(&error), source: Box::new(error) }
}

fn hint_of(error: &impl Hint) -> Option<String> {
    error.hint().map(Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use harvest_proto::SandboxId;

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
            let error = sandbox_error("cannot try", error);
            assert_eq!(error.code(), code);
            assert!(error.hint().is_some_and(|text| text.contains(hint)), "{error:?}");
        }
    }
}
