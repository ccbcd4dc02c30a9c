//! Answers about pull requests and repositories, out of reads of the REST API. The number of reads
//! for one answer is limited.

use harvest_proto::RepositoryName;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    GraphqlBackend, GraphqlRefusal, NodeId,
    fields::{self, ChosenField, PullFacts, Source},
    repository_name,
    syntax::Selection,
};
use crate::read_route::ReadRoute;

const PAGE: &str = "100";
// A list is looked through this far.
const MAX_PAGES: u64 = 10;
// Of one branch: the open one and the last closed ones.
const MAX_OF_BRANCH: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum PullState {
    Open,
    Closed,
    Merged,
}

impl PullState {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "OPEN",
            Self::Closed => "CLOSED",
            Self::Merged => "MERGED",
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct ListVariables {
    owner: String,
    repo: String,
    limit: u32,
    #[serde(default)]
    end_cursor: Option<String>,
    #[serde(default)]
    base_branch: Option<String>,
    #[serde(default)]
    head_branch: Option<String>,
    #[serde(default)]
    state: Option<Vec<PullState>>,
}

pub(super) async fn list(
    backend: &dyn GraphqlBackend,
    variables: ListVariables,
    selected: &[Selection],
) -> Result<Value, GraphqlRefusal> {
    let repository = repository_name(&variables.owner, &variables.repo)?;
    let chosen = choose(selected)?;
    if chosen.iter().any(|field| field.source != Source::Listed) {
        let message = "a list has no comments, reviews, checks, files and counts of changes; \
                       `gh pr view NUMBER --json FIELDS` shows those of one pull request";
        return Err(GraphqlRefusal::new(message));
    }
    let start: usize = match variables.end_cursor.as_deref() {
        None | Some("") => 0,
        Some(cursor) => cursor.parse().map_err(|_| GraphqlRefusal::new("invalid cursor"))?,
    };
    let limit = usize::try_from(variables.limit.min(100)).unwrap_or(100);
    let filter = PullFilter {
        states: variables.state.unwrap_or_else(|| vec![PullState::Open]),
        base: variables.base_branch,
        head: variables.head_branch,
    };
    let all = matching(backend, &repository, &filter).await?;
    let end = start.saturating_add(limit).min(all.len());
    let (total, has_next) = (all.len(), end < all.len());
    let shown = all.into_iter().skip(start).take(limit);
    let nodes: Vec<Value> = shown
        .map(|pull| fields::object(&repository, &PullFacts { pull, ..Default::default() }, &chosen))
        .collect();
    Ok(json!({"repository": {"pullRequests": {
        "totalCount": total,
        "nodes": nodes,
        "pageInfo": {"hasNextPage": has_next, "endCursor": end.to_string()},
    }}}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct BranchVariables {
    owner: String,
    repo: String,
    head_ref_name: String,
    states: Option<Vec<PullState>>,
}

pub(super) async fn of_branch(
    backend: &dyn GraphqlBackend,
    variables: BranchVariables,
    selected: &[Selection],
) -> Result<Value, GraphqlRefusal> {
    let repository = repository_name(&variables.owner, &variables.repo)?;
    let chosen = choose(selected)?;
    let any = || vec![PullState::Open, PullState::Closed, PullState::Merged];
    let states = variables.states.unwrap_or_else(any);
    let filter = PullFilter { states, base: None, head: Some(variables.head_ref_name) };
    let mut all = matching(backend, &repository, &filter).await?;
    all.sort_by_key(|pull| fields::state(pull) != "OPEN");
    let mut nodes = Vec::new();
    for pull in all.into_iter().take(MAX_OF_BRANCH) {
        nodes.push(complete(backend, &repository, pull, &chosen).await?);
    }
    let branch = describe(backend, &repository).await?["default_branch"].take();
    Ok(json!({"repository": {
        "pullRequests": {"nodes": nodes},
        "defaultBranchRef": {"name": branch},
    }}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NumberVariables {
    owner: String,
    repo: String,
    pr_number: u64,
}

pub(super) async fn by_number(
    backend: &dyn GraphqlBackend,
    variables: NumberVariables,
    selected: &[Selection],
) -> Result<Value, GraphqlRefusal> {
    let repository = repository_name(&variables.owner, &variables.repo)?;
    let chosen = choose(selected)?;
    let number = variables.pr_number.to_string();
    let pull = object(backend, &repository, ReadRoute::own(&["pulls", &number], &[])).await?;
    let pull = complete(backend, &repository, pull, &chosen).await?;
    Ok(json!({"repository": {"pullRequest": pull}}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct ProjectVariables {
    #[serde(rename = "endCursor")]
    _end_cursor: Option<String>,
    owner: String,
    name: String,
    #[serde(rename = "number")]
    _number: u64,
}

/// Projects are not read: none.
pub(super) fn project_items(variables: &ProjectVariables) -> Result<Value, GraphqlRefusal> {
    repository_name(&variables.owner, &variables.name)?;
    let items = json!({
        "totalCount": 0,
        "nodes": [],
        "pageInfo": {"hasNextPage": false, "endCursor": ""},
    });
    Ok(json!({"repository": {"pullRequest": {"projectItems": items}}}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RepositoryVariables {
    owner: String,
    name: String,
}

/// The repository under the name it has here, which `gh` uses in its next requests.
pub(super) async fn repository(
    backend: &dyn GraphqlBackend,
    variables: RepositoryVariables,
) -> Result<Value, GraphqlRefusal> {
    let name = repository_name(&variables.owner, &variables.name)?;
    let found = describe(backend, &name).await?;
    let base = backend.base(&name).map_or_else(|| found["default_branch"].clone(), Value::from);
    let permission = if backend.may_push(&name) { "WRITE" } else { "READ" };
    let id = NodeId::Repository(name.clone()).to_string();
    Ok(json!({"repository": {
        "id": id,
        "databaseId": found["id"],
        "name": name.name(),
        "owner": {"login": name.owner()},
        "sshUrl": "",
        "hasIssuesEnabled": found["has_issues"],
        "description": found["description"].as_str().unwrap_or_default(),
        "hasWikiEnabled": found["has_wiki"],
        "viewerPermission": permission,
        // What `gh pr create` takes as the base.
        "defaultBranchRef": {"name": base},
        "parent": null,
        "mergeCommitAllowed": found["allow_merge_commit"].as_bool().unwrap_or_default(),
        "rebaseMergeAllowed": found["allow_rebase_merge"].as_bool().unwrap_or_default(),
        "squashMergeAllowed": found["allow_squash_merge"].as_bool().unwrap_or_default(),
    }}))
}

struct PullFilter {
    states: Vec<PullState>,
    base: Option<String>,
    head: Option<String>,
}

impl PullFilter {
    /// The state of the REST API, which does not tell merged from closed ones.
    fn state(&self) -> &'static str {
        match (self.states.contains(&PullState::Open), self.states.len()) {
            (true, 1) => "open",
            (true, _) => "all",
            (false, _) => "closed",
        }
    }

    fn admits(&self, pull: &Value) -> bool {
        let is = |side: &str, branch: &Option<String>| {
            branch.as_deref().is_none_or(|branch| pull[side]["ref"] == branch)
        };
        let state = fields::state(pull);
        self.states.iter().any(|one| one.as_str() == state)
            && is("base", &self.base)
            && is("head", &self.head)
            && (self.head.is_none() || !fields::is_of_fork(pull))
    }
}

/// The newest pull requests first.
async fn matching(
    backend: &dyn GraphqlBackend,
    repository: &RepositoryName,
    filter: &PullFilter,
) -> Result<Vec<Value>, GraphqlRefusal> {
    let mut query = vec![
        ("state", filter.state()),
        ("sort", "created"),
        ("direction", "desc"),
        ("per_page", PAGE),
    ];
    query.extend(filter.base.as_deref().map(|base| ("base", base)));
    // The forge knows the owner by another name, perhaps.
    let head = match &filter.head {
        Some(head) => {
            let found = describe(backend, repository).await?;
            let owner = found["owner"]["login"].as_str().unwrap_or_default();
            Some(format!("{owner}:{head}"))
        }
        None => None,
    };
    query.extend(head.as_deref().map(|head| ("head", head)));
    let mut all = Vec::new();
    for page in 1..=MAX_PAGES {
        let page = page.to_string();
        let query = [&query[..], &[("page", &page)]].concat();
        let (found, has_next) =
            page_of(backend, repository, ReadRoute::own(&["pulls"], &query)).await?;
        all.extend(found.into_iter().filter(|pull| filter.admits(pull)));
        if !has_next {
            break;
        }
    }
    Ok(all)
}

fn choose(selected: &[Selection]) -> Result<Vec<ChosenField>, GraphqlRefusal> {
    fields::choose(selected).map_err(|name| {
        GraphqlRefusal(format!(
            "`{name}` of a pull request is not served here; choose other fields with `--json`, or \
             read `gh api repos/OWNER/NAME/pulls/NUMBER`"
        ))
    })
}

/// A pull request with what the chosen fields need besides what lists have.
async fn complete(
    backend: &dyn GraphqlBackend,
    repository: &RepositoryName,
    pull: Value,
    chosen: &[ChosenField],
) -> Result<Value, GraphqlRefusal> {
    let wants = |source: Source| chosen.iter().any(|field| field.source == source);
    let number = pull["number"].to_string();
    let sha = pull["head"]["sha"].as_str().unwrap_or_default().to_owned();
    let mut facts = PullFacts { pull, ..Default::default() };
    let first = [("per_page", PAGE)];
    let list = async |segments: &[&str]| {
        Ok(page_of(backend, repository, ReadRoute::own(segments, &first)).await?.0)
    };
    // Lists leave out counts.
    if wants(Source::Pull) && facts.pull["additions"].is_null() {
        let route = ReadRoute::own(&["pulls", &number], &[]);
        facts.pull = object(backend, repository, route).await?;
    }
    if wants(Source::Comments) {
        facts.comments = list(&["issues", &number, "comments"]).await?;
    }
    if wants(Source::Reviews) {
        facts.reviews = list(&["pulls", &number, "reviews"]).await?;
    }
    if wants(Source::Files) {
        facts.files = list(&["pulls", &number, "files"]).await?;
    }
    if wants(Source::Commits) {
        facts.commits = list(&["pulls", &number, "commits"]).await?;
    }
    if wants(Source::Checks) && !sha.is_empty() {
        let route = ReadRoute::own(&["commits", &sha, "status"], &first);
        facts.statuses = taken(object(backend, repository, route).await?, "statuses");
        let route = ReadRoute::own(&["commits", &sha, "check-runs"], &first);
        // An App or a token may lack the permission for them; statuses are shown nevertheless.
        let runs = object(backend, repository, route).await;
        facts.check_runs = runs.map_or_else(|_| Vec::new(), |runs| taken(runs, "check_runs"));
    }
    Ok(fields::object(repository, &facts, chosen))
}

async fn describe(
    backend: &dyn GraphqlBackend,
    repository: &RepositoryName,
) -> Result<Value, GraphqlRefusal> {
    object(backend, repository, ReadRoute::own(&[], &[])).await
}

async fn object(
    backend: &dyn GraphqlBackend,
    repository: &RepositoryName,
    route: ReadRoute,
) -> Result<Value, GraphqlRefusal> {
    Ok(document(backend, repository, route).await?.0)
}

async fn page_of(
    backend: &dyn GraphqlBackend,
    repository: &RepositoryName,
    route: ReadRoute,
) -> Result<(Vec<Value>, bool), GraphqlRefusal> {
    match document(backend, repository, route).await? {
        (Value::Array(items), has_next) => Ok((items, has_next)),
        _ => Err(GraphqlRefusal::new("the forge's answer is no list")),
    }
}

async fn document(
    backend: &dyn GraphqlBackend,
    repository: &RepositoryName,
    route: ReadRoute,
) -> Result<(Value, bool), GraphqlRefusal> {
    let path = route.path();
    let answer = backend.read(repository, route).await?;
    let body: Value = serde_json::from_slice(&answer.body)
        .map_err(|_| GraphqlRefusal::new("the forge's answer cannot be read"))?;
    if answer.status != 200 {
        let message = body["message"].as_str().unwrap_or_default();
        let status = answer.status;
        return Err(GraphqlRefusal(format!("{repository}{path}: {message} ({status})")));
    }
    Ok((body, answer.next.is_some()))
}

/// A list inside of an object.
fn taken(mut object: Value, field: &str) -> Vec<Value> {
    match object[field].take() {
        Value::Array(items) => items,
        _ => Vec::new(),
    }
}
