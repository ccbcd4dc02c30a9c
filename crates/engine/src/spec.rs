//! The request for a sandbox: its disk, limits, network and owner. Plain data.

use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

use harvest_proto::{SandboxId, SnapshotId, api::SandboxDoor, launch::NetworkSettings};
use serde::{Deserialize, Serialize};

/// Ids per sandbox: every 16-bit id.
pub const IDS_PER_SANDBOX: u32 = 65_536;

/// A sandbox to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The id, chosen by the caller before the sandbox exists, so that a crash leaves none unknown.
    pub id: SandboxId,
    /// What its disk starts from.
    pub from: Origin,
    /// Resource limits.
    pub limits: Limits,
    /// Network access.
    pub network: Network,
    /// What it belongs to, which decides how long it lives.
    pub owner: Owner,
    /// Files and folders of the host mounted read-only.
    pub binds: Vec<Bind>,
    /// Volumes to mount.
    pub volumes: Vec<VolumeMount>,
    /// Environment variables added to the image's.
    pub env: BTreeMap<String, String>,
    /// What a standalone sandbox reaches through its door; the engine only keeps it.
    pub door: Option<SandboxDoor>,
    /// Certificates and package sources.
    pub settings: NetworkSettings,
    /// Address of the server's user who created it; `None` without a server.
    pub made_by: Option<String>,
}

/// What a disk starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A named image.
    Image(String),
    /// A snapshot.
    Snapshot(SnapshotId),
    /// These layers, bottom first.
    Layers {
        /// At least one layer.
        layers: Vec<LayerId>,
        /// Defaults for commands.
        config: ImageConfig,
    },
}

/// Defaults for commands that do not set their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// `root`, `harvest` or a number.
    pub user: String,
    /// An absolute path inside.
    pub workdir: String,
    /// The agents that the image states in [`AGENTS_FILE`], with their versions.
    #[serde(default)]
    pub agents: BTreeMap<String, String>,
}

/// The file in which an image states its agents: one JSON object from names to versions.
pub const AGENTS_FILE: &str = "etc/harvest/agents.json";

impl Default for ImageConfig {
    fn default() -> Self {
        Self {
            env: BTreeMap::new(),
            user: "root".to_owned(),
            workdir: "/".to_owned(),
            agents: BTreeMap::new(),
        }
    }
}

/// Resource limits of all commands of a sandbox together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory, swap included.
    pub memory_bytes: u64,
    /// CPU time per second; 1000 is one core.
    pub cpu_millis_per_second: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Bytes on its own disk, volumes excluded; a name counts as 4 KiB besides its content.
    pub writable_bytes: Option<u64>,
    /// Maximum lifetime, counted from its creation or last restart.
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

/// Network access of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// Only the door.
    Door,
    /// No network: no gateway serves the door, so every name is refused at once.
    Nothing,
    /// The host's network, including its abstract sockets: for trusted builds only.
    Host,
}

/// What a sandbox belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// A standalone sandbox: stays until it is removed.
    Standalone,
    /// Belongs to a session: the server removes it when no session knows it.
    Sessions,
    /// Belongs to this process: killed and removed when the process exits.
    Process(u32),
}

/// A file or folder of the host, mounted read-only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// A file or folder of the host.
    pub source: PathBuf,
    /// An absolute path inside; created when missing.
    pub inside: PathBuf,
}

/// A volume mounted at a path inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: VolumeName,
    /// An absolute path inside; created when missing.
    pub inside: PathBuf,
    /// Mounted read-only.
    pub read_only: bool,
}

/// Whether a text is safe as a file name.
pub(crate) fn is_plain_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=80).contains(&text.len()) && text.bytes().all(plain)
}

/// A text that is safe as a file name, and the error of a text that is not.
macro_rules! plain_name {
    ($(#[$doc:meta])* $name:ident, $(#[$error_doc:meta])* $error:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        #[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
        $(#[$error_doc])*
        pub struct $error(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.to_owned().try_into()
            }
        }

        impl TryFrom<String> for $name {
            type Error = $error;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                if is_plain_name(&text) { Ok(Self(text)) } else { Err($error(text)) }
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(&self.0)
            }
        }
    };
}

plain_name!(
    /// A volume's name, which is also the name of its folder.
    VolumeName,
    /// A text that is not a volume name.
    #[error("invalid volume name `{0}`: use letters, digits, `_` and `-`, at most 80")]
    ParseVolumeNameError
);

plain_name!(
    /// The id of a layer: the name of its folder.
    LayerId,
    /// A text that is not a layer id.
    #[error("`{0}` is not a layer id")]
    ParseLayerIdError
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_id_cannot_contain_a_path() {
        for text in ["", ".", "..", "a/b", "../x", "a\0b"] {
            assert!(text.parse::<LayerId>().is_err(), "{text:?}");
        }
        assert_eq!("lay_0a-b".parse::<LayerId>().unwrap().as_str(), "lay_0a-b");
    }
}
