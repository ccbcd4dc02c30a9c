//! Routes of pull requests.

use axum::{
    Json,
    body::Bytes,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use harvest_proto::{BranchName, api::PullRequestState, repository_name::LOCAL_OWNER};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    client::{Client, RepositoryAccess, body, list as list_answer},
    commits as commit_routes,
    error::RestError,
    json::{self as objects, id_of, node_id},
};
use crate::local::{
    ForgeError, git,
    history::{self, CommitFilter},
    merge::{MergeMethod, MergeOutcome, MergeRequest, Mergeability, merge_texts, mergeability},
    permissions::PermissionLevel::{Read, Write},
    pull_requests::{NewPullRequest, Opening, PullChange, PullRecord},
};

// GitHub's limits, in characters.
pub(super) const MAX_TEXT: usize = 65_536;
const MAX_TITLE: usize = 256;
const PULLS: &[&str] = &["pull_requests"];

/// A number in a path.
pub(super) fn number(text: &str) -> Result<u64, RestError> {
    text.parse().map_err(|_| RestError::not_found())
}

/// A pull request as it is in lists.
fn simple(access: &RepositoryAccess, record: &PullRecord, repository: &Value) -> Value {
    let (urls, name, pull) = (&access.urls, access.name.as_str(), &record.pull);
    let number = pull.number;
    let url = urls.repository(name, &format!("/pulls/{number}"));
    let issue = urls.repository(name, &format!("/issues/{number}"));
    let statuses = urls.repository(name, &format!("/statuses/{}", pull.commit));
    let review_comment = urls.repository(name, "/pulls/comments{/number}");
    let id = id_of("PullRequest", &format!("{name}/{number}"));
    let is_open = pull.state == PullRequestState::Open;
    let side = |branch: &BranchName, sha: &str| {
        json!({
            "label": format!("{LOCAL_OWNER}:{branch}"),
            "ref": **branch,
            "sha": sha,
            "user": objects::user(urls, LOCAL_OWNER),
            "repo": repository,
        })
    };
    let link = |href: &str| json!({"href": href});
    let links = json!({
        "self": link(&url),
        "html": link(&pull.url),
        "issue": link(&issue),
        "comments": link(&format!("{issue}/comments")),
        "review_comments": link(&format!("{url}/comments")),
        "review_comment": link(&review_comment),
        "commits": link(&format!("{url}/commits")),
        "statuses": link(&statuses),
    });
    let (created, updated) = (objects::time(record.created_at), objects::time(record.updated_at));
    let (closed, merged) =
        (record.closed_at.map(objects::time), record.merged_at.map(objects::time));
    let mut object = json!({
        "_links": links,
        "id": id,
        "node_id": node_id("PullRequest", id),
        "number": number,
        "state": if is_open { "open" } else { "closed" },
        "locked": false,
        "draft": record.pull.draft,
        "title": pull.title,
        "body": pull.body,
        "user": objects::user(urls, &record.author),
        "author_association": "COLLABORATOR",
        "created_at": created,
        "updated_at": updated,
        "closed_at": closed,
        "merged_at": merged,
        "merge_commit_sha": record.merge_commit,
        "head": side(&pull.branch, &pull.commit),
        "base": side(&pull.base, &record.base_commit),
        "url": url,
        "html_url": pull.url,
        "diff_url": format!("{}.diff", pull.url),
        "patch_url": format!("{}.patch", pull.url),
        "issue_url": issue,
        "commits_url": format!("{url}/commits"),
        "review_comments_url": format!("{url}/comments"),
        "review_comment_url": review_comment,
        "comments_url": format!("{issue}/comments"),
        "statuses_url": statuses,
    });
    for field in ["assignee", "milestone", "auto_merge", "active_lock_reason"] {
        object[field] = Value::Null;
    }
    for field in ["labels", "assignees", "requested_reviewers", "requested_teams"] {
        object[field] = json!([]);
    }
    object
}

/// Where the changes of a pull request begin.
async fn start(access: &RepositoryAccess, record: &PullRecord) -> Result<String, ForgeError> {
    let (base, head) = (&record.base_commit, &record.pull.commit);
    let common = history::merge_base(&access.git, base, head).await?;
    Ok(common.unwrap_or_else(|| base.clone()))
}

/// The commits of a pull request as a range.
fn range(record: &PullRecord) -> [String; 2] {
    [record.pull.commit.clone(), format!("^{}", record.base_commit)]
}

/// A pull request with all that only a single one contains.
pub(super) async fn full(
    access: &RepositoryAccess,
    record: &PullRecord,
) -> Result<Value, ForgeError> {
    let git = &access.git;
    let repository = objects::repository(access).await?;
    let mut object = simple(access, record, &repository);
    let from = start(access, record).await?;
    let changes = history::changes(git, &from, &record.pull.commit).await?;
    let [head, not_base] = range(record);
    let commits = history::count(git, &[&head, &not_base], &CommitFilter::default()).await?;
    let (mergeable, state) = merge_state(access, record).await?;
    object["mergeable"] = mergeable.into();
    object["mergeable_state"] = state.into();
    object["rebaseable"] = Value::Null;
    object["merged"] = (record.pull.state == PullRequestState::Merged).into();
    let merged_by = record.merged_by.as_deref().filter(|_| record.merged_at.is_some());
    object["merged_by"] = merged_by.map(|login| objects::user(&access.urls, login)).into();
    object["maintainer_can_modify"] = false.into();
    object["comments"] = access.forge.comments(&access.name, record.pull.number)?.len().into();
    object["review_comments"] = 0.into();
    object["commits"] = commits.into();
    object["changed_files"] = changes.len().into();
    object["additions"] = changes.iter().map(|change| change.additions).sum::<u64>().into();
    object["deletions"] = changes.iter().map(|change| change.deletions).sum::<u64>().into();
    Ok(object)
}

async fn merge_state(
    access: &RepositoryAccess,
    record: &PullRecord,
) -> Result<(Option<bool>, &'static str), ForgeError> {
    if record.pull.state != PullRequestState::Open {
        return Ok((None, "unknown"));
    }
    let Some(base) = git::head(&access.git, &record.pull.base).await? else {
        return Ok((Some(false), "dirty"));
    };
    Ok(match mergeability(&access.git, &base, &record.pull.commit).await? {
        Mergeability::Conflict => (Some(false), "dirty"),
        Mergeability::Clean { .. } if record.pull.draft => (Some(true), "draft"),
        Mergeability::Clean { .. } => (Some(true), "clean"),
    })
}

pub(super) async fn list(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), PULLS, Read)?;
    let mut all = access.forge.pull_records(&access.name).await?;
    let open = |record: &PullRecord| record.pull.state == PullRequestState::Open;
    match client.parameter("state").unwrap_or("open") {
        "open" => all.retain(open),
        "closed" => all.retain(|record| !open(record)),
        _ => {}
    }
    if let Some(base) = client.parameter("base") {
        all.retain(|record| *record.pull.base == *base);
    }
    // GitHub filters by `owner:branch` and ignores a branch alone.
    if let Some((owner, head)) = client.parameter("head").and_then(|head| head.split_once(':')) {
        all.retain(|record| owner == LOCAL_OWNER && *record.pull.branch == *head);
    }
    let by_update = client.parameter("sort") == Some("updated");
    all.sort_by_key(|record| if by_update { record.updated_at } else { record.created_at });
    let ascending = match client.parameter("direction") {
        Some(direction) => direction == "asc",
        None => client.parameter("sort").is_some_and(|sort| sort != "created"),
    };
    if !ascending {
        all.reverse();
    }
    let (page, links) = client.paginate(all);
    let repository = objects::repository(&access).await?;
    Ok(list_answer(page.iter().map(|record| simple(&access, record, &repository)).collect(), links))
}

#[derive(Deserialize)]
struct NewPull {
    title: Option<String>,
    body: Option<String>,
    head: Option<String>,
    base: Option<String>,
    #[serde(default)]
    draft: bool,
}

fn check_texts(title: Option<&str>, body: Option<&str>) -> Result<(), RestError> {
    let too_long = |field, limit| {
        let message = format!("{field} is too long (maximum is {limit} characters)");
        Err(RestError::custom("PullRequest", &message))
    };
    if title.is_some_and(|title| title.trim().is_empty()) {
        return Err(RestError::field("PullRequest", "title", "missing_field"));
    }
    if title.is_some_and(|title| title.chars().count() > MAX_TITLE) {
        return too_long("title", MAX_TITLE);
    }
    if body.is_some_and(|body| body.chars().count() > MAX_TEXT) {
        return too_long("body", MAX_TEXT);
    }
    Ok(())
}

/// A branch of this repository, with or without its owner.
fn branch(text: Option<&str>, field: &str) -> Result<BranchName, RestError> {
    let text = text.ok_or_else(|| RestError::field("PullRequest", field, "missing_field"))?;
    let invalid = || RestError::field("PullRequest", field, "invalid");
    let name = match text.split_once(':') {
        Some((LOCAL_OWNER, branch)) => branch,
        Some(_) => return Err(invalid()),
        None => text,
    };
    name.parse().map_err(|_| invalid())
}

fn refused(error: ForgeError, head: &BranchName) -> RestError {
    match error {
        ForgeError::NoBranch { branch, .. } => {
            let field = if branch == *head { "head" } else { "base" };
            RestError::field("PullRequest", field, "invalid")
        }
        ForgeError::NoNewCommits { branch, base } => {
            let message = format!("No commits between {base} and {branch}");
            RestError::custom("PullRequest", &message)
        }
        ForgeError::PullRequestExists { branch } => {
            let message = format!("A pull request already exists for {LOCAL_OWNER}:{branch}.");
            RestError::custom("PullRequest", &message)
        }
        other => other.into(),
    }
}

pub(super) async fn create(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
    bytes: Bytes,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), PULLS, Write)?;
    let new: NewPull = body(&bytes)?;
    let title = new.title.unwrap_or_default();
    let body = new.body.unwrap_or_default();
    check_texts(Some(&title), Some(&body))?;
    let head = branch(new.head.as_deref(), "head")?;
    let base = branch(new.base.as_deref(), "base")?;
    let pull = NewPullRequest { title, body, branch: head.clone(), base };
    let opening = Opening { author: &access.login, draft: new.draft };
    let opened = access.forge.open_pull_record(&access.name, pull, opening).await;
    let record = opened.map_err(|error| refused(error, &head))?;
    Ok((StatusCode::CREATED, Json(full(&access, &record).await?)).into_response())
}

pub(super) async fn get(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), PULLS, Read)?;
    let record = access.forge.pull_record(&access.name, number(&pull)?).await?;
    if client.wants("diff") {
        let from = start(&access, &record).await?;
        return commit_routes::diff(&access, &from, &record.pull.commit).await;
    }
    Ok(Json(full(&access, &record).await?).into_response())
}

#[derive(Deserialize)]
struct PullUpdate {
    title: Option<String>,
    body: Option<String>,
    base: Option<String>,
    state: Option<String>,
}

pub(super) async fn update(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
    bytes: Bytes,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), PULLS, Write)?;
    let PullUpdate { title, body, base, state } = body(&bytes)?;
    check_texts(title.as_deref(), body.as_deref())?;
    let base = base.map(|base| branch(Some(&base), "base")).transpose()?;
    let open = match state.as_deref() {
        None => None,
        Some("open") => Some(true),
        Some("closed") => Some(false),
        Some(_) => return Err(RestError::field("PullRequest", "state", "invalid")),
    };
    let number = number(&pull)?;
    let current = access.forge.pull_record(&access.name, number).await?;
    if open == Some(true) && current.pull.state == PullRequestState::Merged {
        return Err(RestError::custom("PullRequest", "state cannot be changed."));
    }
    let change = PullChange { title, body, base, open, draft: None };
    let changed =
        access.forge.change_pull_record(&access.name, number, change, &access.login).await;
    let record = changed.map_err(|error| refused(error, &current.pull.branch))?;
    Ok(Json(full(&access, &record).await?))
}

pub(super) async fn files(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), PULLS, Read)?;
    let record = access.forge.pull_record(&access.name, number(&pull)?).await?;
    let from = start(&access, &record).await?;
    let changes = history::changes(&access.git, &from, &record.pull.commit).await?;
    let (page, links) = client.paginate(changes);
    let file = |change| objects::change(&access, &record.pull.commit, change);
    Ok(list_answer(page.iter().map(file).collect(), links))
}

pub(super) async fn commits(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), PULLS, Read)?;
    let record = access.forge.pull_record(&access.name, number(&pull)?).await?;
    let [head, not_base] = range(&record);
    let (range, everything) = ([head.as_str(), not_base.as_str()], CommitFilter::default());
    let total = history::count(&access.git, &range, &everything).await?;
    let window = commit_routes::newest_last(client.page().range(), total);
    let mut page = history::commits(&access.git, &range, &everything, window).await?;
    page.reverse();
    let page = page.iter().map(|commit| objects::commit(&access, commit)).collect();
    Ok(list_answer(page, client.links(total)))
}

/// The forge has no reviews.
pub(super) async fn reviews(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), PULLS, Read)?;
    access.forge.pull_record(&access.name, number(&pull)?).await?;
    Ok(list_answer(Vec::new(), client.links(0)))
}

pub(super) async fn is_merged(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
) -> Result<StatusCode, RestError> {
    let access = client.open((&owner, &name), PULLS, Read)?;
    let record = access.forge.pull_record(&access.name, number(&pull)?).await?;
    match record.pull.state {
        PullRequestState::Merged => Ok(StatusCode::NO_CONTENT),
        _ => Err(RestError::not_found()),
    }
}

#[derive(Deserialize)]
struct Merge {
    commit_title: Option<String>,
    commit_message: Option<String>,
    sha: Option<String>,
    merge_method: Option<String>,
}

pub(super) async fn merge(
    client: Client,
    Path((owner, name, pull)): Path<(String, String, String)>,
    bytes: Bytes,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), &["contents"], Write)?;
    let request: Merge = body(&bytes)?;
    let not_allowed = |message: &str| RestError::new(StatusCode::METHOD_NOT_ALLOWED, message);
    let method = match request.merge_method.as_deref() {
        None | Some("merge") => MergeMethod::Merge,
        Some("squash") => MergeMethod::Squash,
        Some("rebase") => {
            return Err(not_allowed("Rebase merges are not allowed on this repository."));
        }
        Some(_) => return Err(RestError::field("PullRequest", "merge_method", "invalid")),
    };
    let number = number(&pull)?;
    let record = access.forge.pull_record(&access.name, number).await?;
    let (title, message) = merge_texts(&record, method);
    let outcome = access.forge.merge_pull_request(
        &access.name,
        number,
        MergeRequest {
            method,
            title: request.commit_title.unwrap_or(title),
            message: request.commit_message.unwrap_or(message),
            expected: request.sha.as_deref(),
            author: &access.login,
        },
    );
    match outcome.await? {
        MergeOutcome::Merged { sha } => {
            let message = "Pull Request successfully merged";
            Ok(Json(json!({"sha": sha, "merged": true, "message": message})).into_response())
        }
        MergeOutcome::NotOpen | MergeOutcome::Conflict => {
            Err(not_allowed("Pull Request is not mergeable"))
        }
        MergeOutcome::Draft => Err(not_allowed("Pull Request is still a draft")),
        MergeOutcome::HeadMoved => {
            Err(RestError::conflict("Head branch was modified. Review and try the merge again."))
        }
        MergeOutcome::BaseMoved => {
            Err(RestError::conflict("Base branch was modified. Review and try the merge again."))
        }
    }
}
