//! The memory of a repository inside a session's sandbox: a file in the format of the stock memory
//! server, written when the sandbox has booted. It is a copy; agents change the memory with tools.

use harvest_proto::{
    RepositoryName,
    api::MemoryGraph,
    bridge::FileRequest,
    launch::{MEMORY_FILE, MEMORY_FOLDER, MEMORY_SEED},
};
use harvest_store::{CheckoutRecord, Store, StoreError};

use crate::{
    bridge::{Bridge, BridgeError},
    error_chain::error_chain,
};

// More than the supervisor writes.
const MAX_SEED_BYTES: usize = 1024 * 1024;

const USER: &str = "harvest";

#[derive(Debug, thiserror::Error)]
enum ProvideError {
    #[error("cannot reach the sandbox")]
    Bridge(#[from] BridgeError),
    #[error("cannot use the stored memory")]
    Store(#[from] StoreError),
    #[error("the first entities are not valid")]
    Seed(#[from] serde_json::Error),
}

/// Stores the first entities of a repository that has none yet, then writes the file. Without a
/// repository the folder is made, which the stock memory server expects. A session works without
/// either, so a failure is only logged.
pub(crate) async fn provide(store: &Store, bridge: &Bridge, first: Option<&CheckoutRecord>) {
    let Some(CheckoutRecord { repository, .. }) = first else {
        if let Err(error) = make_folder(bridge).await {
            tracing::warn!(error = error_chain(&error), "the sandbox has no folder for memory");
        }
        return;
    };
    if let Err(error) = try_provide(store, bridge, repository).await {
        let error = error_chain(&error);
        tracing::warn!(%repository, error, "the sandbox has no copy of the repository's memory");
    }
}

async fn try_provide(
    store: &Store,
    bridge: &Bridge,
    repository: &RepositoryName,
) -> Result<(), ProvideError> {
    let user = Some(USER.to_owned());
    if !store.memory_seeded(repository).await? {
        let seed = bridge.file_read(MEMORY_SEED, user.clone(), MAX_SEED_BYTES).await?;
        let seed: MemoryGraph = serde_json::from_slice(&seed)?;
        match store.memory_seed(repository, seed).await {
            // Otherwise no session of the repository would ever get the file.
            Err(StoreError::TooLarge { what }) => {
                tracing::warn!(%repository, what, "the first entities are left out");
                store.memory_seed(repository, MemoryGraph::default()).await?;
            }
            seeded => seeded?,
        }
    }
    let text = store.memory_read(repository).await?.to_jsonl();
    make_folder(bridge).await?;
    bridge.file_write(MEMORY_FILE, 0o600, user, text.as_bytes()).await?;
    Ok(())
}

async fn make_folder(bridge: &Bridge) -> Result<(), BridgeError> {
    let folder = FileRequest::Mkdir { path: MEMORY_FOLDER.to_owned(), mode: 0o700 };
    bridge.file(Some(USER.to_owned()), folder).await.map(drop)
}
