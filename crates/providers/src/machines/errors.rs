//! The engine's errors in the words of the API, each with what to do next where we know it.

use harvest_engine::{EngineError, PullError, UnpackError};
use harvest_proto::SandboxId;
use harvest_session::machines::MachineError;
pub(super) use harvest_session::words;

const GC: &str = "`harvest df` shows what takes the room, `harvest gc` removes what nothing uses";

/// What the engine said while it was `doing` something.
pub(super) fn explained(doing: String, error: EngineError) -> MachineError {
    let text = error.to_string();
    match &error {
        EngineError::ImageMissing { image } => image_missing(image),
        EngineError::SnapshotMissing { snapshot } => missing(
            "snapshot_missing",
            format!("there is no snapshot {snapshot}"),
            "`harvest snapshot ls` lists those there are",
        ),
        EngineError::NotRunning { sandbox } => not_running(sandbox),
        EngineError::Exists { .. } => {
            conflict("exists", text, "`harvest sandbox ls` lists those there are")
        }
        EngineError::Invalid { .. } => MachineError::invalid("invalid_sandbox", text),
        EngineError::VolumeMissing { volume } => {
            missing("volume_missing", text, format!("`harvest volume create {volume}` makes it"))
        }
        EngineError::VolumeExists { .. } => {
            conflict("exists", text, "`harvest volume ls` lists those there are")
        }
        EngineError::VolumeInUse { .. } => {
            conflict("volume_in_use", text, "`harvest sandbox ls` shows who may have it")
        }
        EngineError::NoRoom { .. } => MachineError::NoRoom { what: text, hint: GC.to_owned() },
        EngineError::DiskLow { hint, .. } => {
            MachineError::NoRoom { what: text, hint: (*hint).to_owned() }
        }
        EngineError::Recipe(_) => invalid("invalid_recipe", &error, None),
        EngineError::Pull { source: PullError::Reference { .. }, .. } => {
            invalid("invalid_reference", &error, None)
        }
        EngineError::Unpack { source, .. } => unpack(source, &error),
        EngineError::Build { hint, .. } => failed(doing, Some((*hint).to_owned()), error),
        EngineError::Rootless(rootless) => {
            let hint = rootless.hint().to_owned();
            failed(doing, Some(hint), error)
        }
        EngineError::File { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            failed(doing, Some(GC.to_owned()), error)
        }
        _ => failed(doing, None, error),
    }
}

fn unpack(source: &UnpackError, error: &EngineError) -> MachineError {
    let hint = match source {
        UnpackError::Owner { .. } => {
            "pack it with `tar --owner=0 --group=0`, or as the ids it has inside"
        }
        UnpackError::Limit { .. } => "if it is what you want, say so with --max-size",
        _ => return invalid("invalid_archive", error, None),
    };
    invalid("invalid_archive", error, Some(hint))
}

/// No image of this name.
pub(super) fn image_missing(named: &str) -> MachineError {
    let hint =
        "`harvest image ls` lists those there are, `harvest image build FILE.toml` makes one";
    missing("image_missing", format!("there is no image `{named}`"), hint)
}

/// Nobody knows this sandbox.
pub(super) fn no_such_sandbox(sandbox: &SandboxId) -> MachineError {
    missing(
        "not_found",
        format!("there is no sandbox {sandbox}"),
        "`harvest sandbox ls` lists those there are",
    )
}

/// It is there, and nothing runs in it.
pub(super) fn not_running(sandbox: &SandboxId) -> MachineError {
    let hint = format!("`harvest sandbox start {sandbox}` starts it with the disk it left");
    conflict("not_running", format!("{sandbox} does not run"), hint)
}

pub(super) fn missing(
    code: &'static str,
    what: impl Into<String>,
    hint: impl Into<String>,
) -> MachineError {
    MachineError::Missing { code, what: what.into(), hint: hint.into() }
}

pub(super) fn conflict(
    code: &'static str,
    what: impl Into<String>,
    hint: impl Into<String>,
) -> MachineError {
    MachineError::Conflict { code, what: what.into(), hint: hint.into() }
}

/// With everything behind it in one line: nothing else is left of the error.
fn invalid(code: &'static str, error: &EngineError, hint: Option<&str>) -> MachineError {
    MachineError::Invalid { code, what: words(error), hint: hint.map(str::to_owned) }
}

fn failed(doing: String, hint: Option<String>, error: EngineError) -> MachineError {
    MachineError::Failed { doing, hint, source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_can_mend_says_how() {
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
            let error = explained("cannot try".into(), error);
            assert_eq!(error.code(), code);
            assert!(error.hint().is_some_and(|text| text.contains(hint)), "{error:?}");
        }
    }
}
