//! Which branch judges a commit, and whether the commit is the repository's own.

use harvest_proto::{
    BranchName,
    api::{Evidence, Repository},
    bridge::Author,
};

use super::{Repositories, shared_owners};

/// The name of the commit status.
const STATUS: &str = "harvest/check";

/// The branch whose check runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Judge {
    /// Where the check's sandbox boots; `None` for the remote's default branch.
    pub(super) boots: Option<BranchName>,
    /// As it was asked for.
    named: Option<BranchName>,
    /// Whether it is the base of the repository, not one that a pull request or session chose.
    is_own: bool,
}

impl Judge {
    /// `is_default` says that the named branch is at the same commit as the remote's default
    /// branch.
    fn choose(own: Option<&BranchName>, named: Option<&BranchName>, is_default: bool) -> Self {
        let boots = if own.is_none() && is_default { None } else { named };
        let is_own = boots == own;
        Self { boots: boots.cloned(), named: named.cloned(), is_own }
    }

    /// The context of the commit status: people require `harvest/check` at the forge, and a branch
    /// that was made for the purpose must not set it.
    pub(super) fn status(&self) -> String {
        match (self.is_own, &self.named) {
            (true, _) => STATUS.to_owned(),
            (false, Some(base)) => format!("{STATUS} ({base})"),
            (false, None) => format!("{STATUS} (default branch)"),
        }
    }

    /// The evidence, with the branch as it was asked for.
    pub(super) fn name(&self, evidence: Evidence) -> Evidence {
        Evidence { base: self.named.clone(), ..evidence }
    }
}

impl Repositories {
    /// The judge of commits that are to be merged into `named`. A branch at the commit of the
    /// default branch counts as that one, and then it is the default branch that is booted: it does
    /// not help to move the branch afterwards.
    pub(super) async fn judge(
        &self,
        repository: &Repository,
        named: Option<&BranchName>,
        user: &Author,
    ) -> Judge {
        let own = repository.base.as_ref();
        let is_default = match (own, named) {
            (None, Some(_)) => {
                let default = self.remote_tip(repository, None, user).await.flatten();
                default.is_some()
                    && default == self.remote_tip(repository, named, user).await.flatten()
            }
            _ => false,
        };
        Judge::choose(own, named, is_default)
    }

    /// The newest commit of a branch, or of the default branch; `Some(None)` when it does not
    /// exist, and `None` when the remote does not answer.
    pub(super) async fn remote_tip(
        &self,
        repository: &Repository,
        branch: Option<&BranchName>,
        user: &Author,
    ) -> Option<Option<String>> {
        let access = self.git_access(repository, None);
        let owners = shared_owners(std::iter::once(repository.name.clone()), user);
        match self.shared.forge.tip(&access.url, branch) {
            Some(tip) => Some(tip),
            None => self.shared.sandboxes.doors.tip(&access, &owners, branch).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_own_base_sets_required_status() {
        let branch = |name: &str| name.parse::<BranchName>().unwrap();
        let (main, evil) = (branch("main"), branch("evil"));
        for (own, named, is_default, boots, status) in [
            (None, None, false, None, "harvest/check"),
            (None, Some(&main), true, None, "harvest/check"),
            (None, Some(&evil), false, Some(&evil), "harvest/check (evil)"),
            (Some(&main), Some(&main), false, Some(&main), "harvest/check"),
            (Some(&main), Some(&evil), false, Some(&evil), "harvest/check (evil)"),
            (Some(&main), None, false, None, "harvest/check (default branch)"),
        ] {
            let judge = Judge::choose(own, named, is_default);
            assert_eq!((judge.boots.as_ref(), &*judge.status()), (boots, status), "{named:?}");
        }
    }
}
