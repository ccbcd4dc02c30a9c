//! Routes of commits and of comparisons.

use axum::{
    Json,
    extract::Path,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use harvest_proto::Timestamp;
use serde_json::{Value, json};

use super::{
    client::{Client, RepositoryAccess, list},
    error::RestError,
    json::{self as objects, encode},
    statuses,
};
use crate::local::{
    git,
    history::{self, CommitFilter},
    permissions::PermissionLevel::Read,
};

const CONTENTS: &[&str] = &["contents"];
const MAX_DIFF_BYTES: usize = 3 << 20;

async fn list_filtered(
    client: &Client,
    access: &RepositoryAccess,
    range: &[&str],
    filter: &CommitFilter<'_>,
) -> Result<Response, RestError> {
    let total = history::count(&access.git, range, filter).await?;
    let commits = history::commits(&access.git, range, filter, client.page().range()).await?;
    let page = commits.iter().map(|commit| objects::commit(access, commit)).collect();
    Ok(list(page, client.links(total)))
}

pub(super) async fn list_all(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Read)?;
    let start = client.parameter("sha").unwrap_or("HEAD");
    let Some(start) = history::resolve(&access.git, start).await? else {
        return Err(if client.parameter("sha").is_none() {
            RestError::conflict("Git Repository is empty.")
        } else {
            RestError::not_found()
        });
    };
    // Only times that were parsed reach git, which would take any text for a time.
    let time = |name| {
        let time = client.parameter(name)?.parse::<Timestamp>().ok()?;
        Some(objects::time(time))
    };
    let path = client.parameter("path");
    let filter = CommitFilter { path, since: time("since"), until: time("until") };
    list_filtered(&client, &access, &[&start], &filter).await
}

/// `commits/{ref}` and what is below it.
pub(super) async fn below(
    client: Client,
    Path((owner, name, rest)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let repository = (owner.as_str(), name.as_str());
    match rest.rsplit_once('/') {
        Some((reference, "status")) => statuses::combined(&client, repository, reference).await,
        Some((reference, "statuses")) => statuses::list(&client, repository, reference).await,
        Some((reference, "check-runs")) => {
            statuses::check_runs(&client, repository, reference).await
        }
        _ => get(&client, repository, &rest).await,
    }
}

async fn get(
    client: &Client,
    repository: (&str, &str),
    reference: &str,
) -> Result<Response, RestError> {
    let access = client.open(repository, CONTENTS, Read)?;
    let sha = resolve(&access, reference).await?;
    if client.wants("sha") {
        return Ok(sha.into_response());
    }
    let commit = history::commit(&access.git, &sha).await?;
    let parent = match commit.parents.first() {
        Some(parent) => parent.clone(),
        None => git::empty_tree(&access.git).await?,
    };
    if client.wants("diff") {
        return diff(&access, &parent, &sha).await;
    }
    let changes = history::changes(&access.git, &parent, &sha).await?;
    let (additions, deletions) = changes.iter().fold((0, 0), |(added, deleted), change| {
        (added + change.additions, deleted + change.deletions)
    });
    let (page, links) = client.paginate(changes);
    let mut answer = objects::commit(&access, &commit);
    answer["stats"] =
        json!({"additions": additions, "deletions": deletions, "total": additions + deletions});
    answer["files"] =
        page.iter().map(|change| objects::change(&access, &sha, change)).collect::<Value>();
    Ok((links, Json(answer)).into_response())
}

/// The commit that a request names; as on GitHub, a name that cannot be one is a 422.
pub(super) async fn resolve(access: &RepositoryAccess, name: &str) -> Result<String, RestError> {
    let missing = || RestError::unprocessable(format!("No commit found for SHA: {name}"));
    history::resolve(&access.git, name).await?.ok_or_else(missing)
}

pub(super) async fn diff(
    access: &RepositoryAccess,
    from: &str,
    to: &str,
) -> Result<Response, RestError> {
    let arguments = [
        "diff",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        "--find-renames",
        "--end-of-options",
        from,
        to,
        "--",
    ];
    let (bytes, more) =
        git::limited(&access.git, "compare two commits", &arguments, MAX_DIFF_BYTES).await?;
    if more {
        return Err(RestError::new(StatusCode::NOT_ACCEPTABLE, "Sorry, the diff is too large."));
    }
    let kind = [(header::CONTENT_TYPE, "application/vnd.github.diff; charset=utf-8")];
    Ok((kind, bytes).into_response())
}

pub(super) async fn compare(
    client: Client,
    Path((owner, name, basehead)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Read)?;
    let (base, head) = basehead.split_once("...").ok_or_else(RestError::not_found)?;
    // The repository has no forks, so the owner before a colon says nothing.
    let plain = |name: &str| name.rsplit(':').next().unwrap_or_default().to_owned();
    let base =
        history::resolve(&access.git, &plain(base)).await?.ok_or_else(RestError::not_found)?;
    let head =
        history::resolve(&access.git, &plain(head)).await?.ok_or_else(RestError::not_found)?;
    let common = history::merge_base(&access.git, &base, &head).await?;
    let common = common.ok_or_else(|| {
        RestError::new(StatusCode::NOT_FOUND, "No common ancestor between the two commits")
    })?;
    if client.wants("diff") {
        return diff(&access, &common, &head).await;
    }
    let answer = comparison(&client, &access, (&base, &head, &common), &encode(&basehead)).await?;
    Ok(answer.into_response())
}

async fn comparison(
    client: &Client,
    access: &RepositoryAccess,
    (base, head, common): (&str, &str, &str),
    basehead: &str,
) -> Result<impl IntoResponse + use<>, RestError> {
    let git = &access.git;
    let (not_base, not_head) = (format!("^{base}"), format!("^{head}"));
    let everything = CommitFilter::default();
    let range = [head, not_base.as_str()];
    let ahead = history::count(git, &range, &everything).await?;
    let behind = history::count(git, &[base, &not_head], &everything).await?;
    let mut commits =
        history::commits(git, &range, &everything, newest_last(client.page().range(), ahead))
            .await?;
    commits.reverse();
    let changes = history::changes(git, common, head).await?;
    let status = match (ahead, behind) {
        (0, 0) => "identical",
        (_, 0) => "ahead",
        (0, _) => "behind",
        _ => "diverged",
    };
    let html = access.urls.page(&access.name, &format!("/compare/{basehead}"));
    let answer = json!({
        "url": access.urls.repository(&access.name, &format!("/compare/{basehead}")),
        "html_url": html,
        "permalink_url": access.urls.page(&access.name, &format!("/compare/{base}...{head}")),
        "diff_url": format!("{html}.diff"),
        "patch_url": format!("{html}.patch"),
        "base_commit": objects::commit(access, &history::commit(git, base).await?),
        "merge_base_commit": objects::commit(access, &history::commit(git, common).await?),
        "status": status,
        "ahead_by": ahead,
        "behind_by": behind,
        "total_commits": ahead,
        "commits": commits.iter().map(|commit| objects::commit(access, commit)).collect::<Vec<_>>(),
        "files": changes.iter().map(|change| objects::change(access, head, change)).collect::<Vec<_>>(),
    });
    Ok((client.links(ahead), Json(answer)))
}

/// The page of a list that is oldest first, as a range of git's list, which is newest first.
pub(super) fn newest_last((skip, count): (usize, usize), total: usize) -> (usize, usize) {
    let end = skip.saturating_add(count).min(total);
    (total - end, end.saturating_sub(skip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_commits_are_on_the_first_page() {
        assert_eq!(newest_last((0, 30), 5), (0, 5));
        assert_eq!(newest_last((0, 2), 5), (3, 2));
        assert_eq!(newest_last((4, 2), 5), (0, 1));
        assert_eq!(newest_last((6, 2), 5), (0, 0));
    }
}
