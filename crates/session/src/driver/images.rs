//! Images of a prompt on their way into the sandbox: each becomes a file there before the prompt is
//! sent, since a frame of the bridge is too short for it.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_proto::{SessionId, api::Prompt, bridge::ImageFile};
use harvest_store::Store;

use crate::{
    bridge::{Bridge, BridgeError},
    error::SessionError,
    error_chain::error_chain,
};

/// Why the images did not get into the sandbox.
pub(super) enum CopyError {
    /// The next connection tries again.
    Lost,
    Failed(String),
}

/// The refusal of a prompt with images that would answer a question.
pub(super) fn not_in_an_answer() -> SessionError {
    SessionError::conflict(
        "answer_with_attachments",
        "the agent waits for an answer, which has no attachments",
        "answer first, then send the attachments with another prompt; or use `--now`",
    )
}

/// Where the images of a prompt are in the sandbox.
pub(super) fn files(prompt: &Prompt) -> Vec<ImageFile> {
    let types = prompt.attachments.iter().map(|attachment| attachment.media_type);
    let file = |(number, media_type): (u32, _)| {
        let extension = harvest_proto::image::ImageType::extension(media_type);
        ImageFile { path: format!("/tmp/{}-{number}.{extension}", prompt.id), media_type }
    };
    (1..).zip(types).map(file).collect()
}

/// Writes the images of a prompt into the sandbox, as the agent's user.
pub(super) async fn copy(
    store: &Store,
    session: &SessionId,
    prompt: &Prompt,
    bridge: &Bridge,
) -> Result<(), CopyError> {
    for (number, file) in (1..).zip(files(prompt)) {
        let stored = store.attachment_get(session, &prompt.id, number).await;
        let base64 = stored.map_err(|error| CopyError::Failed(error_chain(&error)))?;
        let bytes = BASE64_STANDARD.decode(base64).unwrap_or_default();
        let failed = |error: BridgeError| match error {
            BridgeError::Lost => CopyError::Lost,
            error => CopyError::Failed(error_chain(&error)),
        };
        let mut writer = bridge.file_writer(&file.path, 0o644, None).map_err(failed)?;
        writer.write(&bytes).await.map_err(failed)?;
        writer.finish().await.map_err(failed)?;
    }
    Ok(())
}
