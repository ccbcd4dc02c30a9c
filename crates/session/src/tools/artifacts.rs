//! The tool by which an agent hands over a file.

use harvest_gateway::ledger::ToolResult;
use harvest_proto::{
    EventBody,
    api::{
        Artifact, MAX_ARTIFACT_BYTES, MAX_ARTIFACTS_BYTES, check_artifact_name, check_media_type,
    },
    bridge::FileKind,
};
use harvest_store::Write;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    SessionTools, ToolError, arguments,
    definition::{Definition, Effect, text},
    document,
};
use crate::{
    artifacts::{ReceivedFile, is_taken},
    bridge::Bridge,
    error_chain::error_chain,
    wall_clock::now,
};

pub(super) const DEFINITION: Definition = Definition {
    name: "upload_artifact",
    description: "Hand over a file that is not part of the change, such as a screenshot, a report \
                  or a build. The user can download it. At most 50 MB each and 500 MB in all",
    effect: Effect::Adds,
    arguments: &[("path", || text("The file; absolute, or relative to your first checkout"))],
    optional: &[
        ("name", || text("Its name, unique in this session [default: the name of the file]")),
        ("media_type", || text("Its type [default: application/octet-stream]")),
    ],
};

// Small files cost rows, which every call reads.
const MAX_ARTIFACTS: usize = 500;

#[derive(Deserialize)]
struct Upload {
    path: String,
    name: Option<String>,
    media_type: Option<String>,
}

pub(super) async fn call(tools: &SessionTools, given: Value) -> Result<ToolResult, ToolError> {
    let Upload { path, name, media_type } = arguments(given)?;
    let name = name.unwrap_or_else(|| path.rsplit('/').next().unwrap_or_default().to_owned());
    let media_type = media_type.unwrap_or_else(|| "application/octet-stream".to_owned());
    let invalid =
        |error: harvest_proto::api::InvalidArtifact| ToolError::Refused(error.to_string());
    check_artifact_name(&name).map_err(invalid)?;
    check_media_type(&media_type).map_err(invalid)?;
    check_room(tools, &name, 0).await?;
    let path = absolute(tools, path).await?;
    let bridge = tools.host()?.bridge(&tools.session).await?;
    check_file(&bridge, &path).await?;
    let reader = bridge.file_reader(&path, None).await.map_err(|error| refused(&error))?;
    let files = &tools.shared.artifacts;
    let received = files.receive(reader).await.map_err(|error| refused(&error))?;
    let artifact = Artifact {
        name,
        media_type,
        bytes: received.bytes,
        sha256: received.sha256.clone(),
        created_at: now(),
    };
    let own = tools.clone();
    let handed = json!(artifact);
    // An agent that disconnects must not leave a content without a row, or a row without content.
    tools.detach(async move { keep(&own, &received, &artifact).await }).await?;
    Ok(document(&handed, handed.clone()))
}

async fn keep(
    tools: &SessionTools,
    received: &ReceivedFile,
    artifact: &Artifact,
) -> Result<(), ToolError> {
    let files = &tools.shared.artifacts;
    let lock = files.lock().await;
    check_room(tools, &artifact.name, artifact.bytes).await?;
    files.keep(&lock, received).map_err(|error| refused(&error))?;
    let stored = store(tools, artifact).await;
    if stored.is_err()
        && let Err(error) = files.remove_locked(&lock, &tools.shared.store, &artifact.sha256).await
    {
        tracing::warn!(error = error_chain(&error), "cannot remove an artifact");
    }
    stored
}

fn refused(error: &(dyn std::error::Error + 'static)) -> ToolError {
    ToolError::Refused(error_chain(error))
}

async fn absolute(tools: &SessionTools, path: String) -> Result<String, ToolError> {
    if path.starts_with('/') {
        return Ok(path);
    }
    let record = tools.shared.store.session_get(&tools.session).await?;
    Ok(format!("{}/{path}", record.work_folder()))
}

/// Only a regular file: neither a link, which may lead anywhere, nor a device.
async fn check_file(bridge: &Bridge, path: &str) -> Result<(), ToolError> {
    let stat = bridge.file_stat(path, None, false).await.map_err(|error| refused(&error))?;
    let what = match stat.kind {
        FileKind::File if stat.size > MAX_ARTIFACT_BYTES => {
            format!("`{path}` has {} bytes; at most {MAX_ARTIFACT_BYTES} are possible", stat.size)
        }
        FileKind::File => return Ok(()),
        FileKind::Folder => format!("`{path}` is a folder; pack it into one file first"),
        FileKind::Link => format!("`{path}` is a link; name the file itself"),
        FileKind::Other | FileKind::NotUtf8 => format!("`{path}` is not a regular file"),
    };
    Err(ToolError::Refused(what))
}

async fn check_room(tools: &SessionTools, name: &str, bytes: u64) -> Result<(), ToolError> {
    let store = &tools.shared.store;
    let all = store.artifact_list(&tools.session).await?;
    if all.iter().any(|one| one.name == name) {
        return Err(taken(name));
    }
    if all.len() >= MAX_ARTIFACTS {
        let what = format!("this session has {MAX_ARTIFACTS} artifacts, which is the limit");
        return Err(ToolError::Refused(what));
    }
    let sum: u64 = all.iter().map(|one| one.bytes).sum();
    if sum.saturating_add(bytes) > MAX_ARTIFACTS_BYTES {
        let what = format!(
            "the artifacts of this session would have more than {MAX_ARTIFACTS_BYTES} bytes"
        );
        return Err(ToolError::Refused(what));
    }
    // Each call stores an event.
    let stored = store.session_history_bytes(&tools.session).await?;
    if stored >= Some(tools.shared.retention.rules.history.per_session) {
        return Err(ToolError::Refused("the history of this session is full".to_owned()));
    }
    Ok(())
}

fn taken(name: &str) -> ToolError {
    ToolError::Refused(format!("there is already an artifact `{name}`; give another name"))
}

async fn store(tools: &SessionTools, artifact: &Artifact) -> Result<(), ToolError> {
    let (shared, at) = (&tools.shared, artifact.created_at);
    let event = EventBody::Artifact {
        name: artifact.name.clone(),
        media_type: artifact.media_type.clone(),
        bytes: artifact.bytes,
    };
    let writes = vec![
        Write::Artifact(Box::new(artifact.clone())),
        Write::EventInTurn { at, body: Box::new(event) },
    ];
    match shared.store.session_commit(&tools.session, shared.lease, at, writes).await {
        Err(error) if is_taken(&error) => Err(taken(&artifact.name)),
        stored => Ok(stored.map(drop)?),
    }
}
