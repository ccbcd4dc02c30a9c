//! Where the git door serves repositories.

use harvest_proto::RepositoryName;

/// The git remote of a repository, as seen from its sandboxes.
pub(crate) fn remote(name: &RepositoryName) -> String {
    format!("http://{}/{name}.git", harvest_proto::door::GIT_NAME)
}
