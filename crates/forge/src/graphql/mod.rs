//! The part of GitHub's GraphQL API that `gh pr create`, `list`, `view` and `comment` use. A
//! document is parsed and must be a known one (`known`); its variables are read into types, and the
//! answer is made of what the REST API says. No document is passed on, and nothing is executed.

mod fields;
mod known;
mod pulls;
mod syntax;
mod tokens;

use std::{fmt, str::FromStr};

use async_trait::async_trait;
use harvest_proto::RepositoryName;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::read_route::{ReadAnswer, ReadRoute};
use known::{KnownDocument, recognise};
use syntax::Document;

/// What the commands of `gh` are answered from.
#[async_trait]
pub trait GraphqlBackend: Send + Sync {
    /// Reads a part of a repository, if the client may.
    async fn read(
        &self,
        repository: &RepositoryName,
        route: ReadRoute,
    ) -> Result<ReadAnswer, GraphqlRefusal>;

    /// The name of the client's account.
    async fn login(&self) -> Result<String, GraphqlRefusal>;

    /// Whether the client may push to a repository.
    fn may_push(&self, repository: &RepositoryName) -> bool;

    /// The base of the client's pull requests, if it is not the repository's default branch.
    fn base(&self, repository: &RepositoryName) -> Option<String>;

    /// Opens a pull request and returns its number and the URL of its page.
    async fn open_pull_request(
        &self,
        repository: &RepositoryName,
        wanted: WantedPullRequest,
    ) -> Result<(u64, String), GraphqlRefusal>;

    /// Comments on a pull request and returns the URL of the comment.
    async fn comment(
        &self,
        repository: &RepositoryName,
        number: u64,
        body: String,
    ) -> Result<String, GraphqlRefusal>;
}

/// A pull request that `gh pr create` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedPullRequest {
    pub title: String,
    pub body: String,
    pub head: String,
    pub base: String,
    pub draft: bool,
}

/// Why a request is not answered, for the user of `gh`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GraphqlRefusal(pub String);

impl GraphqlRefusal {
    fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

/// The id of an object in answers. Ids of GitHub are not used: a request could name any.
#[derive(Debug, Clone, PartialEq, Eq)]
enum NodeId {
    Repository(RepositoryName),
    Pull(RepositoryName, u64),
}

impl fmt::Display for NodeId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repository(name) => write!(out, "harvest:repository:{name}"),
            Self::Pull(name, number) => write!(out, "harvest:pull:{name}:{number}"),
        }
    }
}

impl FromStr for NodeId {
    type Err = GraphqlRefusal;

    fn from_str(text: &str) -> Result<Self, GraphqlRefusal> {
        let unknown = || GraphqlRefusal::new("an id in the request is not one of an answer");
        let rest = text.strip_prefix("harvest:").ok_or_else(unknown)?;
        let (kind, rest) = rest.split_once(':').ok_or_else(unknown)?;
        let name = |text: &str| RepositoryName::try_from(text.to_owned()).map_err(|_| unknown());
        match (kind, rest.split_once(':')) {
            ("repository", None) => Ok(Self::Repository(name(rest)?)),
            ("pull", Some((repository, number))) => {
                Ok(Self::Pull(name(repository)?, number.parse().map_err(|_| unknown())?))
            }
            _ => Err(unknown()),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GraphqlRequest {
    query: String,
    #[serde(default)]
    variables: Option<Map<String, Value>>,
    #[serde(default, rename = "operationName")]
    operation_name: Option<String>,
}

/// The answer to a request, as the API's JSON.
pub async fn answer(backend: &dyn GraphqlBackend, body: &[u8]) -> Value {
    match answer_known(backend, body).await {
        Ok(data) => json!({ "data": data }),
        Err(GraphqlRefusal(message)) => {
            json!({"errors": [{"type": "FORBIDDEN", "message": message}]})
        }
    }
}

async fn answer_known(backend: &dyn GraphqlBackend, body: &[u8]) -> Result<Value, GraphqlRefusal> {
    let request: GraphqlRequest = serde_json::from_slice(body)
        .map_err(|error| GraphqlRefusal(format!("the request cannot be read: {error}")))?;
    let document = Document::parse(&request.query)
        .map_err(|error| GraphqlRefusal(format!("the document cannot be read: {error}")))?;
    let (known, selected) = recognise(&document).ok_or_else(not_served)?;
    let own_name = document.operations.first().and_then(|one| one.name.as_deref());
    if request.operation_name.as_deref().is_some_and(|name| Some(name) != own_name) {
        return Err(GraphqlRefusal::new("the request names another operation than its document"));
    }
    let variables = Value::Object(request.variables.unwrap_or_default());
    match known {
        KnownDocument::PullRequests => pulls::list(backend, read(variables)?, selected).await,
        KnownDocument::PullRequestOfBranch => {
            pulls::of_branch(backend, read(variables)?, selected).await
        }
        KnownDocument::PullRequestByNumber => {
            pulls::by_number(backend, read(variables)?, selected).await
        }
        KnownDocument::ProjectItems => pulls::project_items(&read(variables)?),
        KnownDocument::Repository => pulls::repository(backend, read(variables)?).await,
        // `gh` asks what the server can do; it needs none of the newer abilities.
        KnownDocument::IssueFields => Ok(json!({"Issue": {"fields": []}})),
        KnownDocument::CreatePullRequest => create(backend, read(variables)?).await,
        KnownDocument::Viewer => Ok(json!({"viewer": {"login": backend.login().await?}})),
        KnownDocument::Comment => comment(backend, read(variables)?).await,
    }
}

fn not_served() -> GraphqlRefusal {
    GraphqlRefusal::new(
        "only `gh pr create`, `list`, `view` and `comment` of gh 2.103 are served here, without \
         reviewers, labels, projects and searches; read other things with \
         `gh api repos/OWNER/NAME/...`",
    )
}

/// The variables of a known document. Any others are refused.
fn read<T: DeserializeOwned>(variables: Value) -> Result<T, GraphqlRefusal> {
    serde_json::from_value(variables)
        .map_err(|error| GraphqlRefusal(format!("the variables are not those of gh: {error}")))
}

fn repository_name(owner: &str, name: &str) -> Result<RepositoryName, GraphqlRefusal> {
    RepositoryName::new(owner, name).map_err(|invalid| GraphqlRefusal(invalid.to_string()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutation<Input> {
    input: Input,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct CreateInput {
    repository_id: String,
    title: String,
    body: String,
    head_ref_name: String,
    base_ref_name: String,
    draft: bool,
    // Both branches are in one repository, whose people may push anyway.
    #[serde(rename = "maintainerCanModify")]
    _maintainer_can_modify: bool,
}

async fn create(
    backend: &dyn GraphqlBackend,
    Mutation { input }: Mutation<CreateInput>,
) -> Result<Value, GraphqlRefusal> {
    let NodeId::Repository(repository) = input.repository_id.parse()? else {
        return Err(GraphqlRefusal::new("the id is not that of a repository"));
    };
    let wanted = WantedPullRequest {
        title: input.title,
        body: input.body,
        head: input.head_ref_name,
        base: input.base_ref_name,
        draft: input.draft,
    };
    let (number, url) = backend.open_pull_request(&repository, wanted).await?;
    let id = NodeId::Pull(repository, number).to_string();
    Ok(json!({"createPullRequest": {"pullRequest": {"id": id, "url": url}}}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct CommentInput {
    subject_id: String,
    body: String,
}

async fn comment(
    backend: &dyn GraphqlBackend,
    Mutation { input }: Mutation<CommentInput>,
) -> Result<Value, GraphqlRefusal> {
    let NodeId::Pull(repository, number) = input.subject_id.parse()? else {
        return Err(GraphqlRefusal::new("the id is not that of a pull request"));
    };
    let url = backend.comment(&repository, number, input.body).await?;
    Ok(json!({"addComment": {"commentEdge": {"node": {"url": url}}}}))
}

#[cfg(test)]
mod tests;
