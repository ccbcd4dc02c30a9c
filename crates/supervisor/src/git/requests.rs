//! Answers git requests of a connection.

use std::{path::Path, rc::Rc, time::Duration};

use harvest_proto::bridge::{Fault, FaultCode, GitRequest, Reply, RequestId};

use super::{Git, LOCAL_TIMEOUT};
use crate::{connection::Connection, users::AGENT_USER};

// Enough for the new commits of one branch.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10 * 60);

// The branches of sessions start with this.
const SESSION_PREFIX: &str = "harvest/";

/// Runs a request as a task of the connection, as the agent's user.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    request: GitRequest,
) -> Result<(), Fault> {
    let user = connection.sandbox.user(Some(AGENT_USER))?;
    let shared = Rc::clone(connection);
    connection.spawn(async move {
        let git = Git { sandbox: &shared.sandbox, user: &user };
        let result = git.answer(request).await;
        shared.reply(id, result.map_err(|tail| Fault::new(FaultCode::System, tail))).await;
    });
    Ok(())
}

impl Git<'_> {
    async fn answer(&self, request: GitRequest) -> Result<Reply, String> {
        let folder = |checkout: &str| format!("{}/{checkout}", self.sandbox.workspace());
        match request {
            GitRequest::Head { checkout } => {
                let folder = folder(&checkout);
                let commit = self.head(&folder).await;
                Ok(Reply::Head { commit, default_branch: self.default_branch(&folder).await })
            }
            GitRequest::SetBranch { checkout, branch } => {
                self.set_branch(&folder(&checkout), &branch).await.map(|()| Reply::Done)
            }
            GitRequest::CheckOut { checkout, branch, commit } => {
                let changed = self.check_out_commit(&folder(&checkout), &branch, &commit).await?;
                Ok(Reply::CheckedOut { changed_harvest_folder: changed })
            }
        }
    }

    async fn head(&self, folder: &str) -> Option<String> {
        self.last_line(folder, &["rev-parse", "--verify", "HEAD"]).await
    }

    // Renames the branch of another session (after a fork); from any other HEAD, creates the
    // session's branch there. A checkout that a turn deleted stays deleted, without an error.
    async fn set_branch(&self, folder: &str, branch: &str) -> Result<(), String> {
        if !Path::new(folder).join(".git").exists() {
            return Ok(());
        }
        let current = self.last_line(folder, &["symbolic-ref", "--short", "HEAD"]).await;
        let current = current.unwrap_or_default();
        if current == branch {
            return Ok(());
        }
        if current.starts_with(SESSION_PREFIX) {
            self.run(folder, &["branch", "-M", branch], LOCAL_TIMEOUT).await?;
        } else if let Err(tail) =
            self.run(folder, &["checkout", "--quiet", "-B", branch], LOCAL_TIMEOUT).await
        {
            // Without a commit there is nothing to check out.
            let reference = format!("refs/heads/{branch}");
            let set = ["symbolic-ref", "HEAD", &reference];
            self.run(folder, &set, LOCAL_TIMEOUT).await.map_err(|_| tail)?;
        }
        // A branch without an upstream is an error to git.
        let _no_upstream = self.run(folder, &["branch", "--unset-upstream"], LOCAL_TIMEOUT).await;
        Ok(())
    }

    // True when the commit differs from the one checked out before in `.harvest`.
    async fn check_out_commit(
        &self,
        folder: &str,
        branch: &str,
        commit: &str,
    ) -> Result<bool, String> {
        if !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(format!("`{commit}` is not a commit id"));
        }
        let before = self.head(folder).await.ok_or("nothing is checked out")?;
        let source = format!("+refs/heads/{branch}:refs/harvest/pushed");
        self.run(folder, &["fetch", "--quiet", "origin", &source], FETCH_TIMEOUT).await?;
        let check_out = ["checkout", "--quiet", "--force", "--detach", commit];
        self.run(folder, &check_out, LOCAL_TIMEOUT).await?;
        let after = self.head(folder).await;
        if after.as_deref() != Some(commit) {
            return Err(format!("the checkout is at {after:?} instead of {commit}"));
        }
        let diff = ["diff", "--quiet", &before, commit, "--", ".harvest"];
        // A failed comparison counts as a change.
        Ok(self.run(folder, &diff, LOCAL_TIMEOUT).await.is_err())
    }
}
