//! What programs inside a sandbox read and write at the forges of their session's repositories, in
//! the form of GitHub's API: `gh` with `api`, `run list`, and `pr create`, `list`, `view` and
//! `comment`. Reads reach the session's repositories alone; writes its own branch.

use std::sync::Arc;

use async_trait::async_trait;
use harvest_forge::{
    ReadAnswer, ReadForm, ReadRoute,
    graphql::{self, GraphqlBackend, GraphqlRefusal, WantedPullRequest},
};
use harvest_gateway::ledger::{ForgeAnswer, ForgeCall};
use harvest_proto::RepositoryName;
use harvest_store::SessionRecord;

use crate::{
    error::SessionError,
    repositories::{ForgeReadError, PullRequestText},
    tools::{SessionTools, ToolError, text_within},
};

const MAX_TITLE_CHARACTERS: usize = 200;
const MAX_BODY_CHARACTERS: usize = 30_000;
// Of one sandbox: each notifies people.
const MAX_COMMENTS: u32 = 50;

/// Answers one request.
pub(crate) async fn answer(tools: &SessionTools, call: ForgeCall) -> ForgeAnswer {
    let record = match tools.shared.store.session_get(&tools.session).await {
        Ok(record) => record,
        Err(error) => return ForgeAnswer::refused(503, &error.to_string()),
    };
    match call {
        ForgeCall::Graphql { body } => {
            let backend = SessionForge { tools, record };
            let body = graphql::answer(&backend, &body).await.to_string().into_bytes();
            ForgeAnswer { status: 200, is_json: true, body, next: None }
        }
        ForgeCall::Read { path, query, accept } => {
            let form = ReadForm::of(&accept);
            let read = async {
                let (name, below) = repository_of(&record, path)?;
                let route = ReadRoute::new(below, query, form)
                    .map_err(|refused| (403, refused.to_string()))?;
                let repositories = &tools.shared.repositories;
                let read = repositories.forge_read(&record, &name, &route).await;
                read.map_err(|error| (error.status(), error.to_string()))
            };
            match read.await {
                Ok(ReadAnswer { status, body, next }) => {
                    let is_json = form == ReadForm::Json || status != 200;
                    ForgeAnswer { status, is_json, body, next }
                }
                Err((status, message)) => ForgeAnswer::refused(status, &message),
            }
        }
    }
}

/// The repository that a path names and the rest of the path; the error is a status and a message.
fn repository_of(
    record: &SessionRecord,
    path: Vec<String>,
) -> Result<(RepositoryName, Vec<String>), (u16, String)> {
    let mut segments = path.into_iter();
    let named = match (segments.next().as_deref(), segments.next(), segments.next()) {
        (Some("repos"), Some(owner), Some(name)) => RepositoryName::new(&owner, &name).ok(),
        _ => None,
    };
    let named = named.filter(|name| has_repository(record, name));
    named.map(|name| (name, segments.collect())).ok_or_else(|| (404, other_repository(record)))
}

fn has_repository(record: &SessionRecord, name: &RepositoryName) -> bool {
    record.checkouts.iter().any(|checkout| checkout.repository == *name)
}

fn other_repository(record: &SessionRecord) -> String {
    let own = record.checkouts.iter().map(|checkout| format!("repos/{}", checkout.repository));
    let own = own.collect::<Vec<_>>().join(", ");
    format!("this session reads only its own repositories; try `gh api {own}`")
}

/// The session as the commands of `gh pr` see it.
struct SessionForge<'a> {
    tools: &'a SessionTools,
    record: SessionRecord,
}

impl SessionForge<'_> {
    fn own(&self, repository: &RepositoryName) -> Result<(), GraphqlRefusal> {
        match has_repository(&self.record, repository) {
            true => Ok(()),
            false => Err(GraphqlRefusal(other_repository(&self.record))),
        }
    }
}

#[async_trait]
impl GraphqlBackend for SessionForge<'_> {
    async fn read(
        &self,
        repository: &RepositoryName,
        route: ReadRoute,
    ) -> Result<ReadAnswer, GraphqlRefusal> {
        self.own(repository)?;
        let repositories = &self.tools.shared.repositories;
        let read = repositories.forge_read(&self.record, repository, &route).await;
        read.map_err(|error| GraphqlRefusal(error.to_string()))
    }

    async fn login(&self) -> Result<String, GraphqlRefusal> {
        Ok("harvest".to_owned())
    }

    fn may_push(&self, repository: &RepositoryName) -> bool {
        has_repository(&self.record, repository)
    }

    fn base(&self, repository: &RepositoryName) -> Option<String> {
        let checkout = self.record.checkouts.iter().find(|one| one.repository == *repository)?;
        Some(checkout.base.as_ref()?.to_string())
    }

    async fn open_pull_request(
        &self,
        repository: &RepositoryName,
        wanted: WantedPullRequest,
    ) -> Result<(u64, String), GraphqlRefusal> {
        self.own(repository)?;
        let branch = &self.record.session.branch;
        if wanted.head != **branch {
            let message = format!(
                "this session opens pull requests of its branch `{branch}` alone; push your work \
                 there, and leave out `--head`"
            );
            return Err(GraphqlRefusal(message));
        }
        let text = pull_request_text(&wanted).map_err(refusal)?;
        self.tools.check_history().await.map_err(refusal)?;
        let repositories = self.tools.shared.repositories.clone();
        let (session, name) = (self.tools.session.clone(), repository.clone());
        let (base, draft) = (wanted.base, wanted.draft);
        let opening = async move {
            repositories.open_pull_request_at(&session, &name, &base, text, draft).await
        };
        let pull = self.tools.detach(opening).await.map_err(refusal)?;
        Ok((pull.number, pull.url))
    }

    async fn comment(
        &self,
        repository: &RepositoryName,
        number: u64,
        body: String,
    ) -> Result<String, GraphqlRefusal> {
        self.own(repository)?;
        let body = text_within("body", &body, MAX_BODY_CHARACTERS).map_err(refusal)?;
        let made = &self.tools.comments;
        if made.fetch_add(1, std::sync::atomic::Ordering::Relaxed) >= MAX_COMMENTS {
            let message = format!("a sandbox makes at most {MAX_COMMENTS} comments");
            return Err(GraphqlRefusal(message));
        }
        let repositories = self.tools.shared.repositories.clone();
        let (record, name) = (self.record.clone(), repository.clone());
        let commenting =
            async move { repositories.forge_comment(&record, &name, number, &body).await };
        self.tools.detach(commenting).await.map_err(refusal)
    }
}

/// Title and description as the agent wrote them. Without a description the first prompt is quoted.
fn pull_request_text(wanted: &WantedPullRequest) -> Result<PullRequestText, ToolError> {
    let title = text_within("title", &wanted.title, MAX_TITLE_CHARACTERS)?;
    let body = wanted.body.trim();
    let summary = match body.is_empty() {
        true => None,
        false => Some(text_within("body", body, MAX_BODY_CHARACTERS)?),
    };
    Ok(PullRequestText { title: Some(title), summary, ..Default::default() })
}

fn refusal(error: impl Into<ToolError>) -> GraphqlRefusal {
    GraphqlRefusal(crate::error_chain::error_chain(&error.into()))
}

/// Counts the comments of one sandbox.
pub(crate) type CommentCount = Arc<std::sync::atomic::AtomicU32>;

impl From<ForgeReadError> for ToolError {
    fn from(error: ForgeReadError) -> Self {
        match error {
            ForgeReadError::Session(error) => Self::Session(error),
            other => Self::Refused(other.to_string()),
        }
    }
}

impl From<SessionError> for ForgeReadError {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}
