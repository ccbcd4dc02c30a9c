//! What a sandbox is asked to be: its disk, its limits, its network, its owner. Inert: only words.

use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

use harvest_proto::{SandboxId, SnapshotId};
use serde::{Deserialize, Serialize};

use crate::volume::VolumeName;

/// What to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The sandbox's id, chosen before it exists, so that a crash leaves no stranger.
    pub id: SandboxId,
    /// What its disk begins as.
    pub from: Origin,
    /// What it may use.
    pub limits: Limits,
    /// What it can reach.
    pub network: Network,
    /// Who it lives for.
    pub owner: Owner,
    /// Files and folders of the host it may read.
    pub binds: Vec<Bind>,
    /// Volumes it has.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// Variables on top of the image's.
    pub env: BTreeMap<String, String>,
    /// The user of a server that asked for it, by their address; nobody's where there was no server.
    #[serde(default)]
    pub made_by: Option<String>,
}

/// What a disk begins as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A named image.
    Image(String),
    /// A snapshot.
    Snapshot(SnapshotId),
    /// These layers, bottom first.
    Layers {
        /// At least one.
        layers: Vec<LayerId>,
        /// What commands get.
        config: ImageConfig,
    },
}

/// What commands get unless they say otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Variables.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// `root`, `harvest` or a number.
    pub user: String,
    /// An absolute path inside.
    pub workdir: String,
}

impl Default for ImageConfig {
    fn default() -> Self {
        Self { env: BTreeMap::new(), user: "root".to_owned(), workdir: "/".to_owned() }
    }
}

/// What a sandbox's commands may use together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory, swap included.
    pub memory_bytes: u64,
    /// CPU time per second; 1000 is one core.
    pub cpu_millis_per_second: u32,
    /// Processes and threads.
    pub pids: u32,
    /// What it may write to its own disk, volumes apart; a name counts as 4 KiB besides its content.
    #[serde(default)]
    pub writable_bytes: Option<u64>,
    /// How long it may live, counted from its creation.
    #[serde(default)]
    pub lifetime_secs: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: 4 << 30,
            cpu_millis_per_second: 2000,
            pids: 4096,
            writable_bytes: Some(10 << 30),
            lifetime_secs: None,
        }
    }
}

/// What a sandbox can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// Nothing but the door.
    Door,
    /// Nothing at all: nobody serves the door, so every name is refused at once.
    Nothing,
    /// What the host reaches, abstract sockets of the host included: for builds the host trusts.
    Host,
}

/// Who a sandbox lives for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// It stays until somebody ends it.
    Kept,
    /// It stays as well, and belongs to the server's sessions: the server ends what none of them knows.
    Sessions,
    /// It is killed and removed when this process is gone.
    Process(u32),
}

/// Something of the host, to read at a path inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// A file or folder of the host.
    pub source: PathBuf,
    /// An absolute path inside; made when it is missing.
    pub inside: PathBuf,
}

/// A volume at a path inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// Which.
    pub name: VolumeName,
    /// An absolute path inside; made when it is missing.
    pub inside: PathBuf,
    /// Nobody inside can write to it.
    pub read_only: bool,
}

/// Whether a text can be part of a path and never leave its folder.
pub(crate) fn is_plain_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=80).contains(&text.len()) && text.bytes().all(plain)
}

/// Names a layer: the name of its folder.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayerId(String);

/// Why a text is no layer id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a layer id")]
pub struct ParseLayerIdError(String);

impl LayerId {
    /// The folder's name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for LayerId {
    type Err = ParseLayerIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if is_plain_name(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(ParseLayerIdError(text.to_owned()))
        }
    }
}

impl TryFrom<String> for LayerId {
    type Error = ParseLayerIdError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<LayerId> for String {
    fn from(id: LayerId) -> Self {
        id.0
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl fmt::Debug for LayerId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_id_cannot_leave_its_folder() {
        for text in ["", ".", "..", "a/b", "../x", "a\0b"] {
            assert!(text.parse::<LayerId>().is_err(), "{text:?}");
        }
        assert_eq!("lay_0a-b".parse::<LayerId>().unwrap().as_str(), "lay_0a-b");
    }
}
