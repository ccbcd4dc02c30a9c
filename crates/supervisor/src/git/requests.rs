//! Answers git requests of a connection.

use std::{path::Path, rc::Rc, time::Duration};

use harvest_proto::bridge::{Fault, GitQuery, GitRequest, Reply, RequestId};

use super::{
    Git,
    queries::{GitStream, is_object_id},
};
use crate::{connection::Connection, users::AGENT_USER};

// Enough for the new commits of one branch.
pub(super) const FETCH_TIMEOUT: Duration = Duration::from_secs(10 * 60);

// The branches of sessions start with this.
const SESSION_PREFIX: &str = "harvest/";

/// Runs a request as a task of the connection, as the agent's user.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    request: GitRequest,
) -> Result<(), Fault> {
    let user = connection.sandbox.user(Some(AGENT_USER))?;
    check_ids(&request)?;
    // Opened before the task runs: bytes may follow the request at once.
    let stream = GitStream::open(connection, &request)?;
    let cancelled = connection.register_kill(id);
    let shared = Rc::clone(connection);
    connection.spawn(async move {
        let git = Git { sandbox: &shared.sandbox, user: &user };
        let result = tokio::select! {
            result = git.answer(&shared, request, &stream) => result,
            // Dropping the answer kills git.
            () = cancelled.notified() => Err(Fault::system("cancelled")),
        };
        shared.unregister_kill(id);
        stream.forget(&shared);
        shared.reply(id, result).await;
    });
    Ok(())
}

// Git would take other text for an option or for a name of the agent's choice.
fn check_ids(request: &GitRequest) -> Result<(), Fault> {
    let ids: &[Option<&String>] = match request {
        GitRequest::CheckOut { commit, .. } => &[Some(commit)],
        GitRequest::SaveTree { against, .. } => &[against.as_ref()],
        GitRequest::Query { query: GitQuery::Diff { base, .. }, .. } => &[Some(base)],
        GitRequest::Query { query: GitQuery::Compare { from, to, .. }, .. } => {
            &[Some(from), Some(to)]
        }
        GitRequest::Query { query: GitQuery::Pack { tree, base }, .. } => {
            &[Some(tree), base.as_ref()]
        }
        // Their names are checked as they are parsed.
        GitRequest::Query { query: GitQuery::Bundle { .. }, .. }
        | GitRequest::Head { .. }
        | GitRequest::SetBranch { .. }
        | GitRequest::UnpackTree { .. } => &[],
    };
    match ids.iter().flatten().find(|id| !is_object_id(id)) {
        Some(id) => Err(Fault::invalid(format!("`{id}` is not an object id"))),
        None => Ok(()),
    }
}

impl Git<'_> {
    async fn answer(
        &self,
        connection: &Connection,
        request: GitRequest,
        stream: &GitStream,
    ) -> Result<Reply, Fault> {
        let failed = |tail| Fault::system(tail);
        match request {
            GitRequest::Head { checkout } => {
                let folder = self.folder(&checkout);
                let commit = self.head(&folder).await;
                let default_branch = self.default_branch(&folder).await;
                let has_setup = super::may_set_up(Path::new(&folder));
                Ok(Reply::Head { commit, default_branch, has_setup })
            }
            GitRequest::SetBranch { checkout, branch } => {
                let set = self.set_branch(&checkout, &branch).await;
                set.map(|()| Reply::Done).map_err(failed)
            }
            GitRequest::CheckOut { checkout, branch, commit } => {
                let folder = self.folder(&checkout);
                self.check_out_commit(&folder, branch.as_deref(), &commit).await.map_err(failed)
            }
            GitRequest::SaveTree { checkout, against } => self.save_tree(&checkout, against).await,
            GitRequest::Query { checkout, query, limit, .. } => {
                self.query(connection, &checkout, query, limit, stream).await
            }
            GitRequest::UnpackTree { checkout, .. } => {
                self.unpack_tree(connection, &checkout, stream).await
            }
        }
    }

    /// The commit that is checked out.
    pub(super) async fn head(&self, folder: &str) -> Option<String> {
        let head = self.last_line(folder, &["rev-parse", "--verify", "HEAD"]).await;
        head.filter(|commit| is_object_id(commit))
    }

    // Renames the branch of another session (after a fork); from any other HEAD, creates the
    // session's branch there. A checkout that a turn deleted stays deleted, without an error.
    async fn set_branch(&self, checkout: &str, branch: &str) -> Result<(), String> {
        let folder = &self.folder(checkout);
        if !Path::new(folder).join(".git").exists() {
            return Ok(());
        }
        let current = self.last_line(folder, &["symbolic-ref", "--short", "HEAD"]).await;
        let current = current.unwrap_or_default();
        if current == branch {
            return Ok(());
        }
        let reference = format!("refs/heads/{branch}");
        // A branch of this name is moved: its commits may be on no other one.
        if self.run(folder, &["rev-parse", "--quiet", "--verify", &reference]).await.is_ok() {
            self.keep(checkout, &reference, "HEAD").await;
        }
        if current.starts_with(SESSION_PREFIX) {
            self.run(folder, &["branch", "-M", branch]).await?;
        } else if let Err(tail) = self.run(folder, &["checkout", "--quiet", "-B", branch]).await {
            // Without a commit there is nothing to check out.
            let set = ["symbolic-ref", "HEAD", &reference];
            self.run(folder, &set).await.map_err(|_| tail)?;
        }
        // A branch without an upstream is an error to git.
        let _no_upstream = self.run(folder, &["branch", "--unset-upstream"]).await;
        Ok(())
    }
}
