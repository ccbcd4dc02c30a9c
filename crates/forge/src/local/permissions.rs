//! What a token may do, in the words of GitHub's permissions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ForgeError;

/// The permissions that the forge's routes ask for.
pub(super) const KNOWN: &[&str] = &[
    "actions",
    "checks",
    "contents",
    "issues",
    "metadata",
    "pull_requests",
    "repository_hooks",
    "statuses",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PermissionLevel {
    Read,
    Write,
}

/// Permissions by name, such as `contents`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Permissions(BTreeMap<String, PermissionLevel>);

impl Permissions {
    /// # Errors
    /// When the forge knows no permission of a name.
    pub fn new<'a>(
        permissions: impl IntoIterator<Item = (&'a str, PermissionLevel)>,
    ) -> Result<Self, ForgeError> {
        let mut all = BTreeMap::new();
        for (name, level) in permissions {
            if !KNOWN.contains(&name) {
                return Err(ForgeError::UnknownPermission { name: name.to_owned() });
            }
            all.insert(name.to_owned(), level);
        }
        Ok(Self(all).with_metadata())
    }

    /// Adds the permission to read what a repository is, which all have.
    pub(super) fn with_metadata(mut self) -> Self {
        self.0.insert("metadata".to_owned(), PermissionLevel::Read);
        self
    }

    pub(super) fn allow(&self, name: &str, level: PermissionLevel) -> bool {
        self.0.get(name).is_some_and(|granted| *granted >= level)
    }

    /// Whether each of these permissions is part of `self`.
    pub(super) fn contain(&self, others: &Self) -> bool {
        others.0.iter().all(|(name, level)| self.allow(name, *level))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PermissionLevel::{Read, Write};

    #[test]
    fn write_includes_read_but_not_reverse() {
        let granted = Permissions::new([("contents", Write), ("issues", Read)]).unwrap();
        assert!(granted.allow("contents", Read) && granted.allow("contents", Write));
        assert!(granted.allow("issues", Read) && !granted.allow("issues", Write));
        assert!(granted.allow("metadata", Read) && !granted.allow("statuses", Read));
        let fewer = Permissions::new([("contents", Read)]).unwrap();
        assert!(granted.contain(&fewer) && !fewer.contain(&granted));
        assert!(Permissions::new([("nonsense", Read)]).is_err());
    }
}
