//! The door out: egress policy, git with credentials, model calls metered. Holds the secrets so that
//! no sandbox has to.
//!
//! A connection's way: `door` reads what it is for → `policy` says whether → `model` answers model
//! calls, `git` carries fetches and pushes, `egress` splices to a name of the policy. Who may do what
//! and what it cost is the [`ledger::Ledger`]'s; nothing here is remembered across a restart.
#![forbid(unsafe_code)]

mod door;
mod egress;
mod git;
mod http;
pub mod ledger;
mod model;
pub mod policy;
mod registries;
pub mod vault;

use std::{collections::BTreeMap, io, net::SocketAddr, path::Path, sync::Arc};

pub use door::DoorHandle;
pub use harvest_proto::script::{Script, ScriptError, ScriptRule};
use ledger::{Ledger, Pass};
pub use registries::host_registries;

/// How the gateway behaves for every door.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Where the Anthropic API is, without a path.
    pub anthropic_url: String,
    /// What the scripted upstream plays when a prompt carries no script of its own.
    pub script_rules: Vec<ScriptRule>,
    /// Lets names of a policy lead to private addresses. For tests and for networks whose package
    /// mirror is inside; it opens the host's own network to every sandbox that may use such a name.
    pub allow_private_upstreams: bool,
    /// Names that are not looked up but lead here, port included.
    pub pinned: BTreeMap<String, SocketAddr>,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            anthropic_url: "https://api.anthropic.com".to_owned(),
            script_rules: Vec::new(),
            allow_private_upstreams: false,
            pinned: BTreeMap::new(),
        }
    }
}

/// Opens doors. Cheap to clone; all clones are one gateway.
#[derive(Clone)]
pub struct Gateway {
    shared: Arc<Shared>,
}

/// What all doors have in common.
pub(crate) struct Shared {
    ledger: Arc<dyn Ledger>,
    config: GatewayConfig,
    clients: http::Clients,
    mishaps: model::Mishaps,
}

impl Gateway {
    /// A gateway that keeps its books with this ledger.
    #[must_use]
    pub fn new(ledger: Arc<dyn Ledger>, config: GatewayConfig) -> Self {
        let clients = http::Clients::new();
        Self {
            shared: Arc::new(Shared {
                ledger,
                config,
                clients,
                mishaps: model::Mishaps::default(),
            }),
        }
    }

    /// Opens one sandbox's door: listens on this socket until the handle is dropped. A socket left
    /// there by an earlier process is replaced. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn open(&self, door_socket: &Path, pass: Pass) -> io::Result<DoorHandle> {
        door::open(Arc::clone(&self.shared), door_socket, pass)
    }
}
