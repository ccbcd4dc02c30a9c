//! `/mnt/state`: the volume every sandbox has unless it is asked not to. One for each repository and one
//! for commands that belong to none; what one run leaves there the next one finds.

use std::fmt::Write;

use ring::digest;

use super::{VolumeName, VolumeSpec};
use crate::{Engine, EngineError, spec::VolumeMount};

/// Where it is inside.
pub const STATE_INSIDE: &str = "/mnt/state";

/// What is in it whenever a sandbox gets it.
pub const STATE_FOLDERS: [&str; 4] = [".cache", "git-repos", "checkpoints", "workspace"];

/// The volume's name for commands that belong to no repository.
pub const EXEC_STATE: &str = "exec-state";

// With the digest and what stands around it, well below the 80 a name may have.
const READABLE: usize = 48;

impl VolumeName {
    /// Where a repository's sandboxes keep their state. Two repositories never share one.
    #[must_use]
    pub fn of_repository(repository: &str) -> Self {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
        let mut name: String =
            "repo-".chars().chain(repository.chars().take(READABLE).map(plain)).collect();
        let digest = digest::digest(&digest::SHA256, repository.as_bytes());
        name.push('-');
        for byte in &digest.as_ref()[..8] {
            let _ = write!(name, "{byte:02x}");
        }
        Self(name)
    }
}

impl Engine {
    /// Makes sure of a volume for `/mnt/state` and answers its mount, for [`crate::Spec::volumes`].
    ///
    /// # Errors
    /// When the host lacks the room for a new one.
    pub fn state(&self, name: &VolumeName) -> Result<VolumeMount, EngineError> {
        let mount =
            VolumeMount { name: name.clone(), inside: STATE_INSIDE.into(), read_only: false };
        if self.volume(name)?.is_some() {
            return Ok(mount);
        }
        let folders = STATE_FOLDERS.map(str::to_owned).into();
        match self.volume_create(&VolumeSpec { folders, ..VolumeSpec::new(name.clone()) }) {
            // Another start was quicker.
            Ok(_) | Err(EngineError::VolumeExists { .. }) => Ok(mount),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_repositories_never_share_their_state_and_every_name_is_one() {
        let long = "x".repeat(500);
        let names = ["acme/app", "acme-app", "acme_app", "ACME/app", "../..", "", "ü/ö", &long];
        let mut seen: Vec<VolumeName> =
            names.iter().map(|name| VolumeName::of_repository(name)).collect();
        for name in &seen {
            assert!(name.as_str().parse::<VolumeName>().is_ok(), "{name}");
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), names.len());
        EXEC_STATE.parse::<VolumeName>().unwrap();
    }
}
