//! `/mnt/state`: a volume that every sandbox has by default. There is one per repository and one
//! for commands without a repository; its content persists between runs.

use harvest_proto::RepositoryName;
use ring::digest;

use super::{Backing, MAX_FILES, VolumeSpec, check_free_space};
use crate::{
    Engine, EngineError,
    records::hex,
    spec::{VolumeMount, VolumeName},
};

/// The mount point of the state volume inside.
pub const STATE_INSIDE: &str = "/mnt/state";

/// Folders that exist in the state volume whenever a sandbox mounts it.
pub const STATE_FOLDERS: [&str; 4] = [".cache", "git-repos", "checkpoints", "workspace"];

// For volumes that are too small for the usual number of files.
const BYTES_PER_FILE: u64 = 4096;

// With prefix and digest, the name stays well below the limit of 80.
const READABLE_CHARS: usize = 48;

impl VolumeName {
    /// The name of the state volume of commands without a repository.
    #[must_use]
    pub fn of_commands() -> Self {
        "exec-state".parse().expect("letters and `-`")
    }

    /// The name of a repository's state volume; unique per repository.
    #[must_use]
    pub fn of_repository(repository: &RepositoryName) -> Self {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
        let mut name: String =
            "repo-".chars().chain(repository.chars().take(READABLE_CHARS).map(plain)).collect();
        let digest = digest::digest(&digest::SHA256, repository.as_bytes());
        name.push('-');
        name.push_str(&hex(&digest.as_ref()[..8]));
        name.parse().expect("letters, digits and `-`, below the limit of 80")
    }
}

impl Engine {
    /// Creates the state volume of a repository, or of commands without one, if it does not exist,
    /// and returns its mount, for [`crate::Spec::volumes`]. The volume is sparse; `size_bytes` is
    /// its maximum.
    ///
    /// # Errors
    /// When the volume could fill the host's disk.
    pub fn state(
        &self,
        owner: Option<&RepositoryName>,
        size_bytes: u64,
    ) -> Result<VolumeMount, EngineError> {
        let name = owner.map_or_else(VolumeName::of_commands, VolumeName::of_repository);
        let mount =
            VolumeMount { name: name.clone(), inside: STATE_INSIDE.into(), read_only: false };
        if let Some(volume) = self.volume(&name)? {
            // A plain folder has no limit: only the margin is checked.
            let growth_bytes = match volume.backing {
                Backing::Image => volume.size_bytes.saturating_sub(self.volume_bytes(&volume)),
                Backing::Folder => 0,
            };
            check_free_space(&self.disk.home.volumes(), &name, growth_bytes)?;
            return Ok(mount);
        }
        let spec = VolumeSpec {
            size_bytes,
            files: (size_bytes / BYTES_PER_FILE).min(MAX_FILES),
            folders: STATE_FOLDERS.map(str::to_owned).into(),
            sparse: true,
            owner: owner.map(ToString::to_string),
            ..VolumeSpec::new(name)
        };
        match self.volume_create(&spec) {
            // A concurrent start has created it.
            Ok(_) | Err(EngineError::VolumeExists { .. }) => Ok(mount),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_repository_has_its_own_valid_volume_name() {
        let long = format!("{0}/{0}", "x".repeat(100));
        let names = ["a-b/c", "a/b-c", "a/b_c", "A/b-c", "b/a-c", "local/app", "acme/app", &long];
        let mut seen: Vec<VolumeName> =
            names.iter().map(|name| VolumeName::of_repository(&name.parse().unwrap())).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), names.len());
        assert!(!seen.contains(&VolumeName::of_commands()));
    }
}
