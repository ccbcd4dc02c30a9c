//! Accounts: access tokens with the users they belong to, and secrets.

mod secrets;
mod tokens;

use std::sync::Arc;

use harvest_gateway::vault::Vault;
use harvest_store::Store;

use crate::tasks::Tasks;

pub(crate) use secrets::seal;
pub use secrets::secret_binding;

/// The tokens and secrets of one server. Cheap to clone.
#[derive(Clone)]
pub struct Accounts {
    store: Store,
    vault: Arc<Vault>,
    tasks: Tasks,
}

impl Accounts {
    pub(crate) fn new(store: Store, vault: Arc<Vault>, tasks: Tasks) -> Self {
        Self { store, vault, tasks }
    }
}
