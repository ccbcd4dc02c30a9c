//! The sync of a checkout that the agent already works in: what is possible without the remote
//! comes first, the fetch follows.

use std::{fs, path::Path, time::Duration};

use harvest_proto::bridge::{BootStart, Checkout, DiffStat, Reply};
use tokio::time::timeout;

use super::{Git, SyncResult, Synced, has_repository, may_set_up, queries::is_object_id};

impl Git<'_> {
    /// Puts an existing checkout on the session's branch as far as the disk allows. False if the
    /// remote has to come first: there is no checkout, it is another one, or it is not at the base.
    pub(crate) async fn begin_locally(&self, checkout: &Checkout, start: BootStart) -> bool {
        let folder = self.folder(&checkout.folder);
        if !has_repository(&folder) {
            return false;
        }
        self.remove_locks(&folder);
        if checkout.clone_missing && self.check_origin(&folder, &checkout.remote).await.is_err() {
            return false;
        }
        match (start, &checkout.branch) {
            (BootStart::Restore, _) => true,
            (BootStart::Image, Some(branch)) => self.begin_branch(&folder, checkout, branch).await,
            (_, _) => false,
        }
    }

    // A new sandbox runs no git yet: the locks are of processes that ended with an earlier one.
    fn remove_locks(&self, folder: &str) {
        for lock in ["index.lock", "HEAD.lock"] {
            let path = Path::new(folder).join(".git").join(lock);
            let _usually_missing = self.user.access(|| fs::remove_file(&path));
        }
    }

    // Changes no file: the branch begins at the commit that is checked out.
    async fn begin_branch(&self, folder: &str, checkout: &Checkout, branch: &str) -> bool {
        let base = checkout.base.as_deref().unwrap_or("HEAD");
        let origin = format!("refs/remotes/origin/{base}");
        let commits = self.run(folder, &["rev-parse", "HEAD", &origin]).await.unwrap_or_default();
        let commits: Vec<&str> = commits.lines().collect();
        let [.., head, known] = commits[..] else { return false };
        if head != known || !is_object_id(head) {
            return false;
        }
        let reference = format!("refs/heads/{branch}");
        let update = ["update-ref", &reference, head];
        let switch = ["symbolic-ref", "HEAD", &reference];
        self.run(folder, &update).await.is_ok() && self.run(folder, &switch).await.is_ok()
    }

    /// Fetches an existing checkout and, unless its disk is a restored one, moves it to the base.
    /// Without an answer of the remote it becomes stale; a permanent refusal is an error.
    pub(crate) async fn sync_beside(
        &self,
        checkout: &Checkout,
        start: BootStart,
        limit: Duration,
        is_permanent: impl Fn(&str) -> bool,
    ) -> Result<SyncResult, String> {
        let folder = self.folder(&checkout.folder);
        let before = self.head(&folder).await;
        // Dropping the fetch kills git.
        let fetched = timeout(limit, self.fetch(&folder, checkout)).await;
        let fetched = fetched.unwrap_or_else(|_| Err("the remote did not answer in time".into()));
        let what = match fetched {
            Ok(()) => Synced::UpToDate,
            Err(tail) if start == BootStart::Image && is_permanent(&tail) => return Err(tail),
            Err(tail) => Synced::Stale(format!("cannot fetch {}: {tail}", checkout.name)),
        };
        if start == BootStart::Restore {
            let after = before.clone();
            return Ok(SyncResult { what, before, after, kept: None });
        }
        // Commands beside the agent may have committed meanwhile.
        let kept = match self.base(&folder, checkout).await {
            Some(base) if self.head(&folder).await != before => {
                let base = format!("refs/remotes/origin/{base}");
                self.keep(&checkout.folder, "HEAD", &base).await
            }
            _ => None,
        };
        self.check_out(&folder, checkout, start).await?;
        let after = self.head(&folder).await;
        Ok(SyncResult { what, before, after, kept })
    }

    /// Whether one of these paths differs between two commits.
    pub(crate) async fn differs(
        &self,
        checkout: &Checkout,
        (before, after): (&str, &str),
        paths: &[&str],
    ) -> bool {
        let mut arguments = vec!["diff", "--quiet", "--no-ext-diff", before, after, "--"];
        arguments.extend(paths);
        // A failed comparison counts as a difference.
        self.run(&self.folder(&checkout.folder), &arguments).await.is_err()
    }

    /// What the session's changes are compared with: this commit, or the tree that setup left.
    pub(crate) async fn base_of_changes(&self, checkout: &Checkout, commit: &str) -> String {
        let has_setup = may_set_up(Path::new(&self.folder(&checkout.folder)));
        let saved = match has_setup {
            true => self.save_tree(&checkout.folder, Some(commit.to_owned())).await.ok(),
            false => None,
        };
        match saved {
            Some(Reply::SavedTree { tree, stat: DiffStat { files: 1.., .. } }) => tree,
            _ => commit.to_owned(),
        }
    }
}
