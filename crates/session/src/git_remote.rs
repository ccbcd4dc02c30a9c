//! Where the git door serves repositories.

/// The git remote of a repository, as seen from its sandboxes.
pub(crate) fn remote(name: &str) -> String {
    format!("http://{}/{name}.git", harvest_proto::door::GIT_NAME)
}
